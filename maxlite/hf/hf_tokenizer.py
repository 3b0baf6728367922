"""Tokenizers in the files that Hugging Face's tools look for."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from maxlite.config.schema import DataConfig
from maxlite.hf.hf_folder import CONFIG as FOLDER_CONFIG
from maxlite.hf.hf_folder import read_config, read_object, write_json

MAIN, SENTENCEPIECE, CONFIG = "tokenizer.json", "tokenizer.model", "tokenizer_config.json"
GENERATION, CHAT = "generation_config.json", "chat_template.jinja"
BESIDE = (CONFIG, "special_tokens_map.json", "added_tokens.json", CHAT, GENERATION)
_BOS, _EOS = "bos_token_id", "eos_token_id"
BYTE_BOS, BYTE_EOS = "<|begin_of_text|>", "<|end_of_text|>"


def tokenizer_keys(directory: Path) -> dict[str, str]:
  """Our keys of the tokenizer in `directory`; none where there is no file of one."""
  for kind, name in (("huggingface", MAIN), ("sentencepiece", SENTENCEPIECE)):
    if (directory / name).is_file():
      return {"tokenizer_type": kind, "tokenizer_path": str(directory / name)}
  return {}


def copy_tokenizer(source: Path, target: Path) -> None:
  """Copies the tokenizer's files that `source` has into the new folder `target`, if any.

  What only its config.json says of which tokens begin and end texts, they say then.
  """
  found = [source / name for name in (MAIN, SENTENCEPIECE, *BESIDE) if (source / name).is_file()]
  for path in found:
    target.mkdir(exist_ok=True)
    shutil.copyfile(path, target / path.name)
  if found and not (target / GENERATION).exists() and (source / FOLDER_CONFIG).is_file():
    config = read_config(source)
    told = {name: config[name] for name in (_BOS, _EOS) if config.get(name) is not None}
    if told:
      write_json(target / GENERATION, told)


def write_tokenizer(cfg: DataConfig, bos: int, ends: Sequence[int], target: Path) -> dict[str, Any]:
  """Writes the tokenizer of a run, whose texts begin with `bos` and end with any of `ends`.

  Returns what config.json has to say of these.
  """
  told = {_BOS: bos, _EOS: list(ends) if len(ends) > 1 else ends[0]}
  _write_files(cfg, bos, ends[0], target)
  if cfg.chat_template_path:
    shutil.copyfile(Path(cfg.chat_template_path).expanduser(), target / CHAT)
  if (target / GENERATION).exists():
    write_json(target / GENERATION, read_object(target / GENERATION) | told)
  return told


def _write_files(cfg: DataConfig, bos: int, eos: int, target: Path) -> None:
  if cfg.tokenizer_type == "sentencepiece":
    shutil.copyfile(Path(cfg.tokenizer_path).expanduser(), target / SENTENCEPIECE)
    return
  if cfg.tokenizer_type == "byte":
    made = byte_tokenizer(bos, eos)
    made.save(str(target / MAIN))
  else:
    path = Path(cfg.tokenizer_path).expanduser()
    copy_tokenizer(path.parent, target)
    shutil.copyfile(path, target / MAIN)
    made = tokenizers.Tokenizer.from_file(str(path))
  if not (target / CONFIG).exists():
    tokens = {"bos_token": made.id_to_token(bos), "eos_token": made.id_to_token(eos)}
    write_json(target / CONFIG, {"tokenizer_class": "PreTrainedTokenizerFast", **tokens})


def byte_tokenizer(bos: int, eos: int) -> tokenizers.Tokenizer:
  """Bytes as their own ids, `bos` before each text: maxlite's tokenizer_type=byte."""
  # A byte-level vocabulary spells each byte as one printable character, sorted alike.
  spelled = {byte: _spelling(byte) for byte in range(256)}
  vocabulary = {character: byte for byte, character in spelled.items()}
  made = tokenizers.Tokenizer(models.BPE(vocabulary | {BYTE_BOS: bos, BYTE_EOS: eos}, []))
  made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  made.decoder = decoders.ByteLevel()
  made.add_special_tokens([BYTE_BOS, BYTE_EOS])
  specials = [(BYTE_BOS, bos), (BYTE_EOS, eos)]
  made.post_processor = processors.TemplateProcessing(
    single=f"{BYTE_BOS} $A", pair=f"{BYTE_BOS} $A {BYTE_BOS} $B", special_tokens=specials
  )
  return made


def _spelling(byte: int) -> str:
  """The character by which a byte-level vocabulary spells `byte`.

  Printable characters of Latin-1 spell themselves; the others, in their order, those from 256 on.

  Source: Radford et al., GPT-2 (2019), section 2.2, and its published vocabulary.
  """
  own = [*range(33, 127), *range(161, 173), *range(174, 256)]
  others = [other for other in range(256) if other not in own]
  return chr(byte) if byte in own else chr(256 + others.index(byte))
