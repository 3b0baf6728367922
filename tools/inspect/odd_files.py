"""Replace the files of a run folder by what is no such file, and open, evaluate and resume the run.

Each case must work or end in one printable line, within LIMIT seconds. A few minutes:

python tools/inspect/odd_files.py [PART_OF_A_NAME ...]

The arguments choose files, such as `config.yml` or `manifest`; by default all but checkpoints.
"""

import contextlib
import io
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import maxlite
from maxlite.checkpoint.manager import CheckpointWriteError
from maxlite.config import Config, load_config
from maxlite.errors import UserError
from maxlite.runs.run import train_model

LIMIT = 60  # [s]
KEYS = {
  "dataset_type": "synthetic",
  "decoder_block": "llama",
  "vocab_size": 264,
  "base_emb_dim": 16,
  "base_num_decoder_layers": 1,
  "scan_layers": "false",
  "base_num_query_heads": 2,
  "base_num_kv_heads": 2,
  "head_dim": 8,
  "base_mlp_dim": 32,
  "max_target_length": 16,
  "per_device_batch_size": 2,
  "eval_fraction": 0.1,
  "eval_interval": 2,
  "eval_steps": 1,
  "checkpoint_period": 2,
  "log_period": 1,
  "enable_tensorboard": "false",
}
random_bits = random.Random(0)


def flip(path: Path, content: bytes) -> None:
  """Write `content` with one bit flipped."""
  changed = bytearray(content)
  if changed:
    changed[random_bits.randrange(len(changed))] ^= 1 << random_bits.randrange(8)
  path.write_bytes(changed)


def bind_socket(path: Path) -> None:
  with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as bound:
    bound.bind(path.name)  # a path would be too long


def write_sparse(path: Path) -> None:
  path.touch()
  os.truncate(path, 1 << 40)


# By name, what is written in the place of a file, from its path and its content.
ODD: dict[str, Callable[[Path, bytes], object]] = {
  "pipe": lambda path, _: os.mkfifo(path),
  "socket": lambda path, _: bind_socket(path),
  "folder": lambda path, _: path.mkdir(),
  "link to a device": lambda path, _: path.symlink_to("/dev/zero"),
  "link to nothing": lambda path, _: path.symlink_to("nothing"),
  "loop of links": lambda path, _: path.symlink_to(path.name),
  "nothing": lambda path, _: None,
  "empty": lambda path, _: path.touch(),
  "sparse": lambda path, _: write_sparse(path),
  "zeros": lambda path, _: path.write_bytes(bytes(1000)),
  "random": lambda path, _: path.write_bytes(random_bits.randbytes(1000)),
  "control characters": lambda path, _: path.write_bytes(b"\x1b]0;title\x07\x9b2J\n"),
  "deep": lambda path, _: path.write_bytes(b"[" * 100_000 + b"\n"),
  "large number": lambda path, _: path.write_bytes(b"9" * 5000 + b"\n"),
  "null": lambda path, _: path.write_bytes(b"null\n"),
  "another object": lambda path, _: path.write_bytes(b'{"step": 1}\n'),
  "half": lambda path, content: path.write_bytes(content[: len(content) // 2]),
  "twice": lambda path, content: path.write_bytes(2 * content),
  "deep last line": lambda path, content: path.write_bytes(content + b"[" * 100_000 + b"\n"),
  "flipped bit": flip,
  "another flipped bit": flip,
}


def config_of(run: Path, num_steps: int) -> Config:
  place = {"base_output_directory": run.parent, "run_name": run.name, "steps": num_steps}
  return load_config([f"{key}={value}" for key, value in (KEYS | place).items()])


def open_and_evaluate(run: Path) -> None:
  opened = maxlite.open_run(run)
  opened.evaluate(1)
  assert opened.rows


USES = {"opened": open_and_evaluate, "resumed": lambda run: train_model(config_of(run, 6))}


def outcome(use: Callable[[Path], object], run: Path) -> str:
  """Return what is wrong with how the use of a run ended; empty if nothing is."""

  def stop(*_: object) -> None:
    raise TimeoutError(f"takes more than {LIMIT} s")

  signal.signal(signal.SIGALRM, stop)
  signal.alarm(LIMIT)
  output = io.StringIO()
  try:
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
      use(run)
  except (UserError, CheckpointWriteError) as error:
    output.write(str(error))
  except Exception as error:  # of any kind: each is a finding of this tool
    frames = [each for each in traceback.extract_tb(error.__traceback__) if "maxlite" in each[0]]
    place = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}"
    return f"{type(error).__name__} at {place}: {str(error)[:100]!r}"
  finally:
    signal.alarm(0)
  unprintable = {each for each in output.getvalue() if not each.isprintable()} - {"\n"}
  return f"prints {sorted(unprintable)}" if unprintable else ""


def cases(run: Path, names: list[str]) -> Iterator[tuple[str, str, str]]:
  """Yield the names of a file, of an odd content and of a use."""
  for path in sorted(run.rglob("*")):
    name = path.relative_to(run).as_posix()
    chosen = any(part in name for part in names) if names else "checkpoints" not in name
    if path.is_file() and chosen:
      for kind in ODD:
        for use in USES:
          yield name, kind, use


def main() -> int:
  began = time.monotonic()
  num_cases = 0
  num_wrong = 0
  with tempfile.TemporaryDirectory() as folder:
    whole = Path(folder, "whole")
    with contextlib.redirect_stdout(io.StringIO()):
      train_model(config_of(whole, 4))
    for name, kind, use in cases(whole, sys.argv[1:]):
      run = Path(folder, "run")
      shutil.rmtree(run, ignore_errors=True)
      shutil.copytree(whole, run)
      content = (run / name).read_bytes()
      (run / name).unlink()
      ODD[kind](run / name, content)
      wrong = outcome(USES[use], run)
      num_cases += 1
      if wrong:
        num_wrong += 1
        print(f"{name} is {kind}, and the run is {use}: {wrong}", flush=True)
  print(f"{num_wrong} of {num_cases} cases are wrong ({time.monotonic() - began:.0f} s)")
  return bool(num_wrong)


if __name__ == "__main__":
  sys.exit(main())
