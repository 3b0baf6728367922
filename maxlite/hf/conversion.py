"""`maxlite.convert`: import and export Hugging Face checkpoints, and upcycle dense runs."""

import collections
import contextlib
import dataclasses
import functools
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from maxlite.checkpoint.chunked_array import ChunkedArray, Index, whole
from maxlite.checkpoint.manager import Checkpoints
from maxlite.checkpoint.parameters import StoredParameters, write_parameters
from maxlite.checkpoint.run_folder import RunFolder
from maxlite.config import Config, UserError, load_config, read_saved, save_keys, save_resolved
from maxlite.config.command_line import without_files
from maxlite.config.file_io import new_folder
from maxlite.config.json_values import Json, JsonObject
from maxlite.config.model_function import EXECUTION
from maxlite.config.object_store import is_remote, join, list_names, local_folder, upload
from maxlite.config.raw_values import show
from maxlite.config.registry import SOURCES
from maxlite.config.schema import DEFAULTS, DataConfig, LoraConfig, build, flatten
from maxlite.config.tokenizer_files import copy_tokenizer
from maxlite.data.sources.chat import open_chat
from maxlite.data.tokenizer import open_tokenizer
from maxlite.hf.hf_checkpoint import params_from_hf, write_weights
from maxlite.hf.hf_config import find_family, has_mtp_tensors, model_keys
from maxlite.hf.hf_folder import read_tensors, shorten_list, write_json
from maxlite.hf.hf_tokenizer import tokenizer_keys, write_tokenizer
from maxlite.hf.load_model import abstract_params
from maxlite.hf.peft_export import write_adapter
from maxlite.hf.text_model import other_parts
from maxlite.hf.upcycle import upcycled_config, upcycled_params
from maxlite.layers.lora import ADAPTER, OPTIONAL_MODULE_KEYS, merge_lora
from maxlite.metrics.waits import report_wait
from maxlite.runs.open_run import checkpoint_step
from maxlite.runs.saved_run import config_of_run, run_folder
from maxlite.sharding.pytree import PyTree

TOKENIZER = ("tokenizer_type", "tokenizer_path")


def run_conversion(command: str, folder: str, argv: Sequence[str]) -> int:
  """Run a command of convert.USAGE and print a line about the result."""
  with report_wait(f"converting ({command})"):
    line = COMMANDS[command](folder, argv)
  sys.stdout.write(f"{line}\n")
  return 0


def from_hf(folder: str, argv: Sequence[str]) -> str:
  """Import the Hugging Face folder `folder` as the run named in `argv`."""
  directory = local_folder(folder)
  family, keys = model_keys(directory)
  tokenizer = tokenizer_keys(directory)
  cfg = load_config(argv, defaults=DEFAULTS | keys | tokenizer, needs_data=False)
  _require_unchanged(keys, flatten(cfg), f"{directory}/config.json")
  target = _new_run(cfg)
  notes = []
  if tokenizer and not SOURCES.entry(cfg.data.dataset_type).is_synthetic:
    opened = open_tokenizer(cfg.data)  # raises if it is damaged
    try:
      open_chat(cfg.data, opened)  # warns if it has no end token
    except UserError as error:
      notes.append(f"conversations cannot be rendered, since {error}")
  abstract = abstract_params(cfg.model)
  not_finite = collections.Counter[str]()
  params = {}
  read = params_from_hf(directory, family, cfg.model, keys["vocab_size"], abstract)
  for path, chunked in read.items():
    counted = functools.partial(_counted, path, chunked, not_finite)
    params[path] = dataclasses.replace(chunked, chunks=counted)
  with _created_at(target) as temporary:
    _write_run(RunFolder(temporary), cfg, (*keys, *TOKENIZER), params)
  notes.insert(0, f"{target}: {_count(abstract):,} parameters of {family.model_type}")
  damaged = {path for path, count in not_finite.items() if count}
  if damaged:
    total = not_finite.total()
    notes.append(f"{total:,} weights are NaN or infinite, in {shorten_list(damaged)}")
  left_out = other_parts(family, read_tensors(directory))
  if left_out:
    notes.append(f"only the text model, without {shorten_list(left_out)}")
  if cfg.model.vocab_size > keys["vocab_size"]:
    notes.append(f"rows {keys['vocab_size']} to {cfg.model.vocab_size} of the vocabulary are zero")
  if not tokenizer and cfg.data.tokenizer_type == "byte":
    notes.append("the folder has no tokenizer.json or tokenizer.model: using byte tokens")
  return "; ".join(notes)


def to_hf(_: str, argv: Sequence[str]) -> str:
  """Export the latest checkpoint of the run named in `argv` to the folder `output_path`."""
  cfg = config_of_run(argv, "maxlite.convert to_hf")
  target = _require_new(os.path.expanduser(cfg.convert.output_path), "output_path")
  model = dataclasses.replace(cfg.model, lora=LoraConfig(), num_draft_heads=0)
  if not has_mtp_tensors(model):
    model = dataclasses.replace(model, mtp_num_layers=0)
  family, of_family = find_family(model)
  hf = {
    "dtype": model.weight_dtype,
    "max_position_embeddings": cfg.data.max_target_length,
    "pad_token_id": None,  # some classes have a default, with which they refuse a small vocabulary
    **of_family,
  }
  stored = _stored_parameters(cfg)
  abstract = abstract_params(model)
  with _created_at(target) as temporary:
    if not SOURCES.entry(cfg.data.dataset_type).is_synthetic:
      hf |= _export_tokenizer(cfg.data, temporary)
    write_json(temporary / "config.json", hf)
    read = functools.partial(read_merged, stored, lora_alpha=cfg.model.lora.lora_alpha)
    write_weights(temporary, family, model, abstract, read)
    stored.verify()
  line = f"{target}: {_count(abstract):,} parameters of {stored.directory} as {family.model_type}"
  if cfg.training.ema_decay:
    line += "; these are the weights, not their moving averages"
  if cfg.model.num_draft_heads:
    line += "; its draft heads are omitted, since this format does not support them"
  if cfg.model.mtp_num_layers > model.mtp_num_layers:
    line += "; its layers of multi-token prediction are omitted, since no such model_type has them"
  return line


def _export_tokenizer(cfg: DataConfig, target: Path) -> JsonObject:
  """Write the tokenizer of a run and return the keys of config.json for its bos and eos."""
  tokenizer = open_tokenizer(cfg)
  chat = open_chat(cfg, tokenizer)
  stop_token_ids = tokenizer.stop_token_ids
  if chat:
    stop_token_ids = chat.stop_token_ids
  return write_tokenizer(cfg, tokenizer.bos, stop_token_ids, target)


def to_peft(folder: str, argv: Sequence[str]) -> str:
  """Export the adapters of the run named in `argv`, for the base model in `folder`."""
  directory = local_folder(folder)
  cfg = config_of_run(argv, "maxlite.convert to_peft")
  target = _require_new(os.path.expanduser(cfg.convert.output_path), "output_path")
  if not cfg.model.lora.lora_rank:
    raise UserError(
      f"the run {run_folder(cfg).place} has no adapters (lora_rank=0): use to_hf, or train it "
      "with lora_rank=8"
    )
  family, keys = model_keys(directory)
  _require_unchanged(keys, flatten(cfg), f"{directory}/config.json")
  base = dataclasses.replace(cfg.model, lora=LoraConfig(), num_draft_heads=0)
  model = dataclasses.replace(base, lora=cfg.model.lora)
  stored = _stored_parameters(cfg)
  base_leaves = {}
  adapters = {}
  for path, leaf in abstract_params(model).items():
    if set(path.split("/")) & set(ADAPTER):
      adapters[path] = leaf
    else:
      base_leaves[path] = leaf
  adapters = _trained(adapters, cfg)
  base_params = params_from_hf(directory, family, base, keys["vocab_size"], base_leaves)
  with _created_at(target) as temporary:
    write_adapter(temporary, family, model, folder, adapters, stored.read)
    _require_same_weights(base_params, stored, directory)
    stored.verify()
  return f"{target}: {_count(adapters):,} parameters of {stored.directory} for {directory}"


def upcycle(_: str, argv: Sequence[str]) -> str:
  """Create the run `output_path`, a mixture of experts, from the dense run named in `argv`."""
  requested = load_config(argv, needs_data=False)
  folder = run_folder(requested)
  if not folder.config.is_file():
    raise UserError(f"there is no run {folder.place}: train it first, or correct run_name")
  dense: Config = build(Config, read_saved(folder.config, requested))
  stored = _stored_parameters(requested)
  cfg = upcycled_config(dense, without_files(argv), requested.convert.output_path)
  target = _new_run(cfg)
  abstract = abstract_params(cfg.model)
  read = functools.partial(read_merged, stored, lora_alpha=dense.model.lora.lora_alpha)
  params = upcycled_params(stored, read, abstract, cfg)
  names = [name for name in flatten(cfg.model) if name not in EXECUTION | OPTIONAL_MODULE_KEYS]
  with _created_at(target) as temporary:
    _write_run(RunFolder(temporary), cfg, (*names, *TOKENIZER), params)
    stored.verify()
  return f"{target}: {_count(abstract):,} parameters of {stored.directory}"


COMMANDS = {"from_hf": from_hf, "to_hf": to_hf, "to_peft": to_peft, "upcycle": upcycle}


def read_merged(stored: StoredParameters, path: str, index: Index, lora_alpha: float) -> np.ndarray:
  """Read a layer of a parameter and merge its LoRA adapter, if there is one."""
  part = stored.read(path, index)
  parent, _, name = path.rpartition("/")
  if f"{parent}/{ADAPTER[0]}/{name}" not in stored.leaves:
    return part
  is_layer = stored.leaves[path]["shape"][0] > index[0].stop - index[0].start
  layer: Index = ()
  if is_layer:
    layer = index[:1]
  module: dict[str, PyTree] = {name: part}
  for factor in ADAPTER:
    adapter = f"{parent}/{factor}/{name}"
    rest = whole(stored.leaves[adapter]["shape"][len(layer) :])
    module[factor] = {name: jax.numpy.asarray(stored.read(adapter, (*layer, *rest)))}
  return np.asarray(merge_lora(module, lora_alpha)[name])


def _trained(
  adapters: Mapping[str, jax.ShapeDtypeStruct], cfg: Config
) -> dict[str, jax.ShapeDtypeStruct]:
  """Return the adapters that were trained: their second matrix is not zero."""
  stored = _stored_parameters(cfg)  # a separate reader, since `verify` counts every read
  found = {}
  for path, leaf in adapters.items():
    second = path.replace("/lora_a/", "/lora_b/")
    if stored.read(second, whole(adapters[second].shape)).any():
      found[path] = leaf
  if not found:
    raise UserError(f"no adapter of {run_folder(cfg).place} was trained: train it first")
  return found


def _require_same_weights(
  params: Mapping[str, ChunkedArray], stored: StoredParameters, directory: Path
) -> None:
  """Raise UserError unless the stored parameters have the bits of `params`."""
  for path, chunked in params.items():
    for index, chunk in chunked.chunks():
      if stored.read(path, index).tobytes() != chunk.tobytes():
        raise UserError(
          f"the base weights in {directory} differ from those the adapters were trained on "
          f"({path}): name the folder that the run was imported from, or, if more than adapters "
          "was trained, use to_hf, which merges them"
        )


def _require_unchanged(keys: Mapping[str, Json], flat: Mapping[str, Json], file: str) -> None:
  """Raise UserError unless `flat` has the values of `keys`.

  Its vocabulary may be larger, and it may have fewer layers of multi-token prediction.
  """
  for name, value in keys.items():
    found = flat[name]
    if name == "vocab_size":
      is_allowed = found >= value
      remedy = "use that or more"
    elif name == "mtp_num_layers":
      is_allowed = found <= value
      remedy = "use that or less"
    else:
      is_allowed = found == value
      remedy = "use that"
    if not is_allowed:
      raise UserError(f"{name}={show(found)}, but {file} has {show(value)}: {remedy}")


def _counted(
  path: str, chunked: ChunkedArray, not_finite: collections.Counter
) -> Iterator[tuple[Index, np.ndarray]]:
  """Yield the chunks, and add the number of elements that are not finite to `not_finite[path]`."""
  for index, chunk in chunked.chunks():
    not_finite[path] += int(np.count_nonzero(~np.isfinite(chunk)))
    yield index, chunk


def _new_run(cfg: Config) -> str:
  """Return the place of a run that does not exist yet."""
  return _require_new(run_folder(cfg).place, "run_name")


def _require_new(path: str, key: str) -> str:
  """Return `path`, the value of `key`; raise UserError if something is there."""
  exists = bool(list_names(path)) if is_remote(path) else os.path.lexists(path)
  if exists:
    raise UserError(f"{path} already exists: choose another {key}, or move it away")
  return path


def _stored_parameters(cfg: Config) -> StoredParameters:
  """Return the parameters of the run's checkpoint that `cfg` selects, by default the latest."""
  checkpoints = Checkpoints(cfg.checkpoint, run_folder(cfg).checkpoints, report=lambda line: None)
  step = checkpoint_step(run_folder(cfg), cfg.checkpoint.load_checkpoint)
  return StoredParameters(*checkpoints.stored(step))


def _write_run(
  folder: RunFolder, cfg: Config, fixed: Sequence[str], params: Mapping[str, ChunkedArray]
) -> None:
  """Write a run that starts from `params` and keeps the keys `fixed`, whatever files set later."""
  copy_tokenizer(flatten(cfg), folder.directory)
  save_resolved(cfg, folder.config)
  save_keys(cfg, fixed, folder.model)
  write_parameters(folder.checkpoints.absolute() / "0", params)


@contextlib.contextmanager
def _created_at(place: str) -> Iterator[Path]:
  """Yield a new folder that is renamed to `place` on success and removed on failure.

  On an object store it is copied there; the files of the folder itself, such as the config, last.
  """
  if is_remote(place):
    with tempfile.TemporaryDirectory() as temporary:
      folder = Path(temporary)
      yield folder
      files = [file for file in folder.rglob("*") if file.is_file()]
      files.sort(key=lambda file: file.parent == folder)
      upload((file, join(place, file.relative_to(folder).as_posix())) for file in files)
  else:
    with new_folder(Path(place)) as folder:
      yield folder


def _count(params: Mapping[str, jax.ShapeDtypeStruct]) -> int:
  """Return the number of elements of {path: array}."""
  return sum(math.prod(leaf.shape) for leaf in params.values())
