"""Command-line arguments: YAML files, key=value, and absl flags generated from the schema."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from maxlite.config.errors import UserError
from maxlite.config.raw_values import show
from maxlite.config.schema import KEYS, SchemaKey
from maxlite.config.values import Setting, domain, suggest

_USAGE = """\
usage: python -m {program} [FILE.yml ...] [key=value ...] [--key=value ...]

In any order. Later ones override earlier ones: defaults, base_config of the files, the files from
left to right, the preset of model_name, key=value, --key=value.
"""


@dataclasses.dataclass(frozen=True)
class CommandLine:
  """The arguments by kind, each list in the order of writing; values are not parsed yet."""

  files: list[Path]
  assignments: list[Setting]
  flags: list[Setting]
  help: bool

  @classmethod
  def split(cls, argv: Sequence[str]) -> "CommandLine":
    """Sort arguments by kind.

    Raises:
      UserError: an argument is neither a YAML file, an assignment nor a flag with its value.
    """
    defined = _define_flags()
    try:
      others = defined(["", *argv], known_only=True)[1:]
    except (flags.Error, ValueError) as error:
      raise UserError(f"command line: {error}; write --key=value") from None
    present = [name for name in KEYS if defined[name].present]
    given = [Setting(name, str(defined[name].value), f"--{name}") for name in present]
    line = cls([], [], given, help=bool(defined["help"].present))
    for argument in others:
      line._add(argument)
    return line

  def _add(self, argument: str) -> None:
    """Add an argument that is not a known flag."""
    name, equals, text = argument.partition("=")
    if argument.startswith("-"):
      self.flags.append(Setting(name.lstrip("-"), text, name))
    elif equals:
      self.assignments.append(Setting(name, text, "command line"))
    elif argument.endswith((".yml", ".yaml")):
      self.files.append(Path(argument))
    else:
      hint = suggest(argument, KEYS, "write FILE.yml, key=value or --key=value")
      raise UserError(f"command line: {argument} is neither a YAML file nor key=value; {hint}")


def help_text(program: str) -> str:
  """Usage, and every key with its doc, type, range and default, by section."""
  defined = _define_flags()
  titles = dict.fromkeys(map(_title, KEYS.values()))
  return _USAGE.format(program=program) + "\n".join(map(defined.module_help, titles)) + "\n"


def _title(key: SchemaKey) -> str:
  doc = (key.section.__doc__ or "").removesuffix(".")
  return f"{key.section.__name__.removesuffix('Config')}: {doc}"


def _define_flags() -> flags.FlagValues:
  defined = flags.FlagValues()
  defined.set_gnu_getopt(True)
  for key in KEYS.values():
    doc = f"{key.field.doc} ({domain(key)}; default {show(key.default)})"
    is_bool = key.type is bool
    # The base class of parsers keeps the text; values.parse converts it.
    flag: flags.Flag = flags.Flag(
      flags.ArgumentParser(), None, key.name, None, doc, boolean=is_bool
    )
    flags.DEFINE_flag(flag, defined, module_name=_title(key))
  flags.DEFINE_boolean("help", False, "Print this.", defined, short_name="h")
  return defined
