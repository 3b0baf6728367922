"""`python -m maxlite.tokenizer CONFIG vocab_size=N tokenizer_path=FILE`: train a tokenizer.

The data are those that `maxlite.train` reads with the same arguments, without what it holds out.
"""

import sys
from pathlib import Path

from maxlite.config import main_config
from maxlite.config.command_line import CommandLine
from maxlite.config.help_text import USAGE
from maxlite.config.load import read_settings
from maxlite.config.read_keys import check_typed
from maxlite.config.schema import DEFAULTS
from maxlite.config.values import Setting, parse
from maxlite.errors import UserError, exit_on_user_error, write_line
from maxlite.runs.saved_run import token_cache

_USAGE = f"""{USAGE}
Trains a byte-level BPE tokenizer with vocab_size ids on the training data of the config, and writes
it to tokenizer_path, for tokenizer_type=huggingface.
"""
# Documents are read as bytes, whatever tokenizer the config names: its file does not exist yet.
_AS_BYTES = ("--tokenizer_type=byte", "--tokenizer_path=", "--vocab_size=258")


def main() -> int:
  cfg = main_config([*sys.argv[1:], *_AS_BYTES], "maxlite.tokenizer", usage=_USAGE)
  with exit_on_user_error("maxlite.tokenizer"):
    check_typed("maxlite.tokenizer", CommandLine.split(sys.argv[1:]).typed, cfg)
    settings = read_settings(CommandLine.split(sys.argv[1:]), None, DEFAULTS)
    named = {setting.name: setting for setting in settings}
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
  sys.exit(main())
