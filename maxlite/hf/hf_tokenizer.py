"""Read and write the tokenizer files of a Hugging Face folder."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from maxlite.config.file_io import read_json_object, require_own_file
from maxlite.config.object_store import local_tokenizer
from maxlite.config.schema import DataConfig
from maxlite.data.tokenizer import ByteTokenizer
from maxlite.hf.hf_folder import CONFIG as FOLDER_CONFIG
from maxlite.hf.hf_folder import COPY_AGAIN, read_config, write_json

MAIN, SENTENCEPIECE, CONFIG = "tokenizer.json", "tokenizer.model", "tokenizer_config.json"
GENERATION, CHAT = "generation_config.json", "chat_template.jinja"
EXTRA_FILES = (CONFIG, "special_tokens_map.json", "added_tokens.json", CHAT, GENERATION)
_BOS, _EOS = "bos_token_id", "eos_token_id"


def tokenizer_keys(directory: Path) -> dict[str, str]:
  """Return our keys for the tokenizer in `directory`; empty if it has none."""
  for kind, name in (("huggingface", MAIN), ("sentencepiece", SENTENCEPIECE)):
    if (directory / name).is_file():
      return {"tokenizer_type": kind, "tokenizer_path": str(directory / name)}
  return {}


def copy_tokenizer(source: Path, target: Path) -> None:
  """Copy the tokenizer files of `source`, if any, into the new folder `target`.

  Without a generation_config.json, one is written with the bos and eos ids of config.json. Raises
  UserError if a file is a link out of `source`.
  """
  paths = (source / name for name in (MAIN, SENTENCEPIECE, *EXTRA_FILES))
  found = [path for path in paths if path.is_file()]
  for path in found:
    require_own_file(path)
    target.mkdir(exist_ok=True)
    shutil.copyfile(path, target / path.name)
  if found and not (target / GENERATION).exists() and (source / FOLDER_CONFIG).is_file():
    config = read_config(source)
    if ids := {name: config[name] for name in (_BOS, _EOS) if config.get(name) is not None}:
      write_json(target / GENERATION, ids)


def write_tokenizer(
  cfg: DataConfig, bos: int, stop_token_ids: Sequence[int], target: Path
) -> dict[str, Any]:
  """Write the tokenizer of a run and return the keys of config.json for its bos and eos."""
  eos, *others = stop_token_ids
  ids = {_BOS: bos, _EOS: [eos, *others] if others else eos}
  _write_files(cfg, bos, eos, target)
  if cfg.chat_template_path:
    shutil.copyfile(Path(cfg.chat_template_path).expanduser(), target / CHAT)
  if (target / GENERATION).exists():
    write_json(target / GENERATION, read_json_object(target / GENERATION, COPY_AGAIN) | ids)
  return ids


def _write_files(cfg: DataConfig, bos: int, eos: int, target: Path) -> None:
  if cfg.tokenizer_type == "sentencepiece":
    shutil.copyfile(local_tokenizer(cfg.tokenizer_path), target / SENTENCEPIECE)
    return
  if cfg.tokenizer_type == "byte":
    tokenizer = byte_tokenizer()
    tokenizer.save(str(target / MAIN))
  else:
    path = local_tokenizer(cfg.tokenizer_path)
    copy_tokenizer(path.parent, target)
    shutil.copyfile(path, target / MAIN)
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
  if not (target / CONFIG).exists():
    tokens = {"bos_token": tokenizer.id_to_token(bos), "eos_token": tokenizer.id_to_token(eos)}
    write_json(target / CONFIG, {"tokenizer_class": "PreTrainedTokenizerFast", **tokens})


def byte_tokenizer() -> tokenizers.Tokenizer:
  """Build tokenizer_type=byte: the ids of bytes are their values, and bos begins a sequence."""
  # A byte-level vocabulary represents printable bytes by their Latin-1 character, and the others in
  # order by characters from 256 on.
  alphabet = set(pre_tokenizers.ByteLevel.alphabet())
  printable = {character for character in alphabet if ord(character) < 256}
  others = [byte for byte in range(256) if chr(byte) not in printable]
  vocabulary = {character: ord(character) for character in printable}
  vocabulary |= dict(zip(sorted(alphabet - printable), others, strict=True))
  specials, bos = ByteTokenizer.special_tokens, ByteTokenizer.special_tokens_map["bos_token"]
  tokenizer = tokenizers.Tokenizer(models.BPE({**vocabulary, **specials}, []))
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  tokenizer.decoder = decoders.ByteLevel()
  tokenizer.add_special_tokens(list(specials))
  tokenizer.post_processor = processors.TemplateProcessing(
    single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=list(specials.items())
  )
  return tokenizer
