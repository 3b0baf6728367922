"""Rules on data: its files, tokenizer, conversations and batches."""

import os
import re

from maxlite.config.rules.path_rules import is_file
from maxlite.config.rules.violation import (
  Violation,
  Violations,
  ensemble_key,
  largest_divisor,
)
from maxlite.config.schema import Config, flatten
from maxlite.config.schema.data_config import MESSAGE_FIELDS, ROW_FIELDS, SCHEDULE_KEYS
from maxlite.config.values import suggest
from maxlite.config.yaml_files import CONFIGS
from maxlite.registry import SOURCES, TOKENIZERS, other_dataset_type
from maxlite.storage.file_io import expand_glob
from maxlite.storage.tokenizer_files import FOLDER, MAIN_FILES

_SPLIT = re.compile(r"\d+(\.\d+)?(,\d+(\.\d+)?){0,2}")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def tokenizer(cfg: Config) -> Violations:
  """The rules on the tokenizer and its file."""
  data = cfg.data
  entry = TOKENIZERS.entry(data.tokenizer_type)
  source = SOURCES.entry(data.dataset_type)
  has_own_ids = source.is_synthetic or source.has_token_ids
  if cfg.model.vocab_size < entry.min_vocab_size and not has_own_ids:
    yield Violation(
      ["vocab_size", "tokenizer_type"],
      f"{entry.units} need {entry.min_vocab_size} ids; write vocab_size={entry.min_vocab_size}",
    )
  keys = ["tokenizer_path", "tokenizer_type"]
  if is_file(data.tokenizer_path) and not entry.needs_file:
    with_file = [name for name, other in TOKENIZERS.entries().items() if other.needs_file]
    yield Violation(
      keys,
      f"{entry.units} need no file; write tokenizer_type={' or '.join(with_file)}, or no path",
    )
  if entry.needs_file and not data.tokenizer_path:
    yield Violation(keys, _tokenizer_fix(cfg))


def chat(cfg: Config) -> Violations:
  """The rules on conversations and their template."""
  data = cfg.data
  template = data.chat_template_path
  if not SOURCES.entry(data.dataset_type).has_conversations:
    if not data.packing:
      yield Violation(
        ["packing", "dataset_type"],
        "only conversations can have a row each; write packing=true",
      )
    return
  entry = TOKENIZERS.entry(data.tokenizer_type)
  if not entry.has_control_tokens:
    yield Violation(
      ["tokenizer_type", "dataset_type"],
      "chat needs control tokens; write tokenizer_type=huggingface, with tokenizer.json",
    )
  if not entry.has_chat_template and not template:
    yield Violation(
      ["dataset_type", "tokenizer_type"],
      f"{entry.units} have no chat template; write chat_template_path={_plain_template()}",
    )


def columns(cfg: Config) -> Violations:
  """The rules on other names of the columns of conversations."""
  fields = (*ROW_FIELDS, *MESSAGE_FIELDS)
  renamed = cfg.data.data_columns
  for field, column in renamed.items():
    if field not in fields:
      yield Violation(
        ["data_columns"], f"{field} is not a field of conversations; {suggest(field, fields)}"
      )
    if not isinstance(column, str) or not column:
      yield Violation(
        ["data_columns"], f"{field} needs one column", {"data_columns": f"{{{field}: NAME}}"}
      )
  if len(set(renamed.values())) < len(renamed):
    yield Violation(["data_columns"], "two fields have one column; write a column for each")


def _plain_template() -> str:
  """The path of a chat template that is shipped: relative in a clone, absolute elsewhere."""
  file = CONFIGS / "chat" / "plain.jinja"
  if file.is_relative_to(os.getcwd()):
    file = file.relative_to(os.getcwd())
  return str(file)


def batches(cfg: Config) -> Violations:
  """The rules on columns, rows and their order."""
  data = cfg.data
  if SOURCES.entry(data.dataset_type).has_text_column and not data.text_column:
    yield Violation(["text_column", "dataset_type"], "is empty; write text_column=text")
  if data.eval_dataset_path and data.dataset_mixture:
    yield Violation(
      ["eval_dataset_path", "dataset_mixture"],
      "write eval_path in the sources of the mixture",
    )
  if data.per_device_batch_size <= 0:
    yield Violation(
      ["per_device_batch_size"],
      "a step needs rows; write per_device_batch_size=1, or a fraction of it",
    )
  if data.enable_data_shuffling:
    return
  if data.data_sampling == "bootstrap":
    yield Violation(
      ["data_sampling", "enable_data_shuffling"],
      "draws rows at random; write enable_data_shuffling=true",
    )
  if cfg.ensemble.ensemble_data != "shared":
    yield Violation(
      ["ensemble_data", "enable_data_shuffling"],
      "members would read the same order; write enable_data_shuffling=true",
    )


def shards(cfg: Config) -> Violations:
  """The rules on text that is tokenized during training."""
  data = cfg.data
  if not data.tokenization_shard_bytes:
    return
  source = SOURCES.entry(data.dataset_type)
  if not (source.is_plain_text or source.has_text_column):
    yield Violation(
      ["tokenization_shard_bytes", "dataset_type"], "is of text; write tokenization_shard_bytes=0"
    )
  if data.dataset_mixture:
    yield Violation(
      ["tokenization_shard_bytes", "dataset_mixture"],
      "is of one source; write tokenization_shard_bytes=0",
    )
  if data.eval_split == "tail" and data.eval_fraction and not data.eval_dataset_path:
    yield Violation(
      ["eval_split", "tokenization_shard_bytes"],
      "the tail is not read first",
      {"eval_split": "documents"},
    )


def megatron(cfg: Config) -> Violations:
  """The rules on the order of Megatron-LM."""
  data = cfg.data
  if not data.megatron_order:
    return
  if not SOURCES.entry(data.dataset_type).has_token_ids and not data.dataset_mixture:
    yield Violation(
      ["megatron_order", "dataset_type"], "is of token files", {"dataset_type": "tokens"}
    )
  if not data.enable_data_shuffling:
    yield Violation(
      ["enable_data_shuffling", "megatron_order"], "shuffles; write enable_data_shuffling=true"
    )
  for key, value in {"data_sampling": "shuffle", "packing_strategy": "concatenate"}.items():
    if flatten(data)[key] != value:
      yield Violation([key, "megatron_order"], "Megatron-LM has no such rows", {key: value})
  if not data.megatron_num_samples:
    yield Violation(
      ["megatron_num_samples", "megatron_order"],
      "its order depends on it; write train_iters x global_batch_size of the job",
    )
  else:
    num_skipped = sum(end - first for first, end in data.skip_rows)
    most = (data.megatron_num_samples - num_skipped) // data.global_batch_size
    if cfg.run.steps > most:
      yield Violation(
        ["megatron_num_samples", "steps"], f"the samples end before the steps; write steps={most}"
      )
  if not _SPLIT.fullmatch(data.megatron_split) or not float(data.megatron_split.split(",")[0]):
    yield Violation(["megatron_split"], "is no list of up to three shares; write 969,30,1")


def megatron_blend(cfg: Config) -> Violations:
  """The rules on mixtures in the order of Megatron-LM."""
  if not cfg.data.megatron_order:
    return
  for source in cfg.data.dataset_mixture:
    for key in sorted({"from_step", "max_epochs"}.intersection(source)):
      yield Violation(["dataset_mixture", "megatron_order"], f"Megatron-LM has no {key}; remove it")


def schedules(cfg: Config) -> Violations:
  """The rules on the schedules of the batch size and of the sequence length."""
  data = cfg.data
  values = flatten(data)
  other = ensemble_key(cfg.ensemble)
  if cfg.phasing.phases:
    other = "phases"
  for key in SCHEDULE_KEYS:
    entries = values[key]
    if not entries:
      continue
    starts = [start for start, _ in entries]
    if starts[0] != 0 or starts != sorted(set(starts)):
      yield Violation([key], f"steps must ascend from 0; write {key}=[[0, 8], [1000, 16]]")
    if any(value < 1 for _, value in entries):
      yield Violation([key], "a step needs tokens; write 1 or more")
    if other:
      yield Violation([key, other], f"all batches must have one shape there; write {key}=[]")
  if data.batch_size_schedule and data.global_batch_size:
    yield Violation(
      ["batch_size_schedule", "global_batch_size"],
      "the schedule replaces the size; write global_batch_size=0",
    )
  for _, length in data.sequence_length_schedule:
    if data.max_target_length % length:
      divisor = largest_divisor(data.max_target_length, length)
      yield Violation(
        ["sequence_length_schedule", "max_target_length"],
        f"{length} is not a divisor; write {divisor}",
      )


def skipped_rows(cfg: Config) -> Violations:
  """The rules on ranges of rows that are not trained on."""
  ends = [0]
  for first, end in cfg.data.skip_rows:
    ends += [first, end]
    if first >= end:
      yield Violation(
        ["skip_rows"], f"[{first}, {end}] has no rows; write [[{first}, {first + 1}]] for one"
      )
  if ends != sorted(ends):
    yield Violation(
      ["skip_rows"], "ranges must ascend from 0 and not overlap; write [[800, 816], [900, 908]]"
    )


def data_files(cfg: Config) -> Violations:
  """The rules on the files of data and of the tokenizer, for commands that read them.

  Commands that open a run read the tokenizer in its folder.
  """
  data = cfg.data
  if data.tokenizer_path and not is_file(data.tokenizer_path):
    yield Violation(["tokenizer_path", "tokenizer_type"], _tokenizer_fix(cfg))
  template = data.chat_template_path
  if template and not is_file(template):
    yield Violation(["chat_template_path"], _template_fix(template))
  if SOURCES.entry(data.dataset_type).is_synthetic:
    return
  if data.dataset_mixture:  # its sources are validated one by one
    return
  if not data.dataset_path:
    yield Violation(["dataset_path"], "has no data", {"dataset_path": "FILE or [stdlib]"})
  for path in data.dataset_path:
    yield from _data_file("dataset_path", path, data.dataset_type)
  for path in data.eval_dataset_path:
    yield from _data_file("eval_dataset_path", path, data.dataset_type)


def _tokenizer_fix(cfg: Config) -> str:
  """What to write instead of a tokenizer_path that is not a file."""
  path = cfg.data.tokenizer_path
  folder = os.path.join(cfg.run.base_output_directory, cfg.run.run_name, FOLDER)
  own = os.path.join(folder, MAIN_FILES.get(cfg.data.tokenizer_type, os.path.basename(path)))
  if path and is_file(own):
    return f"no such file; write tokenizer_path={own}, the copy that the run has"
  for kind, name in MAIN_FILES.items():
    found = os.path.join(path, name)
    if path and is_file(found):
      return f"is a folder; write tokenizer_type={kind} tokenizer_path={found}"
  if _HUB_NAME.fullmatch(path) and not path.endswith((".json", ".model")):
    owner, _, name = path.rpartition("/")
    uri = f"hf://{owner or 'OWNER'}/{name}/tokenizer.json"
    return (
      f"no such file; write tokenizer_type=huggingface tokenizer_path={uri} for the tokenizer of a "
      "model on Hugging Face's hub"
    )
  return "no such file; write tokenizer_path=FILE, or tokenizer_type=byte without a path"


def _template_fix(path: str) -> str:
  """What to write instead of a chat_template_path that is not a file."""
  in_package = CONFIGS.parent / path
  if not os.path.isabs(path) and in_package.is_file():
    return f"no such file in this folder; write chat_template_path={in_package}"
  return "no such file; write chat_template_path=FILE, a Jinja2 template"


def _data_file(key: str, entry: str, dataset_type: str) -> Violations:
  """The rules on one entry of a key: `stdlib`, a URI, a file, a folder or a glob."""
  if entry == "stdlib":
    if not SOURCES.entry(dataset_type).is_plain_text:
      yield Violation([key, "dataset_type"], "stdlib is text", {key: "FILE"})
    return
  path = os.path.expanduser(entry)
  is_uri = "://" in entry  # looked up when it is opened
  if not is_uri and not os.path.exists(path) and not any(expand_glob(path)):
    yield Violation(
      [key], f"{entry} matches no file", {key: "FILE, a folder or a glob that matches"}
    )
  if os.path.isdir(path):
    return
  other = other_dataset_type(entry, dataset_type)
  if other:
    yield Violation([key, "dataset_type"], f"{entry} is of another type", {"dataset_type": other})


DATA_RULES = (
  tokenizer,
  chat,
  columns,
  batches,
  shards,
  megatron,
  megatron_blend,
  schedules,
  skipped_rows,
)
