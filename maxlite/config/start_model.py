"""The keys that a run takes from the model it starts from: `load_parameters_path`, `from_run`.

They are those that determine the model's function and its tokenizer. Files and presets do not
override them; a key that is typed, or that a `Config` has, does, and is refused where the weights
would not fit.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from maxlite.config.config_field import KeyValue
from maxlite.config.model_function import ADDED_MODULES, function_keys
from maxlite.config.python_values import to_raw
from maxlite.config.raw_values import show
from maxlite.config.saved import read_values
from maxlite.config.schema import KEYS, LoraConfig, ModelConfig, build, flatten
from maxlite.config.values import Setting, show_key
from maxlite.errors import UserError
from maxlite.registry import WEIGHT_FORMATS, has_reference
from maxlite.storage.object_store import join
from maxlite.storage.tokenizer_files import OWNED_KEYS, is_same_file

START_KEYS = ("load_parameters_path", "from_run")
_ADAPTERS = tuple(flatten(LoraConfig()))
_FORMATS = {"config.yml": "run", "config.json": "huggingface"}


def format_of(folder: Path) -> str:
  """The name in WEIGHT_FORMATS of a folder with a model; empty if it has none."""
  for file, name in _FORMATS.items():
    if (folder / file).is_file():
      return name
  return ""


def keys_of_run(folder: Path) -> dict[str, KeyValue]:
  """{key: value} that a run takes from the run in `folder`: of its model and its tokenizer."""
  values = read_values(folder / "config.yml")
  model = build(ModelConfig, values)
  keys = {}
  for name, value in function_keys(model).items():
    if name not in ADDED_MODULES or value:
      keys[name] = value
  names = ["decoder_block", "scan_layers", "dtype", "weight_dtype"]
  names += ["tokenizer_type", "add_bos", *OWNED_KEYS]
  if model.lora.lora_rank:
    names += _ADAPTERS
  for name in names:
    keys[name] = values[name]
  return keys


def start_values(values: Mapping[str, KeyValue]) -> dict[str, KeyValue]:
  """{key: value} of the model that a new run starts from; of its own model if it has started.

  Args:
    values: of all keys; those of the model are not read.

  Raises:
    UserError: the folder has a damaged config.
  """
  path = path_of_start(values)
  if not path or "://" in path:
    return {}
  folder = _own_folder(values)
  if format_of(folder) != "run":
    folder = Path(os.path.expanduser(path))
  name = format_of(folder)
  if not name:
    return {}
  keys: dict[str, KeyValue] = WEIGHT_FORMATS.entry(name).read_keys(folder)
  return keys


def _own_folder(values: Mapping[str, KeyValue]) -> Path:
  return Path(os.path.expanduser(values["base_output_directory"]), values["run_name"])


def path_of_start(values: Mapping[str, KeyValue]) -> str:
  """The folder that `load_parameters_path` or `from_run` names; empty if neither is set."""
  path = str(values["load_parameters_path"])
  if not values["from_run"]:
    return path
  folder = join(values["base_output_directory"], values["from_run"])
  if path not in ("", folder):
    raise UserError(
      f"from_run={values['from_run']} with load_parameters_path={path}: both name the parameters "
      "to start from; write one of them"
    )
  return folder


def with_start(values: Mapping[str, KeyValue]) -> dict[str, KeyValue]:
  """The values of all keys, with `from_run` as a path, and the reference of a loss.

  It is the model that training starts from, unless adapters are added to that.
  """
  path = path_of_start(values)
  completed = dict(values) | {"load_parameters_path": path, "from_run": ""}
  if not path or values["reference_path"]:
    return completed
  own = _own_folder(values)
  if format_of(own) == "run":
    completed["reference_path"] = read_values(own / "config.yml")["reference_path"]
    return completed
  losses = {phase.get("loss", values["loss_type"]) for phase in values["phases"]}
  needs_reference = any(
    has_reference(loss, values["grpo_beta"]) for loss in losses or {values["loss_type"]}
  )
  adds_adapters = values["lora_rank"] and not start_values(values).get("lora_rank")
  if needs_reference and not adds_adapters:
    completed["reference_path"] = path
  return completed


def require_weights_fit(values: Mapping[str, KeyValue], start: Mapping[str, KeyValue]) -> None:
  """Raise UserError with the keys in which a run differs so that the weights would not fit.

  Args:
    values: of all keys of the run.
    start: of the model that it starts from.
  """
  path = path_of_start(values)
  wrong = []
  for name, there in start.items():
    if KEYS[name].field.shapes_model and name not in OWNED_KEYS and values[name] != there:
      is_added = name in ADDED_MODULES and not there
      if not is_added:
        wrong.append(f"{show_key(name, values[name])} (there {show(there)})")
  if wrong:
    raise UserError(
      f"load_parameters_path={path} has a model of other shapes than {', '.join(wrong)}: remove "
      "these keys, or name another folder"
    )
  for name in OWNED_KEYS:
    there = start.get(name, "")
    if there and not is_same_file(name, str(values[name]), there):
      raise UserError(
        f"{show_key(name, values[name])} is another file than the {name} of "
        f"load_parameters_path={path}: remove it, or name weights that were trained with it"
      )


def start_settings(settings: list[Setting], defaults: Mapping[str, KeyValue]) -> list[Setting]:
  """The settings of the model that the other settings name as the start; see `start_values`."""
  named = {*START_KEYS, "base_output_directory", "run_name"}
  values = dict(defaults)
  for setting in settings:
    if setting.name in named:
      values[setting.name] = setting.raw
  if not all(isinstance(values[name], str) for name in named):
    return []  # reported as mistakes of these keys
  source = path_of_start(values)
  start = start_values(values)
  return [Setting(name, to_raw(value), source) for name, value in start.items()]
