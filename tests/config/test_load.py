"""Loading a config: precedence of sources, syntax of values, presets."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxlite.config import load_config, yaml_files
from maxlite.config.command_line import CommandLine
from maxlite.config.load import read_settings
from maxlite.config.raw_values import show
from maxlite.config.schema import DEFAULTS, KEYS, Config, flatten
from maxlite.config.values import Setting, domain, parse
from maxlite.errors import UserError

TEXT = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S", "Zs", "Cc")))


@pytest.fixture
def presets(tmp_path, monkeypatch):
  """A folder with the preset `small`, in place of the shipped presets."""
  (tmp_path / "models").mkdir()
  (tmp_path / "models" / "small.yml").write_text("steps: 30\n")
  monkeypatch.setattr(yaml_files, "CONFIGS", tmp_path)
  return tmp_path / "models"


def test_no_arguments_give_the_defaults():
  assert load_config([]) == Config()


@pytest.mark.parametrize("kept", list(itertools.product([False, True], repeat=5)))
def test_precedence_of_sources(kept, tmp_path, presets):
  in_base, in_own, in_preset, in_argument, in_flag = kept
  base = tmp_path / "base.yml"
  base.touch()
  own = tmp_path / "own.yml"
  own.write_text("base_config: base.yml\n")
  argv = [str(own)]
  expected = DEFAULTS["steps"]
  if in_base:
    base.write_text("steps: 10\n")
    expected = 10
  if in_own:
    own.write_text("base_config: base.yml\nsteps: 20\n")
    expected = 20
  if in_preset:
    argv.append("model_name=small")
    expected = 30
  if in_argument:
    argv.insert(0, "steps=40")
    expected = 40
  if in_flag:
    argv.insert(0, "--steps=50")
    expected = 50
  assert load_config(argv).run.steps == expected


def test_settings_are_a_list_from_the_weakest_to_the_strongest(tmp_path, presets):
  (tmp_path / "base.yml").write_text("steps: 10\n")
  (tmp_path / "own.yml").write_text("base_config: base.yml\nsteps: 20\n")
  (presets / "small.yml").write_text("steps: 30\ndtype: bfloat16\n")
  argv = ["--steps=50", "steps=40", "model_name=small", str(tmp_path / "own.yml")]
  settings = read_settings(CommandLine.split(argv), None, DEFAULTS)
  assert [(setting.name, setting.raw) for setting in settings] == [
    ("dtype", "bfloat16"),  # how the preset is computed, which files override
    ("steps", "10"),
    ("steps", "20"),
    ("steps", "30"),
    ("steps", "40"),
    ("model_name", "small"),
    ("steps", "50"),
  ]


def test_later_files_override_earlier_ones_and_all_bases(tmp_path):
  (tmp_path / "deep.yml").write_text("steps: 1\nlog_period: 1\neval_interval: 1\n")
  (tmp_path / "base.yml").write_text("base_config: deep.yml\nsteps: 2\nlog_period: 2\n")
  (tmp_path / "a.yml").write_text("steps: 3\nhead_dim: 16\n")
  (tmp_path / "b.yml").write_text("base_config: base.yml\nhead_dim: 8\n")
  config = load_config([str(tmp_path / "a.yml"), str(tmp_path / "b.yml")])
  assert config.run.steps == 3
  assert config.observe.log_period == 2
  assert config.observe.eval_interval == 1
  assert config.model.head_dim == 8


def test_base_config_is_relative_to_its_file(tmp_path, monkeypatch):
  (tmp_path / "deep").mkdir()
  (tmp_path / "base.yml").write_text("steps: 7\n")
  (tmp_path / "deep" / "own.yml").write_text("base_config: ../base.yml\n")
  monkeypatch.chdir(tmp_path / "deep")
  assert load_config(["own.yml"]).run.steps == 7


@pytest.mark.parametrize("argument", ["model_name=small", "--model_name=small", "own.yml"])
def test_model_name_works_in_every_source(argument, presets, tmp_path, monkeypatch):
  (tmp_path / "own.yml").write_text("model_name: small\nsteps: 9\n")
  monkeypatch.chdir(tmp_path)
  assert load_config([argument]).run.steps == 30


def test_last_model_name_wins(presets, tmp_path):
  (presets / "large.yml").write_text("steps: 99\n")
  (tmp_path / "own.yml").write_text("model_name: small\n")
  assert load_config(["model_name=large", str(tmp_path / "own.yml")]).run.steps == 99
  assert load_config(["model_name=", str(tmp_path / "own.yml")]).run.steps == 300


def test_saved_model_name_does_not_apply_its_preset_again(presets):
  values = flatten(load_config(["model_name=small", "steps=5"]))
  assert load_config(["log_period=2"], defaults=values).run.steps == 5


def test_missing_data_matters_only_if_data_is_read():
  argv = ["dataset_path=nowhere.txt"]
  assert load_config(argv, needs_data=False).data.dataset_path == ("nowhere.txt",)


@pytest.mark.parametrize(
  ("written", "value"),
  [
    ("learning_rate: 3e-4", 3e-4),
    ("learning_rate: 1", 1.0),
    ("run_name: 2024", "2024"),
    ("prompt: yes", "yes"),
    ('prompt: ""', ""),
    ("steps: 010", 10),
    ("steps: 3.0", 3),
    ("steps: 1e2", 100),
    ("learning_rate_schedule_steps: -1.0", -1),
    ("scan_layers: False", False),
    ("mlp_activations: [gelu]", ("gelu",)),
    ("remat_saved_names:\n- mlpwi\n- mlpwo\nremat_policy: custom", ("mlpwi", "mlpwo")),
    ("dataset_path: stdlib", ("stdlib",)),
    (
      "logical_axis_rules: [[embed, [fsdp, expert]], [vocab, []]]",
      (("embed", ("fsdp", "expert")), ("vocab", ())),
    ),
  ],
)
def test_yaml_values_are_parsed_by_the_type_of_the_key(written, value, tmp_path):
  (tmp_path / "own.yml").write_text(written)
  config = load_config([str(tmp_path / "own.yml")])
  name = written.split(":")[0]
  found = flatten(config)[name]
  assert found == value
  assert type(found) is type(value)


@pytest.mark.parametrize("argument", ["{}=false", "--{}=False", "--no{}"])
def test_every_form_of_false(argument):
  assert not load_config([argument.format("scan_layers")]).model.scan_layers


def test_flag_and_value_as_two_arguments():
  assert load_config(["--learning_rate_schedule_steps", "-1", "--steps", "4"]).run.steps == 4


@pytest.mark.parametrize("text", ["a,b", "[a, b]", '["a", b]', "a, b"])
def test_lists_with_and_without_brackets(text):
  assert parse(Setting("dataset_path", text, "command line")) == ("a", "b")


@settings(max_examples=50, deadline=None, derandomize=True)
@given(text=TEXT)
def test_text_is_kept_verbatim(text):
  assert load_config([f"prompt={text}"]).generate.prompt == text


def test_defaults_are_valid():
  for key in KEYS.values():
    if key.type is not str:
      assert parse(Setting(key.name, show(key.default), "default")) == key.default
    assert domain(key)


@pytest.mark.smoke
@pytest.mark.parametrize(
  "file", sorted(yaml_files.CONFIGS.rglob("*.yml")), ids=lambda path: path.stem
)
def test_shipped_files_load(file):
  argv = [str(file)]
  if file.parent.name == "models":
    argv = [f"model_name={file.stem}"]
  if file.parent.name == "chat":  # an imported run may have its own template
    argv.append(f"chat_template_path={file.with_name('plain.jinja')}")
  assert load_config(argv, needs_data=False)


def test_the_first_of_many_unknown_keys_are_compared_with_all_keys(tmp_path):
  """The search for a similar key takes a millisecond, and a file may have thousands of keys."""
  file = tmp_path / "many.yml"
  file.write_text("".join(f"learning_rate_{n}: 1\n" for n in range(200)) + "use_dpo: true\n")
  with pytest.raises(UserError) as caught:
    load_config([str(file)])
  lines = caught.value.lines
  assert len(lines) == 201
  assert ["did you mean learning_rate?" in line for line in lines] == [True] * 50 + [False] * 151
  assert "many.yml:200: learning_rate_199=1 is not a key" in lines[199]
  assert "is a key of MaxText" in lines[200]
