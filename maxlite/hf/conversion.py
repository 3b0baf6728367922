"""Runs made of Hugging Face's folders, and folders of runs; dense runs made mixtures of experts."""

import dataclasses
import math
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxlite.checkpoint.chunked_array import ChunkedArray, Index
from maxlite.checkpoint.manager import Checkpoints
from maxlite.checkpoint.parameters import StoredParameters, write_parameters
from maxlite.checkpoint.run_folder import RunFolder
from maxlite.config import (
  Config,
  exit_on_user_error,
  load_config,
  read_saved,
  save_keys,
  save_resolved,
)
from maxlite.config.errors import UserError
from maxlite.config.raw_values import show
from maxlite.config.schema import DEFAULTS, LoraConfig, build, flatten
from maxlite.data.sources.chat import open_chat
from maxlite.data.tokenizers.tokenizer import open_tokenizer
from maxlite.hf.hf_checkpoint import streams_from_hf, write_weights
from maxlite.hf.hf_config import EXECUTION, family_that_says, model_keys
from maxlite.hf.hf_folder import write_json
from maxlite.hf.hf_tokenizer import copy_tokenizer, tokenizer_keys, write_tokenizer
from maxlite.hf.load_model import abstract_params
from maxlite.hf.peft_export import write_adapter
from maxlite.hf.upcycle import upcycled_config, upcycled_streams
from maxlite.layers.lora import ADAPTER, OPTIONAL_MODULE_KEYS, merge_lora
from maxlite.training.open_run import config_of_run, run_folder

TOKENIZER = ("tokenizer_type", "tokenizer_path")


def run_conversion(verb: str, folder: str, argv: Sequence[str]) -> int:
  """Does what `verb` says (convert.USAGE) and prints what came of it."""
  with exit_on_user_error("maxlite.convert"):
    line = OF_FOLDERS[verb](folder, argv) if verb in OF_FOLDERS else VERBS[verb](argv)
  sys.stdout.write(f"{line}\n")
  return 0


def from_hf(folder: str, argv: Sequence[str]) -> str:
  """Makes the run that `argv` names of the weights in `folder`."""
  directory = Path(folder).expanduser()
  family, keys, unread = model_keys(directory)
  tokenizer = tokenizer_keys(directory)
  cfg = load_config(argv, defaults=DEFAULTS | keys | tokenizer, needs_data=False)
  _require_kept(keys, flatten(cfg), f"{directory}/config.json")
  target = _new_run(cfg)
  params = abstract_params(cfg.model)
  streams = streams_from_hf(directory, family, cfg.model, keys["vocab_size"], params)
  path = cfg.data.tokenizer_path
  copied = bool(path) and path == tokenizer.get("tokenizer_path")
  if copied:
    path = str(target.tokenizer / Path(path).name)
    cfg = dataclasses.replace(cfg, data=dataclasses.replace(cfg.data, tokenizer_path=path))

  def write(made: RunFolder) -> None:
    _write_run(made, cfg, {name: flatten(cfg)[name] for name in (*keys, *TOKENIZER)}, streams)
    if copied:
      copy_tokenizer(directory, made.tokenizer)

  _write_whole(target.directory, lambda made: write(RunFolder(made)))
  notes = [f"{target.directory}: {_count(params):,} parameters of {family.model_type}"]
  if cfg.model.vocab_size > keys["vocab_size"]:
    notes.append(f"rows {keys['vocab_size']} to {cfg.model.vocab_size} of the vocabulary are zero")
  if not tokenizer and cfg.data.tokenizer_type == "byte":
    notes.append("no tokenizer.json or tokenizer.model there, so its tokens are taken for bytes")
  if unread:
    notes.append(f"config.json also has {unread}, which maxlite does not read")
  return "; ".join(notes)


def to_hf(argv: Sequence[str]) -> str:
  """Writes the newest checkpoint of the run that `argv` names into the folder `output_path`."""
  cfg = config_of_run(load_config(argv, needs_data=False), argv)
  target = _new_folder(cfg)
  model = dataclasses.replace(cfg.model, lora=LoraConfig(), num_draft_heads=0)
  family, hf = family_that_says(model)
  stored = _stored(cfg)
  params = abstract_params(model)
  length = {"max_position_embeddings": cfg.data.max_target_length}
  hf = {"dtype": model.weight_dtype} | length | hf
  tokenizer = None if cfg.data.dataset_type == "synthetic" else open_tokenizer(cfg.data)
  chat = open_chat(cfg.data, tokenizer) if tokenizer else None

  def write(made: Path) -> None:
    told = {}
    if tokenizer:
      ends = (chat or tokenizer).stop_token_ids
      told = write_tokenizer(cfg.data, tokenizer.bos, ends, made)
    write_json(made / "config.json", hf | told)
    read = lambda path, index: read_merged(stored, path, index, cfg.model.lora.lora_alpha)
    write_weights(made, family, model, params, read)
    stored.verify()

  _write_whole(target, write)
  line = f"{target}: {_count(params):,} parameters of {stored.directory} as {family.model_type}"
  if cfg.model.num_draft_heads:
    line += "; its draft heads are left out, for which this format has no place"
  return line


def to_peft(folder: str, argv: Sequence[str]) -> str:
  """Writes the adapters of the run that `argv` names, which add to the weights in `folder`."""
  directory = Path(folder).expanduser()
  cfg = config_of_run(load_config(argv, needs_data=False), argv)
  target = _new_folder(cfg)
  if not cfg.model.lora.lora_rank:
    raise UserError(
      f"the run {run_folder(cfg).directory} has no adapters (lora_rank=0): write to_hf, or train "
      "it with lora_rank=8"
    )
  family, keys, _ = model_keys(directory)
  _require_kept(keys, flatten(cfg), f"{directory}/config.json")
  base = dataclasses.replace(cfg.model, lora=LoraConfig(), num_draft_heads=0)
  model = dataclasses.replace(base, lora=cfg.model.lora)
  stored, params = _stored(cfg), abstract_params(model)
  kept = {path: leaf for path, leaf in params.items() if not set(path.split("/")) & set(ADAPTER)}
  adapters = _of_effect({path: leaf for path, leaf in params.items() if path not in kept}, cfg)
  streams = streams_from_hf(directory, family, base, keys["vocab_size"], kept)

  def write(made: Path) -> None:
    write_adapter(made, family, model, folder, adapters, stored.read)
    _require_untrained(streams, stored, directory)
    stored.verify()

  _write_whole(target, write)
  return f"{target}: {_count(adapters):,} parameters of {stored.directory} for {directory}"


def _of_effect(adapters: Mapping[str, Any], cfg: Config) -> dict[str, Any]:
  """Those of `adapters` that add anything: one whose second layer is zero was never trained."""
  stored = _stored(cfg)

  def adds(path: str) -> bool:
    second = path.replace("/lora_a/", "/lora_b/")
    return bool(stored.read(second, tuple(slice(0, n) for n in adapters[second].shape)).any())

  found = {path: leaf for path, leaf in adapters.items() if adds(path)}
  if not found:
    raise UserError(f"no adapter of {run_folder(cfg).directory} was trained: train it first")
  return found


def _require_untrained(
  streams: Mapping[str, ChunkedArray], stored: StoredParameters, directory: Path
) -> None:
  """Raises UserError unless the stored parameters are those of `streams`, to the bit."""
  for path, stream in streams.items():
    for index, part in stream.chunks():
      if stored.read(path, index).tobytes() != part.tobytes():
        raise UserError(
          f"{directory} has other weights than those the adapters stand beside ({path}): name the "
          "folder that the run was made of, or, if more than adapters was trained, write to_hf, "
          "which merges them"
        )


def upcycle(argv: Sequence[str]) -> str:
  """Makes a mixture of experts, the run `output_path`, of the dense run that `argv` names."""
  asked = load_config(argv, needs_data=False)
  folder = run_folder(asked)
  if not folder.config.is_file():
    raise UserError(f"there is no run {folder.directory}: train it first, or correct run_name")
  dense: Config = build(Config, read_saved(folder.config))
  stored = _stored(asked)
  cfg = upcycled_config(dense, argv, _output(asked))
  target = _new_run(cfg)
  params = abstract_params(cfg.model)
  streams = upcycled_streams(stored, params, cfg)
  flat = flatten(cfg)
  fixed = [name for name in flatten(cfg.model) if name not in EXECUTION | OPTIONAL_MODULE_KEYS]

  def write(made: Path) -> None:
    _write_run(RunFolder(made), cfg, {name: flat[name] for name in (*fixed, *TOKENIZER)}, streams)
    stored.verify()

  _write_whole(target.directory, write)
  return f"{target.directory}: {_count(params):,} parameters of {stored.directory}"


VERBS: dict[str, Callable[[Sequence[str]], str]] = {"to_hf": to_hf, "upcycle": upcycle}
OF_FOLDERS = {"from_hf": from_hf, "to_peft": to_peft}


def _output(cfg: Config) -> str:
  if not cfg.convert.output_path:
    raise UserError("output_path is missing: write output_path=NAME for what is to be made")
  return cfg.convert.output_path


def _new_folder(cfg: Config) -> Path:
  target = Path(_output(cfg)).expanduser()
  if target.exists():
    raise UserError(f"output_path={target} is there already: choose another, or move it away")
  return target


def _new_run(cfg: Config) -> RunFolder:
  folder = run_folder(cfg)
  if folder.directory.exists():
    raise UserError(f"{folder.directory} is there already: choose another run_name")
  return folder


def _stored(cfg: Config) -> StoredParameters:
  """The newest checkpoint's parameters of the run that `cfg` names."""
  checkpoints = Checkpoints(cfg.checkpoint, run_folder(cfg).checkpoints, report=lambda line: None)
  return StoredParameters(*checkpoints.latest())


def _require_kept(keys: Mapping[str, Any], flat: Mapping[str, Any], file: str) -> None:
  """Raises UserError where the command line would make another model of the weights."""
  for name, value in keys.items():
    if name == "vocab_size" and flat[name] >= value:
      continue
    if flat[name] != value:
      more = " or more" if name == "vocab_size" else ""
      raise UserError(f"{name}={show(flat[name])}, but {file} says {show(value)}: write that{more}")


def _write_run(
  folder: RunFolder, cfg: Config, fixed: Mapping[str, Any], streams: Mapping[str, ChunkedArray]
) -> None:
  """Writes a run that starts from `streams`, and keeps the keys `fixed` whatever files say."""
  save_resolved(cfg, folder.config)
  save_keys(fixed, folder.model)
  write_parameters(folder.checkpoints.absolute() / "0", streams)


def _write_whole(target: Path, write: Callable[[Path], None]) -> None:
  """Has `write` fill a folder that becomes `target` when it is done, or leaves nothing behind."""
  made = target.with_name(f".{target.name}.{os.getpid()}")
  try:
    made.mkdir(parents=True)
    write(made)
    made.rename(target)
  except BaseException:
    shutil.rmtree(made, ignore_errors=True)
    raise


def read_merged(stored: StoredParameters, path: str, index: Index, lora_alpha: float) -> np.ndarray:
  """A layer of a parameter, with the low-rank adapter beside it added, if there is one."""
  part = stored.read(path, index)
  beside = path.removesuffix("kernel")
  if f"{beside}lora_a/kernel" not in stored.leaves:
    return part
  layer = index[: 1 if stored.leaves[path]["shape"][0] > index[0].stop - index[0].start else 0]

  def adapter(name: str) -> np.ndarray:
    own = f"{beside}{name}/kernel"
    rest = stored.leaves[own]["shape"][len(layer) :]
    return stored.read(own, (*layer, *(slice(0, size) for size in rest)))

  pair = {name: {"kernel": jax.numpy.asarray(adapter(name))} for name in ("lora_a", "lora_b")}
  return np.asarray(merge_lora({"kernel": part, **pair}, lora_alpha)["kernel"])


def _count(params: Mapping[str, Any]) -> int:
  return sum(math.prod(leaf.shape) for leaf in params.values())
