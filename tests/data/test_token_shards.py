"""Rows of text that is tokenized while they are read are the rows of the finished shards."""

import json
import threading

import numpy as np
import pytest
from batch_streams import assert_same, join, take
from support.slow_cases import slow

from maxlite.config.load import load_config
from maxlite.config.schema import DataConfig
from maxlite.data.loader import open_data
from maxlite.data.sources.jsonl import jsonl_documents
from maxlite.data.sources.token_shards import ShardRows, TokenShards
from maxlite.errors import UserError

T = 16


def write_texts(folder, num_documents=120):
  texts = [f"{n} text " * (n % 7 + 1) for n in range(num_documents)]
  lines = [json.dumps({"text": text}) for text in texts]
  (folder / "a.jsonl").write_text("\n".join(lines) + "\n")
  return texts


def config(folder, **keys):
  defaults = {
    "dataset_type": "jsonl",
    "dataset_path": (f"{folder}/a.jsonl",),
    "max_target_length": T,
    "tokenization_shard_bytes": 400,
    "eval_fraction": 0.2,
    "grain_prefetch_buffer_size": 2,
  }
  return DataConfig(**{**defaults, **keys})


def opened(cfg, cache, rows=range(4)):
  return open_data(cfg, vocab_size=258, global_batch_size=4, rows=rows, cache_directory=cache)


def num_shards(cache):
  return len([*cache.glob("*.shards-400/0*")])


@pytest.mark.parametrize(
  "keys",
  [
    {},
    slow({"packing_strategy": "best_fit"}),
    slow({"data_sampling": "bootstrap"}),
    slow({"enable_data_shuffling": False}),
    slow({"grain_worker_count": 2}),
  ],
)
def test_a_run_that_starts_early_reads_what_later_ones_read(tmp_path, keys):
  write_texts(tmp_path)
  cfg = config(tmp_path, **keys)
  early = opened(cfg, tmp_path / "cache").train_stream()
  assert num_shards(tmp_path / "cache") == 1
  batches = take(early, 120)  # several epochs
  state = json.loads(json.dumps(early.state()))
  following = take(early, 10)
  early.close()
  assert num_shards(tmp_path / "cache") > 5
  finished = opened(cfg, tmp_path / "cache")
  stream = finished.train_stream()
  assert_same(take(stream, 120), batches)
  stream.close()
  parts = []
  for host in range(2):
    part = opened(cfg, tmp_path / "cache", range(2 * host, 2 * host + 2)).train_stream()
    part.restore(state)
    parts.append(take(part, 10))
    part.close()
  assert_same([join(list(each)) for each in zip(*parts, strict=True)], following)


def test_an_epoch_has_every_document_that_is_not_held_out(tmp_path):
  texts = write_texts(tmp_path)
  source = opened(config(tmp_path), tmp_path / "cache").source
  rows = source.train
  rows.shards.wait_for_all()
  num_rows = 0
  epochs = []
  for _ in range(2):
    ids = []
    while True:
      epoch, *_ = rows._place(num_rows)
      if epoch > len(epochs):
        break
      row = rows[num_rows]
      ids += row["tokens_BT"][row["segment_BT"] > 0].tolist()
      num_rows += 1
    epochs.append(ids)
  assert sorted(epochs[0]) == sorted(epochs[1])
  assert epochs[0] != epochs[1]
  num_documents = epochs[0].count(257)
  assert 0.6 * len(texts) < num_documents < len(texts)
  assert source.eval is not None


def test_other_shards_are_other_data(tmp_path):
  write_texts(tmp_path)
  stream = opened(config(tmp_path), tmp_path / "cache").train_stream()
  state = stream.state()
  stream.close()
  other = opened(config(tmp_path, tokenization_shard_bytes=800), tmp_path / "cache").train_stream()
  with pytest.raises(UserError, match="other data"):
    other.restore(state)
  other.close()


def test_the_first_rows_need_only_the_first_shard(tmp_path):
  write_texts(tmp_path)
  may_end = threading.Event()
  num_read = 0

  def read(file, column, start, stop, reject):
    nonlocal num_read
    for number, pieces in enumerate(jsonl_documents(file, column, start, stop, reject)):
      if number == 20:
        assert may_end.wait(60)
      num_read += 1
      yield pieces

  cfg = config(tmp_path, eval_fraction=0.0)
  shards = TokenShards(cfg, read, [tmp_path / "a.jsonl"], [], tmp_path / "shards")
  shards.write_first()
  rows = ShardRows(shards, cfg)
  first = len(rows.open(0)[0])
  read_early = [rows[n] for n in range(first)]
  assert num_read <= 40
  assert not (tmp_path / "shards" / "num_shards").exists()
  waiting = threading.Thread(target=rows.shards.wait_for_all, daemon=True)
  waiting.start()
  may_end.set()
  waiting.join(60)
  later = ShardRows(shards, cfg)
  for n, row in enumerate(read_early):
    np.testing.assert_array_equal(row["tokens_BT"], later[n]["tokens_BT"])


def test_a_mistake_in_a_later_shard_ends_the_run_there(tmp_path):
  write_texts(tmp_path)
  with (tmp_path / "a.jsonl").open("a") as file:
    file.write("no json\n")
  stream = opened(config(tmp_path), tmp_path / "cache").train_stream()
  with pytest.raises(UserError, match=r"a\.jsonl:121: not JSON.*on_bad_row=skip"):
    take(stream, 120)
  stream.close()
  (shards,) = (tmp_path / "cache").glob("*.shards-400")
  times = {path: path.stat().st_mtime_ns for path in shards.glob("0*/train.bin")}
  assert len(times) > 3
  again = opened(config(tmp_path), tmp_path / "cache").train_stream()
  with pytest.raises(UserError, match="not JSON"):
    take(again, 120)
  again.close()
  assert {path: path.stat().st_mtime_ns for path in shards.glob("0*/train.bin")} == times


def test_a_first_shard_without_held_out_documents_is_refused(tmp_path):
  write_texts(tmp_path)
  with pytest.raises(UserError, match=r"nothing is held out of .*raise tokenization_shard_bytes"):
    opened(config(tmp_path, tokenization_shard_bytes=1), tmp_path / "cache")


def test_text_that_is_all_held_out_is_refused(tmp_path):
  write_texts(tmp_path, num_documents=3)
  with pytest.raises(UserError, match=r"nothing is left to train on .*lower eval_fraction"):
    opened(config(tmp_path, eval_fraction=0.999), tmp_path / "cache")


def test_a_damaged_shard_is_named(tmp_path):
  write_texts(tmp_path)
  cfg = config(tmp_path)
  opened(cfg, tmp_path / "cache").source.train.shards.wait_for_all()
  (file,) = (tmp_path / "cache").glob("*/000001/train.bin")
  content = bytearray(file.read_bytes())
  content[0] ^= 1
  file.write_bytes(content)
  stream = opened(cfg, tmp_path / "cache").train_stream()
  with pytest.raises(UserError, match=r"train\.bin has changed .*: remove .* to tokenize again"):
    take(stream, 120)
  stream.close()


@pytest.mark.parametrize(
  ("argv", "message"),
  [
    (["dataset_type=synthetic"], "is of text; write tokenization_shard_bytes=0"),
    (["eval_split=tail"], "the tail is not read first"),
    (["dataset_mixture=[{name: a, path: stdlib, weight: 1}]"], "is of one source"),
  ],
)
def test_other_data_are_refused(argv, message):
  with pytest.raises(UserError, match=message):
    load_config(["tokenization_shard_bytes=100", *argv], command="maxlite.train")
