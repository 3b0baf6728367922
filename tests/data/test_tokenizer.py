"""Every tokenizer round-trips text and counts the bytes of each id."""

import dataclasses
import io
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import pytest
import tokenizers
from chat_cases import save_tokenizer

from maxlite.config.schema import DataConfig
from maxlite.data.tokenize import Piece, TextTokenizer
from maxlite.data.tokenizer import encode_prompt, open_tokenizer
from maxlite.errors import UserError
from maxlite.registry import TOKENIZERS

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


def test_text_round_trips_and_bytes_add_up(tokenizer):
  kind, tokenizer = tokenizer
  text = ROUND_TRIP[kind]
  ids = tokenizer.encode(text.encode())
  assert tokenizer.decode(ids) == text
  assert tokenizer.num_bytes_V.shape == (tokenizer.size,)
  assert tokenizer.num_bytes_V[ids].sum() == len(text.encode())
  assert ids.max() < tokenizer.size


def test_special_tokens_have_no_text(tokenizer):
  _, tokenizer = tokenizer
  special = [*tokenizer.prefix_ids, *tokenizer.stop_token_ids]
  assert max(special) < tokenizer.size
  assert not tokenizer.num_bytes_V[special].any()
  assert tokenizer.decode([*special, *tokenizer.encode(b"cat"), *special]) == "cat"


def test_ids_beyond_the_vocabulary_are_not_decoded(tokenizer):
  _, tokenizer = tokenizer
  assert tokenizer.decode([*tokenizer.encode(b"cat"), tokenizer.size + 7]) == "cat"


def test_invalid_utf8_is_encoded(tokenizer):
  kind, tokenizer = tokenizer
  broken = b"cat \xff\xfe"
  assert tokenizer.decode(tokenizer.encode(broken)).startswith("cat")
  if kind == "byte":
    assert tokenizer.encode(broken).tolist() == list(broken)


def test_a_special_token_spelled_in_a_document_is_plain_text(tmp_path):
  tokenizer = TOKENIZERS["huggingface"](save_huggingface(tmp_path))
  ids = tokenizer.encode(b"a<|endoftext|>b")
  assert tokenizer.eos not in ids
  assert tokenizer.decode(ids) == "a<|endoftext|>b"


def test_threads_may_share_a_tokenizer(tmp_path):
  """One parses special tokens, another encodes their spelling as text."""
  tokenizer = TOKENIZERS["huggingface"](save_huggingface(tmp_path))
  text = "<|endoftext|>"
  plain = tokenizer.encode(text.encode()).tolist()
  (special,) = tokenizer.encode_with_offsets(text)[0].tolist()

  def num_wrong(is_plain):
    wrong = 0
    for _ in range(2000):
      if is_plain:
        wrong += tokenizer.encode(text.encode()).tolist() != plain
      else:
        wrong += tokenizer.encode_with_offsets(text)[0].tolist() != [special]
    return wrong

  former = sys.getswitchinterval()
  sys.setswitchinterval(1e-6)
  try:
    with ThreadPoolExecutor(4) as threads:
      assert list(threads.map(num_wrong, [True, False] * 2)) == [0] * 4
  finally:
    sys.setswitchinterval(former)


def test_a_common_spelling_is_bos_unless_files_name_other_tokens(tmp_path):
  path = save_huggingface(tmp_path, ("<s>", "</s>"))
  tokenizer = TOKENIZERS["huggingface"](path)
  assert (tokenizer.bos, tokenizer.eos) == (0, 1)
  assert tokenizer.special_tokens_map == {"bos_token": "<s>", "eos_token": "</s>"}
  for name, content in (
    ("config", {"eos_token_id": 1}),
    ("tokenizer_config", {"pad_token": "<s>"}),
  ):
    (tmp_path / f"{name}.json").write_text(json.dumps(content))
    tokenizer = TOKENIZERS["huggingface"](path)
    assert (tokenizer.bos, tokenizer.eos) == (None, 1)
    assert "bos_token" not in tokenizer.special_tokens_map
    (tmp_path / f"{name}.json").unlink()


def test_unmarked_stop_tokens_have_no_text(tmp_path):
  path = save_huggingface(tmp_path, ())
  raw = tokenizers.Tokenizer.from_file(path)
  raw.add_tokens(["</s>"])
  raw.save(path)
  tokenizer = TOKENIZERS["huggingface"](path)
  assert tokenizer.num_bytes_V[tokenizer.eos] == 0
  assert tokenizer.decode([*tokenizer.encode(b"cat"), tokenizer.eos]) == "cat"


def test_unmarked_stop_tokens_are_not_encoded_from_text(tmp_path):
  path = save_huggingface(tmp_path, ())
  raw = tokenizers.Tokenizer.from_file(path)
  raw.add_tokens(["</s>"])
  raw.save(path)
  tokenizer = TOKENIZERS["huggingface"](path)
  assert tokenizer.eos not in tokenizer.encode(b"a</s>b")
  ids, _ = tokenizer.encode_with_offsets("a</s>b")
  assert ids.tolist().count(tokenizer.eos) == 1


THREE = ("<|endoftext|>", "<|im_end|>", "<|start|>")


@pytest.mark.parametrize(
  ("files", "bos", "stop_token_ids"),
  [
    ({}, None, (0,)),
    ({"tokenizer_config": {"eos_token": "<|im_end|>", "bos_token": None}}, None, (1,)),
    ({"tokenizer_config": {"bos_token": {"content": "<|start|>"}}}, 2, (0,)),
    ({"special_tokens_map": {"eos_token": {"content": "<|im_end|>"}}}, None, (1,)),
    (
      {
        "special_tokens_map": {"eos_token": "<|start|>"},
        "tokenizer_config": {"eos_token": "<|im_end|>"},
      },
      None,
      (1,),
    ),
    ({"config": {"eos_token_id": 1, "bos_token_id": 2}}, 2, (1,)),
    ({"config": {"eos_token_id": 1}, "generation_config": {"eos_token_id": [2, 0]}}, None, (2, 0)),
    (
      {"tokenizer_config": {"eos_token": "<|im_end|>"}, "config": {"eos_token_id": [0, 1]}},
      None,
      (1, 0),
    ),
  ],
)
def test_bos_and_stop_tokens_come_from_the_config_files(tmp_path, files, bos, stop_token_ids):
  path = save_huggingface(tmp_path, THREE)
  for name, content in files.items():
    (tmp_path / f"{name}.json").write_text(json.dumps(content))
  tokenizer = TOKENIZERS["huggingface"](path)
  assert (tokenizer.bos, tokenizer.stop_token_ids) == (bos, stop_token_ids)
  assert tokenizer.eos == stop_token_ids[0]


def template(single):
  tokens = [("<|endoftext|>", 0), ("<|im_end|>", 1), ("<|start|>", 2)]
  return tokenizers.processors.TemplateProcessing(single=single, special_tokens=tokens)


BYTE_LEVEL = tokenizers.processors.ByteLevel(trim_offsets=False)


@pytest.mark.parametrize(
  ("post_processor", "prefix"),
  [
    (None, ()),
    (BYTE_LEVEL, ()),
    (template("<|start|> $A"), (2,)),
    (template("$A <|endoftext|>"), ()),
    (template("<|start|> <|im_end|> $A <|endoftext|>"), (2, 1)),
    (tokenizers.processors.Sequence([BYTE_LEVEL, template("<|start|> $A")]), (2,)),
    (tokenizers.processors.BertProcessing(("<|im_end|>", 1), ("<|start|>", 2)), (2,)),
  ],
)
def test_what_precedes_a_text_is_what_the_file_says(post_processor, prefix, tmp_path):
  path = save_huggingface(tmp_path, THREE)
  raw = tokenizers.Tokenizer.from_file(path)
  if post_processor is not None:
    raw.post_processor = post_processor
  raw.save(path)
  files = {"bos_token": "<|start|>", "add_bos_token": not prefix}  # transformers does not obey it
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(files))
  cfg = DataConfig(tokenizer_type="huggingface", tokenizer_path=path)
  tokenizer = open_tokenizer(cfg)
  assert tokenizer.prefix_ids == prefix
  text = TextTokenizer(tokenizer)
  pieces = iter([Piece("train", b"cat"), Piece("train", None)])
  ((start, end),) = text.encode(pieces, is_open=False)
  cat = tokenizer.encode(b"cat").tolist()
  assert start.ids.tolist() == encode_prompt(tokenizer, b"cat") == [*prefix, *cat]
  assert end.ids.tolist() == [tokenizer.eos]


@pytest.mark.parametrize(
  ("single", "token_id", "message"),
  [("<s> $A", 10**6, "puts the token 1000000 before a text"), ("<s>", 0, "drops the text")],
)
def test_a_post_processor_that_cannot_be_obeyed_is_named(single, token_id, message, tmp_path):
  path = save_huggingface(tmp_path)
  raw = tokenizers.Tokenizer.from_file(path)
  raw.post_processor = tokenizers.processors.TemplateProcessing(
    single=single, special_tokens=[("<s>", token_id)]
  )
  raw.save(path)
  with pytest.raises(UserError, match=message):
    TOKENIZERS["huggingface"](path)


def test_a_key_overrides_what_precedes_a_text(tmp_path):
  cfg = DataConfig(tokenizer_type="huggingface", tokenizer_path=save_huggingface(tmp_path, THREE))
  identities = set()
  for add_bos, named, prefix in (("true", 2, (2,)), ("true", None, (0,)), ("false", 2, ())):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 0, "bos_token_id": named}))
    tokenizer = open_tokenizer(dataclasses.replace(cfg, add_bos=add_bos))
    assert tokenizer.prefix_ids == prefix
    identities.add(tokenizer.identity)
  assert len(identities) == 3
  assert open_tokenizer(cfg).identity == tokenizer.identity  # equal ids
  assert open_tokenizer(DataConfig()).prefix_ids == (256,)
  assert open_tokenizer(DataConfig(add_bos="false")).prefix_ids == ()


@pytest.mark.parametrize(("given", "prefix"), [({}, (1,)), ({"add_bos_token": False}, ())])
def test_the_files_beside_a_sentencepiece_model_may_deny_bos(given, prefix, tmp_path):
  path = save_sentencepiece(tmp_path)
  (tmp_path / "tokenizer_config.json").write_text(json.dumps(given))
  cfg = DataConfig(tokenizer_type="sentencepiece", tokenizer_path=path)
  assert open_tokenizer(cfg).prefix_ids == prefix


@pytest.mark.parametrize(
  ("name", "content", "message"),
  [
    (
      "tokenizer_config.json",
      '{"eos_token": "</s>"}',
      "lacks '</s>', which a file beside it names",
    ),
    ("config.json", '{"eos_token_id": 999}', "has no token 999"),
    ("config.json", '{"eos_token_id": "two"}', "has 'two' for a token's id"),
    ("config.json", '{"eos_token_id": [true]}', "for a token's id"),
    ("special_tokens_map.json", "[]", "is not a JSON object"),
    ("generation_config.json", "[" * 100_000, "is not JSON"),
  ],
)
def test_errors_name_the_config_file(tmp_path, name, content, message):
  path = save_huggingface(tmp_path, THREE)
  (tmp_path / name).write_text(content)
  with pytest.raises(ValueError, match=message) as error:
    TOKENIZERS["huggingface"](path)
  assert "\n" not in str(error.value)


def test_chat_template_is_the_file_or_the_default_entry(tmp_path):
  path = save_huggingface(tmp_path)

  def template():
    return TOKENIZERS["huggingface"](path).chat_template

  assert template() == ""
  both = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
  for given, expected in (("one", "one"), (both, "d")):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": given}))
    assert template() == expected
  (tmp_path / "chat_template.jinja").write_text("é")
  assert template() == "é"


def test_bytes_of_added_tokens_are_counted(tmp_path):
  path = save_huggingface(tmp_path)
  raw = tokenizers.Tokenizer.from_file(path)
  raw.add_tokens(["é    é"])
  raw.save(path)
  tokenizer = TOKENIZERS["huggingface"](path)
  text = "aé    éb".encode()
  assert tokenizer.num_bytes_V[tokenizer.encode(text)].sum() == len(text)


def test_errors_are_one_line(tmp_path):
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


@pytest.mark.parametrize("kind", ["BPE", "WordLevel"])
def test_an_id_beyond_any_vocabulary_is_one_line(tmp_path, kind):
  path = save_huggingface(tmp_path)
  content = json.loads((tmp_path / "tokenizer.json").read_text())
  content["added_tokens"] = []
  vocabulary = content["model"]["vocab"] | {"<|endoftext|>": 2**32 - 2}
  content["model"] = {"type": kind, "vocab": vocabulary, "merges": [], "unk_token": "a"}
  (tmp_path / "tokenizer.json").write_text(json.dumps(content))
  with pytest.raises(UserError, match="has the id 4,294,967,294, more than 16,777,216"):
    TOKENIZERS["huggingface"](path)


@pytest.mark.parametrize(
  "name", ["special_tokens_map.json", "tokenizer_config.json", "chat_template.jinja"]
)
def test_a_link_out_of_the_folder_is_refused(tmp_path, name):
  folder = tmp_path / "models--x" / "snapshots" / "1"
  (folder / "inside").mkdir(parents=True)
  path = save_huggingface(folder)
  for secret in (tmp_path / "secret", folder / "inside" / "content", folder / "../../blobs/7"):
    secret.parent.mkdir(exist_ok=True)
    secret.write_text("{}")
  (folder / name).symlink_to("../../blobs/7")  # as in the hub's cache
  TOKENIZERS["huggingface"](path)
  (folder / name).unlink()
  (folder / name).symlink_to("inside/content")
  TOKENIZERS["huggingface"](path)
  (folder / name).unlink()
  (folder / name).symlink_to(tmp_path / "secret")
  with pytest.raises(UserError, match=f"{name} is a link to .*/secret: replace it by a copy"):
    TOKENIZERS["huggingface"](path)


def test_a_template_that_is_not_text_is_one_line(tmp_path):
  path = save_huggingface(tmp_path)
  (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
  with pytest.raises(UserError, match=r"chat_template\.jinja is not a Jinja2 template"):
    TOKENIZERS["huggingface"](path)


def test_identity_depends_on_the_content(tmp_path):
  first = TOKENIZERS["huggingface"](save_huggingface(tmp_path)).identity
  second = TOKENIZERS["huggingface"](save_huggingface(tmp_path, ("<s>", "</s>"))).identity
  assert first != second


def test_a_regex_that_fails_on_a_text_raises_one_line(tmp_path):
  vocabulary = {"a": 0, "b": 1, "<s>": 2, "</s>": 3}
  library = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
  pattern = tokenizers.Regex("(?:(?:a|aa)+)+$")
  library.pre_tokenizer = tokenizers.pre_tokenizers.Split(pattern, "isolated")
  path = tmp_path / "tokenizer.json"
  library.save(str(path))
  with pytest.raises(ValueError, match=r"cannot split a text of 61 characters: .*retry-limit"):
    open_tokenizer(DataConfig(tokenizer_type="huggingface", tokenizer_path=str(path))).encode(
      b"a" * 60 + b"b"
    )


def test_a_path_may_start_at_the_home_folder(tmp_path, monkeypatch):
  monkeypatch.setenv("HOME", str(tmp_path))
  path = save_huggingface(tmp_path)
  cfg = DataConfig(tokenizer_type="huggingface", tokenizer_path=path.replace(str(tmp_path), "~"))
  direct = TOKENIZERS["huggingface"](path)
  assert open_tokenizer(cfg).encode(TEXT.encode()).tolist() == direct.encode(TEXT.encode()).tolist()


EXTRA = {"content": "<extra>", "special": True, "normalized": False}
NOT_SPECIAL = {"content": "<extra>", "special": False, "normalized": False}
# Files beside a tokenizer.json of 322 ids, which lacks <extra> and <more>.
ADDED = {
  "decoder": {"tokenizer_config": {"added_tokens_decoder": {"322": EXTRA}}},
  "plain in decoder": {"tokenizer_config": {"added_tokens_decoder": {"322": NOT_SPECIAL}}},
  "added_tokens": {"added_tokens": {"<more>": 323, "<extra>": 322}},
  "map": {"special_tokens_map": {"additional_special_tokens": ["<extra>", "<more>"]}},
  "list": {"tokenizer_config": {"extra_special_tokens": ["<extra>"]}},
  "object": {"tokenizer_config": {"extra_special_tokens": {"image_token": "<extra>"}}},
  "names": {
    "tokenizer_config": {"pad_token": "<extra>", "sep_token": {**EXTRA, "__type": "AddedToken"}}
  },
  "word": {"tokenizer_config": {"additional_special_tokens": ["two"]}},
}
NAMES = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}


def save_with(folder, files):
  files = {**files, "tokenizer_config": NAMES | files.get("tokenizer_config", {})}
  return TOKENIZERS["huggingface"](save_tokenizer(folder, **files))


@pytest.mark.parametrize("files", ADDED.values(), ids=ADDED)
def test_tokens_of_the_other_files_are_one_id(tmp_path, files):
  """Those that are special are plain text in a text and in messages."""
  tokenizer = save_with(tmp_path, files)
  is_plain = (
    "added_tokens" in files
    or NOT_SPECIAL in files.get("tokenizer_config", {}).get("added_tokens_decoder", {}).values()
  )
  token = "two" if "two" in str(files) else "<extra>"
  ids, _ = tokenizer.encode_with_offsets(f"a{token}b")
  assert len(ids) == 3
  assert (token in tokenizer.special_tokens) != is_plain
  assert (len(tokenizer.encode(f"a{token}b".encode())) == 3) == (is_plain or token == "two")


def test_a_token_with_another_id_is_refused_by_name(tmp_path):
  for files in (
    {"tokenizer_config": {"added_tokens_decoder": {"345": EXTRA}}},
    {"tokenizer_config": {"added_tokens_decoder": {"5": EXTRA}}},
    {"added_tokens": {"two": 323}},
  ):
    with pytest.raises(UserError, match=r"has the id \d+ for '(<extra>|two)', which has the id"):
      save_with(tmp_path, files)
    (tmp_path / "added_tokens.json").unlink(missing_ok=True)


def test_the_identity_covers_all_that_tokens_depend_on(tmp_path):
  identities = set()
  variants = [
    {},
    {"tokenizer_config": {"sep_token": "<s>"}},
    {"tokenizer_config": {"sep_token": "</s>"}},
    {"tokenizer_config": {"additional_special_tokens": ["two"]}},
    {"tokenizer_config": {"bos_token": "</s>"}},
    {"generation_config": {"eos_token_id": [4, 5]}},
    {"tokenizer_config": {"added_tokens_decoder": {"322": EXTRA}}},
    {"tokenizer_config": {"added_tokens_decoder": {"322": {**EXTRA, "lstrip": True}}}},
  ]
  for n, files in enumerate(variants):
    identities.add(save_with(tmp_path / str(n), files).identity)
  assert len(identities) == len(variants)
  assert save_with(tmp_path / "again", {}).identity in identities


@pytest.mark.parametrize(
  ("key", "value"), [("split_special_tokens", True), ("add_prefix_space", True)]
)
def test_settings_that_are_not_read_are_named(tmp_path, caplog, key, value):
  save_with(tmp_path, {"tokenizer_config": {key: value, "clean_up_tokenization_spaces": True}})
  (message,) = caplog.messages
  assert message.startswith(f"{key} beside ")
  caplog.clear()
  save_with(tmp_path, {"tokenizer_config": {key: False}})
  assert not caplog.messages


@pytest.mark.hf
@pytest.mark.skipif(
  not find_spec("transformers"), reason="needs transformers: pip install -e .[hf]"
)
@pytest.mark.parametrize("files", ADDED.values(), ids=ADDED)
def test_added_tokens_equal_transformers(tmp_path, files):
  from transformers import AutoTokenizer

  ours = save_with(tmp_path, files)
  theirs = AutoTokenizer.from_pretrained(tmp_path)
  text = "a<extra> b <more></s>two"
  expected = theirs.encode(text, add_special_tokens=False)
  assert ours.encode_with_offsets(text)[0].tolist() == expected
  assert ours.decode(expected) == theirs.decode(expected, skip_special_tokens=True)
