"""Every format of the same documents gives the same rows; damage and bombs end in one line."""

import gzip
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from support import trees

from maxlite.config.schema import DataConfig
from maxlite.data.loader import open_data
from maxlite.data.sources import compressed, text
from maxlite.data.sources.arrow_sizes import read_sizes
from maxlite.data.sources.file_paths import expand_paths
from maxlite.data.sources.tables import parquet_documents
from maxlite.data.sources.text import text_documents
from maxlite.errors import UserError

TEXTS = [f"Text {n}, naïve 😀\n" * (n % 7 + 1) for n in range(150)]
JSONL = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def varint(value):
  if value < 128:
    return bytes([value])
  first = value & 127 | 128
  return bytes([first]) + varint(value >> 7)


def field(number, content):
  return bytes([number << 3 | 2]) + varint(len(content)) + content


def example(**features):
  """A serialized `tf.train.Example` of bytes features, by its Protocol Buffers definition."""
  entries = []
  for name, content in features.items():
    value = field(1, field(1, content))
    entry = field(1, name.encode()) + field(2, value)
    entries.append(field(1, entry))
  return field(1, b"".join(entries))


def zstd(content):
  return pa.compress(content, "zstd", asbytes=True)


def write_records(file, records):
  writer = ArrayRecordWriter(str(file), "group_size:8")
  for record in records:
    writer.write(record)
  writer.close()


def write_texts(file):
  write_records(file, [text.encode() for text in TEXTS])


def write_examples(file):
  write_records(file, [example(id=b"7", text=text.encode()) for text in TEXTS])


def write_arrow(file, opened):
  table = pa.table({"text": TEXTS})
  with opened(str(file), table.schema) as writer:
    writer.write_table(table, max_chunksize=16)


FORMATS = {
  "a.jsonl": lambda file: file.write_bytes(JSONL),
  "a.jsonl.gz": lambda file: file.write_bytes(gzip.compress(JSONL)),
  "a.jsonl.zst": lambda file: file.write_bytes(zstd(JSONL)),
  "a.parquet": lambda file: pq.write_table(pa.table({"text": TEXTS}), file),
  "stream.arrow": lambda file: write_arrow(file, pa.ipc.new_stream),
  "file.arrow": lambda file: write_arrow(file, pa.ipc.new_file),
  "text.array_record": write_texts,
  "example.array_record": write_examples,
}
COMPRESSED = {".gz", ".zst"}  # of JSON lines


def rows_of(path, **keys):
  """The tokens of all rows of the training split, and of the held-out split."""
  kind = path.suffix.removeprefix(".")
  if path.suffix in COMPRESSED:
    kind = "jsonl"
  cfg = DataConfig(dataset_path=(str(path),), dataset_type=kind, max_target_length=32, **keys)
  data = open_data(
    cfg,
    vocab_size=258,
    global_batch_size=1,
    rows=range(1),
    cache_directory=path.parent / "tokens",
  ).source
  tokens = []
  for split in (data.train, data.eval):
    rows = [split[n]["tokens_BT"] for n in range(len(split))]
    tokens.append(np.stack(rows))
  return tokens


@pytest.fixture(scope="module", params=["documents", "tail"])
def expected(request, tmp_path_factory):
  path = tmp_path_factory.mktemp("jsonl") / "a.jsonl"
  FORMATS[path.name](path)
  return request.param, rows_of(path, eval_split=request.param)


@pytest.mark.parametrize("name", list(FORMATS)[1:])
def test_all_formats_give_the_same_rows(name, expected, tmp_path):
  eval_split, rows = expected
  FORMATS[name](tmp_path / name)
  trees.assert_equal_leaves(rows_of(tmp_path / name, eval_split=eval_split), rows)


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (0, 0.37), (0.37, 1)])
@pytest.mark.parametrize(
  ("suffix", "pack"), [(".gz", gzip.compress), (".zst", zstd)], ids=["gz", "zst"]
)
def test_parts_of_a_compressed_text_are_those_of_the_text(suffix, pack, start, stop, tmp_path):
  content = "".join(TEXTS).encode()
  plain = tmp_path / "a.txt"
  packed = tmp_path / f"a.txt{suffix}"
  plain.write_bytes(content)
  packed.write_bytes(pack(content))

  def read(file):
    return [b"".join(pieces) for pieces in text_documents(file, "", start, stop)]

  assert read(packed) == read(plain)


def test_only_compressed_files_of_known_content_are_read(tmp_path):
  for name in ("a.txt.gz", "b.zst", "c.tar.gz", "d.png.zst", "e.py.zst"):
    (tmp_path / name).touch()
  found, others = expand_paths([str(tmp_path)], "", "dataset_path")
  other_names = [file.name for file in others]
  assert [file.name for file in found] == ["a.txt.gz", "e.py.zst"]
  assert other_names == ["b.zst", "c.tar.gz", "d.png.zst"]
  for name in other_names:
    with pytest.raises(UserError, match=r"is compressed: decompress it, or name it \*\.txt\.gz$"):
      expand_paths([str(tmp_path / name)], "", "dataset_path")


@pytest.mark.parametrize("name", list(FORMATS)[1:])
def test_a_damaged_file_is_named(name, tmp_path):
  FORMATS[name](tmp_path / name)
  content = (tmp_path / name).read_bytes()
  (tmp_path / name).write_bytes(content[: len(content) // 2])
  with pytest.raises(UserError, match=rf"{name}.*(damaged|not JSON)"):
    rows_of(tmp_path / name)


LONG_TEXTS = ["x" * (1 << 16)] * 64


def write_parquet_bomb(file):
  table = pa.table({"text": LONG_TEXTS})
  pq.write_table(table, file, compression="zstd", use_dictionary=False)


def write_arrow_bomb(file):
  table = pa.table({"text": LONG_TEXTS, "other": [1] * len(LONG_TEXTS)})
  options = pa.ipc.IpcWriteOptions(compression="zstd")
  with pa.ipc.new_file(str(file), table.schema, options=options) as writer:
    writer.write_table(table, max_chunksize=8)


BOMBS = {
  "a.jsonl.zst": lambda file: file.write_bytes(zstd(bytes(1 << 24))),
  "a.parquet": write_parquet_bomb,
  "a.arrow": write_arrow_bomb,
  "a.array_record": lambda file: write_records(file, [b"x" * (1 << 20)] * 64),
}


@pytest.mark.parametrize("name", BOMBS)
def test_expansion_is_bounded(name, tmp_path, monkeypatch):
  monkeypatch.setattr(compressed, "MAX_BYTES", 1 << 20)
  BOMBS[name](tmp_path / name)
  assert (tmp_path / name).stat().st_size < 1 << 18
  with pytest.raises(UserError, match=rf"{name} expands to more than 200 times its size: "):
    rows_of(tmp_path / name)


def test_values_of_a_dictionary_are_not_repeated_in_memory(tmp_path, monkeypatch):
  size = 1 << 20
  monkeypatch.setattr(compressed, "MAX_BYTES", 5 * size // 2)
  texts = pa.chunked_array([pa.array(["x" * size])] * 8)
  table = pa.table({"text": texts})
  file = tmp_path / "a.parquet"
  pq.write_table(table, file, compression="zstd", dictionary_pagesize_limit=2 * size)
  documents = parquet_documents(file, "text", 0, 1)
  for _ in range(2):  # a batch of two rows
    assert sum(map(len, next(documents))) == size
  with pytest.raises(UserError, match=r"a\.parquet expands to more than 200 times its size"):
    next(documents)


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "text.array_record"])
def test_a_large_document_is_cut_into_pieces(name, tmp_path, monkeypatch):
  monkeypatch.setattr(text, "MAX_PIECE_BYTES", 7)
  FORMATS[name](tmp_path / name)
  cut = rows_of(tmp_path / name, eval_split="tail")
  monkeypatch.undo()
  (tmp_path / "uncut").mkdir()
  FORMATS[name](tmp_path / "uncut" / name)
  uncut = rows_of(tmp_path / "uncut" / name, eval_split="tail")
  trees.assert_equal_leaves(cut, uncut)


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_sizes_of_arrow_batches_are_read_from_their_metadata(compression, tmp_path):
  numbers = range(len(TEXTS))
  numbers_with_nulls = [None if n % 3 == 0 else n for n in numbers]
  columns = {
    "text": pa.array(TEXTS),
    "number": pa.array(numbers_with_nulls),
    "name": pa.array([f"{n % 5}" for n in numbers]).dictionary_encode(),
    "list": pa.array([[n] * (n % 4) for n in numbers]),
  }
  table = pa.table(columns)
  file = tmp_path / "a.arrow"
  options = pa.ipc.IpcWriteOptions(compression=compression)
  with pa.ipc.new_stream(str(file), table.schema, options=options) as writer:
    writer.write_table(table, max_chunksize=64)
  with file.open("rb") as stream:
    sizes = read_sizes(stream)
  assert sizes.num_rows == len(TEXTS)
  assert table.nbytes <= sizes.num_bytes <= 1.1 * table.nbytes
  rows = rows_of(file, eval_split="tail")
  (tmp_path / "plain").mkdir()
  plain_file = tmp_path / "plain" / "a.jsonl"
  FORMATS["a.jsonl"](plain_file)
  trees.assert_equal_leaves(rows, rows_of(plain_file, eval_split="tail"))


def test_a_batch_of_arrow_is_refused_before_it_is_decompressed(tmp_path, monkeypatch):
  monkeypatch.setattr(compressed, "MAX_BYTES", 1 << 20)
  BOMBS["a.arrow"](tmp_path / "a.arrow")
  monkeypatch.setattr(pa.ipc, "open_stream", None)  # which decompresses
  with pytest.raises(UserError, match=r"a\.arrow expands to more than 200 times its size"):
    rows_of(tmp_path / "a.arrow")


def test_an_arrow_file_cut_between_two_batches_is_damaged(tmp_path):
  file = tmp_path / "a.arrow"
  write_arrow(file, pa.ipc.new_file)
  content = file.read_bytes()
  with pa.ipc.open_file(file) as opened:
    num_batches = opened.num_record_batches
  ends = [n for n in range(8, len(content)) if content.startswith(b"\xff\xff\xff\xff", n)]
  assert len(ends) >= num_batches
  for end in (ends[2], ends[-1], len(content) - 1):
    file.write_bytes(content[:end])
    with pytest.raises(UserError, match=r"a\.arrow: .*damaged \(its end is missing\)"):
      rows_of(file)


def test_missing_features_and_other_types_are_named(tmp_path):
  write_records(tmp_path / "a.array_record", [example(body=b"x")])
  with pytest.raises(UserError, match=r"record 1: no feature 'text' among \['body'\]"):
    rows_of(tmp_path / "a.array_record")
  table = pa.table({"text": [1]})
  with pa.ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as writer:
    writer.write_table(table)
  with pytest.raises(UserError, match=r"column 'text' holds int64, not strings: set text_column"):
    rows_of(tmp_path / "a.arrow")
