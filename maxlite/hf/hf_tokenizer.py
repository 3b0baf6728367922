"""Read and write the tokenizer files of a Hugging Face folder."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from maxlite.config.schema import DataConfig
from maxlite.data.tokenizer import ByteTokenizer, open_tokenizer
from maxlite.hf.hf_folder import COPY_AGAIN, write_json
from maxlite.storage.file_io import read_json_object, require_own_file
from maxlite.storage.json_values import JsonObject
from maxlite.storage.object_store import local_tokenizer

MAIN = "tokenizer.json"
SENTENCEPIECE = "tokenizer.model"
CONFIG = "tokenizer_config.json"
GENERATION = "generation_config.json"
CHAT = "chat_template.jinja"
EXTRA_FILES = (CONFIG, "special_tokens_map.json", "added_tokens.json", CHAT, GENERATION)
_TEXT = {"Sequence": {"id": "A", "type_id": 0}}  # in the template of a post-processor
_BOS = "bos_token_id"
_EOS = "eos_token_id"


def tokenizer_keys(directory: Path) -> dict[str, str]:
  """Return our keys for the tokenizer in `directory`; empty if it has none."""
  for kind, name in (("huggingface", MAIN), ("sentencepiece", SENTENCEPIECE)):
    path = directory / name
    if path.is_file():
      return {"tokenizer_type": kind, "tokenizer_path": str(path)}
  return {}


def _copy_files(source: Path, target: Path) -> None:
  """Copy the tokenizer files of `source` into the folder `target`."""
  for name in (MAIN, SENTENCEPIECE, *EXTRA_FILES):
    path = source / name
    if path.is_file():
      require_own_file(path)
      shutil.copyfile(path, target / name)


def write_tokenizer(
  cfg: DataConfig,
  bos: int | None,
  stop_token_ids: Sequence[int],
  target: Path,
  *,
  keeps_ids: bool = False,
) -> JsonObject:
  """Write the tokenizer of a run and return the keys of config.json for its bos and eos.

  With `keeps_ids` there are none, and those in an imported generation_config.json are kept.
  """
  eos = stop_token_ids[0]
  ids: JsonObject = {_BOS: bos, _EOS: eos}
  if len(stop_token_ids) > 1:
    ids[_EOS] = list(stop_token_ids)
  _write_files(cfg, bos, eos, target)
  if cfg.chat_template_path:
    shutil.copyfile(Path(cfg.chat_template_path).expanduser(), target / CHAT)
  if keeps_ids:
    return {}
  generation = target / GENERATION
  if generation.exists():
    known = {key: value for key, value in ids.items() if value is not None}
    write_json(generation, read_json_object(generation, COPY_AGAIN) | known)
  return ids


def _write_files(cfg: DataConfig, bos: int | None, eos: int, target: Path) -> None:
  """Write the tokenizer itself and, unless it has one, its tokenizer_config.json."""
  if cfg.tokenizer_type == "sentencepiece":
    path = local_tokenizer(cfg.tokenizer_path)
    _copy_files(path.parent, target)
    shutil.copyfile(path, target / SENTENCEPIECE)
    if not (target / CONFIG).exists():
      write_json(target / CONFIG, {"add_bos_token": bool(open_tokenizer(cfg).prefix_ids)})
    return
  if cfg.tokenizer_type == "byte":
    tokenizer = byte_tokenizer()
    tokenizer.save(str(target / MAIN))
  else:
    path = local_tokenizer(cfg.tokenizer_path)
    _copy_files(path.parent, target)
    shutil.copyfile(path, target / MAIN)
    if cfg.add_bos != "auto":
      _set_prefix(target / MAIN, open_tokenizer(cfg).prefix_ids)
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
  if not (target / CONFIG).exists():
    config = {
      "tokenizer_class": "PreTrainedTokenizerFast",
      "eos_token": tokenizer.id_to_token(eos),
    }
    if bos is not None:
      config["bos_token"] = tokenizer.id_to_token(bos)
    write_json(target / CONFIG, config)


def _set_prefix(file: Path, prefix_ids: Sequence[int]) -> None:
  """Make the post-processor of a tokenizer.json put `prefix_ids` before a text."""
  tokenizer = tokenizers.Tokenizer.from_file(str(file))
  content = read_json_object(file, COPY_AGAIN)
  post_processor = content["post_processor"] or {}
  parts = post_processor.get("processors", [post_processor])
  template: dict[str, Any] = {
    "type": "TemplateProcessing",
    "single": [_TEXT],
    "pair": [_TEXT],
    "special_tokens": {},
  }
  others = []
  for part in parts:
    if part.get("type") == template["type"]:
      template = part
    elif part.get("type") == "ByteLevel":
      others.append(part)
  tokens = [tokenizer.id_to_token(i) for i in prefix_ids]
  for token, i in zip(tokens, prefix_ids, strict=True):
    template["special_tokens"][token] = {"id": token, "ids": [i], "tokens": [token]}
  prefix = [{"SpecialToken": {"id": token, "type_id": 0}} for token in tokens]
  first = next(n for n, piece in enumerate(template["single"]) if "Sequence" in piece)
  template["single"] = [*prefix, *template["single"][first:]]
  content["post_processor"] = {"type": "Sequence", "processors": [*others, template]}
  write_json(file, content)


def byte_tokenizer() -> tokenizers.Tokenizer:
  """Build tokenizer_type=byte: the ids of bytes are their values, and bos begins a sequence."""
  # A byte-level vocabulary represents printable bytes by their Latin-1 character, and the others in
  # order by characters from 256 on.
  alphabet = set(pre_tokenizers.ByteLevel.alphabet())
  printable = {character for character in alphabet if ord(character) < 256}
  others = [byte for byte in range(256) if chr(byte) not in printable]
  vocabulary = {character: ord(character) for character in printable}
  vocabulary |= dict(zip(sorted(alphabet - printable), others, strict=True))
  specials = ByteTokenizer.special_tokens
  bos = ByteTokenizer.special_tokens_map["bos_token"]
  tokenizer = tokenizers.Tokenizer(models.BPE({**vocabulary, **specials}, []))
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  tokenizer.decoder = decoders.ByteLevel()
  tokenizer.add_special_tokens(list(specials))
  tokenizer.post_processor = processors.TemplateProcessing(
    single=f"{bos} $A",
    pair=f"{bos} $A {bos} $B",
    special_tokens=list(specials.items()),
  )
  return tokenizer
