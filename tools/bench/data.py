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
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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

VOCAB = 8192
LENGTH = 1024  # tokens of a row
ROWS = 32  # of a batch
ROUNDS = 3
FORMATS = ("text", "jsonl", "parquet", "array_record")


class Seconds(NamedTuple):
  """The wall time of a computation, and the CPU time of all threads."""

  wall: float
  cpu: float


class Stopwatch:
  """Measures time from its creation."""

  def __init__(self) -> None:
    self._wall = time.perf_counter()
    self._cpu = time.process_time()

  def read(self) -> Seconds:
    return Seconds(time.perf_counter() - self._wall, time.process_time() - self._cpu)


def documents(num_bytes: int) -> Iterator[str]:
  """Yield documents of random words, about `num_bytes` in all, the same at every call."""
  draw = np.random.default_rng(0)
  words = draw_words(draw)
  size = 0
  while size < num_bytes:
    ranks = np.minimum(draw.zipf(1.3, 400), len(words))
    text = " ".join(words[ranks - 1]) + ".\n"
    size += len(text)
    yield text


def draw_words(draw: np.random.Generator) -> np.ndarray:
  """20,000 words of 2 to 10 letters."""
  letters = np.array(list("etaoinshrdlucmfwypvbgkjqxz"))
  words = []
  for length in draw.integers(2, 11, 20_000):
    ranks = np.minimum(draw.geometric(0.12, length), len(letters))
    words.append("".join(letters[ranks - 1]))
  return np.array(words)


def train_tokenizer(texts: Iterator[str], path: Path) -> Tokenizer:
  tokenizer = Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=VOCAB,
    special_tokens=["</s>"],
    initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  tokenizer.train_from_iterator(texts, trainer)
  tokenizer.save(str(path))
  return tokenizer


def encode_alone(tokenizer: Tokenizer, texts: Iterator[str]) -> Seconds:
  """Print the speed of encoding `texts`, without the time to generate them."""
  num_bytes = 0
  num_ids = 0
  wall = 0.0
  cpu = 0.0
  for batch in batches_of(texts):
    num_bytes += sum(map(len, batch))
    stopwatch = Stopwatch()
    for encoding in tokenizer.encode_batch_fast(batch, add_special_tokens=False):
      num_ids += len(encoding.ids)
    own = stopwatch.read()
    wall += own.wall
    cpu += own.cpu
  speed = num_bytes / wall / 1e6
  print(f"{num_bytes / 1e6:.0f} MB, {num_ids:,} ids, {speed:.1f} MB/s, {cpu:.1f} CPU s")
  return Seconds(wall, cpu)


def batches_of(texts: Iterator[str]) -> Iterator[list[str]]:
  """Lists of texts of a little more than BATCH_BYTES each, as maxlite encodes them."""
  batch = []
  size = 0
  for text in texts:
    batch.append(text)
    size += len(text)
    if size > BATCH_BYTES:
      yield batch
      batch = []
      size = 0
  if batch:
    yield batch


def pieces_of(file: Path) -> Iterator[str]:
  """The contents of a file, in pieces of PIECE_BYTES."""
  with file.open() as stream:
    while piece := stream.read(PIECE_BYTES):
      yield piece


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
      table.write(pa.table({"text": rows}))
      for text in rows:
        lines.write(json.dumps({"text": text}) + "\n")
        records.write(text.encode())
  return files


def open_kind(
  kind: str,
  file: Path,
  folder: Path,
  num_workers: int = 0,
) -> DataLoader:
  """Maxlite's data of one file; tokenizes it at the first call."""
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
    offset = 2 * LENGTH * int(index)
    ids = np.fromfile(self._path, np.uint16, LENGTH, offset=offset)
    return ids.astype(np.int32)


def grain_alone(path: Path, num_workers: int) -> Iterator[Any]:
  """Batches of shuffled rows of ids, without segments, positions and targets."""
  dataset = grain.MapDataset.source(Rows(path)).seed(0).shuffle().repeat().batch(ROWS)
  return prefetch(dataset, 16, num_workers)


def tokens_per_second(stream: Iterator[Any], num_batches: int) -> float:
  for _ in range(50):  # processes start, and batches that were read ahead are taken
    next(stream)
  stopwatch = Stopwatch()
  for _ in range(num_batches):
    next(stream)
  return num_batches * ROWS * LENGTH / stopwatch.read().wall


def compare_pipelines(
  files: dict[str, Path],
  folder: Path,
  num_workers: int,
  num_batches: int,
) -> None:
  """Print the median speeds of all streams, which alternate."""
  ids = next((folder / "cache").glob("*/train.bin"))
  streams = {"Grain alone": grain_alone(ids, num_workers)}
  for kind in ("text", "parquet", "array_record"):
    streams[kind] = open_kind(kind, files[kind], folder, num_workers).train_stream()
  speeds: dict[str, list[float]] = {name: [] for name in streams}
  for _ in range(ROUNDS):
    for name, stream in streams.items():
      speeds[name].append(tokens_per_second(stream, num_batches))
  medians = {name: statistics.median(own) for name, own in speeds.items()}
  alone = medians.pop("Grain alone")
  cells = [f"{kind} {speed / 1e6:.2f} ({speed / alone:.2f} x)" for kind, speed in medians.items()]
  print(f"{num_workers} workers: Grain alone {alone / 1e6:.2f} M tokens/s, {', '.join(cells)}")
  for stream in streams.values():
    stream.close()


def compare_tokenization(
  kinds: Sequence[str],
  files: dict[str, Path],
  tokenizer: Tokenizer,
  folder: Path,
  num_bytes: int,
) -> None:
  """Print the time of tokenizing each file, and its ratio to that of `tokenizers` alone."""
  print("tokenizers alone, documents: ", end="")
  of_documents = encode_alone(tokenizer, documents(num_bytes))
  for kind in kinds:
    alone = of_documents
    if kind == "text":
      print(f"tokenizers alone, pieces of {PIECE_BYTES >> 10} KB: ", end="")
      alone = encode_alone(tokenizer, pieces_of(files[kind]))
    before = peak_megabytes()
    stopwatch = Stopwatch()
    open_kind(kind, files[kind], folder)
    own = stopwatch.read()
    print(
      f"{kind:12} {own.wall:.1f} s ({own.wall / alone.wall:.2f} x), {own.cpu:.1f} CPU s "
      f"({own.cpu / alone.cpu:.2f} x); memory grew by {peak_megabytes() - before:.0f} MB"
    )


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument("--megabytes", type=int, default=300)
  parser.add_argument("--formats", nargs="+", default=FORMATS, choices=FORMATS)
  parser.add_argument("--workers", type=int, nargs="*", default=[0, 1, 2, 4])
  parser.add_argument("--batches", type=int, default=200, help="per round")
  args = parser.parse_args()
  num_bytes = args.megabytes * 10**6
  with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    tokenizer = train_tokenizer(documents(4_000_000), folder / "tokenizer.json")
    files = write_formats(documents(num_bytes), folder)
    compare_tokenization(args.formats, files, tokenizer, folder, num_bytes)
    for num_workers in args.workers:
      compare_pipelines(files, folder, num_workers, args.batches)


if __name__ == "__main__":
  main()
