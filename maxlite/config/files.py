"""Settings from YAML files: one file, the chain of its base_config, a preset of configs/models."""

from pathlib import Path

import yaml

from maxlite.config.errors import UserError
from maxlite.config.values import BASE_CONFIG, NotPlainError, Setting, did_you_mean, plain

_PACKAGE = Path(__file__).resolve().parent.parent
_INSTALLED, _CHECKOUT = _PACKAGE / "configs", _PACKAGE.parent / "configs"
MODEL_FILE = "model.yml"  # of a run folder: the keys of a model that was imported
CONFIGS = _INSTALLED if _INSTALLED.is_dir() else _CHECKOUT


def read_file(path: Path, asked_by: str) -> list[Setting]:
  """The settings of one YAML file in its order; `asked_by` says who named the file.

  Raises:
    UserError: the file cannot be read, is no flat mapping, or has a key twice.
  """
  root = _compose(path, asked_by)
  if root is None:
    return []
  if not isinstance(root, yaml.MappingNode):
    raise UserError(f"{path}:1: the file is no mapping; write one `key: value` per line")
  settings: dict[str, Setting] = {}
  for name_node, node in root.value:
    source = f"{path}:{name_node.start_mark.line + 1}"
    name = str(name_node.value)
    if name in settings:
      first = settings[name].source
      raise UserError(f"{source}: {name} is already set at {first}; remove one of the two")
    try:
      settings[name] = Setting(name, plain(node, str(path)), source)
    except NotPlainError as error:
      raise UserError(f"{source}: {name} {error}") from None
  return list(settings.values())


def read_chain(path: Path, asked_by: str, users: tuple[Path, ...] = ()) -> list[list[Setting]]:
  """The settings of every file on the base_config chain of `path`, its own last.

  Raises:
    UserError: as `read_file`, or the chain comes back to one of its `users`.
  """
  chain = (*users, path.resolve())
  own = read_file(path, asked_by)
  base = next((setting for setting in own if setting.name == BASE_CONFIG), None)
  if base is None:
    return [own]
  if not isinstance(base.raw, str):
    raise base.error("is no file's name; write base_config: FILE.yml")
  base_path = path.parent / base.raw
  if base_path.resolve() in chain:
    raise base.error("comes back to a file that builds on it; remove one base_config of the cycle")
  own.remove(base)
  return [*read_chain(base_path, f"{base.source}: {BASE_CONFIG}", chain), own]


def read_preset(chosen: Setting) -> list[Setting]:
  """The settings of configs/models/NAME.yml and of its bases, NAME being what `chosen` says."""
  names = sorted(path.stem for path in (CONFIGS / "models").glob("*.yml"))
  if chosen.raw not in names:
    hint = did_you_mean(str(chosen.raw), names) or f"choose one of {', '.join(names)}"
    raise chosen.error(f"has no file in {CONFIGS / 'models'}; {hint}")
  path = CONFIGS / "models" / f"{chosen.raw}.yml"
  settings = [setting for file in read_chain(path, chosen.source) for setting in file]
  for setting in settings:
    if setting.name == chosen.name:
      raise setting.error("is itself inside a preset; remove it, or use base_config")
  return settings


def _compose(path: Path, asked_by: str) -> yaml.Node | None:
  try:
    return yaml.compose(path.read_bytes(), Loader=yaml.SafeLoader)
  except OSError as error:
    near = did_you_mean(path.name, (p.name for p in path.parent.glob("*.y*ml")))
    hint = near or "name an existing YAML file"
    raise UserError(f"{asked_by}: {path} cannot be read ({error.strerror}); {hint}") from None
  except yaml.MarkedYAMLError as error:
    line = error.problem_mark.line + 1 if error.problem_mark else 1
    raise UserError(f"{path}:{line}: bad YAML, {error.problem}; write `key: value`") from None
  except yaml.YAMLError as error:
    raise UserError(f"{path}: bad YAML, {error}; write plain UTF-8 text") from None
