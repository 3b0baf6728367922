"""Formats of data files by their names, and what to write instead of a path that does not exist."""

import os
import re
from pathlib import Path, PurePosixPath

from maxlite.registry import SOURCES

COMPRESSED_SUFFIXES = (".gz", ".zst")
_TOKENIZER_FILES = {"tokenizer.json": "huggingface", "tokenizer.model": "sentencepiece"}
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def other_dataset_type(name: str, dataset_type: str) -> str:
  """The dataset_type whose format a file has, if `dataset_type` does not read it; else empty.

  Args:
    name: the name or the path of the file; only its suffixes matter.
    dataset_type: a name of SOURCES. A source without suffixes may read any file.
  """
  suffix = _suffix(name)
  source = SOURCES.entry(dataset_type)
  readable = (*source.suffixes, *source.also_reads)
  if not readable or suffix in readable:
    return ""
  for other, entry in SOURCES.entries().items():
    if suffix in entry.suffixes:
      return other
  return ""


def _suffix(name: str) -> str:
  """The suffix of a file, with that of its compression: `.jsonl.gz` of `a.b.jsonl.gz`."""
  path = PurePosixPath(name)
  if path.suffix in COMPRESSED_SUFFIXES:
    return PurePosixPath(path.stem).suffix + path.suffix
  return path.suffix


def tokenizer_fix(path: str) -> str:
  """What to write instead of a tokenizer_path that is not a file."""
  folder = os.path.expanduser(path)
  for name, kind in _TOKENIZER_FILES.items():
    if path and os.path.isfile(os.path.join(folder, name)):
      found = os.path.join(path, name)
      return f"is a folder; write tokenizer_type={kind} tokenizer_path={found}"
  if _HUB_NAME.fullmatch(path) and not path.endswith((".json", ".model")):
    owner, _, name = path.rpartition("/")
    uri = f"hf://{owner or 'OWNER'}/{name}/tokenizer.json"
    return (
      f"no such file; write tokenizer_type=huggingface tokenizer_path={uri} for the tokenizer of a "
      "model on Hugging Face's hub"
    )
  return "no such file; write tokenizer_path=FILE, or tokenizer_type=byte without a path"


def template_fix(path: str, package: Path) -> str:
  """What to write instead of a chat_template_path that is not a file.

  Args:
    package: the folder that contains the shipped `configs`.
  """
  in_package = package / path
  if not os.path.isabs(path) and in_package.is_file():
    return f"no such file in this folder; write chat_template_path={in_package}"
  return "no such file; write chat_template_path=FILE, a Jinja2 template"
