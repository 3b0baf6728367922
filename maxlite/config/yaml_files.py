"""Settings from files: YAML or Python, their base_config chains, and presets of configs/models."""

import os
from collections.abc import Iterator
from pathlib import Path

import yaml

from maxlite.config.maxtext.answers import answer_value, is_section
from maxlite.config.python_files import PythonFile, python_settings
from maxlite.config.raw_values import YamlValueError, compose_yaml, from_yaml
from maxlite.config.schema import KEYS, ModelConfig, flatten
from maxlite.config.values import BASE_CONFIG, Setting, suggest
from maxlite.errors import UserError, raise_all
from maxlite.storage.file_io import MAX_CONFIG_BYTES, read_regular
from maxlite.storage.object_store import AnyPath
from maxlite.storage.tokenizer_files import OWNED_KEYS, resolve_owned

_PACKAGE = Path(__file__).resolve().parent.parent
CONFIGS = _PACKAGE / "configs"  # in an installed package
if not CONFIGS.is_dir():
  CONFIGS = _PACKAGE.parent / "configs"  # in a clone
# Keys of a preset that do not describe the model, so that files and members may set others.
EXECUTION_KEYS = ("dtype", "remat_policy")
MODEL_FILE = "model.yml"  # in the folder of an imported run: the keys of its model
_MARKS_OF_RUNS = ("checkpoints", "members", "metrics.jsonl", MODEL_FILE)  # in run folders
_MODEL_KEYS = {name for name, key in KEYS.items() if key.field.shapes_model}
_MODEL_KEYS |= flatten(ModelConfig()).keys() | {"add_bos"}


def read_file(path: AnyPath, referrer: str, *, follows_links: bool = False) -> list[Setting]:
  """Read the settings of one YAML file, in order.

  Args:
    path: the file, of at most MAX_CONFIG_BYTES.
    referrer: what names the file, for error messages.
    follows_links: whether the file may be a link; in a run folder, it may not.

  Raises:
    UserError: the file cannot be read, is not a flat mapping, or has a duplicate key.
  """
  root = _compose(path, _read_bytes(path, referrer, follows_links=follows_links))
  if root is None:
    return []
  if not isinstance(root, yaml.MappingNode):
    raise UserError(f"{path}:1: the file is not a mapping; write one `key: value` per line")
  settings: dict[str, Setting] = {}
  errors: list[UserError] = []
  for name, name_node, node in _entries(root):
    source = f"{path}:{name_node.start_mark.line + 1}"
    if name in settings:
      first = settings[name].source
      mistake = f"{source}: {name} is already set at {first}; remove one of the two"
      errors.append(UserError(mistake))
      continue
    try:
      raw = from_yaml(node, str(path))
      if name in OWNED_KEYS and isinstance(raw, str):
        raw = resolve_owned(raw, path.parent)
      settings[name] = Setting(name, raw, source)
    except YamlValueError as error:
      if name in KEYS or name == BASE_CONFIG:
        errors.append(UserError(f"{source}: {name} {error}"))
      # An unknown name is reported as such by the caller, whatever its value is.
      settings[name] = Setting(name, "null", source)
  raise_all(errors)
  return list(settings.values())


def _entries(root: yaml.MappingNode) -> Iterator[tuple[str, yaml.Node, yaml.Node]]:
  """Yield (key, its node, the node of its value); keys of MaxText's sections as `section.key`."""
  for name_node, node in root.value:
    name = str(name_node.value)
    is_mapping = isinstance(node, yaml.MappingNode) and node.value
    if is_mapping and name not in KEYS and is_section(name):
      for key, key_node, value_node in _entries(node):
        yield f"{name}.{key}", key_node, value_node
    else:
      yield name, name_node, node


def read_model_file(path: AnyPath) -> list[Setting]:
  """Read the `MODEL_FILE` of a run folder, which holds keys of the model and its tokenizer only.

  Raises:
    UserError: as `read_file`, or it has another key.
  """
  settings = read_file(path, "run folder")
  for setting in settings:
    if setting.name not in _MODEL_KEYS:
      raise setting.error("is not a key of the model, which this file describes; remove the line")
  return settings


def is_of_run(setting: Setting) -> bool:
  """Whether a setting comes from a file in a run folder, whose name is config.yml or similar."""
  file, _, _ = setting.source.rpartition(":")
  folder = os.path.dirname(file)
  if not file.endswith((".yml", ".yaml")):
    return False
  return any(os.path.exists(os.path.join(folder, mark)) for mark in _MARKS_OF_RUNS)


def read_chain(path: Path, referrer: str, users: tuple[Path, ...] = ()) -> list[list[Setting]]:
  """Read each file of the base_config chain of `path`, the file itself last.

  Args:
    path: a YAML file, or a Python file, whose code is run.
    users: the files whose base_config named this one, directly or through others.

  Raises:
    UserError: as `read_file` or `python_settings`, or the chain is a cycle.
  """
  python_file = PythonFile.of(path)
  if python_file is None:
    own = read_file(path, referrer, follows_links=True)
    folder = path.parent
  else:
    code = _read_bytes(python_file.path, referrer, follows_links=True)
    own = python_settings(python_file, code)
    folder = python_file.path.parent
  return with_bases(own, folder, (*users, path.resolve()))


def with_bases(
  own: list[Setting], folder: Path, users: tuple[Path, ...] = ()
) -> list[list[Setting]]:
  """The settings of each file of the base_config chain that `own` names, then `own` without it.

  Args:
    own: settings of one file, or of a mapping.
    folder: to which the file name in base_config is relative.
    users: the file of `own`, if it is of one, and the files whose base_config named that.

  Raises:
    UserError: as `read_chain`, or the base is in a run folder.
  """
  base = None
  for setting in own:
    if setting.name == BASE_CONFIG:
      base = setting
      break
  if base is None:
    return [own]
  if not isinstance(base.raw, str) or "\0" in base.raw:
    raise base.error("is not a file name; write base_config: FILE.yml")
  if is_of_run(base):  # that file could name code, in a folder which is not known to be of a run
    raise base.error("is in a run folder, whose files are resolved; remove the line")
  base_path = folder / base.raw
  if base_path.resolve() in users:
    raise base.error("is a cycle: that file is built on this one; remove one base_config")
  rest = [setting for setting in own if setting is not base]
  return [*read_chain(base_path, f"{base.source}: {BASE_CONFIG}", users), rest]


def find_preset(model_name: Setting) -> Path:
  """The file configs/models/NAME.yml that `model_name` selects.

  Raises:
    UserError: there is no such file.
  """
  folder = CONFIGS / "models"
  name = str(model_name.raw)
  names = sorted(path.stem for path in folder.glob("*.yml"))
  if name not in names:
    otherwise = f"has no file in {folder}; {suggest(name, names)}"
    raise model_name.error(answer_value("model_name", name) or otherwise)
  return folder / f"{name}.yml"


def read_preset(model_name: Setting) -> list[Setting]:
  """Read the preset that `model_name` selects, after its bases.

  Raises:
    UserError: there is no such preset, or a file of it is wrong.
  """
  chain = read_chain(find_preset(model_name), model_name.source)
  settings: list[Setting] = []
  for file in chain:
    for setting in file:
      if setting.name == model_name.name:
        raise setting.error("cannot be set in a preset; remove it, or use base_config")
      settings.append(setting)
  return settings


def _compose(path: AnyPath, text: bytes) -> yaml.Node | None:
  """The root node of the text of a file; None if it is empty."""
  try:
    return compose_yaml(text)
  except yaml.MarkedYAMLError as error:
    line = 1
    if error.problem_mark is not None:
      line = error.problem_mark.line + 1
    raise UserError(f"{path}:{line}: bad YAML, {error.problem}; write `key: value`") from None
  except yaml.YAMLError as error:
    raise UserError(f"{path}: bad YAML, {error}; write plain UTF-8 text") from None


def _read_bytes(path: AnyPath, referrer: str, *, follows_links: bool) -> bytes:
  try:
    if isinstance(path, Path):
      return read_regular(path, MAX_CONFIG_BYTES, follows_links=follows_links)
    with path.open("rb") as file:
      content = bytes(file.read(MAX_CONFIG_BYTES + 1))
  except OSError as error:
    names: list[str] = []
    for pattern in ("*.y*ml", "*.py"):
      names.extend(file.name for file in path.parent.glob(pattern))
    hint = suggest(path.name, names, "name an existing YAML file")
    raise UserError(f"{referrer}: {path} cannot be read ({error.strerror}); {hint}") from None
  if len(content) > MAX_CONFIG_BYTES:
    raise UserError(f"{path} has more than {MAX_CONFIG_BYTES:,} bytes; write a smaller file")
  return content
