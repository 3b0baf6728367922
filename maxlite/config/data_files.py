"""Formats of data files by their names, and what to write in place of a path that is none."""

import os
import re
from pathlib import Path, PurePosixPath

COMPRESSED_SUFFIXES = (".gz", ".zst")
_TYPE_OF_SUFFIX = {
  ".jsonl": "jsonl",
  ".ndjson": "jsonl",
  ".parquet": "parquet",
  ".arrow": "arrow",
  ".array_record": "array_record",
}
_TOKENIZER_FILES = {"tokenizer.json": "huggingface", "tokenizer.model": "sentencepiece"}
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def other_dataset_type(name: str, dataset_type: str) -> str:
  """Return the dataset_type of a file that `dataset_type` does not read, by its name, or "".

  Text may be that of JSON lines, but not of other formats, nor of compressed JSON lines. Types that
  plugins add may read any file.
  """
  if dataset_type not in ("text", "chat", *_TYPE_OF_SUFFIX.values()):
    return ""
  path = PurePosixPath(name)
  is_compressed = path.suffix in COMPRESSED_SUFFIXES
  suffix = PurePosixPath(path.stem).suffix if is_compressed else path.suffix
  kind = _TYPE_OF_SUFFIX.get(suffix, "")
  if not kind:
    return ""
  if kind == "jsonl":
    readers = ["jsonl", "chat"] if is_compressed else ["jsonl", "chat", "text"]
  else:
    readers = [kind]
  return "" if dataset_type in readers else kind


def tokenizer_fix(path: str) -> str:
  """What to write in place of a tokenizer_path that is not a file."""
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
  """What to write in place of a chat_template_path that is not a file; `package` has configs/."""
  in_package = package / path
  if not os.path.isabs(path) and in_package.is_file():
    return f"no such file in this folder; write chat_template_path={in_package}"
  return "no such file; write chat_template_path=FILE, a Jinja2 template"
