"""Batches are the same on any number of hosts and after a restart."""

import dataclasses
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from batch_streams import assert_same, join, take
from support.slow_cases import slow

from maxlite.config.schema import DataConfig
from maxlite.data.loader import open_data
from maxlite.data.train_streams import TrainStreams
from maxlite.registry import SOURCES

# All but prompts, which are rows of no tokens (the last test).
TOKEN_SOURCES = sorted(name for name in SOURCES if not SOURCES.entry(name).has_prompts)
T = 16
B = 8
NUM_DOCUMENTS = 40
EOS = 257  # of bytes
TEMPLATE = "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"


def write_conversations(folder, kind, texts):
  rows = []
  for i, text in enumerate(texts):
    if kind == "chat":
      rows.append({"prompt": f"{i}?", "completion": text[:8]})
    else:
      rows.append({"prompt": f"{i}?", "chosen": text[:8], "rejected": text[:4]})
  write_jsonl(folder / "a.jsonl", rows)
  (folder / "template").write_text(TEMPLATE)


def write_jsonl(file, rows):
  lines = [json.dumps(row) for row in rows]
  file.write_text("\n".join(lines) + "\n")


def write_source(folder, kind, num_documents):
  texts = [f"{i} " * (3 + i % 11) for i in range(num_documents)]
  if kind == "text":
    for i, text in enumerate(texts):
      (folder / f"{i}.txt").write_text(text)
  if kind == "jsonl":
    write_jsonl(folder / "a.jsonl", [{"text": text} for text in texts])
  if kind in ("chat", "preference"):
    write_conversations(folder, kind, texts)
  if kind == "parquet":
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is an extra")
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is an extra")
    parquet.write_table(pyarrow.table({"text": texts}), folder / "a.parquet")
  if kind == "arrow":
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is an extra")
    table = pyarrow.table({"text": texts})
    with pyarrow.ipc.new_stream(str(folder / "a.arrow"), table.schema) as writer:
      writer.write_table(table)
  if kind == "tokens":
    ids = [np.append(np.frombuffer(text.encode(), np.uint8), EOS) for text in texts]
    np.concatenate(ids).astype(np.uint16).tofile(folder / "a.bin")
  if kind == "array_record":
    writer = ArrayRecordWriter(str(folder / "a.array_record"), "group_size:1")
    for text in texts:
      writer.write(text.encode())
    writer.close()


def config(folder, kind="text", num_documents=NUM_DOCUMENTS, **keys):
  folder.mkdir(exist_ok=True)
  write_source(folder, kind, num_documents)
  defaults = {
    "dataset_type": kind,
    "dataset_path": (str(folder),),
    "max_target_length": T,
    "eval_fraction": 0.2,
    "grain_prefetch_buffer_size": 2,
  }
  if kind in ("chat", "preference"):
    defaults["chat_template_path"] = str(folder / "template")
  return DataConfig(**{**defaults, **keys})


def open_part(cfg, rows=range(B), batch_size=B, **options):
  cache = Path(f"{cfg.dataset_path[0]}-cache")
  return open_data(
    cfg, vocab_size=258, global_batch_size=batch_size, rows=rows, cache_directory=cache, **options
  )


def train_stream(cfg):
  return open_part(cfg).train_stream()


def taken(cfg, count, **part):
  stream = open_part(cfg, **part).train_stream()
  batches = take(stream, count)
  stream.close()
  return batches


@pytest.mark.parametrize("kind", TOKEN_SOURCES)
@pytest.mark.parametrize("num_hosts", [slow(2), 4])
def test_global_batches_do_not_depend_on_the_number_of_hosts(tmp_path, kind, num_hosts):
  cfg = config(tmp_path / "data", kind)
  size = B // num_hosts
  parts = []
  for host in range(num_hosts):
    rows = range(host * size, (host + 1) * size)
    parts.append(open_part(cfg, rows))
  streams = [part.train_stream() for part in parts]
  for whole in taken(cfg, 12):  # several epochs of the small sources
    joined = join([next(stream) for stream in streams])
    assert_same([whole], [joined])
  first, *others = [stream.state() for stream in streams]
  assert all(state == first for state in others)
  for stream in streams:
    stream.close()
  eval_streams = [part.eval_batches(3) for part in parts]
  for whole in open_part(cfg).eval_batches(3):
    joined = join([next(stream) for stream in eval_streams])
    assert_same([whole], [joined])
  assert not any(list(stream) for stream in eval_streams)


def test_bootstrap_draws_rows_with_replacement(tmp_path):
  cfg = config(tmp_path / "data", data_sampling="bootstrap", eval_fraction=0.0)
  source = open_part(cfg).source.train
  rows = [source[index]["tokens_BT"].tobytes() for index in range(len(source))]
  places = []
  for batch in taken(cfg, 20):
    places += [rows.index(x_T.tobytes()) for x_T in batch.tokens_BT]
  num_rows = len(rows)
  epochs = []
  for first in range(0, len(places) - num_rows, num_rows):
    epochs.append(places[first : first + num_rows])
  for epoch in epochs:
    assert len(set(epoch)) < num_rows
  assert epochs[0] != epochs[1]
  assert len(set(places)) > 0.8 * num_rows
  other = dataclasses.replace(cfg, data_shuffle_seed=1)
  joined = join(taken(cfg, 3))
  assert (joined.tokens_BT != join(taken(other, 3)).tokens_BT).any()


@pytest.mark.parametrize("kind", TOKEN_SOURCES)
@pytest.mark.parametrize("num_taken", [slow(0), slow(1), 9])
def test_a_restored_stream_yields_the_same_batches(tmp_path, kind, num_taken):
  cfg = config(tmp_path / "data", kind)
  stream = train_stream(cfg)
  take(stream, num_taken)
  state = json.loads(json.dumps(stream.state()))
  following = take(stream, 6)
  stream.close()
  restored = train_stream(cfg)
  take(restored, 2)
  restored.restore(state)
  assert restored.state() == state
  assert_same(take(restored, 6), following)
  restored.close()


class Interrupted:
  """A stream's iterator, interrupted after it has taken a batch and before it returns it."""

  def __init__(self, iterator):
    self._iterator = iterator

  def __next__(self):
    next(self._iterator)
    raise KeyboardInterrupt

  def close(self):
    self._iterator.close()


def test_an_interrupt_loses_no_batch(tmp_path):
  cfg = config(tmp_path / "data")
  expected = taken(cfg, 5)
  stream = train_stream(cfg)
  assert_same(take(stream, 2), expected[:2])
  stream._iterator = Interrupted(stream._iterator)
  with pytest.raises(KeyboardInterrupt):
    next(stream)
  assert stream.state()["num_batches"] == 2
  assert_same(take(stream, 3), expected[2:])
  stream.close()


@pytest.mark.parametrize(
  ("change", "fix"),
  [
    ({"max_target_length": 32}, "set max_target_length=16"),
    ({"data_shuffle_seed": 1}, "set data_shuffle_seed=0"),
    ({"enable_data_shuffling": False}, "set enable_data_shuffling=True"),
    ({"eval_fraction": 0.5}, "other data"),
  ],
)
def test_restoring_another_stream_is_an_error_with_a_fix(tmp_path, change, fix):
  cfg = config(tmp_path / "data")
  state = train_stream(cfg).state()
  changed = dataclasses.replace(cfg, **change)
  with pytest.raises(ValueError, match=fix):
    train_stream(changed).restore(state)


def test_restoring_another_batch_size_is_an_error_with_a_fix(tmp_path):
  cfg = config(tmp_path / "data")
  state = train_stream(cfg).state()
  other = open_part(cfg, range(4), 4).train_stream()
  with pytest.raises(
    ValueError, match=r"this run has 4: set global_batch_size=8.*batch_size_schedule=\[\[0, 8\], \["
  ):
    other.restore(state)


def test_a_change_of_shuffling_is_reported_before_the_seed(tmp_path):
  cfg = config(tmp_path / "data", enable_data_shuffling=False)
  state = train_stream(cfg).state()
  shuffled = dataclasses.replace(cfg, enable_data_shuffling=True)
  with pytest.raises(ValueError, match="set enable_data_shuffling=False"):
    train_stream(shuffled).restore(state)


def tokens_of(batches):
  """The tokens of every row that is not padding."""
  tokens = []
  for batch in batches:
    tokens += [tuple(row) for row in batch.tokens_BT.tolist() if any(row)]
  return tokens


def test_each_epoch_has_every_row_once_in_a_new_order(tmp_path):
  cfg = config(tmp_path / "data")
  num_rows = len(open_part(cfg).source.train)
  rows = tokens_of(taken(cfg, 3 * num_rows, rows=range(1), batch_size=1))
  first = rows[:num_rows]
  second = rows[num_rows : 2 * num_rows]
  third = rows[2 * num_rows :]
  assert sorted(first) == sorted(second) == sorted(third)
  assert first != second != third


def test_unshuffled_rows_keep_the_order_of_the_files(tmp_path):
  cfg = config(tmp_path / "data", "jsonl", enable_data_shuffling=False, eval_fraction=0.0)
  rows = taken(cfg, 4, rows=range(1), batch_size=1)
  ids = np.concatenate([batch.tokens_BT[0] for batch in rows])
  text = bytes(i for i in ids if i < 256).decode()
  assert text.startswith("0 0 0 1 1 1 1 2 2 2 2 2 ")


@pytest.mark.parametrize("kind", ["text", "synthetic"])
def test_eval_batches_are_one_pass_over_held_out_rows(tmp_path, kind):
  data = open_part(config(tmp_path / "data", kind))
  batches = list(data.eval_batches())
  assert_same(batches, data.eval_batches())
  assert_same(batches[:2], data.eval_batches(2))
  assert all(batch.tokens_BT.shape == (B, T) for batch in batches)
  held_out = data.source.eval
  rows = [held_out[i] for i in range(len(held_out))]
  assert len(batches) == math.ceil(len(rows) / B)
  weight_BT = np.concatenate([batch.weight_BT for batch in batches])
  assert weight_BT.sum() == sum(row["weight_BT"].sum() for row in rows)
  assert not weight_BT[len(rows) :].any()
  expected = [tuple(row["tokens_BT"].tolist()) for row in rows]
  assert sorted(tokens_of(batches)) == sorted(expected)


@pytest.mark.parametrize("kind", ["text", "synthetic"])
def test_eval_batches_do_not_depend_on_the_shuffle_seed(tmp_path, kind):
  cfg = config(tmp_path / "data", kind)
  other = dataclasses.replace(cfg, data_shuffle_seed=5)
  assert_same(open_part(cfg).eval_batches(), open_part(other).eval_batches())


def test_fewer_rows_than_a_batch_are_repeated(tmp_path):
  (tmp_path / "data").mkdir()
  (tmp_path / "data" / "a.txt").write_text("tiny text")
  cfg = DataConfig(
    dataset_path=(str(tmp_path / "data"),),
    eval_split="tail",
    eval_fraction=0.3,
    max_target_length=T,
  )
  (batch,) = taken(cfg, 1)
  assert (batch.tokens_BT == batch.tokens_BT[0]).all()
  (held_out,) = open_part(cfg).eval_batches()
  assert (held_out.weight_BT.sum(axis=1) > 0).tolist() == [True] + [False] * (B - 1)


def test_synthetic_splits_differ_and_are_learnable():
  cfg = DataConfig(dataset_type="synthetic", max_target_length=200)
  data = open_part(cfg)
  trained_row = data.source.train[0]
  held_out_row = data.source.eval[0]
  assert not np.array_equal(trained_row["tokens_BT"], held_out_row["tokens_BT"])
  row = data.source.train[3]
  counts_up = (row["tokens_BT"] + 1) % 258 == row["targets_BT"]
  assert 0.8 < counts_up.mean() < 0.98
  np.testing.assert_array_equal(row["tokens_BT"][1:], row["targets_BT"][:-1])


def test_worker_processes_do_not_change_the_stream(tmp_path):
  cfg = config(tmp_path / "data")
  in_processes = dataclasses.replace(cfg, grain_worker_count=2)
  state = {**train_stream(cfg).state(), "num_batches": 3}
  stream = train_stream(in_processes)
  stream.restore(state)
  following = take(stream, 5)
  stream.close()
  assert_same(following, taken(cfg, 8)[3:])


@pytest.mark.parametrize(
  ("keys", "fix"),
  [
    ({"eval_fraction": 1.0, "eval_split": "tail"}, "nothing is left to train on .* 40 documents"),
    ({"dataset_path": ("nowhere",)}, "dataset_path: 'nowhere' gives no file"),
    ({"tokenizer_path": "a.json"}, "tokenizer_type=huggingface"),
  ],
)
def test_unusable_data_is_an_error_with_a_fix(tmp_path, keys, fix):
  cfg = config(tmp_path / "data")
  with pytest.raises(ValueError, match=fix):
    open_part(dataclasses.replace(cfg, **keys))


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet", "chat"])
def test_bad_rows_follow_one_policy(tmp_path, kind):
  cfg = config(tmp_path / "data", kind, eval_fraction=0.0)
  whole = open_part(cfg).source
  names = {"text": "0.txt", "jsonl": "a.jsonl", "parquet": "a.parquet", "chat": "a.jsonl"}
  file = tmp_path / "data" / names[kind]
  if kind == "parquet":
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is an extra")
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is an extra")
    texts = parquet.read_table(file).to_pydict()["text"]
    parquet.write_table(pyarrow.table({"text": [None, *texts]}), file)
  else:
    file.write_bytes(b"\xff\n" + file.read_bytes())
  place = r"data/(0|a)\.\w+(:1| row 1|: byte 0|: row 1)"
  with pytest.raises(ValueError, match=rf"{place}.*on_bad_row=skip"):
    open_part(cfg)
  skipping = open_part(dataclasses.replace(cfg, on_bad_row="skip")).source
  assert skipping.train.identity == whole.train.identity
  assert "; 1 bad rows skipped" in skipping.summary
  with pytest.raises(ValueError, match="on_bad_row=skip"):  # the cache without them is not used
    open_part(cfg)


def test_the_files_of_a_folder_are_reported(tmp_path):
  cfg = config(tmp_path / "data")
  (tmp_path / "data" / "a.jsonl").write_text("{}")
  report = "read 40 .txt; skipped 1 .jsonl (dataset_path=FOLDER/** reads any file)"
  assert open_part(cfg).source.files == report


def test_an_unreadable_file_is_one_line(tmp_path, monkeypatch):
  cfg = config(tmp_path / "data")

  def refuse(path, *_):
    raise PermissionError(path)

  monkeypatch.setattr(Path, "open", refuse)
  with pytest.raises(ValueError, match=r"cannot read the data, or write to .*\.txt"):
    open_part(cfg)


@pytest.mark.parametrize("num_documents", [1, 2, 25])
@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet", "chat"])
def test_few_documents_train_and_say_what_is_held_out(tmp_path, kind, num_documents):
  fraction = 1e-6  # holds out none by content
  cfg = config(tmp_path / "data", kind, num_documents, eval_fraction=fraction)
  source = open_part(cfg).source
  note = "eval_split=tail holds out the tail of the data"
  if num_documents == 1 and kind != "text":  # a file has a tail, a row has none
    note = "nothing is held out"
  assert source.summary.endswith(f"; too few documents for eval_split=documents, so {note}")
  assert len(source.train)
  assert bool(source.eval) == ("tail" in note)
  assert open_part(cfg, evaluates=False).source.eval is None
  assert open_part(dataclasses.replace(cfg, eval_fraction=0.0)).source.eval is None


def test_a_single_row_that_is_held_out_by_content_is_trained_on(tmp_path):
  cfg = config(tmp_path / "data", "jsonl", 1, eval_fraction=1.0)
  source = open_part(cfg).source
  assert source.summary.endswith("so nothing is held out")
  assert len(source.train)


def test_missing_eval_data_is_an_error_only_on_use(tmp_path):
  data = open_part(config(tmp_path / "data", eval_fraction=0.0))
  with pytest.raises(ValueError, match="set eval_fraction above 0"):
    data.eval_batches()


def test_too_small_a_vocabulary_is_an_error_with_a_fix(tmp_path):
  cfg = config(tmp_path / "data")
  with pytest.raises(ValueError, match=r"258 ids .* vocab_size=256: set vocab_size=320"):
    open_data(
      cfg, vocab_size=256, global_batch_size=B, rows=range(B), cache_directory=tmp_path / "cache"
    )


def phase_data(folder):
  """Three phases: two read the same data, the third other data in smaller batches."""
  run = config(folder / "run")
  own = config(folder / "own", kind="jsonl")
  small = open_part(own, rows=range(2), batch_size=2)
  return {"a": open_part(run), "b": small, "c": open_part(run)}


def test_phases_with_equal_data_share_a_stream(tmp_path):
  data = phase_data(tmp_path)
  streams = TrainStreams(data)
  of_shared = []
  of_own = []
  for name in "abbcab":
    batch = streams.take(name)
    if name == "b":
      of_own.append(batch)
    else:
      of_shared.append(batch)
  state = json.loads(json.dumps(streams.state()))
  following = [streams.take(name) for name in "bc"]
  streams.close()
  shared = open_part(data["a"].cfg)
  own = open_part(data["b"].cfg, rows=range(2), batch_size=2)
  assert_same(of_shared, take(shared.train_stream(), 3))
  assert_same(of_own, take(own.train_stream(), 3))
  again = TrainStreams(phase_data(tmp_path))
  again.restore(state)
  assert again.state() == state
  assert_same([again.take(name) for name in "bc"], following)
  again.close()


def test_restoring_other_phase_streams_is_an_error(tmp_path):
  data = phase_data(tmp_path)
  streams = TrainStreams(data)
  one = TrainStreams({name: data["a"] for name in "abc"})
  state = streams.state()
  with pytest.raises(ValueError, match="a stream of batches for each of a, b, this run for a:"):
    one.restore(state)
  with pytest.raises(ValueError, match="a stream of batches for each of a, this run for a, b:"):
    streams.restore(one.state())
  state["streams"]["b"]["global_batch_size"] = 4
  with pytest.raises(ValueError, match=r"phase b: .* was written with a global batch of 4"):
    streams.restore(state)
  older_state = train_stream(data["a"].cfg).state()  # of a single stream
  one.restore(older_state)
  streams.close()
  one.close()


def test_phases_do_not_train_on_held_out_documents(tmp_path):
  """The phase reads the run's documents from another folder in another format."""
  run = config(tmp_path / "run")
  own = config(tmp_path / "own", kind="jsonl")
  held_out = documents_of(open_part(run).eval_batches())
  data = open_part(own, evaluates=False)
  num_batches = math.ceil(len(data.source.train) / B)
  one_epoch = take(data.train_stream(), num_batches)
  trained = documents_of(one_epoch)
  assert held_out
  assert trained
  assert not held_out & trained
  few = dataclasses.replace(own, eval_fraction=1e-9)
  assert open_part(few, evaluates=False).source.eval is None


def documents_of(batches):
  """The first tokens of every document in the batches."""
  documents = set()
  for batch in batches:
    is_real_BT = np.asarray(batch.segment_BT) > 0
    is_start_BT = is_real_BT & (np.asarray(batch.position_BT) == 0)
    for row, begin in np.argwhere(is_start_BT):
      tokens = batch.tokens_BT[row, begin : begin + 4]
      documents.add(tuple(tokens.tolist()))
  return documents


def test_sets_of_prompts_are_the_same_after_a_restart(tmp_path):
  write_jsonl(
    tmp_path / "a.jsonl", [{"prompt": f"{i}?", "answer": i} for i in range(NUM_DOCUMENTS)]
  )
  cfg = DataConfig(dataset_type="prompts", dataset_path=(str(tmp_path),), max_target_length=T)

  def open_stream():
    data = open_data(
      cfg, vocab_size=300, global_batch_size=B, rows=range(B), cache_directory=tmp_path / "cache"
    )
    return TrainStreams({"train": data}).prompts("train")

  stream = open_stream()
  sets = [[prompt.fields["answer"] for prompt in next(stream)] for _ in range(8)]
  assert sorted(itertools.chain.from_iterable(sets[:5])) == list(range(NUM_DOCUMENTS))  # an epoch
  assert sets[0] != sorted(sets[0])
  again = open_stream()
  for _ in range(3):
    next(again)
  state = json.loads(json.dumps(again.state()))
  restored = open_stream()
  restored.restore(state)
  assert [prompt.fields["answer"] for prompt in restored.latest()] == sets[2]
  assert [prompt.fields["answer"] for prompt in next(restored)] == sets[3]
