"""`maxlite.convert`: import and export Hugging Face checkpoints, and upcycle dense runs."""

import collections
import contextlib
import dataclasses
import functools
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from maxlite.checkpoint.chunked_array import ChunkedArray, Index, whole
from maxlite.checkpoint.manager import Checkpoints
from maxlite.checkpoint.parameters import StoredParameters, write_parameters
from maxlite.checkpoint.run_folder import RunFolder
from maxlite.config import Config, load_config, read_saved, save_keys, save_resolved
from maxlite.config.command_line import without_files
from maxlite.config.model_function import ADDED_MODULES, EXECUTION
from maxlite.config.raw_values import show
from maxlite.config.schema import DEFAULTS, DataConfig, LoraConfig, ModelConfig, build, flatten
from maxlite.data.sources.chat import open_chat
from maxlite.data.tokenizer import open_tokenizer
from maxlite.data.tokenizer_config import read_tokenizer_config
from maxlite.data.vocabulary_check import check_vocabulary
from maxlite.errors import UserError, write_line
from maxlite.hf.family import HfFamily
from maxlite.hf.hf_checkpoint import params_from_hf, write_weights
from maxlite.hf.hf_config import exported_config, has_mtp_tensors, model_keys
from maxlite.hf.hf_folder import ADAPTER_CONFIG, read_tensors, shorten_list, write_json
from maxlite.hf.hf_tokenizer import tokenizer_keys, write_tokenizer
from maxlite.hf.import_source import read_source, write_source
from maxlite.hf.load_model import abstract_params
from maxlite.hf.peft_export import write_adapter
from maxlite.hf.peft_import import PeftAdapter
from maxlite.hf.tensor_mapping import tensor_mappings
from maxlite.hf.text_model import other_parts
from maxlite.hf.upcycle import upcycled_config, upcycled_params
from maxlite.layers.lora import ADAPTER, merge_lora
from maxlite.metrics.waits import report_wait
from maxlite.registry import SOURCES
from maxlite.runs.saved_run import config_of_run, run_folder
from maxlite.sharding.pytree import PyTree
from maxlite.storage.file_io import new_folder
from maxlite.storage.json_values import Json, JsonObject
from maxlite.storage.object_store import (
  is_remote,
  join,
  list_names,
  local_folder,
  local_tokenizer,
  upload,
)
from maxlite.storage.tokenizer_files import copy_tokenizer
from maxlite.training.model_weights import checkpoint_step

TOKENIZER = ("tokenizer_type", "tokenizer_path")
# Keys that training takes from the import if it sets them.
CHOSEN = ("dtype", "weight_dtype", "add_bos")


def run_conversion(command: str, folders: Sequence[str], argv: Sequence[str]) -> int:
  """Run a command of convert.USAGE and print a line about the result."""
  with report_wait(f"converting ({command})"):
    line = COMMANDS[command](*folders, argv)
  write_line(line, sys.stdout)
  return 0


def from_peft(adapter: str, folder: str, argv: Sequence[str]) -> str:
  """Import the Hugging Face folder `folder` with an adapter of peft as the run named in `argv`."""
  return from_hf(folder, argv, PeftAdapter(local_folder(adapter)))


def from_hf(folder: str, argv: Sequence[str], adapter: PeftAdapter | None = None) -> str:
  """Import the Hugging Face folder `folder`, with `adapter`, as the run named in `argv`."""
  directory = local_folder(folder)
  family, keys = model_keys(directory)
  tokenizer = tokenizer_keys(directory)
  lora: JsonObject = {}
  if adapter:
    lora = adapter.keys
    tokenizer = tokenizer_keys(adapter.directory) or tokenizer
  cfg = load_config(argv, defaults=DEFAULTS | keys | tokenizer | lora, needs_data=False)
  _require_unchanged(keys, flatten(cfg), f"{directory}/config.json")
  target = _new_run(cfg)
  notes = []
  if tokenizer and not SOURCES.entry(cfg.data.dataset_type).is_synthetic:
    notes = _tokenizer_notes(cfg)
  abstract = abstract_params(cfg.model)
  not_finite = collections.Counter[str]()
  params = {}
  read = _read_weights(directory, family, cfg, keys["vocab_size"], adapter)
  for path, chunked in read.items():
    counted = functools.partial(_counted, path, chunked, not_finite)
    params[path] = dataclasses.replace(chunked, chunks=counted)
  with _created_at(target) as temporary:
    _write_run(RunFolder(temporary), cfg, (*keys, *lora, *TOKENIZER), params)
    write_source(RunFolder(temporary), directory, family, cfg.model)
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


def _read_weights(
  directory: Path, family: HfFamily, cfg: Config, vocab_size: int, adapter: PeftAdapter | None
) -> dict[str, ChunkedArray]:
  """Return {path: parameter} of the model in `directory`, and of its adapter."""
  if adapter is None:
    return params_from_hf(directory, family, cfg.model, vocab_size, abstract_params(cfg.model))
  _require_unchanged(adapter.keys, flatten(cfg), f"{adapter.directory}/{ADAPTER_CONFIG}")
  base, adapters = _split_adapters(abstract_params(cfg.model))
  read = params_from_hf(directory, family, cfg.model, vocab_size, base)
  mappings = tensor_mappings(family, cfg.model, base)
  return read | adapter.read(family, cfg.model, mappings, adapters)


def _tokenizer_notes(cfg: Config) -> list[str]:
  """Return what keeps the tokenizer from being used; raise UserError if it is damaged."""
  tokenizer = open_tokenizer(cfg.data)
  notes = []
  try:
    check_vocabulary(tokenizer, cfg.model.vocab_size)
  except UserError as error:
    notes.append(f"{error} in another import, before it can be used")
  try:
    open_chat(cfg.data, tokenizer)  # warns if it has no end token
  except UserError as error:
    notes.append(f"conversations cannot be rendered, since {error}")
  return notes


def to_hf(argv: Sequence[str]) -> str:
  """Export the latest checkpoint of the run named in `argv` to the folder `output_path`."""
  cfg = config_of_run(argv, "maxlite.convert to_hf")
  target = _require_new(os.path.expanduser(cfg.convert.output_path), "output_path")
  model = dataclasses.replace(cfg.model, lora=LoraConfig(), num_draft_heads=0)
  if not has_mtp_tensors(model):
    model = dataclasses.replace(model, mtp_num_layers=0)
  stored = _stored_parameters(cfg)
  is_trained = stored.directory.name != "0"
  source = read_source(run_folder(cfg), cfg)
  family, hf, is_imported = exported_config(
    model, source.config, cfg.data.max_target_length, is_trained=is_trained
  )
  name = "torch_dtype" if "torch_dtype" in hf else "dtype"  # the name in older files
  hf[name] = model.weight_dtype
  # A separate reader, since `verify` counts every read.
  abstract = source.with_types(abstract_params(model), _stored_parameters(cfg))
  with _created_at(target) as temporary:
    if not SOURCES.entry(cfg.data.dataset_type).is_synthetic:
      hf |= _export_tokenizer(cfg.data, temporary, is_imported=is_imported, is_trained=is_trained)
    write_json(temporary / "config.json", hf)

    def read(path: str, index: Index) -> np.ndarray:
      part = read_merged(stored, path, index, cfg.model.lora.lora_alpha)
      return part.astype(abstract[path].dtype)

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


def _export_tokenizer(
  cfg: DataConfig, target: Path, *, is_imported: bool, is_trained: bool
) -> JsonObject:
  """Write the tokenizer of a run and return keys of config.json for its bos and eos.

  Those of an imported config.json are kept, unless the model was trained to stop at other tokens.
  """
  tokenizer = open_tokenizer(cfg)
  chat = open_chat(cfg, tokenizer)
  stop_token_ids = tokenizer.stop_token_ids
  if chat:
    stop_token_ids = chat.stop_token_ids
  keeps_ids = is_imported and bool(cfg.tokenizer_path)  # else tokens are bytes
  if keeps_ids and is_trained:
    named = read_tokenizer_config(local_tokenizer(cfg.tokenizer_path).parent).ids["eos_token"]
    keeps_ids = set(stop_token_ids) <= set(named)
  return write_tokenizer(cfg, tokenizer.bos, stop_token_ids, target, keeps_ids=keeps_ids)


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
  base_leaves, adapters = _split_adapters(abstract_params(model))
  adapters = _trained(adapters, cfg)
  base_params = params_from_hf(directory, family, base, keys["vocab_size"], base_leaves)
  with _created_at(target) as temporary:
    write_adapter(temporary, family, model, folder, adapters, stored.read)
    _require_same_weights(base_params, stored, directory)
    stored.verify()
  return f"{target}: {_count(adapters):,} parameters of {stored.directory} for {directory}"


def upcycle(argv: Sequence[str]) -> str:
  """Create the run `output_path`, a mixture of experts, from the dense run named in `argv`."""
  requested = load_config(argv, needs_data=False)
  folder = run_folder(requested)
  if not folder.config.is_file():
    raise UserError(f"there is no run {folder.place}: train it first, or correct run_name")
  dense: Config = build(Config, read_saved(folder.config, requested))
  stored = _stored_parameters(requested, dense.model)
  cfg = upcycled_config(dense, without_files(argv), requested.convert.output_path)
  target = _new_run(cfg)
  abstract = abstract_params(cfg.model)
  read = functools.partial(read_merged, stored, lora_alpha=dense.model.lora.lora_alpha)
  params = upcycled_params(stored, read, abstract, cfg)
  names = [name for name in flatten(cfg.model) if name not in EXECUTION | ADDED_MODULES]
  with _created_at(target) as temporary:
    _write_run(RunFolder(temporary), cfg, (*names, *TOKENIZER), params)
    stored.verify()
  return f"{target}: {_count(abstract):,} parameters of {stored.directory}"


COMMANDS: dict[str, Callable[..., str]] = {
  "from_hf": from_hf,
  "from_peft": from_peft,
  "to_hf": to_hf,
  "to_peft": to_peft,
  "upcycle": upcycle,
}


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


def _split_adapters(
  params: Mapping[str, jax.ShapeDtypeStruct],
) -> tuple[dict[str, jax.ShapeDtypeStruct], dict[str, jax.ShapeDtypeStruct]]:
  """Split {path: array} into (parameters of the base model, parameters of adapters)."""
  base = {}
  adapters = {}
  for path, leaf in params.items():
    if set(path.split("/")) & set(ADAPTER):
      adapters[path] = leaf
    else:
      base[path] = leaf
  return base, adapters


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


def _stored_parameters(cfg: Config, model: ModelConfig | None = None) -> StoredParameters:
  """Return the parameters of the run's checkpoint that `cfg` selects, by default the latest."""
  checkpoints = Checkpoints(
    cfg.checkpoint,
    run_folder(cfg).checkpoints,
    report=lambda line: None,
    model=model or cfg.model,
    allow_changes=cfg.run.allow_changes,
  )
  step = checkpoint_step(run_folder(cfg), cfg.checkpoint.load_checkpoint)
  return StoredParameters(*checkpoints.stored(step))


def _write_run(
  folder: RunFolder, cfg: Config, fixed: Sequence[str], params: Mapping[str, ChunkedArray]
) -> None:
  """Write a run that starts from `params` and keeps the keys `fixed`, whatever files set later."""
  values = flatten(cfg)
  copy_tokenizer(values, folder.directory)
  save_resolved(cfg, folder.config)
  chosen = [name for name in CHOSEN if values[name] != DEFAULTS[name] and name not in fixed]
  save_keys(cfg, [*fixed, *chosen], folder.model)
  write_parameters(folder.checkpoints.absolute() / "0", params, cfg.model)


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
