"""Arguments that are not files, assignments or flags because of how they were typed."""

from collections.abc import Sequence

from maxlite.config.schema import KEYS
from maxlite.errors import UserError, raise_all

# absl's flags that print something and exit -> the argument with that meaning.
_PRINTING = {
  "--helpfull": "--help=all",
  "--helpshort": "--help",
  "--version": "--help=version",
}


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
