"""Preference data: the forms of lines, masks of the answers after the prompt, packing of pairs."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
from chat_cases import MARKED, UNMARKED, save_tokenizer, turns

from maxlite.config.schema import DataConfig
from maxlite.data.loader import open_data
from maxlite.data.packing import PackedPairs
from maxlite.data.sources.chat import ChatEncoder, fixed_date
from maxlite.data.sources.preference import preference_documents
from maxlite.data.token_cache import LOSS_MASK_BIT, TokenFile, Tokens
from maxlite.errors import UserError
from maxlite.registry import TOKENIZERS

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
USER = {"role": "user", "content": "two?"}
GOOD = {"role": "assistant", "content": "It is two."}
BAD = {"role": "assistant", "content": "five"}


def pair_of(tmp_path, record):
  """What is read of this line: (prompt, chosen, rejected)."""
  file = tmp_path / "pairs.jsonl"
  file.write_text(f"{json.dumps(record)}\n")
  ((prompt, answers, _, _),) = preference_documents(file, "", 0, 1)
  chosen, rejected = json.loads(answers)
  return json.loads(prompt), chosen, rejected


@pytest.mark.parametrize(
  "record",
  [
    {"prompt": "two?", "chosen": "It is two.", "rejected": "five"},
    {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD], "score": 3},
    {"messages": [USER], "chosen": GOOD, "rejected": BAD},
    {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
    # As in the hub's binarized UltraFeedback.
    {"prompt": "two?", "messages": [USER, GOOD], "chosen": [USER, GOOD], "rejected": [USER, BAD]},
  ],
  ids=["texts", "messages", "one message", "conversations", "conversations and prompt"],
)
def test_every_form_of_a_line_is_the_same_pair(tmp_path, record):
  assert pair_of(tmp_path, record) == ([USER], [GOOD], [BAD])


def test_columns_of_other_names_are_read(tmp_path):
  file = tmp_path / "pairs.jsonl"
  answers = {"winner": [{"role": "assistant", "text": "It is two."}], "loser": "five"}
  file.write_text(json.dumps({"question": "two?", **answers}))
  columns = {"prompt": "question", "chosen": "winner", "rejected": "loser", "content": "text"}
  ((prompt, continuations, _, _),) = preference_documents(file, "", 0, 1, columns=columns)
  assert json.loads(prompt) == [USER]
  assert json.loads(continuations) == [[GOOD], [BAD]]


@pytest.mark.parametrize(
  ("record", "message"),
  [
    ({"prompt": "a", "chosen": "b"}, "no `rejected` among"),
    ({"chosen": "b", "rejected": "c"}, "neither `prompt` nor `messages`"),
    ({"prompt": "a", "chosen": [USER, GOOD], "rejected": "c"}, "write both as answers, or both"),
    ({"prompt": "a", "chosen": [], "rejected": "c"}, "a list of at least one message"),
    ({"prompt": "a", "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "remove `prompt`, or"),
    ({"prompt": 3, "chosen": "b", "rejected": "c"}, "prompt must be a list"),
    ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are equal"),
    ({"chosen": [USER, GOOD], "rejected": [USER, GOOD]}, "chosen and rejected are equal"),
    ({"prompt": "a", "chosen": "b", "rejected": "c", "images": ["d"]}, "images .*only text"),
  ],
  ids=lambda value: "" if isinstance(value, dict) else value,
)
def test_mistakes_in_a_line_are_named(tmp_path, record, message):
  with pytest.raises(UserError, match=f"pairs.jsonl:1.*{message}"):
    pair_of(tmp_path, record)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
  folder = tmp_path_factory.mktemp("tokenizer")
  return TOKENIZERS["huggingface"](save_tokenizer(folder, tokenizer_config=NAMES))


@pytest.mark.parametrize("source", [MARKED[0], UNMARKED[0]], ids=["marked", "unmarked"])
def test_answers_in_the_prompt_have_no_weight(tokenizer, source):
  chat = ChatEncoder(tokenizer, source, place="the template", today=fixed_date)
  messages = turns("two?", "It is two.", "three?", "It is five.")
  ids, is_answer = chat.encode_completion(messages, num_prompt=3)
  assert tokenizer.decode(ids[is_answer].tolist()) == "It is five."
  ids, is_answer = chat.encode_completion(messages, num_prompt=1)
  assert "two" in tokenizer.decode(ids[is_answer].tolist())


def test_a_template_that_changes_earlier_answers_needs_one_answer(tokenizer):
  last = "{% if loop.last %}thinking {% endif %}"
  source = UNMARKED[0].replace("{{ message.content +", f"{last}{{{{ message.content +", 1)
  chat = ChatEncoder(tokenizer, source, place="the template", today=fixed_date)
  messages = turns("two?", "It is two.", "three?", "five")
  ids, is_answer = chat.encode_completion(messages, num_prompt=3)
  assert tokenizer.decode(ids[is_answer].tolist()).strip() == "thinking five"
  with pytest.raises(UserError, match="only one answer after the prompt"):
    chat.encode_completion(messages, num_prompt=1)


@pytest.mark.parametrize("packing", [True, False])
def test_a_row_has_the_two_documents_of_a_pair_one_after_the_other(tmp_path, packing):
  draw = np.random.default_rng(0)
  lengths = draw.integers(2, 10, size=40)
  # The ids of a document are its number.
  ids = np.repeat(np.arange(40, dtype=np.uint32), lengths) | LOSS_MASK_BIT
  ids.tofile(tmp_path / "ids.bin")
  tokens = Tokens.contiguous(TokenFile(tmp_path / "ids.bin", ids.dtype), "digest", lengths)
  rows = PackedPairs(tokens, 32, order_seed=1, packing=packing)
  pairs = []
  for index in range(len(rows)):
    row = rows[index]
    num_segments = int(row["segment_BT"].max())
    assert num_segments % 2 == 0
    assert packing or num_segments == 2
    for segment in range(1, num_segments + 1, 2):
      is_chosen = row["segment_BT"] == segment
      is_rejected = row["segment_BT"] == segment + 1
      (chosen,) = set(row["tokens_BT"][is_chosen].tolist())
      (rejected,) = set(row["tokens_BT"][is_rejected].tolist())
      assert is_chosen.sum() == lengths[chosen] - 1
      assert is_rejected.sum() == lengths[rejected] - 1
      pairs.append((chosen, rejected))
  assert sorted(pairs) == [(n, n + 1) for n in range(0, 40, 2)]
  assert pairs != sorted(pairs)
  assert not packing or len(rows) < 12


def data_of(folder, records, **keys):
  file = folder / "pairs.jsonl"
  lines = [json.dumps(record) for record in records]
  file.write_text("\n".join(lines) + "\n")
  keys = {
    "chat_template_path": str(Path("configs/chat/plain.jinja")),
    "max_target_length": 64,
    "eval_fraction": 0.3,
    **keys,
  }
  cfg = DataConfig(
    dataset_type="preference",
    dataset_path=(str(file),),
    **keys,
  )
  return open_data(
    cfg,
    vocab_size=264,
    global_batch_size=2,
    rows=range(2),
    cache_directory=folder / "cache",
  )


def test_pairs_of_one_prompt_are_in_one_split_and_long_ones_are_counted(tmp_path):
  records = []
  for prompt in range(20):
    for answer in range(2):
      records.append({"prompt": f"{prompt}", "chosen": "a" * (answer + 1), "rejected": "b"})
  records.append({"prompt": "p", "chosen": "a" * 40, "rejected": "b"})  # 21 + 40 bytes
  records.append({"prompt": "p" * 40, "chosen": "a", "rejected": "b"})
  source = data_of(tmp_path, records).source
  assert "1 cut at half of max_target_length" in source.summary
  assert "1 cut before an answer" in source.summary
  trained = prompts_of(source.train)
  held_out = prompts_of(source.eval)
  assert held_out
  assert not trained & held_out


def test_pairs_that_do_not_differ_are_refused_or_counted(tmp_path):
  equal_texts = {"prompt": "a", "chosen": "b", "rejected": [{"role": "assistant", "content": "b"}]}
  trimmed = {
    "prompt": "a",
    "chosen": [{"role": "assistant", "content": "b", "name": "x"}],
    "rejected": "b",
  }
  good = {"prompt": "a", "chosen": "b", "rejected": "c"}
  cut = {"prompt": "a", "chosen": "b" * 40 + "c", "rejected": "b" * 40 + "d"}
  for n, record in enumerate((equal_texts, trimmed)):
    folder = tmp_path / f"{n}"
    folder.mkdir()
    with pytest.raises(UserError, match=r"pairs.jsonl:2: chosen and rejected .*on_bad_row=skip"):
      data_of(folder, [good, record])
  source = data_of(tmp_path, [good, equal_texts, trimmed, cut], on_bad_row="skip").source
  assert "2 bad rows skipped" in source.summary
  assert "1 cut before the answers differ" in source.summary


def test_a_pair_of_ten_megabytes_is_refused_before_it_is_tokenized(tmp_path):
  long = {"prompt": "a", "chosen": "two " * 2_500_000, "rejected": "b"}
  started = time.process_time()
  with pytest.raises(UserError, match=r"pairs.jsonl:1: a conversation of 10,000,\d+ characters"):
    data_of(tmp_path, [long])
  assert time.process_time() - started < 3


def test_tools_of_a_pair_are_rendered_and_weights_obeyed(tmp_path):
  template = tmp_path / "chat.jinja"
  template.write_text("{{ tools | tojson }}" + UNMARKED[2])
  tools = [{"name": "add"}]
  chosen = [*turns("p", "no", "q", "yes")[1:]]
  chosen[0]["weight"] = 0
  record = {"prompt": "p", "chosen": chosen, "rejected": "b", "tools": tools}
  keys = {"max_target_length": 512, "eval_fraction": 0.0, "chat_template_path": str(template)}
  row = data_of(tmp_path, [record], **keys).source.train[0]
  is_chosen = row["segment_BT"] == 1
  text = bytes(i for i in row["tokens_BT"][is_chosen].tolist() if i < 256).decode()
  assert text.startswith(json.dumps(tools) + "user: p")
  answers = row["targets_BT"][is_chosen & (row["weight_BT"] > 0)].tolist()
  assert bytes(i for i in answers if i < 256) == b"yes"


def prompts_of(rows):
  """The tokens without weight of every document."""
  prompts = set()
  for index in range(len(rows)):
    row = rows[index]
    for segment in range(1, int(row["segment_BT"].max()) + 1):
      is_prompt = (row["segment_BT"] == segment) & (row["weight_BT"] == 0)
      prompts.add(tuple(row["tokens_BT"][is_prompt].tolist()))
  return prompts
