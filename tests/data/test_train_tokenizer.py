"""A trained tokenizer encodes any text, and has seen the training documents of any source."""

import json

import pytest
from support.tiny import config_of

from maxlite.config.raw_values import show
from maxlite.data.tokenizer import open_tokenizer
from maxlite.data.train_tokenizer import save_tokenizer, train_tokenizer, training_texts
from maxlite.errors import UserError

WORDS = ("zebra", "quokka", "walrus")
PLAIN = "configs/chat/plain.jinja"


def data_of(folder, **keys):
  keys = {"dataset_type": "text", "eval_fraction": 0, **keys}
  shown = {name: show(value) if isinstance(value, list) else value for name, value in keys.items()}
  return config_of(base_output_directory=folder, **shown).data


def write_files(folder):
  (folder / "a.txt").write_text(f"{WORDS[0]} " * 200)
  rows = [{"text": f"{WORDS[1]} {n} é\n"} for n in range(200)]
  (folder / "b.jsonl").write_text("\n".join(map(json.dumps, rows)))
  messages = [
    {"role": "user", "content": WORDS[2]},
    {"role": "assistant", "content": f"{WORDS[2]} {WORDS[2]}"},
  ]
  (folder / "c.jsonl").write_text("\n".join([json.dumps({"messages": messages})] * 50))


SOURCES = {
  "text": ({"dataset_path": "a.txt"}, WORDS[:1]),
  "jsonl": ({"dataset_path": "b.jsonl", "dataset_type": "jsonl"}, WORDS[1:2]),
  "chat": (
    {"dataset_path": "c.jsonl", "dataset_type": "chat", "chat_template_path": PLAIN},
    WORDS[2:],
  ),
  "mixture": (
    {
      "dataset_mixture": "[{name: a, path: [a.txt], weight: 1}, "
      "{name: b, path: [b.jsonl], type: jsonl, weight: 2}]"
    },
    WORDS[:2],
  ),
}


@pytest.mark.parametrize("name", SOURCES)
def test_words_of_every_source_become_tokens(name, tmp_path):
  write_files(tmp_path)
  keys, words = SOURCES[name]
  for file in ("a.txt", "b.jsonl", "c.jsonl"):
    keys = {key: value.replace(file, f"{tmp_path}/{file}") for key, value in keys.items()}
  trained = train_tokenizer(
    data_of(tmp_path, **keys),
    tmp_path / "cache",
    size=320,
    special_tokens=("<|endoftext|>", "<|im_end|>"),
    max_bytes=10**6,
  )
  save_tokenizer(trained, tmp_path / "new" / "tokenizer.json")
  tokenizer = open_tokenizer(
    data_of(
      tmp_path,
      tokenizer_type="huggingface",
      tokenizer_path=tmp_path / "new" / "tokenizer.json",
    )
  )
  assert (tokenizer.prefix_ids, tokenizer.eos) == ((0,), 0)
  assert trained.token_to_id("<|im_end|>") == 1
  vocabulary = {piece.strip("Ġ") for piece in trained.get_vocab()}
  assert set(words) <= vocabulary
  assert not vocabulary & (set(WORDS) - set(words))
  any_text = "".join(map(chr, range(0x20, 0x3000, 7))) + "\r\n\t 🦓"
  assert tokenizer.decode(tokenizer.encode(any_text.encode())) == any_text


def test_the_texts_are_the_training_documents_once_up_to_a_size(tmp_path):
  (tmp_path / "t").mkdir()
  texts = {f"document {n}: ää\n" * (n + 1) for n in range(40)}
  for n, text in enumerate(sorted(texts)):
    (tmp_path / "t" / f"{n}.txt").write_text(text)
  data = data_of(tmp_path, dataset_path=tmp_path / "t", eval_fraction=0.3)
  found = list(training_texts(data, tmp_path / "cache", 10**6))
  assert set(found) < texts  # without those held out
  assert 15 < len(found) == len(set(found))
  for limit in (1, 1000):
    part = list(training_texts(data, tmp_path / "cache", limit))
    assert limit - 1 <= sum(len(text.encode()) for text in part) <= limit


def test_a_mixture_is_divided_by_its_weights(tmp_path):
  write_files(tmp_path)
  mixture = (
    f"[{{name: a, path: [{tmp_path}/a.txt], weight: 1}}, "
    f"{{name: b, path: [{tmp_path}/b.jsonl], type: jsonl, weight: 2}}]"
  )
  data = data_of(tmp_path, dataset_mixture=mixture)
  texts = list(training_texts(data, tmp_path / "cache", 900))
  num_bytes = {word: 0 for word in WORDS[:2]}
  for text in texts:
    num_bytes[WORDS[0] if WORDS[0] in text else WORDS[1]] += len(text.encode())
  assert num_bytes == {WORDS[0]: 300, WORDS[1]: 600}


def test_mistakes_are_one_line(tmp_path):
  (tmp_path / "a.txt").write_text("a b c")
  data = data_of(tmp_path, dataset_path=tmp_path / "a.txt")
  options = {"special_tokens": ("<s>",), "max_bytes": 100}
  with pytest.raises(UserError, match=r"vocab_size=256 is too small .* write vocab_size=257"):
    train_tokenizer(data, tmp_path, size=256, **options)
  trained = train_tokenizer(data, tmp_path / "cache", size=257, **options)
  save_tokenizer(trained, tmp_path / "t.json")
  with pytest.raises(UserError, match="exists, and runs may depend on it"):
    save_tokenizer(trained, tmp_path / "t.json")
  synthetic = config_of(dataset_type="synthetic").data
  with pytest.raises(UserError, match="dataset_type=synthetic has no text"):
    list(training_texts(synthetic, tmp_path, 100))
