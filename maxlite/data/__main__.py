"""`python -m maxlite.data COMMAND CONFIG key=value`: the data of a run without a run; see USAGE."""

import sys
from collections.abc import Sequence
from pathlib import Path

from maxlite.config import Config, load_config
from maxlite.config.command_line import CommandLine, check_arguments
from maxlite.config.help_text import help_text
from maxlite.config.load import read_settings
from maxlite.config.read_keys import check_typed
from maxlite.config.schema import DEFAULTS
from maxlite.config.values import Setting, parse
from maxlite.errors import UserError, exit_on_user_error, prepare_process, write_line
from maxlite.runs.saved_run import token_cache

USAGE = """\
usage: python -m maxlite.data tokenize [FILE.yml ...] [key=value ...]
         tokenize the data that maxlite.train reads with the same arguments
       python -m maxlite.data inspect [FILE.yml ...] [key=value ...] [inspect_first_row=N ...]
         print rows as text, in colour where they are learned
       python -m maxlite.data export [FILE.yml ...] [key=value ...] output_path=FOLDER
         write the documents as files of Megatron-LM: train.bin, train.idx, eval.bin, eval.idx
       python -m maxlite.data train_tokenizer [FILE.yml ...] [key=value ...] tokenizer_path=FILE
         train a byte-level BPE tokenizer with vocab_size ids on the training documents
"""
COMMANDS = ("tokenize", "inspect", "export", "train_tokenizer")
# Documents are read as bytes, whatever tokenizer the config names: its file does not exist yet.
_AS_BYTES = ("--tokenizer_type=byte", "--tokenizer_path=", "--vocab_size=258")


def main(arguments: Sequence[str]) -> int:
  prepare_process("maxlite.data")
  with exit_on_user_error("maxlite.data"):
    for argument in check_arguments(list(arguments)):
      name, _, topic = argument.partition("=")
      if name in ("--help", "-h"):
        sys.stdout.write(help_text("maxlite.data", topic, USAGE))
        return 0
    if not arguments or arguments[0] not in COMMANDS:
      raise UserError(f"command line: write one of {', '.join(COMMANDS)} first; see --help")
    command, *argv = arguments
    if command == "train_tokenizer":
      return _train_tokenizer(argv)
    cfg = load_config(argv, command=f"maxlite.data {command}")
    from maxlite.data import inspect_rows, token_export  # import NumPy

    if command == "export":
      if not cfg.convert.output_path:
        raise UserError("output_path is missing: write output_path=FOLDER for train.bin and others")
      lines = token_export.export(
        cfg.data, cfg.model.vocab_size, token_cache(cfg), Path(cfg.convert.output_path)
      )
    elif command == "inspect":
      lines = inspect_rows.render(cfg.data, cfg.inspect, cfg.model.vocab_size, token_cache(cfg))
    else:
      lines = inspect_rows.describe(cfg.data, cfg.model.vocab_size, token_cache(cfg))
    for line in lines:
      if command == "inspect":  # escapes its text itself, and adds colours
        sys.stdout.write(f"{line}\n")
      else:
        write_line(line, sys.stdout)
  return 0


def _train_tokenizer(argv: Sequence[str]) -> int:
  """Train a tokenizer on what `maxlite.train` reads with `argv`, without what it holds out."""
  line = CommandLine.split(argv)
  cfg: Config = load_config([*argv, *_AS_BYTES])
  check_typed("maxlite.data train_tokenizer", line.typed, cfg)
  named = {setting.name: setting for setting in read_settings(line, None, DEFAULTS)}
  kind = named.get("tokenizer_type")
  if kind is not None and kind.raw not in ("byte", "huggingface"):
    raise kind.error("is not what is trained; write tokenizer_type=huggingface")
  path = _new_file(named.get("tokenizer_path"))
  size = DEFAULTS["vocab_size"]
  if "vocab_size" in named:
    size = parse(named["vocab_size"])
  from maxlite.data.train_tokenizer import save_tokenizer, train_tokenizer  # imports NumPy

  tokenizer = train_tokenizer(
    cfg.data,
    token_cache(cfg),
    size=size,
    special_tokens=cfg.tokenizer.tokenizer_special_tokens,
    max_bytes=cfg.tokenizer.tokenizer_train_bytes,
  )
  save_tokenizer(tokenizer, path)
  write_line(
    f"{path}: {tokenizer.get_vocab_size():,} tokens; train with tokenizer_type=huggingface "
    f"tokenizer_path={path} vocab_size={size}",
    sys.stdout,
  )
  return 0


def _new_file(setting: Setting | None) -> Path:
  """The file that tokenizer_path names; UserError if it names none, or one that exists."""
  if setting is None or not setting.raw:
    raise UserError("tokenizer_path is missing: write tokenizer_path=tokenizer.json")
  if "://" in str(setting.raw):
    raise setting.error("is not on this machine; write a file, and copy it there")
  path = Path(str(setting.raw)).expanduser()
  if path.exists():
    raise setting.error("exists, and runs may depend on it; name another file")
  return path


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
