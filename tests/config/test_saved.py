"""Save, read and compare resolved configs."""

import math

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from maxlite.config import (
  Config,
  UserError,
  describe_changes,
  differences,
  load_config,
  read_saved,
  save_resolved,
)
from maxlite.config.members import members_of
from maxlite.config.raw_values import FrozenMapping, show
from maxlite.config.schema import DEFAULTS, KEYS, MESH_AXES, AxisRules, SchemaKey, build, flatten
from maxlite.config.values import Setting, parse

TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
RAWS = st.recursive(
  TEXT,
  lambda inner: (
    st.lists(inner, max_size=3).map(tuple)
    | st.dictionaries(TEXT, inner, max_size=3).map(lambda entries: FrozenMapping(entries.items()))
  ),
  max_leaves=6,
)
TABLES = st.dictionaries(TEXT, RAWS, max_size=3).map(lambda entries: FrozenMapping(entries.items()))
COUNTS = st.integers(0, 2**31 - 1)


WHOLE = {
  bool: st.booleans(),
  FrozenMapping: TABLES,
  tuple[FrozenMapping, ...]: st.lists(TABLES, max_size=3).map(tuple),
  tuple[tuple[int, int], ...]: st.lists(st.tuples(COUNTS, COUNTS), max_size=3).map(tuple),
}


def _values(key: SchemaKey) -> st.SearchStrategy:
  field = key.field
  if key.type in WHOLE:
    return WHOLE[key.type]
  if key.type is int:
    return st.integers(int(field.low), int(min(2**31 - 1, field.high or math.inf)))
  if key.type == tuple[int, ...]:
    return st.lists(st.integers(int(field.low), 2**31 - 1), max_size=3).map(tuple)
  if key.type is float:
    return st.floats(field.low, field.high, allow_nan=False, allow_infinity=False)
  if key.type == AxisRules:
    axes = st.lists(st.sampled_from(MESH_AXES), unique=True).map(tuple)
    return st.lists(st.tuples(TEXT.filter(bool), axes), max_size=3).map(tuple)
  one = st.sampled_from([*field.choices]) if field.choices else TEXT
  return one if key.type is str else st.lists(one.filter(bool), max_size=3).map(tuple)


PLUGINS = st.lists(st.sampled_from(["json", "csv"]), max_size=2).map(tuple)  # can be imported
CONFIGS = st.fixed_dictionaries(
  {key.name: _values(key) for key in KEYS.values()} | {"plugins": PLUGINS}
).map(lambda values: build(Config, values))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(config=CONFIGS)
def test_saved_config_is_read_back_exactly(config, tmp_path_factory):
  path = tmp_path_factory.mktemp("run") / "config.yml"
  save_resolved(config, path)
  assert build(Config, read_saved(path)) == config


@settings(max_examples=40, deadline=None, derandomize=True)
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
  same, swapped = FrozenMapping([("a", "1"), ("b", "2")]), FrozenMapping([("b", "2"), ("a", "1")])
  assert (table, hash(table)) == (same, hash(same))
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
  assert list(yaml.safe_load(text)) == list(KEYS)
  assert text.index("# run\n") < text.index("steps: 7") < text.index("# mesh\n")
  assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.yml"]


def test_saved_file_loads_as_a_config_file(tmp_path):
  config = load_config(["steps=7", "remat_policy=custom", "remat_saved_names=mlpwi,mlpwo"])
  save_resolved(config, tmp_path / "config.yml")
  assert load_config([str(tmp_path / "config.yml")]) == config


def test_missing_keys_have_their_defaults(tmp_path):
  (tmp_path / "config.yml").write_text("steps: 7\n")
  assert read_saved(tmp_path / "config.yml") == DEFAULTS | {"steps": 7}


def test_old_names_of_renamed_keys_are_read(tmp_path):
  members = "members:\n- {phase_warmup: {a: 1}}\n"
  (tmp_path / "config.yml").write_text(f"output: x\nremat_save: [mlpwi]\n{members}")
  new_names = {"output_path": "x", "remat_saved_names": ("mlpwi",)}
  new_members = (FrozenMapping([("initial_phases", FrozenMapping([("a", "1")]))]),)
  assert read_saved(tmp_path / "config.yml") == DEFAULTS | new_names | {"members": new_members}


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
