"""Error messages for MaxText's keys and values that maxlite lacks."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path

import yaml

_OFF = ("false", "0", "", "none", "null", "-1", "remat")  # values with which MaxText does without
_LOADER = getattr(yaml, "CBaseLoader", yaml.BaseLoader)  # builds text, lists and mappings only
NO_KEYS: Mapping[str, str] = {}
Reasons = Mapping[str, list[str]]  # reason -> the keys or values that have it


@dataclasses.dataclass(frozen=True)
class MaxTextKeys:
  """The tables of keys.yml, which describes them."""

  other_name: Mapping[str, str]
  not_needed: Reasons
  not_supported: Reasons
  one_value: Mapping[str, str]
  sections: list[str]
  whole_sections: list[str]
  dotted: Mapping[str, str]
  same_name: Mapping[str, str]
  other_meaning: Mapping[str, str]
  values: Mapping[str, Mapping[str, str]]
  unsupported_values: Mapping[str, Reasons]


@functools.cache
def maxtext_keys() -> MaxTextKeys:
  """The tables of keys.yml, which is read only when a command has a mistake to answer."""
  text = Path(__file__).with_name("keys.yml").read_text("utf-8")
  return MaxTextKeys(**_LOADER(text).get_single_data())


def is_section(name: str) -> bool:
  """Whether MaxText has a section of this name, whose keys are written `section.key`."""
  tables = maxtext_keys()
  return name in tables.sections or name in tables.whole_sections


def answer_key(name: str, value: str, beside: Mapping[str, str] = NO_KEYS) -> str:
  """What to do about a key of MaxText, as a part of an error message; empty for other keys.

  Args:
    value: the value that the user wrote for it.
    beside: all keys of the command with their values, on which some answers depend.
  """
  beside = {**beside, name: value}
  tables = maxtext_keys()
  if "." in name:
    return _answer_dotted_key(name, value, beside)
  if name in tables.other_name:
    other = tables.other_name[name]
    return answer_value(name, value, beside) or _other_name(other, value, beside)
  needless = _reason(tables.not_needed, name)
  if needless:
    return answer_value(name, value, beside) or _needless(name, value, needless)
  unsupported = _reason(tables.not_supported, name)
  if unsupported:
    return f"is a key of MaxText that is not supported: {unsupported}; remove it"
  return ""


def _other_name(other: str, value: str, beside: Mapping[str, str]) -> str:
  if "{value}" not in other and _normalize(value) in _OFF:
    return "is a key of MaxText that is not needed to switch something off; remove it"
  return f"is a key of MaxText; write {_fill(other, value, beside)}"


def _needless(name: str, value: str, reason: str) -> str:
  one = maxtext_keys().one_value.get(name)
  if one is None or _normalize(value) == one:
    return f"is a key of MaxText that is not needed: {reason}; remove it"
  return f"is a key of MaxText with one value here, {one}: {reason}; remove it"


def _answer_dotted_key(name: str, value: str, beside: Mapping[str, str]) -> str:
  """`answer_key` of a key in a section of MaxText, such as `lora.lora_rank`."""
  tables = maxtext_keys()
  section, _, key = name.partition(".")
  if name in tables.dotted:
    return f"is a key of MaxText; write {_fill(tables.dotted[name], value, beside)}"
  if not is_section(section):
    return ""
  if section in tables.whole_sections:
    return answer_key(section, "set", beside)
  if key in tables.same_name:
    return answer_value(key, value, beside) or f"is a key of MaxText; write {key}={value}"
  return answer_key(key, value, beside)


def answer_value(name: str, value: str, beside: Mapping[str, str] = NO_KEYS) -> str:
  """What to write instead of a value of MaxText, as a part of an error message; or empty."""
  beside = {**beside, name: value}
  tables = maxtext_keys()
  normalized = _normalize(value)
  for other, advice in tables.values.get(name, {}).items():
    if normalized == other.lower():
      return f"is a value of MaxText; write {_fill(advice, value, beside)}"
  unsupported = _reason(tables.unsupported_values.get(name, {}), normalized)
  if unsupported:
    return f"is a value of MaxText that is not supported: {unsupported}"
  return ""


def _fill(advice: str, value: str, beside: Mapping[str, str]) -> str:
  """`advice` with its places filled in (see `other_name` in keys.yml)."""
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


def _reason(table: Reasons, word: str) -> str:
  """The key of `table`, a reason, whose words have `word`; empty if there is none."""
  for reason, words in table.items():
    if word in (each.lower() for each in words):
      return reason
  return ""
