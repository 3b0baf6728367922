"""Token files of other trainers: their formats, documents and damage."""

import json
import struct

import numpy as np
import pytest
from batch_streams import assert_same, join, take
from hypothesis import given, settings
from hypothesis import strategies as st
from support.token_files import INDEX_TYPES, write_indexed

from maxlite.config.load import load_config
from maxlite.config.schema import DataConfig
from maxlite.data.loader import open_data
from maxlite.data.sources.token_files import TokenFiles, open_id_file
from maxlite.errors import UserError

T = 8
END = 1  # ends documents
TYPES = ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]


def config(*paths, **keys):
  defaults = {
    "dataset_type": "tokens",
    "dataset_path": tuple(str(path) for path in paths),
    "max_target_length": T,
    "document_end_id": END,
    "eval_fraction": 0.0,
  }
  return DataConfig(**{**defaults, **keys})


def opened(cfg, folder, vocab_size=128, batch_size=4, rows=None):
  return open_data(
    cfg,
    vocab_size=vocab_size,
    global_batch_size=batch_size,
    rows=rows or range(batch_size),
    cache_directory=folder / "cache",
  )


def documents_in(source):
  """The documents in the rows of a source whose documents are in the order of the files."""
  found: list[list[int]] = []
  following = -1  # the id after the last row, if its document continues
  for index in range(len(source)):
    row = source[index]
    for segment in range(1, int(row["segment_BT"].max()) + 1):
      ids = row["tokens_BT"][row["segment_BT"] == segment].tolist()
      continues = segment == 1 and found and row["tokens_BT"][0] == following
      if continues:
        found[-1] += ids
      else:
        found.append(ids)
    following = row["targets_BT"][-1] if row["weight_BT"][-1] else -1
  return found


def draw_documents(num_documents, seed=0):
  """Documents that end with END; other ids are 2 to 99."""
  draw = np.random.default_rng(seed)
  return [
    [*draw.integers(2, 100, draw.integers(0, 20)).tolist(), END] for _ in range(num_documents)
  ]


def write(path, documents, kind, dtype):
  """Write a file of a kind; return its path."""
  ids = np.concatenate(documents).astype(dtype)
  if kind == "indexed":
    return write_indexed(path, [[document] for document in documents], dtype)
  if kind == "npy":
    np.save(path.with_suffix(".npy"), ids)
    return path.with_suffix(".npy")
  file = path.with_suffix(".bin")
  content = ids.tobytes()
  if kind == "llm.c":
    magic = {"uint16": 20240520, "uint32": 20240801}[dtype]
    content = struct.pack("<256i", magic, 1, len(ids), *[0] * 253) + content
  file.write_bytes(content)
  return file


CASES = [
  *[("plain", dtype) for dtype in TYPES],
  *[("npy", dtype) for dtype in [*TYPES, ">u2"]],
  *[("indexed", dtype) for dtype in INDEX_TYPES],
  ("llm.c", "uint16"),
  ("llm.c", "uint32"),
]


@pytest.mark.parametrize(("kind", "dtype"), CASES)
def test_every_format_and_width_holds_the_same_documents(tmp_path, kind, dtype):
  documents = draw_documents(30)
  file = write(tmp_path / "a", documents, kind, dtype)
  keys = {"token_dtype": dtype} if kind == "plain" else {}
  if kind == "indexed":
    keys["document_end_id"] = -1
  data = opened(config(file, enable_data_shuffling=False, **keys), tmp_path)
  assert documents_in(data.source.train) == documents
  assert data.source.train.num_tokens == sum(map(len, documents))


def test_documents_stay_whole_by_best_fit(tmp_path):
  documents = [document for document in draw_documents(30) if 1 < len(document) <= T]
  file = write(tmp_path / "a", documents, "indexed", "int64")
  cfg = config(file, document_end_id=-1, packing_strategy="best_fit")
  rows = opened(cfg, tmp_path).source.train
  found = []
  for index in range(len(rows)):
    row = rows[index]
    for segment in range(1, int(row["segment_BT"].max()) + 1):
      is_here = row["segment_BT"] == segment
      found.append([*row["tokens_BT"][is_here].tolist(), row["targets_BT"][is_here][-1]])
  assert sorted(found) == sorted(documents)


def test_documents_of_an_index_have_several_sequences(tmp_path):
  file = write_indexed(tmp_path / "a", [[[5, 6], [7]], [], [[8], [], [9, 9]]])
  data = opened(config(file, document_end_id=-1, enable_data_shuffling=False), tmp_path)
  assert documents_in(data.source.train) == [[5, 6, 7], [8, 9, 9]]
  by_end = opened(config(file, document_end_id=9, enable_data_shuffling=False), tmp_path)
  assert documents_in(by_end.source.train) == [[5, 6, 7, 8, 9], [9]]


def test_several_files_follow_each_other(tmp_path):
  first, second = draw_documents(20), draw_documents(7, seed=1)
  files = [
    write(tmp_path / "a", first, "indexed", "int32"),
    write(tmp_path / "b", [*second[:-1], [3, 4]], "plain", "uint16"),  # the last one has no end
  ]
  data = opened(config(*files, enable_data_shuffling=False), tmp_path)
  assert documents_in(data.source.train) == [*first, *second[:-1], [3, 4]]


@pytest.mark.parametrize("eval_split", ["documents", "tail"])
def test_held_out_documents_do_not_depend_on_the_format(tmp_path, eval_split):
  documents = draw_documents(200)
  documents += documents[:20]  # equal documents are on one side
  found = {}
  for kind, dtype in [("plain", "uint16"), ("npy", "int64"), ("indexed", "uint8")]:
    file = write(tmp_path / kind, documents, kind, dtype)
    cfg = config(file, eval_fraction=0.3, eval_split=eval_split, enable_data_shuffling=False)
    source = opened(cfg, tmp_path).source
    found[kind] = (documents_in(source.train), documents_in(source.eval))
  assert found["plain"] == found["npy"] == found["indexed"]
  train, held_out = found["plain"]
  assert sorted(train + held_out) == sorted(documents)
  if eval_split == "tail":
    assert train == documents[:154]
  else:
    assert 0.2 < len(held_out) / len(documents) < 0.4
    in_both = [each for each in train if each in held_out]
    assert not in_both


def test_the_tail_of_a_file_without_documents_is_held_out(tmp_path):
  file = write(tmp_path / "a", [[*range(2, 102)]], "plain", "uint16")
  source = opened(config(file, eval_fraction=0.2, enable_data_shuffling=False), tmp_path).source
  assert documents_in(source.train) == [[*range(2, 82)]]
  assert documents_in(source.eval) == [[*range(82, 102)]]
  assert "eval_split=tail" in source.summary


@pytest.mark.parametrize(
  ("dtype", "ids", "message"),
  [
    ("int64", [5, 1 << 31], "2147483648 at position 1, which is no token id"),
    ("uint64", [5, (1 << 32) + 7], "4294967303 at position 1, which is no token id"),
    ("int32", [5, 6, -1], "-1 at position 2, which is no token id"),
  ],
)
def test_numbers_that_are_no_ids_are_refused_where_they_are(tmp_path, dtype, ids, message):
  file = tmp_path / "a.bin"
  np.array(ids, dtype).tofile(file)
  with pytest.raises(UserError, match=message):
    TokenFiles([open_id_file(file, dtype)]).read(0, len(ids))


def damaged(file, change):
  index = file.with_suffix(".idx")
  content = bytearray(index.read_bytes())
  change(content)
  index.write_bytes(content)


def cut(count):
  def change(content):
    del content[len(content) - count :]

  return change


def put(place, form, value):
  def change(content):
    at = place if place >= 0 else len(content) + place
    struct.pack_into(form, content, at, value)

  return change


DAMAGE = {
  "truncated": (cut(1), "is truncated"),
  "header only": (cut(10_000), "is no index of Megatron-LM"),
  "other magic": (put(0, "<c", b"X"), "is no index of Megatron-LM"),
  "other version": (put(9, "<Q", 2), "version 2"),
  "floats": (put(17, "<B", 7), "type 7"),
  "more sequences": (put(18, "<Q", 9), "is truncated: .* 9 sequences"),
  "fewer document ends": (put(26, "<Q", 3), "does not fit its counts: .* and 2 documents"),
  "documents end early": (
    put(-8, "<q", 2),
    "wrong document counts: its 3 documents end at sequence 2",
  ),
  "documents descend": (put(-16, "<q", 9), "wrong document counts"),
  "other length": (put(34, "<i", 4), "do not follow each other"),
  "negative length": (put(34, "<i", -4), "do not follow each other"),
  "other place": (put(34 + 12, "<q", 4), "do not follow each other"),
  "modes": (lambda content: content.extend(b"\x00" * 3), "is of a multimodal dataset"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_index_is_named(tmp_path, damage):
  file = write_indexed(tmp_path / "a", [[[5, 6]], [[7]], [[8]]])
  change, message = DAMAGE[damage]
  damaged(file, change)
  with pytest.raises(UserError, match=rf"a\.idx .*{message}"):
    open_id_file(file, "")


@pytest.mark.parametrize(
  ("name", "content", "message"),
  [
    ("a.bin", b"123", "3 bytes, no multiple of the 2 of token_dtype=uint16"),
    ("a.bin", b"", "has no ids"),
    ("a.npy", b"123456789012", "is no .npy file"),
    ("a.ids", b"12", "no .bin or .npy file"),
  ],
)
def test_other_files_are_refused(tmp_path, name, content, message):
  (tmp_path / name).write_bytes(content)
  with pytest.raises(UserError, match=message):
    open_id_file(tmp_path / name, "")


def test_cut_files_and_other_types_are_refused(tmp_path):
  file = write_indexed(tmp_path / "a", [[[5, 6]], [[7]]])
  with pytest.raises(UserError, match="type int32 by its header, not token_dtype=uint16"):
    open_id_file(file, "uint16")
  file.write_bytes(file.read_bytes()[:-4])
  with pytest.raises(UserError, match=r"8 bytes instead of 12 by a\.idx, which counts 3 ids"):
    open_id_file(file, "")
  np.save(tmp_path / "b.npy", np.zeros((2, 3), np.int32))
  with pytest.raises(UserError, match="one-dimensional array of integers"):
    open_id_file(tmp_path / "b.npy", "")
  np.save(tmp_path / "c.npy", np.zeros(3, np.float32))
  with pytest.raises(UserError, match="one-dimensional array of integers"):
    open_id_file(tmp_path / "c.npy", "")


def test_a_type_that_cannot_hold_the_ids_of_the_model_is_refused(tmp_path):
  file = write(tmp_path / "a", draw_documents(3), "plain", "uint16")
  with pytest.raises(
    UserError, match="uint16, which overflow above 65535, and the model has 65537"
  ):
    opened(config(file), tmp_path, vocab_size=65537)
  opened(config(file), tmp_path, vocab_size=65536)
  with pytest.raises(UserError, match=r"has ids up to \d+ and the model vocab_size=64"):
    opened(config(file), tmp_path, vocab_size=64)


def test_documents_of_ids_of_an_unknown_tokenizer_need_their_end(tmp_path):
  file = tmp_path / "a.bin"
  np.array([300, 5], np.uint16).tofile(file)
  with pytest.raises(UserError, match="ids up to 300 are not of tokenizer_type=byte"):
    opened(config(file, document_end_id=-1), tmp_path, vocab_size=512)
  source = opened(config(file, document_end_id=5), tmp_path, vocab_size=512).source
  assert not source.num_bytes_V.any()  # no bits per byte


@settings(max_examples=5, deadline=None)
@given(data=st.data(), seed=st.integers(0, 3))
def test_a_stream_resumes_at_any_row_on_any_number_of_hosts(tmp_path_factory, data, seed):
  folder = tmp_path_factory.mktemp("resume")
  documents = draw_documents(9, seed)
  cfg = config(write(folder / "a", documents, "plain", "uint16"), grain_prefetch_buffer_size=2)
  num_rows = len(opened(cfg, folder).source.train)
  batch_size = data.draw(st.sampled_from([1, 2, 4]))
  taken = data.draw(st.integers(0, 3 * num_rows // batch_size))
  stream = opened(cfg, folder, batch_size=batch_size).train_stream()
  take(stream, taken)
  state = json.loads(json.dumps(stream.state()))
  following = take(stream, num_rows // batch_size + 2)  # past the end of an epoch
  stream.close()
  num_hosts = data.draw(st.sampled_from([n for n in (1, 2, 4) if n <= batch_size]))
  size = batch_size // num_hosts
  parts = []
  for host in range(num_hosts):
    rows = range(host * size, (host + 1) * size)
    part = opened(cfg, folder, batch_size=batch_size, rows=rows).train_stream()
    part.restore(state)
    parts.append(take(part, len(following)))
    part.close()
  assert_same([join(list(batches)) for batches in zip(*parts, strict=True)], following)


def test_another_file_is_other_data(tmp_path):
  documents = draw_documents(9)
  file = write(tmp_path / "a", documents, "plain", "uint16")
  stream = opened(config(file), tmp_path).train_stream()
  take(stream, 2)
  state = stream.state()
  stream.close()
  documents[0][0] += 1
  write(tmp_path / "a", documents, "plain", "uint16")
  changed = opened(config(file), tmp_path).train_stream()
  with pytest.raises(UserError, match="other data"):
    changed.restore(state)
  changed.close()


@pytest.mark.parametrize(
  ("argv", "message"),
  [
    (["document_end_id=5"], "document_end_id=5 has no effect; write dataset_type=tokens"),
    (["token_dtype=int32"], "token_dtype=int32 has no effect; write dataset_type=tokens"),
    (["dataset_type=tokens", "text_column=a"], "text_column=a has no effect"),
    (["dataset_type=tokens", "on_bad_row=skip"], "on_bad_row=skip has no effect"),
    (["dataset_type=tokens"], "stdlib is text"),
    (["dataset_path=a.bin"], "write dataset_type=tokens"),
    (["dataset_type=tokens", "eod_mask_loss=true"], "write megatron_order=true"),
    (["megatron_order=true"], "write dataset_type=tokens"),
    (["dataset_type=tokens", "megatron_order=true"], "write train_iters x global_batch_size"),
  ],
)
def test_keys_without_effect_are_refused(tmp_path, monkeypatch, argv, message):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "a.bin").write_bytes(b"1234")
  if "dataset_type=tokens" in argv and argv != ["dataset_type=tokens"]:
    argv = [*argv, "dataset_path=a.bin"]
  with pytest.raises(UserError, match=message):
    load_config(argv, command="maxlite.train")
