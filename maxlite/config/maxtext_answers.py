"""Error messages for MaxText's keys and values that maxlite lacks."""

from collections.abc import Mapping

from maxlite.config.maxtext_keys import NOT_NEEDED, NOT_SUPPORTED, OTHER_NAME
from maxlite.config.maxtext_same_keys import UNSUPPORTED_VALUES, VALUES

_OFF = ("false", "0", "", "none", "null", "-1", "remat")  # values with which MaxText does without


def answer_key(name: str, value: str) -> str:
  """What to do about a key of MaxText, as a part of an error message; empty for other keys.

  Args:
    value: the value that the user wrote for it.
  """
  if name in OTHER_NAME:
    advice = answer_value(name, value)
    if advice:
      return advice
    if "{value}" not in OTHER_NAME[name] and _normalize(value) in _OFF:
      return "is a key of MaxText that is not needed to switch something off; remove it"
    return f"is a key of MaxText; write {OTHER_NAME[name].replace('{value}', value)}"
  needless = _reason(NOT_NEEDED, name)
  if needless:
    return f"is a key of MaxText that is not needed: {needless}; remove it"
  unsupported = _reason(NOT_SUPPORTED, name)
  if unsupported:
    return f"is a key of MaxText that is not supported: {unsupported}; remove it"
  return ""


def answer_value(name: str, value: str) -> str:
  """What to write instead of a value of MaxText, as a part of an error message; or empty."""
  value = _normalize(value)
  for other, advice in VALUES.get(name, {}).items():
    if value == other.lower():
      return f"is a value of MaxText; write {advice}"
  unsupported = _reason(UNSUPPORTED_VALUES.get(name, {}), value)
  if unsupported:
    return f"is a value of MaxText that is not supported: {unsupported}"
  return ""


def _normalize(value: str) -> str:
  return value.strip("'").lower().removesuffix(".0")


def _reason(table: Mapping[str, str], word: str) -> str:
  """The key of `table`, a reason, whose words have `word`; empty if there is none."""
  for reason, words in table.items():
    if word in words.lower().split():
      return reason
  return ""
