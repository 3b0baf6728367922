"""The words of a command line: YAML files, key=value, and absl flags made from the schema."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from maxlite.config.errors import UserError
from maxlite.config.schema import KEYS, Key
from maxlite.config.values import Setting, did_you_mean, domain, show

_USAGE = """\
usage: python -m {program} [FILE.yml ...] [key=value ...] [--key=value ...]

In any order. What counts, the later the more: defaults, base_config of the files, the files from
left to right, the preset of model_name, key=value, --key=value.
"""


@dataclasses.dataclass(frozen=True)
class Words:
  """A command line taken apart; each list is in the order of writing."""

  files: list[Path]
  assignments: list[Setting]
  flags: list[Setting]
  asks_help: bool


def split(argv: Sequence[str]) -> Words:
  """The words of `argv`, told apart by how they look; values are not read yet.

  Raises:
    UserError: a word is none of the three forms, or a flag lacks its value.
  """
  defined = _define_flags()
  try:
    rest = defined(["", *argv], known_only=True)[1:]
  except (flags.Error, ValueError) as error:
    raise UserError(f"command line: {error}; write --key=value") from None
  given = [
    Setting(name, str(defined[name].value), f"--{name}") for name in KEYS if defined[name].present
  ]
  words = Words([], [], given, asks_help=bool(defined["help"].present))
  for word in rest:
    _sort_in(words, word)
  return words


def help_text(program: str) -> str:
  """Usage and every key with its meaning, type, range and default, by section."""
  defined = _define_flags()
  titles = dict.fromkeys(map(_title, KEYS.values()))
  return _USAGE.format(program=program) + "\n".join(map(defined.module_help, titles)) + "\n"


def _sort_in(words: Words, word: str) -> None:
  name, equals, text = word.partition("=")
  if word.startswith("-"):
    words.flags.append(Setting(name.lstrip("-"), text, name))
  elif equals:
    words.assignments.append(Setting(name, text, "command line"))
  elif word.endswith((".yml", ".yaml")):
    words.files.append(Path(word))
  else:
    hint = did_you_mean(word, KEYS) or "write FILE.yml, key=value or --key=value"
    raise UserError(f"command line: {word} is neither a YAML file nor key=value; {hint}")


class _AsWritten(flags.ArgumentParser):
  """Leaves a flag's text alone: values.parse gives the types."""

  def parse(self, argument: str) -> str:
    return argument


def _title(key: Key) -> str:
  doc = (key.section.__doc__ or "").removesuffix(".")
  return f"{key.section.__name__.removesuffix('Config')}: {doc}"


def _define_flags() -> flags.FlagValues:
  defined = flags.FlagValues()
  defined.set_gnu_getopt(True)
  for key in KEYS.values():
    flag = flags.Flag(
      _AsWritten(),
      None,
      key.name,
      None,
      f"{key.field.doc} ({domain(key)}; default {show(key.default)})",
      boolean=key.type is bool,
    )
    flags.DEFINE_flag(flag, defined, module_name=_title(key))
  flags.DEFINE_boolean("help", False, "Print this.", defined, short_name="h")
  return defined
