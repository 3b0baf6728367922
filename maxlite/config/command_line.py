"""Command-line arguments: config files, key=value, and absl flags generated from the schema."""

import dataclasses
import platform
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

from absl import flags

from maxlite import __version__
from maxlite.config.argument_mistakes import check_arguments
from maxlite.config.config_flags import take_config_flags
from maxlite.config.python_files import PythonFile
from maxlite.config.raw_values import show
from maxlite.config.schema import KEYS, SECTIONS, SchemaKey
from maxlite.config.values import Setting, domain, suggest
from maxlite.errors import UserError

USAGE = """\
usage: python -m {program} [FILE.yml ...] [key=value ...] [--key=value ...]

In any order. Later ones override earlier ones: defaults, base_config of the files, the files from
left to right, the preset of model_name, key=value, --key=value. FILE.py, whose get_config() returns
a ConfigDict of ml_collections, is run; --config=FILE --config.key=value has the form of its flags.
"""
_MORE = """
--version prints versions, --help=KEY one key, --help=all all keys, and --help=SECTION one of these:
{sections}.
"""
# The sections that the help of a command lists.
_OWN_SECTIONS = {
  "train": ("run", "data", "optimizer", "training"),
  "evaluate": ("run", "observe"),
  "generate": ("run", "generate"),
  "serve": ("run", "serve", "generate"),
  "plan": ("plan", "mesh"),
  "convert": ("convert",),
  "tokenizer": ("tokenizer", "data"),
}


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
    defined = _define_flags(KEYS.values())
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


def help_text(program: str, topic: str, usage: str = USAGE) -> str:
  """Usage and keys with their doc, type, range and default, by section.

  Args:
    topic: a key, a section, `all`, `version`, or another text for the sections of the program.

  Raises:
    UserError: there is no such topic.
  """
  if topic in ("", "true"):
    sections = _OWN_SECTIONS.get(program.removeprefix("maxlite."), _OWN_SECTIONS["train"])
    own = [key for section in sections for key in SECTIONS[section]]
    more = _MORE.format(sections=textwrap.fill(", ".join(SECTIONS), 98))
    return usage.format(program=program) + _describe(own) + more
  if topic == "version":
    return _versions()
  topics = {name: [key] for name, key in KEYS.items()}
  topics |= SECTIONS
  topics["all"] = list(KEYS.values())
  if topic not in topics:
    hint = suggest(topic, topics, "--help=all lists all keys")
    raise UserError(f"command line: --help={topic} is not a key or section; {hint}")
  return _describe(topics[topic])


def _versions() -> str:
  """The versions of maxlite, Python and the packages that decide what is computed."""
  from importlib import metadata  # takes a tenth of the time of a command that fails

  packages = ("jax", "flax", "optax", "orbax-checkpoint", "grain")
  lines = [f"maxlite {__version__}", f"Python {platform.python_version()}"]
  lines += [f"{package} {metadata.version(package)}" for package in packages]
  return "\n".join(lines) + "\n"


def _describe(keys: Sequence[SchemaKey]) -> str:
  titles = dict.fromkeys(_title(key) for key in keys)  # each once, in order
  defined = _define_flags(keys)
  return "\n".join(defined.module_help(title) for title in titles) + "\n"


def _title(key: SchemaKey) -> str:
  doc = (key.section.__doc__ or "").removesuffix(".")
  return f"{key.section.__name__.removesuffix('Config')}: {doc}"


def _define_flags(keys: Iterable[SchemaKey]) -> flags.FlagValues:
  defined = flags.FlagValues()
  defined.set_gnu_getopt(True)
  # The base class of parsers keeps the text; values.parse converts it.
  text: flags.ArgumentParser[str] = flags.ArgumentParser()
  for key in keys:
    flags.DEFINE(
      text,
      key.name,
      default=None,
      help=f"{key.field.doc} ({domain(key)}; default {show(key.default)})",
      flag_values=defined,
      module_name=_title(key),
      boolean=key.type is bool,
    )
  flags.DEFINE_multi_string("config", None, "", flag_values=defined)
  flags.DEFINE(text, "help", None, "", defined, boolean=True, short_name="h")
  return defined
