"""Error messages for MaxText's keys and values that maxlite lacks."""

from collections.abc import Mapping

from maxlite.config.maxtext_keys import (
  DOTTED,
  NOT_NEEDED,
  NOT_SUPPORTED,
  ONE_VALUE,
  OTHER_NAME,
  SECTIONS,
  WHOLE_SECTIONS,
)
from maxlite.config.maxtext_same_keys import SAME_NAME, UNSUPPORTED_VALUES, VALUES

_OFF = ("false", "0", "", "none", "null", "-1", "remat")  # values with which MaxText does without
DOTTED_SECTIONS = (*SECTIONS.split(), *WHOLE_SECTIONS)
NO_KEYS: Mapping[str, str] = {}


def answer_key(name: str, value: str, beside: Mapping[str, str] = NO_KEYS) -> str:
  """What to do about a key of MaxText, as a part of an error message; empty for other keys.

  Args:
    value: the value that the user wrote for it.
    beside: all keys of the command with their values, on which some answers depend.
  """
  beside = {**beside, name: value}
  if "." in name:
    return _answer_dotted_key(name, value, beside)
  if name in OTHER_NAME:
    return answer_value(name, value, beside) or _other_name(name, value, beside)
  needless = _reason(NOT_NEEDED, name)
  if needless:
    return answer_value(name, value, beside) or _needless(name, value, needless)
  unsupported = _reason(NOT_SUPPORTED, name)
  if unsupported:
    return f"is a key of MaxText that is not supported: {unsupported}; remove it"
  return ""


def _other_name(name: str, value: str, beside: Mapping[str, str]) -> str:
  if "{value}" not in OTHER_NAME[name] and _normalize(value) in _OFF:
    return "is a key of MaxText that is not needed to switch something off; remove it"
  return f"is a key of MaxText; write {_fill(OTHER_NAME[name], value, beside)}"


def _needless(name: str, value: str, reason: str) -> str:
  one = ONE_VALUE.get(name)
  if one is None or _normalize(value) == one:
    return f"is a key of MaxText that is not needed: {reason}; remove it"
  return f"is a key of MaxText with one value here, {one}: {reason}; remove it"


def _answer_dotted_key(name: str, value: str, beside: Mapping[str, str]) -> str:
  """`answer_key` of a key in a section of MaxText, such as `lora.lora_rank`."""
  section, _, key = name.partition(".")
  if name in DOTTED:
    return f"is a key of MaxText; write {_fill(DOTTED[name], value, beside)}"
  if section not in DOTTED_SECTIONS:
    return ""
  if section in WHOLE_SECTIONS:
    return answer_key(section, "set", beside)
  if key in SAME_NAME:
    return answer_value(key, value, beside) or f"is a key of MaxText; write {key}={value}"
  return answer_key(key, value, beside)


def answer_value(name: str, value: str, beside: Mapping[str, str] = NO_KEYS) -> str:
  """What to write instead of a value of MaxText, as a part of an error message; or empty."""
  beside = {**beside, name: value}
  normalized = _normalize(value)
  for other, advice in VALUES.get(name, {}).items():
    if normalized == other.lower():
      return f"is a value of MaxText; write {_fill(advice, value, beside)}"
  unsupported = _reason(UNSUPPORTED_VALUES.get(name, {}), normalized)
  if unsupported:
    return f"is a value of MaxText that is not supported: {unsupported}"
  return ""


def _fill(advice: str, value: str, beside: Mapping[str, str]) -> str:
  """`advice` with its places filled in (see `OTHER_NAME`)."""
  rows = "parquet"
  if _normalize(beside.get("use_sft", "false")) == "true":
    rows = "chat"
  elif _normalize(beside.get("use_dpo", "false")) == "true":
    rows = "preference"
  places = {
    "value": value,
    "rows": rows,
    "hub": _hub_files(beside, "hf_train_files", beside.get("train_split", "train")),
    "eval_hub": _hub_files(beside, "hf_eval_files", beside.get("hf_eval_split", "validation")),
  }
  for place, text in places.items():
    advice = advice.replace("{" + place + "}", text)
  return advice


def _hub_files(beside: Mapping[str, str], files: str, split: str) -> str:
  """The files of MaxText's key `files`; without it, a glob for a split of its dataset `hf_path`."""
  if _normalize(beside.get(files, "")) not in _OFF:
    return beside[files]
  folders = [beside.get("hf_path", "OWNER/NAME"), beside.get("hf_data_dir", "")]
  folders.append(beside.get("hf_name", beside.get("hf_subset", "")))
  named = [folder.strip("/'\"") for folder in folders if _normalize(folder) not in _OFF]
  return "/".join(["hf://datasets", *named, "**", f"{split}-*.parquet"])


def _normalize(value: str) -> str:
  """`value` in lower case, without quotes, the brackets of a list, and a fraction of zero."""
  for character in "'\"[] ":
    value = value.replace(character, "")
  return value.lower().removesuffix(".0")


def _reason(table: Mapping[str, str], word: str) -> str:
  """The key of `table`, a reason, whose words have `word`; empty if there is none."""
  for reason, words in table.items():
    if word in words.lower().split():
      return reason
  return ""
