"""Tokenization: batches change nothing, a killed process is continued, two writers are safe."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from chat_cases import save_tokenizer
from support.slow_cases import slow
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from maxlite.config.schema import DataConfig
from maxlite.data import tokenize
from maxlite.data.sources import text
from maxlite.data.sources.jsonl import jsonl_documents
from maxlite.data.sources.text import text_documents
from maxlite.data.token_cache import open_tokens
from maxlite.data.tokenize import TextTokenizer
from maxlite.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer

CFG = DataConfig(dataset_type="jsonl", eval_fraction=0.3)


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
  path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
  tokenizer = Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  alphabet = pre_tokenizers.ByteLevel.alphabet()
  trainer = trainers.BpeTrainer(
    vocab_size=300, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
  )
  tokenizer.train_from_iterator(["the quick brown fox"] * 50, trainer)
  tokenizer.save(str(path))
  return HuggingFaceTokenizer(str(path))


def write_jsonl(file, num_documents):
  lines = []
  for n in range(num_documents):
    text = f"the quick {n} brown fox " * (n % 9 + 1)
    lines.append(json.dumps({"text": text}))
  file.write_text("\n".join(lines) + "\n")
  return file


class Contents(NamedTuple):
  """The ids on disk and the lengths of a split's documents."""

  ids: bytes
  lengths: list[int]


def contents(data):
  """The contents of the training split, and of the held-out split."""
  train = Contents(data.train.file.path.read_bytes(), data.train.lengths.tolist())
  held_out = Contents(data.eval.file.path.read_bytes(), data.eval.lengths.tolist())
  return train, held_out


def open_jsonl(file, tokenizer, cache, read=jsonl_documents):
  return open_tokens(CFG, read, [file], [], TextTokenizer(tokenizer), cache)


def test_batches_equal_single_pieces(bpe, tmp_path, monkeypatch):
  file = write_jsonl(tmp_path / "a.jsonl", 200)
  whole = contents(open_jsonl(file, bpe, tmp_path / "whole"))
  monkeypatch.setattr(tokenize, "BATCH_BYTES", 1)
  assert contents(open_jsonl(file, bpe, tmp_path / "single")) == whole
  train, _ = whole
  ids = np.frombuffer(train.ids, np.uint16)
  ends = np.cumsum(train.lengths)
  assert len(ids) == ends[-1]
  starts = ends - train.lengths
  assert (ids[ends - 1] == bpe.eos).all()
  assert bpe.eos not in ids[starts]


CHILD = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = sys.argv[1].split(":")
import test_tokenize as t
t.tokenize.BATCH_BYTES, t.tokenize._SAVE_SECONDS = 300, 0
folder, kind, last = Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
count = 0
class Killed(t.ByteTokenizer):
  def encode_batch(self, texts):
    global count
    count += 1
    if count == last:
      os.kill(os.getpid(), signal.SIGKILL)
    return super().encode_batch(texts)
t.open_file(folder, kind, Killed(""))
"""


READERS = {"jsonl": jsonl_documents, "text": text_documents}


def open_file(folder, kind, tokenizer, cache="cache"):
  cfg = dataclasses.replace(CFG, dataset_type=kind, eval_split="tail")
  file = folder / f"a.{kind}"
  return open_tokens(cfg, READERS[kind], [file], [], TextTokenizer(tokenizer), folder / cache)


@pytest.mark.parametrize("kind", [slow("jsonl"), "text"])
def test_a_killed_process_is_continued(kind, tmp_path, monkeypatch, capsys):
  file = write_jsonl(tmp_path / f"a.{kind}", 150)
  if kind == "text":  # a document of several pieces
    file.write_text("one long line of text\n" * 40_000)
  monkeypatch.setattr(tokenize, "BATCH_BYTES", 300)
  expected = contents(open_file(tmp_path, kind, ByteTokenizer(""), "uninterrupted"))
  here = f"{Path(__file__).parent}:{Path(__file__).parents[1]}"
  for last in (3, 2):
    command = [sys.executable, "-c", CHILD, here, str(tmp_path), kind, str(last)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
  (partial,) = (tmp_path / "cache").iterdir()
  record = json.loads((partial / "progress.json").read_text())
  assert record["content"]["progress"]["num_pieces"] >= 2
  with (partial / "train.bin").open("ab") as file:  # written after the last record of progress
    file.write(b"torn")
  calls = []
  encode = ByteTokenizer.encode_batch

  def encode_and_count(self, texts):
    calls.extend(texts)
    return encode(self, texts)

  monkeypatch.setattr(ByteTokenizer, "encode_batch", encode_and_count)
  assert contents(open_file(tmp_path, kind, ByteTokenizer(""))) == expected
  assert "tokenizing resumes after" in capsys.readouterr().err
  num_bytes = sum(len(split.ids) // 2 for split in expected)
  assert 0 < sum(map(len, calls)) < num_bytes
  (folder,) = (tmp_path / "cache").iterdir()
  assert not {"progress.json", ".lock", "train_lengths.partial"} & set(os.listdir(folder))


class Interrupted(ByteTokenizer):
  """Stops the process, as a signal does, at its third batch."""

  num_batches = 0

  def encode_batch(self, texts):
    self.num_batches += 1
    if self.num_batches == 3:
      raise KeyboardInterrupt
    return super().encode_batch(texts)


def flip_a_bit(folder):
  content = bytearray((folder / "train.bin").read_bytes())
  content[10] ^= 1
  (folder / "train.bin").write_bytes(content)


def edit_the_record(folder):
  record = json.loads((folder / "progress.json").read_text())
  record["content"]["progress"]["num_pieces"] += 1
  (folder / "progress.json").write_text(json.dumps(record))


def swap_the_source(folder):
  source = folder.parent.parent / "a.jsonl"
  before = source.stat()
  source.write_text(source.read_text().replace("quick", "slick"))
  os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))


ATTACKS = {
  "flipped bit": (flip_a_bit, "train.bin is damaged"),
  "cut": (lambda folder: os.truncate(folder / "train.bin", 10), "train.bin was cut short"),
  "removed": (lambda folder: (folder / "eval.bin").unlink(), "eval.bin cannot be read"),
  "swapped source": (swap_the_source, "the data have changed"),
  "other number": (edit_the_record, "progress.json is damaged"),
  "garbage": (
    lambda folder: (folder / "progress.json").write_bytes(b"\xff{"),
    "progress.json is damaged",
  ),
  "other JSON": (
    lambda folder: (folder / "progress.json").write_text("[1]"),
    "progress.json is damaged",
  ),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_what_was_changed_after_a_kill_is_not_continued(name, tmp_path, monkeypatch, caplog):
  attack, reason = ATTACKS[name]
  write_jsonl(tmp_path / "a.jsonl", 150)
  monkeypatch.setattr(tokenize, "BATCH_BYTES", 300)
  monkeypatch.setattr(tokenize, "_SAVE_SECONDS", 0)
  with pytest.raises(KeyboardInterrupt):
    open_file(tmp_path, "jsonl", Interrupted(""))
  (partial,) = (tmp_path / "cache").iterdir()
  attack(partial)
  monkeypatch.undo()
  resumed = contents(open_file(tmp_path, "jsonl", ByteTokenizer("")))
  assert f"starts again: {reason}" in caplog.text
  assert resumed == contents(open_file(tmp_path, "jsonl", ByteTokenizer(""), "uninterrupted"))


def test_two_writers_at_once_write_the_same(tmp_path):
  file = write_jsonl(tmp_path / "a.jsonl", 50)
  inner = []

  def second(*arguments, **keys):
    if not inner:
      inner.append(open_jsonl(file, ByteTokenizer(""), tmp_path / "cache"))
    return jsonl_documents(*arguments, **keys)

  outer = open_jsonl(file, ByteTokenizer(""), tmp_path / "cache", read=second)
  assert contents(outer) == contents(inner[0])
  assert len(list((tmp_path / "cache").iterdir())) == 1


def test_progress_names_size_speed_and_remaining_time(tmp_path, monkeypatch, capsys):
  monkeypatch.setattr(tokenize, "_REPORT_SECONDS", 0)
  file = write_jsonl(tmp_path / "a.jsonl", 9)
  open_jsonl(file, ByteTokenizer(""), tmp_path)
  assert "tokenizing: 0 of 0 MB, 0:00:00 left, " in capsys.readouterr().err


def spaced_text(size):
  """Lines, blank lines, indented lines, and a line longer than a piece."""
  draw = np.random.default_rng(0)
  words = [
    "What",
    "is",
    "the",
    "sum?",
    "It",
    "is",
    "five.",
    "\n",
    "\n\n",
    "\n  ",
    "\n\n\n    ",
    "é🙂",
  ]
  text = "x y " * 2000
  while len(text) < size:
    text += draw.choice(words) + " " * int(draw.integers(0, 3))
  return text


@pytest.mark.parametrize("kind", ["", "first", "always", "gpt2"])
@pytest.mark.parametrize("format_", ["text", "jsonl"])
def test_pieces_give_the_ids_of_the_whole(tmp_path, monkeypatch, caplog, kind, format_):
  """Also with a tokenizer that puts a space before a text, and one that looks at what follows."""
  monkeypatch.setattr(text, "PIECE_BYTES", 6000)
  monkeypatch.setattr(text, "MAX_PIECE_BYTES", 6000)
  names = {"bos_token": "<s>", "eos_token": "</s>"}
  path = save_tokenizer(tmp_path / "tokenizer", kind.replace("gpt2", ""), tokenizer_config=names)
  tokenizer = HuggingFaceTokenizer(path)
  whole = spaced_text(60_000)
  file = tmp_path / "a"
  file.write_text(whole if format_ == "text" else json.dumps({"text": whole}))
  read = text_documents if format_ == "text" else jsonl_documents
  cfg = dataclasses.replace(CFG, dataset_type=format_, eval_fraction=0.0)
  data = open_tokens(cfg, read, [file], [], TextTokenizer(tokenizer), tmp_path / "cache")
  ids = np.fromfile(data.train.file.path, data.train.file.dtype)
  expected = tokenizer.encode(whole.encode())
  num_pieces = sum(1 for document in read(file, "text", 0, 1) for _ in document)
  assert num_pieces > 8
  np.testing.assert_array_equal(ids, [*tokenizer.prefix_ids, *expected, tokenizer.eos])
  assert not [message for message in caplog.messages if "depend on more" in message]


def test_a_tokenizer_that_needs_the_whole_text_is_reported(tmp_path, monkeypatch, caplog):
  """Of a run of one letter, ids depend on where it starts."""
  monkeypatch.setattr(text, "PIECE_BYTES", 6001)
  vocabulary = {"a": 0, "aaa": 1, "</s>": 2, "aa": 3}
  tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "a"), ("aa", "a")]))
  tokenizer.add_special_tokens(["</s>"])
  tokenizer.save(str(tmp_path / "tokenizer.json"))
  opened = HuggingFaceTokenizer(str(tmp_path / "tokenizer.json"))
  file = tmp_path / "a.txt"
  file.write_text("a" * 40_000)
  cfg = dataclasses.replace(CFG, dataset_type="text", eval_fraction=0.0)
  open_tokens(cfg, text_documents, [file], [], TextTokenizer(opened), tmp_path / "cache")
  assert sum("depend on more than 2048 bytes" in message for message in caplog.messages) == 1
