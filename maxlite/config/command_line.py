"""Command-line arguments: config files, key=value, and absl flags generated from the schema."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from maxlite.config.argument_mistakes import check_arguments
from maxlite.config.config_flags import take_config_flags
from maxlite.config.help_text import define_flags
from maxlite.config.python_files import PythonFile
from maxlite.config.schema import KEYS
from maxlite.config.values import Setting, suggest
from maxlite.errors import UserError


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
    overrides, others = take_config_flags(others)
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
