"""Print the growth of this process's memory while reading a large dataset.

From the root of the repository: python -m tools.inspect.data_memory --megabytes 300 --kind jsonl
"""

import argparse
import json
import random
import tempfile
from pathlib import Path

from maxlite.config.schema import DataConfig
from maxlite.data.loader import open_data

_BATCH_SIZE = 32
_NUM_BATCHES = 200


def write_data(file: Path, kind: str, num_bytes: int) -> None:
  """Write about `num_bytes` of random words, in lines of some 800 bytes."""
  words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs"]
  draw = random.Random(0)
  with file.open("w") as stream:
    while stream.tell() < num_bytes:
      line = " ".join(draw.choices(words, k=200))
      if kind == "jsonl":
        line = json.dumps({"text": line})
      stream.write(f"{line}\n")


def peak_megabytes() -> float:
  """Peak memory of this process so far [MB], on Linux."""
  # Not getrusage, whose peak includes that of the parent process.
  status = Path("/proc/self/status").read_text()
  _, _, rest = status.partition("VmHWM:")
  kib = int(rest.split()[0])
  return kib * 1024 / 1e6


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--megabytes", type=int, default=300)
  parser.add_argument("--kind", choices=("text", "jsonl"), default="text")
  args = parser.parse_args()
  with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / f"data.{args.kind}"
    write_data(file, args.kind, args.megabytes * 10**6)
    cfg = DataConfig(
      dataset_type=args.kind,
      dataset_path=(str(file),),
      eval_split="tail",
    )
    before = peak_megabytes()
    data = open_data(
      cfg,
      vocab_size=320,
      global_batch_size=_BATCH_SIZE,
      rows=range(_BATCH_SIZE),
      cache_directory=Path(folder) / "cache",
    )
    stream = data.train_stream()
    for _ in range(_NUM_BATCHES):
      next(stream)
    stream.close()
    print(f"{args.kind}: {file.stat().st_size / 1e6:.0f} MB of data, {data.source.summary}")
    print(f"memory grew by {peak_megabytes() - before:.1f} MB")


if __name__ == "__main__":
  main()
