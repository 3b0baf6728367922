"""Save, read and compare resolved configs."""

import math

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from maxlite.config import (
  Config,
  describe_changes,
  differences,
  load_config,
  public_values,
  read_saved,
  read_values,
  save_resolved,
)
from maxlite.config.members import members_of
from maxlite.config.raw_values import FrozenMapping, show
from maxlite.config.saved import MACHINE_KEYS
from maxlite.config.schema import (
  DEFAULTS,
  KEYS,
  MESH_AXES,
  AxisRules,
  RunConfig,
  SchemaKey,
  build,
  flatten,
)
from maxlite.config.values import Setting, parse
from maxlite.errors import UserError

TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
MAX_INT = 2**31 - 1


def _tuples(strategy: st.SearchStrategy) -> st.SearchStrategy:
  """Tuples of up to three values."""
  return st.lists(strategy, max_size=3).map(tuple)


def _mappings(strategy: st.SearchStrategy) -> st.SearchStrategy:
  """Frozen mappings of up to three values."""
  entries = st.dictionaries(TEXT, strategy, max_size=3)
  return entries.map(lambda entries: FrozenMapping(entries.items()))


RAWS = st.recursive(TEXT, lambda inner: _tuples(inner) | _mappings(inner), max_leaves=6)
TABLES = _mappings(RAWS)
COUNTS = st.integers(0, MAX_INT)
AXES = st.lists(st.sampled_from(MESH_AXES), unique=True).map(tuple)


# Strategies of types whose fields have no bounds and no choices.
WHOLE = {
  bool: st.booleans(),
  FrozenMapping: TABLES,
  tuple[FrozenMapping, ...]: _tuples(TABLES),
  tuple[tuple[int, int], ...]: _tuples(st.tuples(COUNTS, COUNTS)),
  AxisRules: _tuples(st.tuples(TEXT.filter(bool), AXES)),
}


def _values(key: SchemaKey) -> st.SearchStrategy:
  field = key.field
  if key.type in WHOLE:
    return WHOLE[key.type]
  if key.type in (int, tuple[int, ...]):
    high = min(MAX_INT, field.high or math.inf)
    one = st.integers(int(field.low), int(high))
  elif key.type in (float, tuple[float, ...]):
    one = st.floats(field.low, field.high, allow_nan=False, allow_infinity=False)
  elif field.choices:
    one = st.sampled_from([*field.choices])
  else:
    one = TEXT
  if key.type in (int, float, str):
    return one
  if key.type == tuple[str, ...]:
    one = one.filter(bool)
  return _tuples(one)


PLUGINS = st.lists(st.sampled_from(["json", "csv"]), max_size=2).map(tuple)  # can be imported
TRUSTS = Config(run=RunConfig(trust_plugins=True))
VALUES = {key.name: _values(key) for key in KEYS.values()} | {"plugins": PLUGINS}
CONFIGS = st.fixed_dictionaries(VALUES).map(lambda values: build(Config, values))


@settings(max_examples=15, deadline=None, derandomize=True)
@given(config=CONFIGS)
def test_saved_config_is_read_back_exactly(config, tmp_path_factory):
  path = tmp_path_factory.mktemp("run") / "config.yml"
  save_resolved(config, path)
  without_secret = flatten(config) | {"serve_api_key": ""}
  assert read_values(path) == without_secret
  assert read_saved(path, TRUSTS) == without_secret | {"trust_plugins": True}


@settings(max_examples=20, deadline=None, derandomize=True)
@given(text=TEXT)
@example(text="\x85")
@example(text="null")
@example(text="3e-4\n")
def test_text_is_read_back_exactly(text, tmp_path_factory):
  path = tmp_path_factory.mktemp("run") / "config.yml"
  save_resolved(load_config([f"prompt={text}"]), path)
  assert read_saved(path)["prompt"] == text


@settings(max_examples=100, deadline=None, derandomize=True)
@given(tables=st.lists(TABLES, max_size=3).map(tuple))
@example(tables=(FrozenMapping([("a", "null"), ("b", "~"), ("c", "3e-4, 1"), ("d", "#")]),))
def test_shown_mappings_parse_to_themselves(tables):
  assert parse(Setting("members", show(tables), "command line")) == tables


def test_mappings_are_equal_by_entries_and_order():
  table = FrozenMapping([("a", "1"), ("b", "2")], source="a.yml:1")
  same = FrozenMapping([("a", "1"), ("b", "2")])
  swapped = FrozenMapping([("b", "2"), ("a", "1")])
  assert table == same
  assert hash(table) == hash(same)
  assert table != swapped


def test_saved_ensemble_and_members_load_unchanged(tmp_path):
  members = "members=[{model_name: mixtral-8x7b, head_dim: 16}, {learning_rate: 1e-3}]"
  config = load_config([members, "sweep={grid: {init_weights_seed: [1, 2]}}"])
  for saved in (config, *(member.config for member in members_of(config))):
    save_resolved(saved, tmp_path / "config.yml")
    assert load_config([str(tmp_path / "config.yml")]) == saved


def test_saved_file_is_yaml_of_every_key_in_order(tmp_path):
  save_resolved(load_config(["steps=7"]), tmp_path / "run" / "config.yml")
  text = (tmp_path / "run" / "config.yml").read_text()
  assert list(yaml.safe_load(text)) == [name for name in KEYS if name != "serve_api_key"]
  assert text.index("# run\n") < text.index("steps: 7") < text.index("# mesh\n")
  assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.yml"]


def test_saved_file_loads_as_a_config_file(tmp_path):
  config = load_config(["steps=7", "remat_policy=custom", "remat_saved_names=mlpwi,mlpwo"])
  save_resolved(config, tmp_path / "config.yml")
  assert load_config([str(tmp_path / "config.yml")]) == config


def test_a_saved_run_does_not_set_keys_of_code_and_of_this_machine(tmp_path):
  path = tmp_path / "config.yml"
  strangers = {
    "jax_cache_dir": "/x",
    "serve_host": "0.0.0.0",
    "serve_port": 1,
    "save_hlo": "/x",
    "token_cache_directory": "/x",
    "local_checkpoint_directory": "/x",
    "process_id": 7,
    "coordinator_address": "x:1",
    "wandb_project_name": "x",
    "prompt_file": "/x",
  }
  saved = DEFAULTS | strangers | {"steps": 7, "trust_plugins": True}
  save_resolved(build(Config, saved), path)
  command = load_config(["serve_port=80", "jax_cache_dir=mine"])
  mine = {"serve_port": 80, "jax_cache_dir": "mine"}
  assert read_saved(path, command) == DEFAULTS | mine | {"steps": 7}
  trusted = read_saved(path, load_config(["serve_port=80", "trust_plugins=true"]))
  assert trusted == saved


def test_every_key_of_a_path_that_is_written_or_of_an_address_is_of_this_machine():
  """A new key has to be sorted: into these, or into what is only read or replaced on opening."""
  words = ("_dir", "_directory", "_path", "_file", "_host", "_port", "_address", "_api_key", "hlo")
  of_places = {name for name in KEYS if name.endswith(words)}
  read_only = {"dataset_path", "eval_dataset_path", "tokenizer_path", "chat_template_path"}
  only_in_training = {"load_parameters_path", "teacher_path", "reference_path"}
  replaced = {"base_output_directory"}  # by the folder that is opened
  assert of_places - {*MACHINE_KEYS} == read_only | only_in_training | replaced


def test_a_model_file_describes_the_model_only(tmp_path):
  (tmp_path / "run").mkdir()
  argv = [f"base_output_directory={tmp_path}", "run_name=run"]
  (tmp_path / "run" / "model.yml").write_text(
    "head_dim: 16\ndtype: bfloat16\ntokenizer_type: byte\n"
  )
  assert load_config(argv).model.head_dim == 16
  (tmp_path / "run" / "model.yml").write_text("head_dim: 16\nplugins: [json]\n")
  with pytest.raises(UserError, match=r"model.yml:2: plugins=\[json\] is not a key of the model"):
    load_config(argv)


def test_a_secret_is_neither_saved_nor_shown(tmp_path):
  config = load_config(["serve_api_key=hunter2"])
  path = tmp_path / "config.yml"
  assert config.serve.serve_api_key == "hunter2"
  save_resolved(config, path)
  old_path = tmp_path / "old.yml"
  old_path.write_text("serve_api_key: hunter3\n")
  assert read_saved(old_path, TRUSTS)["serve_api_key"] == ""
  assert "hunter" not in path.read_text()
  assert "hunter" not in repr(config)
  assert "hunter" not in str(describe_changes(config))
  assert "hunter" not in str(differences(read_values(old_path), flatten(config)))
  assert "hunter" not in str(public_values(config))


@pytest.mark.parametrize(
  ("argument", "message"),
  [
    ("serve_api_key=hünter2", "has a character that HTTP headers cannot have; write visible ASCII"),
    ("serve_api_key=hunter 2", "has a character that HTTP headers cannot have; write visible"),
    ("serve_apikey=hunter2", r"is not a key; did you mean serve_api_key\?"),
  ],
)
def test_no_message_shows_a_secret(argument, message):
  with pytest.raises(UserError, match=message) as caught:
    load_config([argument])
  assert "hunter2" not in str(caught.value)
  assert "(hidden)" in str(caught.value)


def test_missing_keys_have_their_defaults(tmp_path):
  (tmp_path / "config.yml").write_text("steps: 7\n")
  assert read_saved(tmp_path / "config.yml") == DEFAULTS | {"steps": 7}


@pytest.mark.parametrize("text", [None, "stepz: 7\n", "steps: seven\n"])
def test_damaged_file_is_a_user_error(text, tmp_path):
  if text is not None:
    (tmp_path / "config.yml").write_text(text)
  with pytest.raises(UserError, match=r"config\.yml"):
    read_saved(tmp_path / "config.yml")


def test_differences_and_describe_changes():
  config = load_config(["steps=7", "head_dim=16"])
  expected = {"steps": (300, 7), "head_dim": (32, 16)}
  assert differences(DEFAULTS, flatten(config)) == expected
  assert describe_changes(config) == ["steps=7 (default 300)", "head_dim=16 (default 32)"]
  assert describe_changes(Config()) == []
