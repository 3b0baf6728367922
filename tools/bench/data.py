"""Speed of tokenization against `tokenizers` alone, and of the whole pipeline against Grain alone.

From the root of the repository: python -m tools.bench.data --megabytes 300 [--workers 0 1 2]

Text is generated: words of a Zipf distribution, in documents of some 2,000 characters. `tokenizers`
alone encodes what maxlite encodes: documents, or of `text`, which is one file, pieces. Every ratio
is of two measurements of the same process, in CPU seconds of all its threads (tokenization) or in
wall time (pipeline), so that other load on the machine affects both alike.
"""

import argparse
import contextlib
import itertools
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import grain
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from array_record.python.array_record_module import ArrayRecordWriter
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from maxlite.config.schema import DataConfig
from maxlite.data.host_batches import prefetch
from maxlite.data.loader import DataLoader, open_data
from maxlite.data.sources.text import PIECE_BYTES
from maxlite.data.tokenize import BATCH_BYTES
from tools.inspect.data_memory import peak_megabytes

VOCAB, LENGTH, ROWS, ROUNDS = 8192, 1024, 32, 3
FORMATS = ("text", "jsonl", "parquet", "array_record")


def documents(num_bytes: int) -> Iterator[str]:
  """Yield documents of random words, about `num_bytes` in all, the same at every call."""
  draw = np.random.default_rng(0)
  letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
  lengths = draw.integers(2, 11, 20_000)
  words = np.array(["".join(letters[np.minimum(draw.geometric(0.12, n) - 1, 25)]) for n in lengths])
  size = 0
  while size < num_bytes:
    chosen = words[np.minimum(draw.zipf(1.3, 400), len(words)) - 1]
    text = " ".join(chosen) + ".\n"
    size += len(text)
    yield text


def train_tokenizer(texts: Iterator[str], path: Path) -> Tokenizer:
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


def encode_alone(tokenizer: Tokenizer, texts: Iterator[str]) -> tuple[float, float]:
  """Print the speed of encoding `texts`; return (wall seconds, CPU seconds) of it."""

  def count(batch: list[str]) -> int:
    return sum(len(e.ids) for e in tokenizer.encode_batch_fast(batch, add_special_tokens=False))

  num_bytes, num_ids, wall, cpu, batch = 0, 0, 0.0, 0.0, [""]
  while batch:
    batch, size = [], 0
    for text in texts:
      batch.append(text)
      size += len(text)
      if size > BATCH_BYTES:
        break
    own_ids, own_wall, own_cpu = timed(count, batch)
    num_bytes, num_ids = num_bytes + size, num_ids + own_ids
    wall, cpu = wall + own_wall, cpu + own_cpu
  speed = num_bytes / wall / 1e6
  print(f"{num_bytes / 1e6:.0f} MB, {num_ids:,} ids, {speed:.1f} MB/s, {cpu:.1f} CPU s")
  return wall, cpu


def write_formats(texts: Iterator[str], folder: Path) -> dict[str, Path]:
  """{dataset_type: file}"""
  files = {kind: folder / f"a.{kind}" for kind in FORMATS}
  schema = pa.schema([("text", pa.string())])
  with (
    files["text"].open("w") as plain,
    files["jsonl"].open("w") as lines,
    pq.ParquetWriter(files["parquet"], schema) as table,
    contextlib.closing(ArrayRecordWriter(str(files["array_record"]), "group_size:64")) as records,
  ):
    while rows := list(itertools.islice(texts, 1000)):
      plain.writelines(rows)
      lines.writelines(json.dumps({"text": text}) + "\n" for text in rows)
      table.write(pa.table({"text": rows}))
      for text in rows:
        records.write(text.encode())
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
  for _ in range(50):  # processes start, and batches that were read ahead are taken
    next(stream)
  began = time.perf_counter()
  for _ in range(num_batches):
    next(stream)
  return num_batches * ROWS * LENGTH / (time.perf_counter() - began)


def compare_pipelines(files: dict[str, Path], folder: Path, num_workers: int, num_batches: int):
  """Print the median speeds of all streams, which take turns."""
  ids = next((folder / "cache").glob("*/train.bin"))
  streams = {"Grain alone": grain_alone(ids, num_workers)}
  for kind in ("text", "parquet", "array_record"):
    streams[kind] = open_kind(kind, files[kind], folder, num_workers).train_stream()
  rounds = [
    [tokens_per_second(stream, num_batches) for stream in streams.values()] for _ in range(ROUNDS)
  ]
  alone, *own = np.median(rounds, axis=0)
  cells = [
    f"{kind} {speed / 1e6:.2f} ({speed / alone:.2f} x)"
    for kind, speed in zip(list(streams)[1:], own, strict=True)
  ]
  print(f"{num_workers} workers: Grain alone {alone / 1e6:.2f} M tokens/s, {', '.join(cells)}")
  for stream in streams.values():
    stream.close()


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--megabytes", type=int, default=300)
  parser.add_argument("--formats", nargs="+", default=FORMATS, choices=FORMATS)
  parser.add_argument("--workers", type=int, nargs="*", default=[0, 1, 2, 4])
  parser.add_argument("--batches", type=int, default=200, help="per round")
  args = parser.parse_args()
  with tempfile.TemporaryDirectory() as name:
    folder, num_bytes = Path(name), args.megabytes * 10**6
    tokenizer = train_tokenizer(documents(4_000_000), folder / "tokenizer.json")
    files = write_formats(documents(num_bytes), folder)
    print("tokenizers alone, documents: ", end="")
    of_documents = encode_alone(tokenizer, documents(num_bytes))
    for kind in args.formats:
      wall, cpu = of_documents
      if kind == "text":
        print(f"tokenizers alone, pieces of {PIECE_BYTES >> 10} KB: ", end="")
        with files[kind].open() as stream:
          wall, cpu = encode_alone(tokenizer, iter(lambda: stream.read(PIECE_BYTES), ""))
      before = peak_megabytes()
      _, own_wall, own_cpu = timed(open_kind, kind, files[kind], folder)
      print(
        f"{kind:12} {own_wall:.1f} s ({own_wall / wall:.2f} x), {own_cpu:.1f} CPU s "
        f"({own_cpu / cpu:.2f} x); memory grew by {peak_megabytes() - before:.0f} MB"
      )
    for num_workers in args.workers:
      compare_pipelines(files, folder, num_workers, args.batches)


if __name__ == "__main__":
  main()
