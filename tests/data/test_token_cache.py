"""The token cache is complete or absent, and the two splits are disjoint."""

import dataclasses
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from maxlite.config.schema import DataConfig
from maxlite.data import token_cache
from maxlite.data.sources.jsonl import jsonl_documents
from maxlite.data.sources.text import text_documents
from maxlite.data.token_cache import open_tokens
from maxlite.data.tokenize import TextTokenizer
from maxlite.data.tokenizer import ByteTokenizer

BYTES = ByteTokenizer("")
TEXT = TextTokenizer(BYTES)
CFG = DataConfig(dataset_type="jsonl", eval_fraction=0.3)


def write_jsonl(file, texts):
  lines = [json.dumps({"text": text}) for text in texts]
  file.write_text("\n".join(lines) + "\n")
  return file


def open_jsonl(folder, files, eval_files=(), **keys):
  cfg = dataclasses.replace(CFG, **keys)
  return open_tokens(
    cfg,
    jsonl_documents,
    list(files),
    list(eval_files),
    tokenizer=TEXT,
    cache_directory=folder,
  )


def documents(split):
  """The texts of a split, whose documents have the tokens of begin and end."""
  ids = np.fromfile(split.file.path, split.file.dtype)
  texts = []
  end = 0
  for length in split.lengths:
    start = end
    end += length
    assert ids[start] == BYTES.bos
    assert ids[end - 1] == BYTES.eos
    texts.append(BYTES.decode(ids[start:end]))
  assert end == len(ids)
  return texts


def all_documents(data):
  """The texts of both splits, in order."""
  return sorted(documents(data.train) + documents(data.eval))


@pytest.fixture
def texts():
  return [f"document {i} {'x' * (i % 7)}" for i in range(60)]


@pytest.mark.parametrize("eval_split", ["documents", "tail"])
def test_splits_are_disjoint_and_complete(tmp_path, texts, eval_split):
  data = open_jsonl(tmp_path, [write_jsonl(tmp_path / "a.jsonl", texts)], eval_split=eval_split)
  train = documents(data.train)
  held_out = documents(data.eval)
  assert sorted(train + held_out) == sorted(texts)
  assert 6 <= len(held_out) <= 30
  if eval_split == "tail":
    assert held_out == texts[42:]


def test_equal_documents_are_in_one_split(tmp_path, texts):
  files = [write_jsonl(tmp_path / name, texts) for name in ("a.jsonl", "b.jsonl")]
  data = open_jsonl(tmp_path, files)
  held_out = documents(data.eval)
  different = set(held_out)
  assert not different & set(documents(data.train))
  assert len(held_out) == 2 * len(different)


@pytest.mark.parametrize("eval_split", ["documents", "tail"])
def test_text_splits_are_complete(tmp_path, eval_split):
  files = [tmp_path / f"{i}.txt" for i in range(20)]
  for i, file in enumerate(files):
    file.write_text(f"é{i}\n日本語" * 9)
  cfg = DataConfig(eval_split=eval_split, eval_fraction=0.3)
  data = open_tokens(
    cfg,
    text_documents,
    files,
    [],
    tokenizer=TEXT,
    cache_directory=tmp_path / "cache",
  )
  train = documents(data.train)
  held_out = documents(data.eval)
  assert held_out
  if eval_split == "tail":
    joined = [a + b for a, b in zip(train, held_out, strict=True)]
    assert joined == [file.read_text() for file in files]
    assert all("\ufffd" not in text for text in train + held_out)
  else:
    assert sorted(train + held_out) == sorted(file.read_text() for file in files)


def test_documents_of_eval_files_are_dropped_from_training(tmp_path, texts):
  train = write_jsonl(tmp_path / "train.jsonl", texts)
  held_out = write_jsonl(tmp_path / "eval.jsonl", [*texts[:5], "only here"])
  data = open_jsonl(tmp_path, [train], [held_out])
  assert documents(data.train) == texts[5:]
  assert documents(data.eval) == [*texts[:5], "only here"]
  assert data.num_dropped == 5


def test_empty_documents_are_skipped(tmp_path):
  data = open_jsonl(tmp_path, [write_jsonl(tmp_path / "a.jsonl", ["", "a", ""])], eval_fraction=0.0)
  assert documents(data.train) == ["a"]
  assert documents(data.eval) == []


def test_cache_is_reused_until_anything_changes(tmp_path, texts):
  cache = tmp_path / "cache"
  file = write_jsonl(tmp_path / "a.jsonl", texts)
  first = open_jsonl(cache, [file])
  written = first.train.file.path.stat().st_mtime_ns
  assert open_jsonl(cache, [file]).train.file.path.stat().st_mtime_ns == written
  assert open_jsonl(cache, [file], eval_fraction=0.5).train.file.path != first.train.file.path
  os.utime(file, ns=(1, 1))
  touched = open_jsonl(cache, [file])
  assert touched.train.file.path != first.train.file.path
  assert touched.train.digest == first.train.digest  # depends on the content only
  write_jsonl(file, [*texts[:-1], texts[-1].upper()])
  assert open_jsonl(cache, [file]).train.digest != first.train.digest


@pytest.mark.parametrize("name", ["meta.json", "train.bin", "eval_lengths.npy"])
@pytest.mark.parametrize("damage", ["cut", "removed"])
def test_a_damaged_cache_is_rebuilt(tmp_path, texts, name, damage):
  cache = tmp_path / "cache"
  file = write_jsonl(tmp_path / "a.jsonl", texts)
  first = open_jsonl(cache, [file])
  broken = first.train.file.path.parent / name
  if damage == "cut":
    broken.write_bytes(broken.read_bytes()[:-3])
  else:
    broken.unlink()
  again = open_jsonl(cache, [file])
  assert all_documents(again)
  assert again.train.digest == first.train.digest
  assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize("name", ["train.bin", "eval_lengths.npy"])
def test_a_flipped_bit_is_found_and_named(tmp_path, texts, name, caplog):
  cache = tmp_path / "cache"
  file = write_jsonl(tmp_path / "a.jsonl", texts)
  first = open_jsonl(cache, [file])
  broken = first.train.file.path.parent / name
  before = broken.stat()
  content = bytearray(broken.read_bytes())
  content[-1] ^= 1
  broken.write_bytes(content)
  os.utime(broken, ns=(before.st_atime_ns, before.st_mtime_ns))
  again = open_jsonl(cache, [file])
  assert all_documents(again) == sorted(texts)
  assert "is rebuilt: " in caplog.text
  assert name.split("_")[0].removesuffix(".bin") in caplog.text


def test_other_content_of_the_same_size_and_time_is_tokenized(tmp_path, texts, caplog):
  cache = tmp_path / "cache"
  file = write_jsonl(tmp_path / "a.jsonl", texts)
  first = open_jsonl(cache, [file])
  before = file.stat()
  write_jsonl(file, [text.upper() for text in texts])
  os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
  again = open_jsonl(cache, [file])
  assert again.train.file.path == first.train.file.path
  assert all_documents(again) == sorted(map(str.upper, texts))
  assert "a.jsonl has changed" in caplog.text


def test_untouched_files_are_not_read_again(tmp_path, texts, monkeypatch):
  cache = tmp_path / "cache"
  file = write_jsonl(tmp_path / "a.jsonl", texts)
  first = open_jsonl(cache, [file])
  monkeypatch.setattr(token_cache, "_digest", None)
  assert open_jsonl(cache, [file]).train.digest == first.train.digest


def test_a_cache_of_an_older_version_is_verified_and_used(tmp_path, texts):
  cache = tmp_path / "cache"
  file = write_jsonl(tmp_path / "a.jsonl", texts)
  folder = open_jsonl(cache, [file]).train.file.path.parent
  (folder / "verified").unlink()
  meta = json.loads((folder / "meta.json").read_text())
  del meta["sources"]
  (folder / "meta.json").write_text(json.dumps(meta | {"dtype": "<u2", "sizes": {}}))
  written = (folder / "train.bin").stat().st_mtime_ns
  assert open_jsonl(cache, [file]).train.file.path.stat().st_mtime_ns == written
  assert (folder / "verified").exists()


def test_an_error_leaves_no_files(tmp_path):
  file = tmp_path / "a.jsonl"
  file.write_text('{"text": "a"}\n{"te')
  with pytest.raises(ValueError, match=r"a\.jsonl:2"):
    open_jsonl(tmp_path / "cache", [file])
  assert list((tmp_path / "cache").iterdir()) == []


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import test_token_cache as t
def killed_reader(file, *share):
  yield iter([b"whole"])
  yield iter([b"half"])
  os.kill(os.getpid(), signal.SIGKILL)
folder = Path(sys.argv[1])
t.open_tokens(t.CFG, killed_reader, [folder / "a.jsonl"], [], tokenizer=t.TEXT,
              cache_directory=folder / "cache")
"""


def test_a_kill_during_tokenization_leaves_no_complete_cache(tmp_path, texts):
  file = write_jsonl(tmp_path / "a.jsonl", texts)
  cache = tmp_path / "cache"
  here = os.path.dirname(__file__)
  killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), here], check=False)
  assert killed.returncode == -9
  (partial,) = cache.iterdir()
  other = cache / "other.partial"  # may belong to a running process
  other.mkdir()
  data = open_jsonl(cache, [file])
  assert all_documents(data) == sorted(texts)
  assert not partial.exists()
  assert other.exists()
  (cache / "renamed.partial").symlink_to(cache / "none")  # as if another process had renamed it
  long_ago = time.time() - 10 * token_cache._STALE_SECONDS
  os.utime(other, (long_ago, long_ago))
  shutil.rmtree(data.train.file.path.parent)
  open_jsonl(cache, [file])
  assert not other.exists()


def test_a_folder_is_locked_until_it_is_complete(tmp_path, texts, monkeypatch):
  refused = []
  rename = Path.rename

  def lock_and_rename(path, target):
    with (path / ".lock").open("r+") as lock:
      try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
      except BlockingIOError:
        refused.append(path)
    return rename(path, target)

  monkeypatch.setattr(Path, "rename", lock_and_rename)
  data = open_jsonl(tmp_path / "cache", [write_jsonl(tmp_path / "a.jsonl", texts)])
  assert len(refused) == 1
  assert ".lock" not in os.listdir(data.train.file.path.parent)


def test_a_concurrent_writer_is_harmless(tmp_path, texts):
  file = write_jsonl(tmp_path / "a.jsonl", texts)
  cache = tmp_path / "cache"

  def slow(path, column, start, stop):
    open_jsonl(cache, [file])  # stands for a process that finishes first
    return jsonl_documents(path, column, start, stop)

  data = open_tokens(CFG, slow, [file], [], tokenizer=TextTokenizer(BYTES), cache_directory=cache)
  assert all_documents(data) == sorted(texts)
  assert len(list(cache.iterdir())) == 1


def test_ids_above_16_bits_are_preserved(tmp_path):
  class Wide:
    size = 70_000
    bos = 69_998
    eos = 69_999
    prefix_ids = (bos,)
    identity = "wide"

    def encode(self, text):
      return np.frombuffer(text, np.uint8).astype(np.uint32) + 66_000

    def encode_batch(self, texts):
      return list(map(self.encode, texts))

  file = write_jsonl(tmp_path / "a.jsonl", ["ab"])
  cfg = dataclasses.replace(CFG, eval_fraction=0.0)
  data = open_tokens(
    cfg,
    jsonl_documents,
    [file],
    [],
    tokenizer=TextTokenizer(Wide()),
    cache_directory=tmp_path,
  )
  assert np.fromfile(data.train.file.path, data.train.file.dtype).tolist() == [
    69_998,
    66_097,
    66_098,
    69_999,
  ]
