"""Conversations: rendered, of which exactly the answers are learned, and whole in their rows."""

import itertools
import json
from importlib.util import find_spec

import numpy as np
import pytest
from chat_cases import MARKED, SAID, TALKS, UNMARKED, save_tokenizer, turns
from hypothesis import given, settings
from hypothesis import strategies as st

from maxlite.config import load_config
from maxlite.config.schema import DataConfig
from maxlite.data.loader import open_data
from maxlite.data.packing.conversations import ConversationRows, first_fit
from maxlite.data.sources.chat import LEARNED, Chat, chat_documents, date_in_data, open_chat
from maxlite.data.token_cache import Tokens
from maxlite.data.tokenizers.tokenizer import TOKENIZERS, open_tokenizer

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
  folder = tmp_path_factory.mktemp("tokenizer")
  return TOKENIZERS["huggingface"](save_tokenizer(folder, tokenizer_config=NAMES))


def chat_of(tokenizer, source):
  return Chat(tokenizer, source, place="the template", today=date_in_data)


def spelled(tokenizer, ids):
  """Text of ids with special tokens in capital names."""
  names = {i: f"<{token.strip('<|>[]').upper()}>" for token, i in tokenizer.specials.items()}
  pieces, run = [], []
  for i in [*map(int, ids), None]:
    if i is None or i in names:
      pieces += [tokenizer.decode(run), names.get(i, "")]
      run = []
    else:
      run.append(i)
  return "".join(pieces)


def learned(tokenizer, source, messages):
  """What is learned of a conversation, a piece per answer."""
  ((ids, is_answer),) = chat_of(tokenizer, source).answers(messages)
  edges = np.flatnonzero(np.diff(is_answer.astype(int), prepend=0, append=0))
  return [spelled(tokenizer, ids[a:b]) for a, b in edges.reshape(-1, 2)]


def test_answers_are_learned_with_what_ends_their_turn(tokenizer):
  talk = turns("two?", "It is two.", "three?", "five\n", system="You are helpful.")
  for source in (MARKED[0], UNMARKED[0]):
    ((ids, _),) = chat_of(tokenizer, source).answers(talk)
    assert spelled(tokenizer, ids) == (
      "<IM_START>system\nYou are helpful.<IM_END>\n<IM_START>user\ntwo?<IM_END>\n"
      "<IM_START>assistant\nIt is two.<IM_END>\n<IM_START>user\nthree?<IM_END>\n"
      "<IM_START>assistant\nfive\n<IM_END>\n"
    )
    assert learned(tokenizer, source, talk) == ["It is two.<IM_END>", "five\n<IM_END>"]


@pytest.mark.parametrize("n", range(len(SAID)))
@pytest.mark.parametrize("talk", TALKS, ids=range(len(TALKS)))
def test_without_blocks_the_same_is_learned_as_with_them(tokenizer, n, talk):
  marked, unmarked = (chat_of(tokenizer, source[n]) for source in (MARKED, UNMARKED))
  assert marked.prompt(talk[:1]) == unmarked.prompt(talk[:1])
  ((ids, is_answer),), ((same, also),) = marked.answers(talk), unmarked.answers(talk)
  np.testing.assert_array_equal(ids, same)
  # The plain template prompts with a space, which the tokenizer joins to the answer's first word.
  np.testing.assert_array_equal(is_answer, also)
  prompt = marked.prompt(talk[:1])
  assert ids[: len(prompt) - 1].tolist() == prompt[:-1]


def test_an_answer_ends_with_its_end_of_turn(tokenizer):
  ends = [chat_of(tokenizer, source).ends for source in UNMARKED]
  eos = tokenizer.specials["</s>"]
  assert ends == [(eos, tokenizer.specials["<|im_end|>"]), (eos,), (eos,)]


@pytest.mark.parametrize("metaspace", ["", "first", "always"])
def test_specials_that_are_said_stay_text(tmp_path, metaspace):
  path = save_tokenizer(tmp_path, metaspace, tokenizer_config=NAMES)
  tokenizer = TOKENIZERS["huggingface"](path)
  chat = chat_of(tokenizer, MARKED[0])
  ((ids, is_answer),) = chat.answers(turns("a <|im_end|> b", "It is <|im_start|>two"))
  controls = set(tokenizer.specials.values())
  start, end = (tokenizer.specials[f"<|im_{which}|>"] for which in ("start", "end"))
  assert [int(i) for i in ids if i in controls] == [start, end, start, end]
  assert spelled(tokenizer, ids[is_answer]) == "It is <|im_start|>two<IM_END>"
  # Where nothing is hidden, the whole text is encoded at once.
  whole = tokenizer.encode_marked("<|im_start|>user\na b<|im_end|>\n<|im_start|>two")[0]
  pieces = tokenizer.encode_marked("<|im_start|>user\na b<|im_end|>\n<|im_start|>two\ufdd0")[0]
  np.testing.assert_array_equal(whole, pieces)


def test_bytes_speak_too():
  cfg = DataConfig(chat_template_path="configs/chat/plain.jinja")
  chat = open_chat(cfg, open_tokenizer(cfg))
  ((ids, is_answer),) = chat.answers(turns("é?", "ü<|end_of_text|>", "a", "b"))
  text = "user: é?\nassistant: ü<|end_of_text|>", "\nuser: a\nassistant: b", "\n"
  expected = [256, *text[0].encode(), 257, *text[1].encode(), 257, *text[2].encode()]
  assert ids.tolist() == expected
  assert ids[is_answer].tolist() == [*"ü<|end_of_text|>".encode(), 257, *b"b", 257]
  assert bytes(chat.prompt(turns("é?"))[1:]).decode() == "user: é?\nassistant: "


def test_a_token_that_is_an_answer_in_part_is_learned(tokenizer):
  (piece,) = tokenizer.encode_marked(" two")[0]
  source = (
    "{% for m in messages %}{{ ' ' }}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
  )
  ((ids, is_answer),) = chat_of(tokenizer, source).answers(turns("two"))
  assert (ids.tolist(), is_answer.tolist()) == ([piece], [True])


# As of models that forget how they came to earlier answers.
FORGETFUL = (
  "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
  "{% if loop.last and m.role == 'assistant' %}{{ 'so: ' }}{% endif %}{{ m.content }}"
  "{{ '<|im_end|>\n' }}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# One that has the assistant begin in a way in which it does not go on.
HASTY = FORGETFUL.replace("assistant\n' }}{% endif %}", "assistant\nthus' }}{% endif %}")


def test_answers_that_are_rendered_otherwise_later_are_learned_each_by_itself(tokenizer):
  texts = list(chat_of(tokenizer, FORGETFUL).answers(turns("a", "b", "c", "d")))
  first = "<IM_START>user\na<IM_END>\n<IM_START>assistant\n"
  second = "b<IM_END>\n<IM_START>user\nc<IM_END>\n<IM_START>assistant\n"
  assert [spelled(tokenizer, ids) for ids, _ in texts] == [
    f"{first}so: b<IM_END>\n",
    f"{first}{second}so: d<IM_END>\n",
  ]
  answers = [spelled(tokenizer, ids[is_answer]) for ids, is_answer in texts]
  assert answers == ["so: b<IM_END>", "so: d<IM_END>"]
  assert len(list(chat_of(tokenizer, FORGETFUL).answers(turns("a", "b")))) == 1


@pytest.mark.parametrize(
  ("source", "told"),
  [
    (HASTY, "set chat_template_path to one that has"),
    ("{% if %}", "the template is no Jinja2 template: Expected"),
    ("{{ raise_exception('no\nsystem') }}", "the template: no system"),
    ("{{ messages[9].content.strip() }}", "the template: "),
    ("{{ ''.__class__.__mro__ }}", "the template: .*unsafe"),
    ("{% for i in range(10 ** 9) %}{% endfor %}", "the template: Range too big"),
    ("{{ messages.append(1) }}", "the template: "),
    ("{% include 'x' %}", "the template: no loader"),
  ],
)
def test_a_template_that_fails_is_one_line(tokenizer, source, told):
  with pytest.raises(ValueError, match=told) as error:
    list(chat_of(tokenizer, source).answers(TALKS[1]))
  assert "\n" not in str(error.value)


def test_a_template_knows_a_date_that_is_the_same_every_day(tokenizer):
  source = "{{ strftime_now('%d %b %Y') }}{{ messages | tojson }}"
  ((ids, _),) = chat_of(tokenizer, source).answers(turns("é"))
  assert tokenizer.decode(ids) == '01 Jan 2025[{"role": "user", "content": "é"}]'


def write_lines(folder, *records):
  folder.mkdir(exist_ok=True)
  file = folder / "a.jsonl"
  file.write_text("".join(f"{json.dumps(record)}\n" for record in records))
  return file


def read(file):
  return [json.loads(next(pieces)) for pieces in chat_documents(file, "", 0, 1)]


def test_prompts_and_completions_are_conversations(tmp_path):
  talk = turns("a", "b")
  written = [{"messages": talk, "id": 7}, {"prompt": "a", "completion": "b"}]
  written += [{"prompt": talk[:1], "completion": talk[1:]}]
  assert read(write_lines(tmp_path, *written)) == [talk] * 3


@pytest.mark.parametrize(
  ("record", "told"),
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
def test_a_bad_line_is_named(tmp_path, record, told):
  file = write_lines(tmp_path, {"messages": turns("a")}, record)
  with pytest.raises(ValueError, match=rf"a\.jsonl:2: {told}") as error:
    read(file)
  assert "\n" not in str(error.value)


def opened(folder, *records, **knobs):
  write_lines(folder, *({"messages": messages} for messages in records))
  template = folder / "chat.jinja"
  template.write_text(MARKED[2])
  cfg = DataConfig(
    dataset_type="chat",
    dataset_path=(str(folder),),
    chat_template_path=str(template),
    eval_fraction=0.0,
    **{"max_target_length": 40} | knobs,
  )
  cache = folder / "cache"
  data = open_data(cfg, vocab_size=258, global_batch_size=1, rows=range(1), cache_directory=cache)
  return data.source


def test_what_is_cut_or_left_out_is_told(tmp_path):
  source = opened(
    tmp_path, turns("a", "b"), turns("c"), turns("d", "e" * 50), turns("f" * 60, "g"), packing=False
  )
  assert len(source.train) == 2
  for told in ("2 conversations; eval", "1 without an answer", "1 cut at max_target_length"):
    assert told in source.summary
  assert "; 1 cut before their first answer" in source.summary
  lengths = sorted(int((source.train[i]["segment_BT"] > 0).sum()) for i in range(2))
  assert lengths == [len("user: a\nassistant: b$"), 40]


def test_each_of_such_answers_is_a_document(tmp_path):
  write_lines(tmp_path, {"messages": turns("a", "b", "c", "d")}, {"messages": turns("a", "b")})
  summary = open_with(tmp_path, FORGETFUL).source.summary
  assert "in 3 conversations" in summary
  assert summary.endswith("; 1 more, as each answer is learned by itself")


def test_the_example_is_read_whole(tmp_path):
  words = ["configs/chat/lora.yml", "chat_template_path=configs/chat/plain.jinja"]
  cfg = load_config([*words, "eval_fraction=0"]).data
  shape = {"vocab_size": 258, "global_batch_size": 1, "rows": range(1)}
  summary = open_data(cfg, **shape, cache_directory=tmp_path).source.summary
  assert summary.endswith("in 52 conversations; eval 0 tokens in 0 conversations")


def test_a_template_that_refuses_names_the_line(tmp_path):
  write_lines(tmp_path, {"messages": turns("a", "b")}, {"messages": turns("a", system="s")})
  with pytest.raises(ValueError, match=r"a\.jsonl:2: chat_template_path=.*: only user and"):
    open_with(tmp_path, MARKED[1])


def open_with(folder, source):
  """The data in `folder`, by the template `source`."""
  (folder / "chat.jinja").write_text(source)
  cfg = DataConfig(
    dataset_type="chat",
    dataset_path=(str(folder),),
    chat_template_path=str(folder / "chat.jinja"),
    eval_fraction=0.0,
  )
  shape = {"vocab_size": 258, "global_batch_size": 1, "rows": range(1)}
  return open_data(cfg, **shape, cache_directory=folder / "cache")


def test_another_template_makes_other_documents(tmp_path):
  write_lines(tmp_path, {"messages": turns("a", "b")})
  first, again = (open_with(tmp_path, MARKED[2]).source.train.identity for _ in range(2))
  assert first == again
  assert open_with(tmp_path, MARKED[0]).source.train.identity != first
  assert len(list((tmp_path / "cache").iterdir())) == 2


def tokens_of(folder, documents):
  """Documents of (id, whether it is learned) as tokens on disk."""
  flagged = [
    np.array([i | LEARNED * is_learned for i, is_learned in d], np.uint32) for d in documents
  ]
  folder.mkdir(exist_ok=True)
  np.concatenate(flagged).tofile(folder / "train.bin")
  lengths = np.array([len(document) for document in documents])
  return Tokens(folder / "train.bin", np.dtype(np.uint32), "digest", lengths)


T = 12
DOCUMENTS = st.lists(
  st.lists(st.tuples(st.integers(1, 999), st.booleans()), min_size=2, max_size=T + 1),
  min_size=1,
  max_size=30,
)


@settings(max_examples=60, deadline=None)
@given(DOCUMENTS, st.booleans(), st.sampled_from([None, 0, 1]))
def test_rows_hold_every_document_once_and_whole(tmp_path_factory, documents, packing, seed):
  tokens = tokens_of(tmp_path_factory.getbasetemp() / "rows", documents)
  rows = ConversationRows(tokens, T, seed, packing=packing)
  found = []
  for row in (rows[i] for i in range(len(rows))):
    segment_T = row["segment_BT"]
    num_segments = int(segment_T.max())
    assert num_segments == 1 or packing
    for segment in range(1, num_segments + 1):
      inside = segment_T == segment
      names = ("tokens_BT", "targets_BT", "weight_BT", "position_BT")
      columns = (row[name][inside].tolist() for name in names)
      *columns, positions = columns
      assert positions == list(range(len(positions)))
      found.append(list(zip(*columns, strict=True)))
    assert not row["weight_BT"][segment_T == 0].any()
  following = lambda d: [(i, j, float(w)) for (i, _), (j, w) in itertools.pairwise(d)]
  assert sorted(found) == sorted(map(following, documents))


@given(st.lists(st.integers(1, 20), max_size=300))
def test_rows_are_filled_in_their_order_and_well(lengths):
  rows = first_fit(np.array(lengths, np.int64), 20)
  filled = np.bincount(rows, lengths) if lengths else np.zeros(0)
  assert (filled <= 20).all()
  assert (filled > 0).all()  # rows are numbered without a gap
  assert (filled <= 10).sum() <= 1 + len(lengths) // 64


def test_another_order_is_another_stream(tmp_path):
  tokens = tokens_of(tmp_path, [[(n, True), (n, True)] for n in range(1, 30)])
  identities = {
    ConversationRows(tokens, T, seed, packing=p).identity for seed in (0, 1) for p in (True, False)
  }
  assert len(identities) == 4


@pytest.mark.hf
@pytest.mark.skipif(
  not find_spec("transformers"), reason="needs transformers: pip install -e .[hf]"
)
@pytest.mark.parametrize("metaspace", ["", "first"])
def test_ids_and_answers_are_those_of_transformers(tmp_path, metaspace):
  from transformers import AutoTokenizer

  config = {"tokenizer_class": "PreTrainedTokenizerFast", **NAMES}
  path = save_tokenizer(tmp_path, metaspace, tokenizer_config=config)
  ours, theirs = TOKENIZERS["huggingface"](path), AutoTokenizer.from_pretrained(tmp_path)
  for marked, unmarked in zip(MARKED, UNMARKED, strict=True):
    for talk in TALKS[:2]:
      told = theirs.apply_chat_template(
        talk, chat_template=marked, return_assistant_tokens_mask=True, return_dict=True
      )
      ((ids, is_answer),) = chat_of(ours, marked).answers(talk)
      assert ids.tolist() == told["input_ids"]
      assert is_answer.tolist() == [bool(is_in) for is_in in told["assistant_masks"]]
    for talk in TALKS:  # with special tokens said by the speakers, which they can hide, too
      wish = {"sanitize_control_tokens": True, "add_generation_prompt": True, "return_dict": False}
      told = theirs.apply_chat_template(talk[:-1], chat_template=unmarked, **wish)
      assert chat_of(ours, unmarked).prompt(talk[:-1]) == told
