"""A command line becomes a config: what counts most, how values are written, where presets lie."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxlite.config import files, load_config
from maxlite.config.schema import DEFAULTS, KEYS, Config, flatten
from maxlite.config.values import Setting, domain, parse, show

TEXT = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S", "Zs", "Cc")))


@pytest.fixture
def presets(tmp_path, monkeypatch):
  """A folder of presets in place of the shipped ones; holds `small`."""
  (tmp_path / "models").mkdir()
  (tmp_path / "models" / "small.yml").write_text("steps: 30\n")
  monkeypatch.setattr(files, "CONFIGS", tmp_path)
  return tmp_path / "models"


def test_no_words_give_the_defaults():
  assert load_config([]) == Config()


@pytest.mark.parametrize("kept", list(itertools.product([False, True], repeat=5)))
def test_the_highest_layer_that_speaks_wins(kept, tmp_path, presets):
  base, own = tmp_path / "base.yml", tmp_path / "own.yml"
  base.write_text("steps: 10\n" if kept[0] else "")
  own.write_text("base_config: base.yml\n" + ("steps: 20\n" if kept[1] else ""))
  words = [
    *(["--steps=50"] if kept[4] else []),
    *(["steps=40"] if kept[3] else []),
    str(own),
    *(["model_name=small"] if kept[2] else []),
  ]
  said = [steps for steps, layer in zip((10, 20, 30, 40, 50), kept, strict=True) if layer]
  assert load_config(words).run.steps == (said[-1] if said else DEFAULTS["steps"])


def test_files_count_from_left_to_right_and_above_every_base(tmp_path):
  for name, text in {
    "deep.yml": "steps: 1\nlog_period: 1\neval_period: 1\n",
    "base.yml": "base_config: deep.yml\nsteps: 2\nlog_period: 2\n",
    "a.yml": "steps: 3\nhead_dim: 16\n",
    "b.yml": "base_config: base.yml\nhead_dim: 8\n",
  }.items():
    (tmp_path / name).write_text(text)
  config = load_config([str(tmp_path / "a.yml"), str(tmp_path / "b.yml")])
  assert (config.run.steps, config.observe.log_period, config.observe.eval_period) == (3, 2, 1)
  assert config.model.head_dim == 8


def test_a_base_is_found_relative_to_its_file(tmp_path, monkeypatch):
  (tmp_path / "deep").mkdir()
  (tmp_path / "base.yml").write_text("steps: 7\n")
  (tmp_path / "deep" / "own.yml").write_text("base_config: ../base.yml\n")
  monkeypatch.chdir(tmp_path / "deep")
  assert load_config(["own.yml"]).run.steps == 7


@pytest.mark.parametrize("word", ["model_name=small", "--model_name=small", "own.yml"])
def test_a_preset_is_named_from_anywhere(word, presets, tmp_path, monkeypatch):
  (tmp_path / "own.yml").write_text("model_name: small\nsteps: 9\n")
  monkeypatch.chdir(tmp_path)
  assert load_config([word]).run.steps == 30


def test_the_preset_is_the_one_named_last(presets, tmp_path):
  (presets / "large.yml").write_text("steps: 99\n")
  (tmp_path / "own.yml").write_text("model_name: small\n")
  assert load_config(["model_name=large", str(tmp_path / "own.yml")]).run.steps == 99
  assert load_config(["model_name=", str(tmp_path / "own.yml")]).run.steps == 300


def test_defaults_of_a_run_are_not_overruled_by_its_own_preset(presets):
  values = flatten(load_config(["model_name=small", "steps=5"]))
  assert load_config(["log_period=2"], defaults=values).run.steps == 5


def test_missing_data_matters_only_where_data_is_read():
  words = ["dataset_path=nowhere.txt"]
  assert load_config(words, needs_data=False).data.dataset_path == ("nowhere.txt",)


@pytest.mark.parametrize(
  ("written", "value"),
  [
    ("learning_rate: 3e-4", 3e-4),
    ("learning_rate: 1", 1.0),
    ("run_name: 2024", "2024"),
    ("prompt: yes", "yes"),
    ('prompt: ""', ""),
    ("steps: 010", 10),
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
def test_a_yaml_value_means_what_is_written(written, value, tmp_path):
  (tmp_path / "own.yml").write_text(written)
  found = flatten(load_config([str(tmp_path / "own.yml")]))[written.split(":")[0]]
  assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("word", ["{}=false", "--{}=False", "--no{}"])
def test_a_boolean_is_switched_off_in_every_form(word):
  assert not load_config([word.format("scan_layers")]).model.scan_layers


def test_a_flag_may_stand_apart_from_its_value():
  assert load_config(["--learning_rate_schedule_steps", "-1", "--steps", "4"]).run.steps == 4


@pytest.mark.parametrize("text", ["a,b", "[a, b]", '["a", b]', "a, b"])
def test_a_list_is_written_with_or_without_brackets(text):
  assert parse(Setting("dataset_path", text, "command line")) == ("a", "b")


@settings(max_examples=100, deadline=None, derandomize=True)
@given(text=TEXT)
def test_text_arrives_as_it_is_typed(text):
  assert load_config([f"prompt={text}"]).generate.prompt == text


def test_every_default_is_within_its_own_rules():
  for key in KEYS.values():
    if key.type is not str:
      assert parse(Setting(key.name, show(key.default), "default")) == key.default
    assert domain(key)


@pytest.mark.smoke
@pytest.mark.parametrize("file", sorted(files.CONFIGS.rglob("*.yml")), ids=lambda path: path.stem)
def test_a_shipped_file_loads(file):
  preset = file.parent.name == "models"
  words = [f"model_name={file.stem}" if preset else str(file)]
  if file.parent.name == "chat":  # the imported run that it tunes may come with its own
    words.append(f"chat_template_path={file.with_name('plain.jinja')}")
  assert load_config(words, needs_data=False)
