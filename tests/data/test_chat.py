"""Chat data: rendering, loss masks that cover exactly the answers, and packing without cuts."""

import itertools
import json
from importlib.util import find_spec

import numpy as np
import pytest
import tokenizers
from chat_cases import ANSWERS, CONVERSATIONS, MARKED, UNMARKED, save_tokenizer, turns
from hypothesis import given, settings
from hypothesis import strategies as st

from maxlite.config import load_config
from maxlite.config.raw_values import FrozenMapping
from maxlite.config.schema import DataConfig
from maxlite.data.loader import open_data
from maxlite.data.packing import PackedConversations, first_fit
from maxlite.data.sources.chat import (
  MAX_CHARACTERS,
  ChatEncoder,
  chat_documents,
  fixed_date,
  open_chat,
)
from maxlite.data.token_cache import LOSS_MASK_BIT, TokenFile, Tokens
from maxlite.data.tokenizer import open_tokenizer
from maxlite.errors import UserError
from maxlite.registry import TOKENIZERS

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
  folder = tmp_path_factory.mktemp("tokenizer")
  return TOKENIZERS["huggingface"](save_tokenizer(folder, tokenizer_config=NAMES))


def chat_of(tokenizer, source):
  return ChatEncoder(tokenizer, source, place="the template", today=fixed_date)


def spelled(tokenizer, ids):
  """Text of ids with special tokens in capital names."""
  names = {}
  for token, i in tokenizer.special_tokens.items():
    name = token.strip("<|>[]").upper()
    names[i] = f"<{name}>"
  text = ""
  run = []  # of ordinary ids, which must be decoded together
  for i in map(int, ids):
    if i in names:
      text += tokenizer.decode(run) + names[i]
      run = []
    else:
      run.append(i)
  return text + tokenizer.decode(run)


def masked_text(tokenizer, source, messages):
  """Text of each answer in the loss mask."""
  ((ids, is_answer),) = chat_of(tokenizer, source).encode(messages)
  edges = np.flatnonzero(np.diff(is_answer.astype(int), prepend=0, append=0))
  texts = []
  for start, stop in edges.reshape(-1, 2):
    texts.append(spelled(tokenizer, ids[start:stop]))
  return texts


def test_mask_covers_answers_and_their_end_of_turn(tokenizer):
  conversation = turns("two?", "It is two.", "three?", "five\n", system="You are helpful.")
  for source in (MARKED[0], UNMARKED[0]):
    ((ids, _),) = chat_of(tokenizer, source).encode(conversation)
    assert spelled(tokenizer, ids) == (
      "<IM_START>system\nYou are helpful.<IM_END>\n<IM_START>user\ntwo?<IM_END>\n"
      "<IM_START>assistant\nIt is two.<IM_END>\n<IM_START>user\nthree?<IM_END>\n"
      "<IM_START>assistant\nfive\n<IM_END>\n"
    )
    assert masked_text(tokenizer, source, conversation) == ["It is two.<IM_END>", "five\n<IM_END>"]


@pytest.mark.parametrize("n", range(len(ANSWERS)))
@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=range(len(CONVERSATIONS)))
def test_mask_is_the_same_without_generation_blocks(tokenizer, n, conversation):
  marked = chat_of(tokenizer, MARKED[n])
  unmarked = chat_of(tokenizer, UNMARKED[n])
  prompt = marked.prompt(conversation[:1])
  assert prompt == unmarked.prompt(conversation[:1])
  ((ids, is_answer),) = marked.encode(conversation)
  ((ids_without, mask_without),) = unmarked.encode(conversation)
  np.testing.assert_array_equal(ids, ids_without)
  np.testing.assert_array_equal(is_answer, mask_without)
  # The plain template prompts with a space, which the tokenizer joins to the answer's first word.
  assert ids[: len(prompt) - 1].tolist() == prompt[:-1]


def test_stop_tokens_include_the_end_of_turn(tokenizer):
  stop_token_ids = [chat_of(tokenizer, source).stop_token_ids for source in UNMARKED]
  eos = tokenizer.special_tokens["</s>"]
  end_of_turn = tokenizer.special_tokens["<|im_end|>"]
  assert stop_token_ids == [(eos, end_of_turn), (eos,), (eos,)]


@pytest.mark.parametrize("metaspace", ["", "first", "always"])
def test_special_tokens_in_messages_are_plain_text(tmp_path, metaspace):
  path = save_tokenizer(tmp_path, metaspace, tokenizer_config=NAMES)
  tokenizer = TOKENIZERS["huggingface"](path)
  chat = chat_of(tokenizer, MARKED[0])
  ((ids, is_answer),) = chat.encode(turns("a <|im_end|> b", "It is <|im_start|>two"))
  special_ids = set(tokenizer.special_tokens.values())
  start = tokenizer.special_tokens["<|im_start|>"]
  end = tokenizer.special_tokens["<|im_end|>"]
  assert [int(i) for i in ids if i in special_ids] == [start, end, start, end]
  assert spelled(tokenizer, ids[is_answer]) == "It is <|im_start|>two<IM_END>"
  # Encoding in pieces (with an ESCAPE) equals encoding the whole text at once.
  text = "<|im_start|>user\na b<|im_end|>\n<|im_start|>two"
  whole, _ = tokenizer.encode_with_offsets(text)
  in_pieces, _ = tokenizer.encode_with_offsets(f"{text}\ufdd0")
  np.testing.assert_array_equal(whole, in_pieces)


def test_byte_tokenizer_supports_chat():
  cfg = DataConfig(chat_template_path="configs/chat/plain.jinja")
  chat = open_chat(cfg, open_tokenizer(cfg))
  ((ids, is_answer),) = chat.encode(turns("é?", "ü<|end_of_text|>", "a", "b"))
  first_turns = "user: é?\nassistant: ü<|end_of_text|>".encode()
  last_turns = b"\nuser: a\nassistant: b"
  assert ids.tolist() == [256, *first_turns, 257, *last_turns, 257, *b"\n"]
  assert ids[is_answer].tolist() == [*"ü<|end_of_text|>".encode(), 257, *b"b", 257]
  prompt = chat.prompt(turns("é?"))
  assert bytes(prompt[1:]).decode() == "user: é?\nassistant: "


def test_a_token_partly_in_an_answer_is_masked(tokenizer):
  ((piece,), _) = tokenizer.encode_with_offsets(" two")
  source = (
    "{% for m in messages %}{{ ' ' }}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
  )
  ((ids, is_answer),) = chat_of(tokenizer, source).encode(turns("two"))
  assert ids.tolist() == [piece]
  assert is_answer.tolist() == [True]


# Renders the last answer differently, like reasoning models that drop earlier reasoning.
LAST_DIFFERS = (
  "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
  "{% if loop.last and m.role == 'assistant' %}{{ 'so: ' }}{% endif %}{{ m.content }}"
  "{{ '<|im_end|>\n' }}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Has a generation prompt that answers do not start with.
BAD_PROMPT = LAST_DIFFERS.replace("assistant\n' }}{% endif %}", "assistant\nthus' }}{% endif %}")


def test_answers_rendered_differently_later_become_separate_documents(tokenizer):
  texts = list(chat_of(tokenizer, LAST_DIFFERS).encode(turns("a", "b", "c", "d")))
  first = "<IM_START>user\na<IM_END>\n<IM_START>assistant\n"
  second = "b<IM_END>\n<IM_START>user\nc<IM_END>\n<IM_START>assistant\n"
  assert [spelled(tokenizer, ids) for ids, _ in texts] == [
    f"{first}so: b<IM_END>\n",
    f"{first}{second}so: d<IM_END>\n",
  ]
  answers = [spelled(tokenizer, ids[is_answer]) for ids, is_answer in texts]
  assert answers == ["so: b<IM_END>", "so: d<IM_END>"]
  assert len(list(chat_of(tokenizer, LAST_DIFFERS).encode(turns("a", "b")))) == 1


@pytest.mark.parametrize(
  ("source", "message"),
  [
    (BAD_PROMPT, "set chat_template_path to one that has"),
    ("{% if %}", "the template is not a Jinja2 template: Expected"),
    ("{{ raise_exception('no\nsystem') }}", "the template: no system"),
    ("{{ messages[9].content.strip() }}", "the template: "),
    ("{{ ''.__class__.__mro__ }}", "the template: .*unsafe"),
    ("{% for i in range(10 ** 9) %}{% endfor %}", "the template: Range too big"),
    ("{{ messages.append(1) }}", "the template: "),
    ("{% include 'x' %}", "the template: no loader"),
  ],
)
def test_template_errors_are_one_line(tokenizer, source, message):
  with pytest.raises(ValueError, match=message) as error:
    list(chat_of(tokenizer, source).encode(CONVERSATIONS[1]))
  assert "\n" not in str(error.value)


def test_the_date_in_training_data_is_fixed(tokenizer):
  source = "{{ strftime_now('%d %b %Y') }}{{ messages | tojson }}"
  ((ids, _),) = chat_of(tokenizer, source).encode(turns("é"))
  assert tokenizer.decode(ids) == '01 Jan 2025[{"role": "user", "content": "é"}]'


@pytest.mark.parametrize("source", [MARKED[0], UNMARKED[0]], ids=["marked", "unmarked"])
def test_answers_of_weight_zero_are_in_no_loss(tokenizer, source):
  messages = turns("two?", "It is two.", "three?", "five", "two?", "two")
  for weights in itertools.product([0, 1, None], repeat=3):
    expected = []
    for n, answer in enumerate(["It is two.", "five", "two"]):
      messages[2 * n + 1]["weight"] = weights[n]
      if weights[n] != 0:
        expected.append(f"{answer}<IM_END>")
    assert masked_text(tokenizer, source, messages) == expected


def test_weights_hold_for_templates_that_mark_several_parts_of_a_message(tokenizer):
  source = (
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}|"
    "{% if m.role == 'assistant' %}{% generation %}{{ eos_token }}{% endgeneration %}{% endif %}"
    "{% endfor %}"
  )
  messages = turns("two?", "It is two.", "three?", "five")
  messages[1]["weight"] = 0
  assert masked_text(tokenizer, source, messages) == ["two?", "three?", "five", "</S>"]


def test_a_template_that_marks_only_the_last_answer_has_no_weights(tokenizer):
  source = MARKED[2].replace("message.role == 'assistant'", "loop.last")
  messages = turns("two?", "It is two.", "three?", "five")
  messages[1]["weight"] = 0
  with pytest.raises(UserError, match="weight 0 cannot be located"):
    masked_text(tokenizer, source, messages)


def test_an_answer_of_weight_zero_becomes_no_document(tokenizer):
  messages = turns("a", "b", "c", "d")
  messages[1]["weight"] = 0
  ((ids, is_answer),) = chat_of(tokenizer, LAST_DIFFERS).encode(messages)
  assert spelled(tokenizer, ids[is_answer]) == "so: d<IM_END>"


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
WITH_TOOLS = (
  "{% if tools %}[{{ tools | tojson }}]{% endif %}{% for m in messages %}{{ m.role }}: "
  "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"
  "{% if m.content is defined %}{{ m.content }}{% endif %}"
  "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
  "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
CALLS = [
  {"role": "user", "content": "1+1?"},
  {"role": "assistant", "content": None, "tool_calls": [CALL]},
  {"role": "tool", "content": "2"},
  {"role": "assistant", "content": "two"},
]


def texts_of(folder, source, record):
  """The texts that a row becomes, and their answers."""
  write_lines(folder, [record])
  tokens = open_with(folder, source, max_target_length=999, packing=False).source.train
  texts = []
  for index in range(len(tokens)):
    row = tokens[index]
    for chosen in (row["segment_BT"] > 0, row["weight_BT"] > 0):
      texts.append(bytes(i for i in row["targets_BT"][chosen].tolist() if i < 256).decode())
  return texts


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)], ids=["list", "text"])
def test_tools_and_calls_are_rendered(tmp_path, tools):
  text, answers = texts_of(tmp_path, WITH_TOOLS, {"messages": CALLS, "tools": tools})
  calls = json.dumps([CALL])
  assert text == f"{json.dumps(TOOLS)}]user: 1+1?\nassistant: {calls}\ntool: 2\nassistant: two\n"
  assert answers == f"{calls}two"


def test_variables_of_the_template_are_passed(tmp_path):
  record = {"messages": turns("a", "b"), "chat_template_kwargs": {"style": "<|end_of_text|>"}}
  (text, _) = texts_of(tmp_path, "{{ 'in ' + style }}" + UNMARKED[2], record)
  assert text == "n <|end_of_text|>user: a\nassistant: b\n"


@pytest.mark.parametrize(
  ("record", "name"),
  [
    ({"messages": turns("a", "b"), "tools": TOOLS}, "tools"),
    ({"messages": CALLS}, "tool_calls"),
  ],
)
def test_a_template_that_drops_tools_or_their_calls_is_refused(tmp_path, record, name):
  source = UNMARKED[2].replace("message.content", "(message.content or '')")
  with pytest.raises(ValueError, match=rf"a\.jsonl:1: .* does not print {name}: "):
    texts_of(tmp_path, source, record)


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"functions": [{"name": "add"}]}, "functions .*: write tools"),
    ({"system": "Be kind."}, "system .*as the first message"),
    ({"images": ["a.png"]}, "images .*only text is read"),
    ({"weight": 0.5}, "weight .*in the messages"),
    ({"label": False}, "label: false"),
    ({"tools": {"name": "add"}}, "tools must be a list"),
    ({"tools": "add"}, "tools is text that is not JSON"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs has messages"),
  ],
)
def test_fields_with_a_meaning_in_other_formats_are_refused(tmp_path, fields, message):
  neutral = {"tools": [], "images": None, "system": "", "id": 7, "label": "math"}
  assert read(write_lines(tmp_path, [{"messages": turns("a", "b"), **neutral}])) == [
    turns("a", "b")
  ]
  for record in ({"messages": turns("a", "b")}, {"prompt": "a", "completion": "b"}):
    file = write_lines(tmp_path, [{**record, **fields}])
    with pytest.raises(ValueError, match=rf"a\.jsonl:1: .*{message}"):
      read(file)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"weight": 0.5}, "has weight 0.5"),
    ({"role": "user", "weight": 1}, "has weight 1: write 0, or 1 in an answer"),
    ({"train": False}, "train .*: write weight: 0 or 1"),
    ({"function_call": {"name": "add"}}, "function_call .*: write tool_calls"),
    ({"content": [{"type": "image", "url": "a"}]}, "has a part that is not"),
    ({"content": ["a"]}, "has a part that is not"),
    ({"content": None, "tool_calls": []}, "must be"),
    ({"tool_calls": "add"}, "has tool_calls that are not"),
  ],
)
def test_fields_of_messages_with_another_meaning_are_refused(tmp_path, change, message):
  messages = turns("a", "b")
  messages[1] |= change
  file = write_lines(tmp_path, [{"messages": messages}])
  with pytest.raises(ValueError, match=rf"a\.jsonl:1: messages: the 2\. ?.*{message}"):
    read(file)


@pytest.mark.parametrize("depth", [99, 300, 990])
def test_rows_that_are_nested_too_deeply_are_bad_rows(tmp_path, depth):
  nested = "x"
  for _ in range(depth):
    nested = [nested]
  good = {"messages": turns("a", "b")}
  records = [good, {"messages": [{**turns("a")[0], "x": nested}, *turns("a", "b")[1:]]}, good]
  write_lines(tmp_path, records)
  with pytest.raises(UserError, match=r"a\.jsonl:2: nested more than 100 levels"):
    open_with(tmp_path, UNMARKED[2])
  source = open_with(tmp_path, UNMARKED[2], on_bad_row="skip").source
  assert "2 conversations" in source.summary
  assert "1 bad rows skipped" in source.summary


def test_what_the_vocabulary_lacks_is_no_stop_token(tmp_path):
  spellings = ["<unk>", "<s>", "</s>", *" :1279?aeinrstu"]
  vocabulary = {spelling: i for i, spelling in enumerate(spellings)}
  model = tokenizers.models.BPE(vocabulary, [], unk_token="<unk>")
  library = tokenizers.Tokenizer(model)
  library.add_special_tokens(spellings[:3])
  library.save(str(tmp_path / "tokenizer.json"))
  tokenizer = TOKENIZERS["huggingface"](str(tmp_path / "tokenizer.json"))
  for end in ("\n</s>", "</s>\n"):
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}" + end + "{% endfor %}"
    assert chat_of(tokenizer, source).stop_token_ids == (2,)
  assert not chat_of(tokenizer, source.replace(end, "\n")).has_end_token


def test_a_template_without_an_end_token_is_noted(tmp_path, caplog):
  for end, num_notes in (("{{ eos_token }}", 0), ("\n", 1)):
    file = tmp_path / "chat.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}" + end + "{% endfor %}")
    cfg = DataConfig(chat_template_path=str(file))
    open_chat(cfg, open_tokenizer(cfg))
    assert caplog.text.count("no special token after an answer") == num_notes


def test_a_conversation_that_is_far_too_long_is_not_tokenized(tokenizer):
  chat = chat_of(tokenizer, UNMARKED[0])
  messages = turns("a", "b" * MAX_CHARACTERS)
  with pytest.raises(UserError, match="raise max_target_length"):
    list(chat.encode(messages, max_ids=99))
  messages = turns("a", "two " * 999)
  assert len(list(chat.encode(messages, max_ids=99))) == 1  # is cut later


def write_lines(folder, records):
  folder.mkdir(exist_ok=True)
  file = folder / "a.jsonl"
  lines = [json.dumps(record) for record in records]
  file.write_text("\n".join(lines) + "\n")
  return file


def read(file):
  return [json.loads(next(pieces)) for pieces in chat_documents(file, "", 0, 1)]


def test_prompt_and_completion_form_a_conversation(tmp_path):
  conversation = turns("a", "b")
  records = [
    {"messages": conversation, "id": 7},
    {"prompt": "a", "completion": "b"},
    {"prompt": conversation[:1], "completion": conversation[1:]},
  ]
  assert read(write_lines(tmp_path, records)) == [conversation] * 3


TOOLS_TEMPLATE = (
  "{% if tools %}[{{ tools | tojson }}]{% endif %}{% for m in messages %}{{ m.role[0] }}:"
  "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"
  "{{ m.content if m.content is defined else '' }}{{ eos_token }}{% endfor %}"
  "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_rows_of_tables_equal_those_of_json_lines(tmp_path, suffix):
  """Also with fields that only some messages have, which are null in the others."""
  pa = pytest.importorskip("pyarrow", reason="pyarrow is an extra")
  parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is an extra")
  messages = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "bad", "weight": 0},
    {"role": "assistant", "content": "It is 2."},
  ]
  rows = [{"messages": messages, "tools": json.dumps(TOOLS)}, {"messages": turns("a", "b")}]
  write_lines(tmp_path / "lines", rows)
  (tmp_path / "table").mkdir()
  table = pa.Table.from_pylist(rows)
  file = tmp_path / "table" / f"a.{suffix}"
  if suffix == "parquet":
    parquet.write_table(table, file)
  else:
    with pa.ipc.new_stream(str(file), table.schema) as writer:
      writer.write_table(table)
  lines = open_with(tmp_path / "lines", TOOLS_TEMPLATE).source
  read_table = open_with(tmp_path / "table", TOOLS_TEMPLATE).source
  assert read_table.train.identity == lines.train.identity
  assert f"1 .{suffix}" in read_table.files


def test_share_gpt_and_alpaca_rows_are_conversations(tmp_path):
  talk = [{"from": "system", "value": "s"}, {"from": "human", "value": "a"}]
  records = [
    {"conversations": [*talk, {"from": "gpt", "value": "b", "weight": 0}]},
    {"instruction": "a", "input": "", "output": "b"},
    {"instruction": "a", "input": "x", "output": "b", "history": []},
  ]
  conversations = read(write_lines(tmp_path, records))
  with_system = turns("a", "b", system="s")
  with_system[2]["weight"] = 0
  assert conversations == [with_system, turns("a", "b"), turns("a\n\nx", "b")]
  unknown = {"conversations": [*talk, {"from": "function_call", "value": "{}"}]}
  with pytest.raises(UserError, match=r"a.jsonl:1: conversations: the 3\. must be"):
    read(write_lines(tmp_path, [unknown]))


RENAMED = {
  "messages": ({"messages": "dialog"}, {"dialog": turns("a", "b"), "messages": "an id"}),
  "messages and their fields": (
    {"messages": "history", "role": "speaker", "content": "text"},
    {"history": [{"speaker": "human", "text": "a"}, {"speaker": "gpt", "text": "b"}]},
  ),
  "prompt and completion": ({"prompt": "q", "completion": "prompt"}, {"q": "a", "prompt": "b"}),
  "Alpaca": (
    {"instruction": "question", "input": "context", "output": "answer"},
    {"question": "a", "answer": "b", "output": "of another model"},
  ),
}


@pytest.mark.parametrize(("columns", "record"), RENAMED.values(), ids=RENAMED)
def test_columns_of_other_names_are_read(tmp_path, columns, record):
  file = write_lines(tmp_path, [record])
  (pieces,) = chat_documents(file, "", 0, 1, columns=columns)
  assert json.loads(next(pieces)) == turns("a", "b")


def test_a_column_that_is_missing_is_named(tmp_path):
  file = write_lines(tmp_path, [{"messages": turns("a", "b")}])
  with pytest.raises(UserError, match=r"a.jsonl:1: no column 'talk' among \['messages'\]: correct"):
    list(chat_documents(file, "", 0, 1, columns={"messages": "talk"}))


def test_tokens_and_their_cache_depend_on_the_columns(tmp_path):
  write_lines(tmp_path, [{"messages": turns("a", "b"), "other": turns("c", "d")}])
  first = open_with(tmp_path, MARKED[2]).source.train.identity
  columns = FrozenMapping([("messages", "other")])
  other = open_with(tmp_path, MARKED[2], data_columns=columns).source.train.identity
  assert open_with(tmp_path, MARKED[2]).source.train.identity == first != other
  assert len(list((tmp_path / "cache").iterdir())) == 2


@pytest.mark.parametrize(
  ("record", "message"),
  [
    ({"text": "a"}, "neither `messages` nor `prompt` and `completion` among .'text'."),
    ({"prompt": "a"}, "neither"),
    ({"prompt": "a", "completion": 3}, "completion must be a list"),
    ({"messages": []}, "messages must be a list of at least one"),
    ({"messages": ["a"]}, r"messages: the 1\. must be"),
    (
      {"messages": [*turns("a"), {"role": "assistant", "content": None}]},
      r"messages: the 2\. must be",
    ),
  ],
)
def test_errors_name_the_line(tmp_path, record, message):
  file = write_lines(tmp_path, [{"messages": turns("a")}, record])
  with pytest.raises(ValueError, match=rf"a\.jsonl:2: {message}") as error:
    read(file)
  assert "\n" not in str(error.value)


def write_conversations(folder, conversations):
  write_lines(folder, [{"messages": messages} for messages in conversations])


def test_summary_counts_cut_and_dropped_conversations(tmp_path):
  conversations = [turns("a", "b"), turns("c"), turns("d", "e" * 50), turns("f" * 60, "g")]
  write_conversations(tmp_path, conversations)
  source = open_with(tmp_path, MARKED[2], max_target_length=40, packing=False).source
  assert len(source.train) == 2
  for note in ("2 conversations; eval", "1 without an answer", "1 cut at max_target_length"):
    assert note in source.summary
  assert "; 1 cut before their first answer" in source.summary
  lengths = []
  for row in (source.train[0], source.train[1]):
    is_real_T = row["segment_BT"] > 0
    lengths.append(is_real_T.sum())
  assert sorted(lengths) == [len("user: a\nassistant: b$"), 40]


def test_each_differing_answer_is_a_document(tmp_path):
  write_conversations(tmp_path, [turns("a", "b", "c", "d"), turns("a", "b")])
  summary = open_with(tmp_path, LAST_DIFFERS).source.summary
  assert "in 3 conversations" in summary
  assert summary.endswith("; 1 added, as each answer is a document")


def test_the_example_config_reads_all_conversations(tmp_path):
  arguments = ["configs/chat/lora.yml", "chat_template_path=configs/chat/plain.jinja"]
  cfg = load_config([*arguments, "eval_fraction=0"]).data
  shape = {"vocab_size": 258, "global_batch_size": 1, "rows": range(1)}
  summary = open_data(cfg, **shape, cache_directory=tmp_path).source.summary
  assert summary.endswith("in 52 conversations; eval 0 tokens in 0 conversations")


def test_a_rejected_conversation_names_the_line(tmp_path):
  write_conversations(tmp_path, [turns("a", "b"), turns("a", system="s")])
  with pytest.raises(ValueError, match=r"a\.jsonl:2: chat_template_path=.*: only user and"):
    open_with(tmp_path, MARKED[1])


def open_with(folder, source, **keys):
  """Open the data in `folder` with the template `source`."""
  (folder / "chat.jinja").write_text(source)
  cfg = DataConfig(
    dataset_type="chat",
    dataset_path=(str(folder),),
    chat_template_path=str(folder / "chat.jinja"),
    eval_fraction=0.0,
    **keys,
  )
  shape = {"vocab_size": 258, "global_batch_size": 1, "rows": range(1)}
  return open_data(cfg, **shape, cache_directory=folder / "cache")


def test_a_mixture_of_conversations_has_the_rows_of_each_source(tmp_path):
  """One source is of ShareGPT, the other calls its columns otherwise."""
  records = {
    "a": [
      {"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": "b"}]}
      for q in "acegi"
    ],
    "b": [{"talk": turns(q, "d")} for q in "mnop"],
  }
  entries = []
  for name, weight in {"a": 3, "b": 1}.items():
    (tmp_path / name).mkdir()
    write_lines(tmp_path / name, records[name])
    keys = {"name": name, "path": str(tmp_path / name), "weight": str(weight)}
    entries.append(FrozenMapping(keys.items()))
  entries[1] = FrozenMapping(
    [*entries[1].items(), ("columns", FrozenMapping([("messages", "talk")]))]
  )
  data = open_with(tmp_path, MARKED[2], dataset_mixture=tuple(entries), max_target_length=64)
  alone = {
    "a": open_with(tmp_path / "a", MARKED[2], max_target_length=64).source,
    "b": open_with(
      tmp_path / "b", MARKED[2], max_target_length=64, data_columns=entries[1]["columns"]
    ).source,
  }
  for name, source in alone.items():
    assert data.source.parts[name].train.identity == source.train.identity
  stream = data.train_stream()
  seen = set()
  for _ in range(8):
    batch = next(stream)
    text = bytes(i for i in batch.tokens_BT[0] if i < 256).decode()
    name = "a" if "assistant: b" in text else "b"
    rows = [alone[name].train[n] for n in range(len(alone[name].train))]
    assert any(np.array_equal(row["tokens_BT"], batch.tokens_BT[0]) for row in rows)
    seen.add(name)
  assert seen == {"a", "b"}


def test_cache_depends_on_the_template(tmp_path):
  write_conversations(tmp_path, [turns("a", "b")])

  def identity_with(template):
    return open_with(tmp_path, template).source.train.identity

  first = identity_with(MARKED[2])
  assert identity_with(MARKED[2]) == first
  assert identity_with(MARKED[0]) != first
  assert len(list((tmp_path / "cache").iterdir())) == 2


def tokens_of(folder, documents):
  """Write documents of (id, in_loss) as tokens on disk."""
  flagged = []
  for document in documents:
    ids = [i | LOSS_MASK_BIT * in_loss for i, in_loss in document]
    flagged.append(np.array(ids, np.uint32))
  folder.mkdir(exist_ok=True)
  np.concatenate(flagged).tofile(folder / "train.bin")
  lengths = np.array([len(document) for document in documents])
  file = TokenFile(folder / "train.bin", np.dtype(np.uint32))
  return Tokens.contiguous(file, "digest", lengths)


T = 12
DOCUMENTS = st.lists(
  st.lists(st.tuples(st.integers(1, 999), st.booleans()), min_size=2, max_size=T + 1),
  min_size=1,
  max_size=30,
)


@settings(max_examples=60, deadline=None)
@given(DOCUMENTS, st.booleans(), st.sampled_from([None, 0, 1]))
def test_rows_contain_every_document_once_and_uncut(tmp_path_factory, documents, packing, seed):
  tokens = tokens_of(tmp_path_factory.getbasetemp() / "rows", documents)
  rows = PackedConversations(tokens, T, seed, packing=packing)
  found = []
  for index in range(len(rows)):
    row = rows[index]
    segment_T = row["segment_BT"]
    num_segments = int(segment_T.max())
    assert num_segments == 1 or packing
    for segment in range(1, num_segments + 1):
      inside = segment_T == segment
      inputs = row["tokens_BT"][inside].tolist()
      targets = row["targets_BT"][inside].tolist()
      weights = row["weight_BT"][inside].tolist()
      assert row["position_BT"][inside].tolist() == list(range(len(inputs)))
      found.append(list(zip(inputs, targets, weights, strict=True)))
    assert not row["weight_BT"][segment_T == 0].any()
  expected = []
  for document in documents:
    pairs = itertools.pairwise(document)
    expected.append([(i, j, float(in_loss)) for (i, _), (j, in_loss) in pairs])
  assert sorted(found) == sorted(expected)


@given(st.lists(st.integers(1, 20), max_size=300))
def test_first_fit_never_overflows_and_wastes_little(lengths):
  rows = first_fit(np.array(lengths, np.int64), 20)
  filled = np.bincount(rows, np.array(lengths, float))
  assert (filled <= 20).all()
  assert (filled > 0).all()  # rows are numbered without a gap
  assert (filled <= 10).sum() <= 1 + len(lengths) // 64


def test_identity_depends_on_order_and_packing(tmp_path):
  tokens = tokens_of(tmp_path, [[(n, True), (n, True)] for n in range(1, 30)])
  identities = set()
  for seed in (0, 1):
    identities.add(PackedConversations(tokens, T, seed, packing=True).identity)
    identities.add(PackedConversations(tokens, T, seed, packing=False).identity)
  assert len(identities) == 4


@pytest.mark.hf
@pytest.mark.skipif(
  not find_spec("transformers"), reason="needs transformers: pip install -e .[hf]"
)
@pytest.mark.parametrize("metaspace", ["", "first"])
def test_ids_and_masks_equal_transformers(tmp_path, metaspace):
  from transformers import AutoTokenizer

  config = {"tokenizer_class": "PreTrainedTokenizerFast", **NAMES}
  path = save_tokenizer(tmp_path, metaspace, tokenizer_config=config)
  ours = TOKENIZERS["huggingface"](path)
  theirs = AutoTokenizer.from_pretrained(tmp_path)
  for marked, unmarked in zip(MARKED, UNMARKED, strict=True):
    for conversation in CONVERSATIONS[:2]:
      expected = theirs.apply_chat_template(
        conversation, chat_template=marked, return_assistant_tokens_mask=True, return_dict=True
      )
      ((ids, is_answer),) = chat_of(ours, marked).encode(conversation)
      assert ids.tolist() == expected["input_ids"]
      assert is_answer.tolist() == [bool(is_in) for is_in in expected["assistant_masks"]]
    # Also special tokens in messages, which transformers can escape.
    options = {"sanitize_control_tokens": True, "add_generation_prompt": True, "return_dict": False}
    for conversation in CONVERSATIONS:
      expected = theirs.apply_chat_template(conversation[:-1], chat_template=unmarked, **options)
      assert chat_of(ours, unmarked).prompt(conversation[:-1]) == expected


@pytest.mark.hf
@pytest.mark.skipif(
  not find_spec("transformers"), reason="needs transformers: pip install -e .[hf]"
)
def test_tools_calls_and_reasoning_equal_transformers(tmp_path):
  """Also if they spell special tokens, which both encode as text."""
  from transformers import AutoTokenizer

  config = {"tokenizer_class": "PreTrainedTokenizerFast", **NAMES}
  ours = TOKENIZERS["huggingface"](save_tokenizer(tmp_path, tokenizer_config=config))
  theirs = AutoTokenizer.from_pretrained(tmp_path)
  source = WITH_TOOLS.replace("{{ m.role }}", "{{ m.role }}<think>{{ m.reasoning_content }}")
  chat = chat_of(ours, source)
  for spelled_text in ("two", "</s> two <|im_end|>"):
    calls = [{"function": {"name": "add", "arguments": {"a": spelled_text}}}]
    messages = [
      {"role": "user", "content": spelled_text, "name": None},
      {"role": "assistant", "content": None, "tool_calls": calls, "reasoning": spelled_text},
      {"role": "tool", "content": spelled_text},
    ]
    for tools in (None, [{"name": "add", "description": spelled_text}]):
      expected = theirs.apply_chat_template(
        messages,
        tools=tools,
        chat_template=source,
        add_generation_prompt=True,
        sanitize_control_tokens=True,
        return_dict=False,
      )
      assert chat.prompt(messages, {"tools": tools}) == expected
