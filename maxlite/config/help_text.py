"""The text of --help: usage, and keys with their doc, type, range and default."""

import dataclasses
import platform
import textwrap
from collections.abc import Iterable, Sequence

from absl import flags

from maxlite import __version__
from maxlite.config.config_field import SchemaKey, SectionClass, entry_keys, is_section, walk
from maxlite.config.raw_values import show
from maxlite.config.schema import ENTRIES, KEYS, SECTIONS
from maxlite.config.values import domain, suggest
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
  "audit": ("audit", "mesh"),
  "convert": ("convert",),
  "data": ("data", "inspect", "tokenizer"),
}


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
  titles = dict.fromkeys(title(key) for key in keys)  # each once, in order
  defined = define_flags(keys)
  text = "\n".join(defined.module_help(each) for each in titles) + "\n"
  for key in keys:
    for name in entries_in(key.name):
      text += _describe_entry(name)
  return text


def _describe_entry(name: str) -> str:
  """The keys of the mappings that a key of the schema holds."""
  entry = ENTRIES[name]
  text = f"\nKeys of {name}. {entry.__doc__}\n"
  for key in own_keys(entry):
    doc = f"{key.name}: {key.field.doc} ({domain(key)}; {default_of(key)})"
    text += textwrap.fill(doc, 79, initial_indent="  ", subsequent_indent="    ") + "\n"
  inherited = ", ".join(inherited_keys(entry))
  if inherited:
    text += textwrap.fill(f"Keys of the run: {inherited}.", 79, subsequent_indent="    ") + "\n"
  return text


def entries_in(name: str) -> list[str]:
  """The keys of mappings with entries, from `name` inwards: itself, and those in its entries."""
  if name not in ENTRIES:
    return []
  names = [name]
  for key in own_keys(ENTRIES[name]):
    names += entries_in(key.name)
  return names


def own_keys(entry: SectionClass) -> list[SchemaKey]:
  """The keys of an entry that the run does not have under the same name."""
  return [key for name, key in entry_keys(entry).items() if key.overrides != name]


def inherited_keys(entry: SectionClass) -> list[str]:
  """The keys of the run that an entry may override: names, or `all of SECTION except ...`."""
  inherited: list[str] = []
  for each in dataclasses.fields(entry):
    overrides = each.metadata["config"].overrides
    if not overrides or not is_section(each.type):
      continue
    section = [key.name for key in walk(each.type)]
    others = [key for key in section if key not in overrides.values()]
    if len(others) < len(section) / 8:  # shorter than a list
      text = f"all of {each.type.__name__.removesuffix('Config')}"
      inherited.append(text + (f" except {' and '.join(others)}" if others else ""))
    else:
      inherited += [key for key in overrides if key in section]
  return inherited


def default_of(key: SchemaKey) -> str:
  """The default of a key, as help and documentation show it."""
  if key.field.required:
    return "required"
  if key.default is None or (key.overrides and key.overrides != key.name):
    return "optional"
  return f"default {show(key.default)}"


def title(key: SchemaKey) -> str:
  doc = (key.section.__doc__ or "").removesuffix(".")
  return f"{key.section.__name__.removesuffix('Config')}: {doc}"


def define_flags(keys: Iterable[SchemaKey]) -> flags.FlagValues:
  defined = flags.FlagValues()
  defined.set_gnu_getopt(True)
  # The base class of parsers keeps the text; values.parse converts it.
  text: flags.ArgumentParser[str] = flags.ArgumentParser()
  for key in keys:
    flags.DEFINE(
      text,
      key.name,
      default=None,
      help=f"{key.field.doc} ({domain(key)}; {default_of(key)})",
      flag_values=defined,
      module_name=title(key),
      boolean=key.type is bool,
    )
  flags.DEFINE_multi_string("config", None, "", flag_values=defined)
  flags.DEFINE(text, "help", None, "", defined, boolean=True, short_name="h")
  return defined
