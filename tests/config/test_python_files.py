"""Configs in Python: files with `get_config`, flags of ml_collections, and `maxlite.get_config`."""

import re
import subprocess
import sys

import ml_collections
import numpy as np
import pytest
import yaml
from ml_collections import config_dict

import maxlite
from maxlite.api.arguments import change_config
from maxlite.config import load_config, save_resolved
from maxlite.config.schema import KEYS, flatten
from maxlite.config.values import SECRETS
from maxlite.config.yaml_files import CONFIGS
from maxlite.errors import UserError

CONFIG = """
import ml_collections

def get_config(run_name="mine"):
  config = ml_collections.ConfigDict()
  config.base_config = "base.yml"
  config.steps = 20
  config.head_dim = config.get_ref("steps") * 2
  config.learning_rate = 1e-4
  config.run_name = run_name
  config.mlp_activations = ("gelu", "linear")
  config.sweep = {"grid": {"learning_rate": [1e-3, 3e-3]}}
  return config
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """The working directory, with base.yml and my_config.py."""
  (tmp_path / "base.yml").write_text("steps: 10\nlog_period: 7\n")
  (tmp_path / "my_config.py").write_text(CONFIG)
  monkeypatch.chdir(tmp_path)
  return tmp_path


@pytest.mark.parametrize("argv", [["my_config.py"], ["--config=my_config.py"]])
def test_a_python_file_stands_for_a_yaml_file(argv, folder):
  config = load_config(argv)
  assert (config.run.steps, config.observe.log_period, config.model.head_dim) == (20, 7, 40)
  assert (config.optimizer.learning_rate, config.run.run_name) == (1e-4, "mine")
  assert config.model.mlp_activations == ("gelu", "linear")
  assert config.ensemble.sweep["grid"]["learning_rate"] == ("0.001", "0.003")


@pytest.mark.parametrize(
  "argv",
  [
    ["my_config.py", "steps=50"],
    ["steps=50", "my_config.py:mine"],
    ["my_config.py", "--config.steps=50"],
    ["--config", "my_config.py", "--config.steps", "50"],
    ["--config=my_config.py", "steps=60", "-config.steps=50"],
  ],
)
def test_arguments_override_a_python_file(argv, folder):
  assert load_config(argv).run.steps == 50


def test_an_argument_of_get_config_follows_a_colon(folder):
  assert load_config(["my_config.py:other=2"]).run.run_name == "other=2"


@pytest.mark.parametrize("argument", ["--noconfig.scan_layers", "--config.scan_layers=false"])
def test_flags_of_config_take_false(argument):
  assert not load_config([argument]).model.scan_layers


def test_a_python_file_imports_the_files_beside_it(folder):
  (folder / "own.py").write_text("import my_config\nget_config = my_config.get_config\n")
  (folder / "own.yml").write_text("base_config: own.py\nlog_period: 3\n")
  config = load_config(["own.yml"])
  assert (config.run.steps, config.observe.log_period) == (20, 3)
  assert str(folder) not in sys.path


@pytest.mark.parametrize("base", ["evil.py", "sub/base.yml"])
def test_the_config_of_a_run_folder_executes_no_python_file(base, folder):
  (folder / "run/sub").mkdir(parents=True)
  (folder / "run/metrics.jsonl").touch()
  (folder / "run/evil.py").write_text("open('ran', 'w')")
  (folder / "run/sub/base.yml").write_text("base_config: ../evil.py\n")
  (folder / "run/config.yml").write_text(f"base_config: {base}\n")
  with pytest.raises(UserError, match=rf"config.yml:1: base_config={base} is in a run folder"):
    load_config(["run/config.yml"])
  assert not (folder / "ran").exists()


def test_secrets_are_not_in_a_config_dict():
  config = maxlite.get_config(serve_api_key="secret")
  assert "serve_api_key" not in config
  with pytest.raises(UserError, match=r"^config: serve_api_key is a secret, which"):
    config.serve_api_key = "secret"


def test_a_python_file_may_return_a_mapping_with_values_of_numpy(folder):
  code = "import numpy as np\ndef get_config():\n  return {'steps': np.int64(5), 'scan_layers': "
  (folder / "own.py").write_text(f"{code}np.bool_(False), 'adam_b1': np.float32(0.5)}}\n")
  config = load_config(["own.py"])
  assert (config.run.steps, config.model.scan_layers, config.optimizer.adam_b1) == (5, False, 0.5)


MISTAKES = {
  "def get_config(): return {'stepz': 3}": "own.py:1: stepz=3 is not a key; did you mean steps?",
  "def get_config():\n  return dict(\n    steps=0)": "own.py:3: steps=0 is below 1; write steps=1",
  "def get_config(): return {'steps': None}": "own.py:1: steps is None; write a value, or remove",
  "def get_config(): return {'steps': print}": "own.py:1: steps has the type builtin_function_or_m",
  "def get_config(): return {'sweep': {3: 4}}": "own.py:1: sweep has 3 for a key; write text",
  "def get_config(): return {3: 4}": "own.py: the key 3 is not text; write the name of a key",
  "def get_config():\n  return 3": "own.py: get_config() returned int; return a ConfigDict or a d",
  "steps = 3": "own.py: has no function get_config; write def get_config()",
  "steps = (\n": "own.py:1: '(' was never closed; correct the Python code",
  "steps = '\0'": "source code string cannot contain null bytes; correct the Python code",
  "def get_config():\n  return {}['a']": "own.py:2: KeyError: 'a'; correct the Python code",
  "import sys\nsys.exit()": "own.py:2: SystemExit: ; correct the Python code",
  "def get_config():\n  raise SystemExit('bye')": "own.py:2: SystemExit: bye; correct the Python",
  "import no_such_module": "own.py:1: ModuleNotFoundError: No module named 'no_such_module'",
  "def get_config():\n  a = {}\n  a['steps'] = 1\n  a['steps'] = 0\n  return a": "own.py: steps=0",
  "def get_config(): return {'members': [{'steps': -1}]}": "members[0] (own.py): steps=-1",
  "def get_config(): return {'base_config': 'own.py'}": "own.py:1: base_config=own.py is a cycle",
}


@pytest.mark.parametrize("code", MISTAKES)
def test_mistakes_in_a_python_file_are_one_line(code, folder):
  (folder / "own.py").write_text(code)
  with pytest.raises(UserError) as error:
    load_config(["own.py"])
  assert MISTAKES[code] in str(error.value)
  assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  ("argv", "message"),
  [
    (["my_confg.py"], "command line: my_confg.py cannot be read (No such file or directory); did"),
    (["--config=mine"], "--config=mine is neither a YAML nor a Python file"),
    (["--config.stepz=3"], "--config.stepz: stepz=3 is not a key; did you mean steps?"),
    (["--config.steps=3.5"], "--config.steps: steps=3.5 is not a whole number"),
    (["--config.steps"], "Missing value for flag --config.steps; write --config.KEY=value"),
    (["--config.scan_layers=maybe"], "--config.scan_layers=maybe: "),
    (["--noconfig.scan_layers", "--", "--config=c.py"], "write --config.KEY=value before any --"),
    (["\0.yml"], "is not the name of a file: correct it"),
    (["\0.py"], "is not the name of a file: correct it"),
    (["--config.sweep.adam_b1=1"], "--config.sweep.adam_b1 is a part of sweep; write --config.sw"),
  ],
)
def test_mistakes_in_flags_of_config_are_one_line(argv, message, folder):
  with pytest.raises(UserError) as error:
    load_config(argv)
  assert message in str(error.value)


def test_get_config_is_a_locked_config_dict(folder):
  config = maxlite.get_config("base.yml", steps=50)
  assert isinstance(config, ml_collections.ConfigDict)
  assert (config.is_locked, config.steps, config.log_period) == (True, 50, 7)
  assert set(KEYS) - set(SECRETS) <= set(dir(config))
  with pytest.raises(UserError, match=r"^config: stepz=3 is not a key; did you mean steps\?$"):
    config.stepz = 3
  with pytest.raises(UserError, match=r"^config: stepz=None is not a key; did you mean steps\?$"):
    config["stepz"] = None
  with pytest.raises(TypeError, match="steps"):
    config.steps = "many"
  config.steps = 60
  assert change_config(config, {}).run.steps == 60
  config.steps = -1
  with pytest.raises(UserError, match=r"^config: steps=-1 is below 1; write steps=1 or more$"):
    change_config(config, {})


@pytest.mark.parametrize(
  "keys",
  [
    {},
    {"model_name": "deepseek2-16b", "base_num_decoder_layers": 2},
    {"members": [{"learning_rate": 1e-3, "name": "a"}, {"base_emb_dim": 64}]},
    {
      "sweep": {"grid": {"learning_rate": [1e-3, 3e-3], "adam_b1": [0.8, 0.9]}},
      "dtype": "bfloat16",
    },
    {"logical_axis_rules": [["embed", ["fsdp", "expert"]], ["vocab", []]]},
  ],
)
def test_get_config_yaml_and_saved_configs_hold_the_same(keys, folder):
  expected = change_config((), keys)
  saved = folder / "config.yml"
  save_resolved(expected, saved)
  (folder / "own.py").write_text(
    f"import maxlite\ndef get_config(): return maxlite.get_config(**{keys!r})\n"
  )
  config = maxlite.get_config(**keys)
  (folder / "dumped.yml").write_text(yaml.safe_dump(config.to_dict(), sort_keys=False))
  values = flatten(expected) | {"model_name": ""}
  for source in (config, "dumped.yml", "own.py", saved, expected, config.to_dict()):
    assert flatten(change_config(source, {})) | {"model_name": ""} == values
    assert maxlite.get_config(source).to_dict() == config.to_dict()


def test_a_config_dict_of_get_config_refuses_a_preset_that_it_would_hide():
  config = maxlite.get_config()
  config.model_name = "mixtral-8x7b"
  with pytest.raises(UserError, match="config: model_name=mixtral-8x7b selects a preset, but this"):
    change_config(config, {})
  assert (
    change_config(maxlite.get_config(), {"model_name": "mixtral-8x7b"}).model.decoder_block
    == "mixtral"
  )


def test_a_mapping_stands_for_a_file(folder):
  config = change_config({"base_config": "base.yml", "steps": np.int32(3)}, {"log_period": 9})
  assert (config.run.steps, config.observe.log_period) == (3, 9)


def test_an_incomplete_placeholder_is_one_line():
  config = ml_collections.ConfigDict({"steps": config_dict.placeholder(int)})
  with pytest.raises(UserError, match=r"^config: steps is None; write a value"):
    change_config(config, {})


def test_other_commands_do_not_import_ml_collections(folder):
  code = (
    "import sys, maxlite.config as c; c.load_config(['base.yml', 'steps=3', '--log_period=2']); "
  )
  code += "print(any(name.partition('.')[0] == 'ml_collections' for name in sys.modules))"
  command = [sys.executable, "-c", code]
  output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
  assert output.strip() == "False"


SHIPPED = [*CONFIGS.glob("*.yml"), *CONFIGS.glob("alternating/*"), *CONFIGS.glob("ensemble/*")]


@pytest.mark.parametrize("path", sorted(SHIPPED), ids=lambda path: path.stem)
def test_shipped_configs_pass_through_a_config_dict(path):
  expected = load_config([str(path)], needs_data=False)
  config = maxlite.get_config(path)
  read = change_config(config, {}, needs_data=False)
  assert flatten(read) == flatten(expected) | {"model_name": ""}
  assert yaml.safe_load(yaml.safe_dump(config.to_dict())) == config.to_dict()


def test_the_example_of_the_documentation_is_a_config(tmp_path, monkeypatch):
  page = (CONFIGS.parent / "docs" / "config.md").read_text()
  code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
  (tmp_path / "configs").symlink_to(CONFIGS)
  (tmp_path / "my_config.py").write_text(code)
  monkeypatch.chdir(tmp_path)
  config = load_config(["my_config.py"], needs_data=False)
  assert (config.run.steps, config.optimizer.warmup_steps_fraction) == (200, 0.1)
  commands = re.findall(r"^python -m maxlite.train (.*my_config.py.*)$", page, re.MULTILINE)
  assert len(commands) == 2
  for command in commands:
    arguments = command.partition("#")[0].split()
    assert load_config(arguments, needs_data=False).run.steps == 10
