"""Rules on what a run reads: its tokenizer, its files and how they fill batches."""

import glob
import os

from maxlite.config.complaint import Complaint, Complaints
from maxlite.config.schema import Config, flatten


def tokenizer(c: Config) -> Complaints:
  d, byte = c.data, c.data.tokenizer_type == "byte"
  keys = ("tokenizer_path", "tokenizer_type")
  if byte and c.model.vocab_size < 258 and d.dataset_type != "synthetic":
    yield Complaint(("vocab_size", "tokenizer_type"), "bytes need 258 ids; write vocab_size=258")
  if byte and d.tokenizer_path:
    text = "bytes need no file; write tokenizer_type=huggingface or sentencepiece, or no path"
    yield Complaint(keys, text)
  if not byte and not os.path.isfile(os.path.expanduser(d.tokenizer_path)):
    yield Complaint(keys, "no such file; write tokenizer_path=FILE or tokenizer_type=byte")


def chat(c: Config) -> Complaints:
  d = c.data
  if d.chat_template_path and not os.path.isfile(os.path.expanduser(d.chat_template_path)):
    text = "no such file; write chat_template_path=FILE, a Jinja2 template"
    yield Complaint(("chat_template_path",), text)
  if d.dataset_type != "chat":
    if not d.packing:
      text = "only conversations can have rows of their own; write packing=true"
      yield Complaint(("packing", "dataset_type"), text)
  elif d.tokenizer_type == "sentencepiece":
    text = (
      "conversations need control tokens; write tokenizer_type=huggingface, with tokenizer.json"
    )
    yield Complaint(("tokenizer_type", "dataset_type"), text)
  elif d.tokenizer_type == "byte" and not d.chat_template_path:
    text = "bytes come without a chat template; write chat_template_path=configs/chat/plain.jinja"
    yield Complaint(("dataset_type", "tokenizer_type"), text)


def datasets(c: Config) -> Complaints:
  if c.data.dataset_type == "synthetic":
    return
  if not c.data.dataset_path:
    yield Complaint(("dataset_path",), "names no data; write dataset_path=FILE or [stdlib]")
  for key, entries in flatten(c.data).items():
    if key in ("dataset_path", "eval_dataset_path"):
      yield from _entries(key, entries, c.data.dataset_type)


def _entries(key: str, entries: tuple[str, ...], dataset_type: str) -> Complaints:
  for entry in entries:
    path = os.path.expanduser(entry)
    if entry == "stdlib":
      if dataset_type != "text":
        yield Complaint((key, "dataset_type"), f"stdlib is text; write {key}=FILE")
    elif not os.path.exists(path) and not glob.glob(path, recursive=True):
      fix = f"write {key}=FILE, a folder or a glob that matches"
      yield Complaint((key,), f"{entry} matches no file; {fix}")


def columns(c: Config) -> Complaints:
  if c.data.dataset_type in ("jsonl", "parquet") and not c.data.text_column:
    yield Complaint(("text_column", "dataset_type"), "names no column; write text_column=text")


def batch(c: Config) -> Complaints:
  if c.data.per_device_batch_size <= 0:
    text = "a step needs rows; write per_device_batch_size=1, or a fraction of it"
    yield Complaint(("per_device_batch_size",), text)


def sampling(c: Config) -> Complaints:
  if not c.data.enable_data_shuffling:
    fix = "write enable_data_shuffling=true"
    if c.data.data_sampling == "bootstrap":
      yield Complaint(("data_sampling", "enable_data_shuffling"), f"draws rows at random; {fix}")
    if c.ensemble.ensemble_data != "shared":
      keys = ("ensemble_data", "enable_data_shuffling")
      yield Complaint(keys, f"members would read the same order; {fix}")
