"""Every tokenizer gives its text back, and knows how many bytes each id stands for."""

import io
import json

import pytest
import tokenizers

from maxlite.config.schema import DataConfig
from maxlite.data.tokenizers.tokenizer import TOKENIZERS, open_tokenizer

TEXT = "def add(a, b):\n  return a + b  # café, naïve, 日本語, 🙂\n" * 30
PLAIN = "the cat sat on the mat and the dog sat on the log"


def save_huggingface(folder, specials=("<|endoftext|>",)):
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=320,
    special_tokens=list(specials),
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  tokenizer.train_from_iterator([TEXT], trainer)
  tokenizer.enable_truncation(5)
  path = folder / "tokenizer.json"
  tokenizer.save(str(path))
  return str(path)


def save_sentencepiece(folder):
  sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece is an extra")
  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.train(
    sentence_iterator=iter([PLAIN] * 20),
    model_writer=model,
    vocab_size=300,
    model_type="bpe",
    byte_fallback=True,
    hard_vocab_limit=False,
    add_dummy_prefix=False,
    minloglevel=2,
  )
  path = folder / "spm.model"
  path.write_bytes(model.getvalue())
  return str(path)


SAVE = {
  "byte": lambda _folder: "",
  "huggingface": save_huggingface,
  "sentencepiece": save_sentencepiece,
}
ROUND_TRIP = {"byte": TEXT, "huggingface": TEXT, "sentencepiece": f"{PLAIN} 日本語"}


@pytest.fixture(params=sorted(TOKENIZERS))
def tokenizer(request, tmp_path):
  path = SAVE[request.param](tmp_path)
  cfg = DataConfig(tokenizer_type=request.param, tokenizer_path=path)
  return request.param, open_tokenizer(cfg)


def test_text_comes_back_and_bytes_add_up(tokenizer):
  kind, tokenizer = tokenizer
  text = ROUND_TRIP[kind]
  ids = tokenizer.encode(text.encode())
  assert tokenizer.decode(ids) == text
  assert tokenizer.num_bytes_V.shape == (tokenizer.size,)
  assert tokenizer.num_bytes_V[ids].sum() == len(text.encode())
  assert ids.max() < tokenizer.size


def test_specials_are_no_text(tokenizer):
  _, tokenizer = tokenizer
  ends = [tokenizer.bos, tokenizer.eos]
  assert max(ends) < tokenizer.size
  assert not tokenizer.num_bytes_V[ends].any()
  assert tokenizer.decode([tokenizer.bos, *tokenizer.encode(b"cat"), tokenizer.eos]) == "cat"


def test_ids_of_no_token_are_left_out_of_text(tokenizer):
  _, tokenizer = tokenizer
  assert tokenizer.decode([*tokenizer.encode(b"cat"), tokenizer.size + 7]) == "cat"


def test_bytes_that_are_no_text_do_not_stop_anything(tokenizer):
  kind, tokenizer = tokenizer
  broken = b"cat \xff\xfe"
  assert tokenizer.decode(tokenizer.encode(broken)).startswith("cat")
  if kind == "byte":
    assert tokenizer.encode(broken).tolist() == list(broken)


def test_a_special_spelled_in_a_document_stays_text(tmp_path):
  tokenizer = TOKENIZERS["huggingface"](save_huggingface(tmp_path))
  ids = tokenizer.encode(b"a<|endoftext|>b")
  assert tokenizer.eos not in ids
  assert tokenizer.decode(ids) == "a<|endoftext|>b"


def test_bos_and_eos_are_told_apart_where_there_are_two(tmp_path):
  tokenizer = TOKENIZERS["huggingface"](save_huggingface(tmp_path, ("<s>", "</s>")))
  assert (tokenizer.bos, tokenizer.eos) == (0, 1)


def test_ends_that_are_not_marked_as_special_are_no_text_either(tmp_path):
  path = save_huggingface(tmp_path, ())
  raw = tokenizers.Tokenizer.from_file(path)
  raw.add_tokens(["</s>"])
  raw.save(path)
  tokenizer = TOKENIZERS["huggingface"](path)
  assert tokenizer.num_bytes_V[tokenizer.eos] == 0
  assert tokenizer.decode([*tokenizer.encode(b"cat"), tokenizer.eos]) == "cat"


def test_ends_that_are_not_marked_are_no_more_spelled_by_text(tmp_path):
  path = save_huggingface(tmp_path, ())
  raw = tokenizers.Tokenizer.from_file(path)
  raw.add_tokens(["</s>"])
  raw.save(path)
  tokenizer = TOKENIZERS["huggingface"](path)
  assert tokenizer.eos not in tokenizer.encode(b"a</s>b")
  assert tokenizer.encode_marked("a</s>b")[0].tolist().count(tokenizer.eos) == 1


THREE = ("<|endoftext|>", "<|im_end|>", "<|start|>")


@pytest.mark.parametrize(
  ("files", "bos", "ends"),
  [
    ({}, 0, (0,)),
    ({"tokenizer_config": {"eos_token": "<|im_end|>", "bos_token": None}}, 1, (1,)),
    ({"tokenizer_config": {"bos_token": {"content": "<|start|>"}}}, 2, (0,)),
    ({"special_tokens_map": {"eos_token": {"content": "<|im_end|>"}}}, 1, (1,)),
    (
      {
        "special_tokens_map": {"eos_token": "<|start|>"},
        "tokenizer_config": {"eos_token": "<|im_end|>"},
      },
      1,
      (1,),
    ),
    ({"config": {"eos_token_id": 1, "bos_token_id": 2}}, 2, (1,)),
    ({"config": {"eos_token_id": 1}, "generation_config": {"eos_token_id": [2, 0]}}, 2, (2, 0)),
    (
      {"tokenizer_config": {"eos_token": "<|im_end|>"}, "config": {"eos_token_id": [0, 1]}},
      1,
      (1, 0),
    ),
  ],
)
def test_what_begins_and_ends_a_text_is_read_from_the_files_beside_it(tmp_path, files, bos, ends):
  path = save_huggingface(tmp_path, THREE)
  for name, content in files.items():
    (tmp_path / f"{name}.json").write_text(json.dumps(content))
  tokenizer = TOKENIZERS["huggingface"](path)
  assert (tokenizer.bos, tokenizer.ends, tokenizer.eos) == (bos, ends, ends[0])


@pytest.mark.parametrize(
  ("name", "content", "told"),
  [
    (
      "tokenizer_config.json",
      '{"eos_token": "</s>"}',
      "lacks '</s>', which a file beside it names",
    ),
    ("config.json", '{"eos_token_id": 999}', "has no token 999"),
    ("config.json", '{"eos_token_id": "two"}', "has 'two' for a token's id"),
    ("config.json", '{"eos_token_id": [true]}', "for a token's id"),
    ("special_tokens_map.json", "[]", "is no JSON object"),
    ("generation_config.json", "[" * 100_000, "is no JSON"),
  ],
)
def test_files_beside_it_that_are_wrong_are_named(tmp_path, name, content, told):
  path = save_huggingface(tmp_path, THREE)
  (tmp_path / name).write_text(content)
  with pytest.raises(ValueError, match=told) as error:
    TOKENIZERS["huggingface"](path)
  assert "\n" not in str(error.value)


def test_the_chat_template_is_that_of_its_file_or_the_default(tmp_path):
  path = save_huggingface(tmp_path)
  template = lambda: TOKENIZERS["huggingface"](path).chat_template
  assert template() == ""
  both = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
  for given, expected in (("one", "one"), (both, "d")):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": given}))
    assert template() == expected
  (tmp_path / "chat_template.jinja").write_text("é")
  assert template() == "é"


def test_added_tokens_count_their_own_bytes(tmp_path):
  path = save_huggingface(tmp_path)
  raw = tokenizers.Tokenizer.from_file(path)
  raw.add_tokens(["é    é"])
  raw.save(path)
  tokenizer = TOKENIZERS["huggingface"](path)
  text = "aé    éb".encode()
  assert tokenizer.num_bytes_V[tokenizer.encode(text)].sum() == len(text)


def test_what_cannot_be_a_tokenizer_is_refused_in_one_line(tmp_path):
  junk = tmp_path / "junk"
  junk.write_text("{}")
  for kind in ("huggingface", "sentencepiece"):
    for path, match in ((str(junk), "is not a"), (str(tmp_path / "none"), "is not a file")):
      with pytest.raises(ValueError, match=match) as error:
        TOKENIZERS[kind](path)
      assert "\n" not in str(error.value)
  with pytest.raises(ValueError, match="has none of"):
    TOKENIZERS["huggingface"](save_huggingface(tmp_path, ()))
  with pytest.raises(ValueError, match="tokenizer_type=byte"):
    TOKENIZERS["byte"]("x.json")


def test_identity_is_of_the_content(tmp_path):
  first = TOKENIZERS["huggingface"](save_huggingface(tmp_path)).identity
  second = TOKENIZERS["huggingface"](save_huggingface(tmp_path, ("<s>", "</s>"))).identity
  assert first != second
