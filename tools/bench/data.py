"""Speed of tokenization against `tokenizers` alone, and of the whole pipeline against Grain alone.

From the root of the repository: python -m tools.bench.data --megabytes 300 [--workers 0 1 2]

Text is generated: words of a Zipf distribution, in documents of some 2,000 characters. Every ratio
is of two measurements of the same process, in CPU seconds of all its threads (tokenization) or in
wall time (pipeline), so that other load on the machine affects both alike.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import grain
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from array_record.python.array_record_module import ArrayRecordWriter
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from maxlite.config.schema import DataConfig
from maxlite.data.loader import DataLoader, open_data
from maxlite.data.prefetch import prefetch
from tools.inspect.data_memory import peak_megabytes

VOCAB, LENGTH, ROWS = 8192, 1024, 32


def documents(num_bytes: int) -> list[str]:
  """Documents of random words, about `num_bytes` in all."""
  draw = np.random.default_rng(0)
  letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
  lengths = draw.integers(2, 11, 20_000)
  words = np.array(["".join(letters[np.minimum(draw.geometric(0.12, n) - 1, 25)]) for n in lengths])
  texts, size = [], 0
  while size < num_bytes:
    chosen = words[np.minimum(draw.zipf(1.3, 400), len(words)) - 1]
    texts.append(" ".join(chosen) + ".\n")
    size += len(texts[-1])
  return texts


def train_tokenizer(texts: list[str], path: Path) -> Tokenizer:
  tokenizer = Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  alphabet = pre_tokenizers.ByteLevel.alphabet()
  trainer = trainers.BpeTrainer(
    vocab_size=VOCAB, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
  )
  tokenizer.train_from_iterator(texts, trainer)
  tokenizer.save(str(path))
  return tokenizer


def timed(function, *arguments):
  """(result, wall seconds, CPU seconds of all threads)."""
  wall, cpu = time.perf_counter(), time.process_time()
  result = function(*arguments)
  return result, time.perf_counter() - wall, time.process_time() - cpu


def encode_alone(tokenizer: Tokenizer, texts: list[str]) -> int:
  """The number of ids of all texts, which stay in memory as briefly as possible."""
  batches = (texts[n : n + 1000] for n in range(0, len(texts), 1000))
  encoded = (tokenizer.encode_batch_fast(batch, add_special_tokens=False) for batch in batches)
  return sum(len(each.ids) for batch in encoded for each in batch)


def write_formats(texts: list[str], folder: Path) -> dict[str, Path]:
  """{dataset_type: file}"""
  files = {kind: folder / f"a.{kind}" for kind in ("text", "jsonl", "parquet", "array_record")}
  files["text"].write_text("".join(texts))
  with files["jsonl"].open("w") as stream:
    stream.writelines(json.dumps({"text": text}) + "\n" for text in texts)
  pq.write_table(pa.table({"text": texts}), files["parquet"])
  writer = ArrayRecordWriter(str(files["array_record"]), "group_size:64")
  for text in texts:
    writer.write(text.encode())
  writer.close()
  return files


def open_kind(kind: str, file: Path, folder: Path, num_workers: int = 0) -> DataLoader:
  cfg = DataConfig(
    dataset_type=kind,
    dataset_path=(str(file),),
    tokenizer_type="huggingface",
    tokenizer_path=str(folder / "tokenizer.json"),
    eval_split="tail",
    max_target_length=LENGTH,
    grain_worker_count=num_workers,
  )
  return open_data(
    cfg,
    vocab_size=VOCAB,
    global_batch_size=ROWS,
    rows=range(ROWS),
    cache_directory=folder / "cache",
  )


class Rows:
  """Rows of ids in one file, for Grain alone."""

  def __init__(self, path: Path) -> None:
    self._path = path
    self._rows = np.memmap(path, np.uint16, mode="r").size // LENGTH

  def __len__(self) -> int:
    return self._rows

  def __getitem__(self, index: int) -> np.ndarray:
    return np.fromfile(self._path, np.uint16, LENGTH, offset=2 * LENGTH * int(index)).astype("i4")


def grain_alone(path: Path, num_workers: int):
  """Batches of shuffled rows of ids, without segments, positions and targets."""
  dataset = grain.MapDataset.source(Rows(path)).seed(0).shuffle().repeat().batch(ROWS)
  return prefetch(dataset, 16, num_workers)


def tokens_per_second(stream, num_batches: int) -> float:
  for _ in range(20):  # processes start, and buffers fill
    next(stream)
  began = time.perf_counter()
  for _ in range(num_batches):
    next(stream)
  speed = num_batches * ROWS * LENGTH / (time.perf_counter() - began)
  stream.close()
  return speed


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--megabytes", type=int, default=300)
  parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2, 4])
  parser.add_argument("--batches", type=int, default=300)
  args = parser.parse_args()
  with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    texts = documents(args.megabytes * 10**6)
    size = sum(map(len, texts)) / 1e6
    tokenizer = train_tokenizer(texts[:2000], folder / "tokenizer.json")
    files = write_formats(texts, folder)
    num_ids, wall, cpu = timed(encode_alone, tokenizer, texts)
    print(
      f"tokenizers alone: {size:.0f} MB, {num_ids:,} ids, {size / wall:.1f} MB/s, {cpu:.1f} CPU s"
    )
    del texts
    for kind, file in files.items():
      before = peak_megabytes()
      _, own_wall, own_cpu = timed(open_kind, kind, file, folder)
      print(
        f"{kind:12} {own_wall:.1f} s ({own_wall / wall:.2f} x), {own_cpu:.1f} CPU s "
        f"({own_cpu / cpu:.2f} x); memory grew by {peak_megabytes() - before:.0f} MB"
      )
    path = next((folder / "cache").glob("*/train.bin"))
    for num_workers in args.workers:
      alone = tokens_per_second(grain_alone(path, num_workers), args.batches)
      print(f"{num_workers} workers: Grain alone {alone / 1e6:6.2f} M tokens/s", end="")
      for kind in ("text", "parquet", "array_record"):
        stream = open_kind(kind, files[kind], folder, num_workers).train_stream()
        speed = tokens_per_second(stream, args.batches)
        print(f", {kind} {speed / 1e6:.2f} ({speed / alone:.2f} x)", end="", flush=True)
      print()


if __name__ == "__main__":
  main()
