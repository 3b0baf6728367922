"""Command-line arguments: config files, key=value, and absl flags generated from the schema."""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from maxlite.config.help_text import define_flags
from maxlite.config.python_files import PythonFile
from maxlite.config.raw_values import show
from maxlite.config.schema import KEYS
from maxlite.config.values import Setting, suggest
from maxlite.errors import UserError, raise_all

# absl's flags that print something and exit -> the argument with that meaning.
_PRINTING = {
  "--helpfull": "--help=all",
  "--helpshort": "--help",
  "--version": "--help=version",
}
_OVERRIDE = re.compile(r"--?(?:no)?config\.([^=]*)", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class CommandLine:
  """The arguments by kind, each list in the order of writing; values are not parsed yet."""

  files: list[Path]
  assignments: list[Setting]
  flags: list[Setting]
  help: str | None  # the topic of --help, `true` if it names none; None without --help

  @property
  def typed(self) -> list[Setting]:
    """The settings that are not in files, the strongest last."""
    return [*self.assignments, *self.flags]

  @classmethod
  def split(cls, argv: Sequence[str]) -> "CommandLine":
    """Sort arguments by kind.

    Raises:
      UserError: an argument is neither a config file, an assignment nor a flag with its value.
    """
    argv = check_arguments(argv)
    defined = define_flags(KEYS.values())
    try:
      others = defined(["", *argv], known_only=True)[1:]
    except (flags.Error, ValueError) as error:
      raise UserError(f"command line: {error}; write --key=value") from None
    given = []
    for name in KEYS:
      if defined[name].present:
        given.append(Setting(name, str(defined[name].value), f"--{name}"))
    overrides, others = _take_config_flags(others)
    line = cls(files=[], assignments=[], flags=[*overrides, *given], help=defined["help"].value)
    for argument in others:
      name, equals, text = argument.partition("=")
      if _is_file(argument):
        line.files.append(Path(argument))
      elif argument.startswith("-"):
        line.flags.append(Setting(name.lstrip("-"), text, name))
      elif equals:
        line.assignments.append(Setting(name, text, "command line"))
      else:
        raise _not_an_argument(argument)
    for file in defined["config"].value or ():
      if not _is_file(file):
        raise UserError(f"--config={file} is neither a YAML nor a Python file; write its name")
      line.files.append(Path(file))
    return line


def _is_file(argument: str) -> bool:
  """Whether the argument names a YAML file, or a Python file with or without `:ARGUMENT`."""
  if argument.startswith("-"):
    return False
  is_yaml = "=" not in argument and argument.endswith((".yml", ".yaml"))
  return is_yaml or PythonFile.of(argument) is not None


def _not_an_argument(argument: str) -> UserError:
  """The error about an argument that has none of the forms of arguments."""
  hint = suggest(argument, KEYS, "write FILE.yml, FILE.py, key=value or --key=value")
  return UserError(f"command line: {argument} is neither a config file nor key=value; {hint}")


def without_files(argv: Sequence[str]) -> list[str]:
  """The assignments and flags of `argv`, as arguments."""
  line = CommandLine.split(argv)
  assignments = [f"{setting.name}={setting.raw}" for setting in line.assignments]
  return assignments + [f"--{setting.name}={setting.raw}" for setting in line.flags]


def check_arguments(argv: Sequence[str]) -> list[str]:
  """`argv` with `--help` in one form.

  Raises:
    UserError: an assignment has spaces around `=`, or a flag file cannot be read.
  """
  errors: list[UserError] = []
  previous = ""
  for argument in argv:
    is_value = previous.startswith("-") and "=" not in previous  # the second part of `--key value`
    if not is_value:
      mistake = _mistake(argument, previous)
      if mistake:
        errors.append(UserError(f"command line: {mistake}"))
    previous = argument
  raise_all(errors)
  return [_PRINTING.get(argument, argument) for argument in argv]


def _mistake(argument: str, previous: str) -> str:
  """What is wrong with the form of an argument after `previous`; empty if nothing is."""
  name, equals, value = argument.partition("=")
  if argument in KEYS:
    return f"{argument} has no value; write {argument}=VALUE, without spaces around ="
  if equals and not name.strip():
    return f"{argument} has no key; write KEY={value.strip()}, without spaces around ="
  if name != name.strip() and name.strip().lstrip("-") in KEYS:
    return f"{argument} has a space before =; write {name.strip()}={value.strip()}"
  is_other = equals or argument.startswith("-") or argument.endswith((".yml", ".yaml", ".py"))
  if previous.endswith("=") and previous[:-1].lstrip("-") in KEYS and not is_other:
    return f"{previous} {argument} has a space after =; write {previous}{argument}"
  if name.lstrip("-") == "flagfile":
    return _flag_file_mistake(value)
  return ""


def _flag_file_mistake(path: str) -> str:
  """What is wrong with `--flagfile=path`; empty if the file can be read."""
  if not path:
    return "--flagfile has no value; write --flagfile=FILE, with a --key=value per line"
  try:
    with open(path, encoding="utf-8") as file:
      file.read()
  except (OSError, ValueError) as error:
    reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
    return f"--flagfile={path} cannot be read: {reason}; write a file with a --key=value per line"
  return ""


def _take_config_flags(arguments: Sequence[str]) -> tuple[list[Setting], list[str]]:
  """Return (settings of `--config.KEY`, the other arguments).

  Values stay text, which is parsed like that of all other settings.

  Raises:
    UserError: a flag is not of a key, or has no value.
  """
  values: dict[str, bool | str] = {}  # a value of the type of each flag, to be overridden
  for argument in arguments:
    match = _OVERRIDE.match(argument)
    if match is not None:
      name = match[1]
      _require_flat(name)
      is_bool = name in KEYS and KEYS[name].type is bool
      values[name] = True if is_bool else ""
  if not values:
    return [], list(arguments)
  from ml_collections import ConfigDict, config_flags  # takes 0.1 s

  argv = ["", *arguments]
  defined = flags.FlagValues()
  defined.set_gnu_getopt(True)
  try:
    config_flags.DEFINE_config_dict(
      "config", ConfigDict(values), flag_values=defined, sys_argv=argv
    )
    others = defined(argv, known_only=True)[1:]
    overrides = config_flags.get_override_values(defined["config"])
  # absl does not parse flags after `--`.
  except (flags.Error, ValueError) as error:
    raise UserError(f"command line: {error}; write --config.KEY=value before any --") from None
  settings = [Setting(name, show(value), f"--config.{name}") for name, value in overrides.items()]
  return settings, list(others)


def _require_flat(name: str) -> None:
  """Raise UserError if `name` is a part of a key's value, such as `sweep.learning_rate`."""
  key = re.split(r"[.\[]", name)[0]
  if key != name:
    raise UserError(f"--config.{name} is a part of {key}; write --config.{key}=value as a whole")
