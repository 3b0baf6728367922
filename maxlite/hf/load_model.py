"""Load a model and its parameters from a run folder or a Hugging Face folder."""

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import traverse_util
from jax.sharding import Mesh
from jax.typing import ArrayLike

from maxlite.checkpoint.checksum import leaves_by_path
from maxlite.checkpoint.chunked_array import to_array
from maxlite.checkpoint.run_folder import RunFolder
from maxlite.config import Config, load_config
from maxlite.config.raw_values import show
from maxlite.config.schema import (
  DEFAULTS,
  FLOAT_TYPES,
  MESH_AXES,
  DataConfig,
  ModelConfig,
  OptimizerConfig,
  build,
)
from maxlite.data.batch import token_ids
from maxlite.errors import UserError
from maxlite.hf.hf_checkpoint import open_weights, params_from_hf
from maxlite.hf.hf_config import model_keys
from maxlite.models.decoder import Decoder
from maxlite.sharding import Sharder
from maxlite.sharding.pytree import PyTree
from maxlite.storage.object_store import HUB, local_folder
from maxlite.training.model_weights import ModelWeights, RunWeights
from maxlite.training.program import Program, build_program
from maxlite.training.spec import spec_of


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedModel:
  """A decoder on its mesh."""

  cfg: ModelConfig
  decoder: Decoder
  sharder: Sharder

  def apply(
    self,
    params: Mapping[str, PyTree],
    tokens_BT: ArrayLike,
    *,
    segment_ids: jax.Array | None = None,
    positions: jax.Array | None = None,
  ) -> jax.Array:
    """Return logits_BTV, float32.

    Args:
      params: from `load`, also as {"params": params}.
      segment_ids: [B, T], numbers from 1 for packed documents and 0 for padding; by default a row
        is one document.
      positions: [B, T], from 0 within each document.

    Raises:
      UserError: `tokens_BT` is not an array of JAX, and has ids outside the vocabulary.
    """
    if not isinstance(tokens_BT, jax.Array):  # JAX would cast ids to int32, and clamp them
      tokens_BT = token_ids("tokens", tokens_BT, self.cfg.vocab_size)
    variables: Mapping[str, PyTree] = {"params": params}
    if set(params) == {"params"}:
      variables = params
    arrays = jax.tree.map(jnp.asarray, (tokens_BT, segment_ids, positions))  # None stays None
    logits_BTV: PyTree = self.decoder.apply(variables, *arrays)
    return logits_BTV


def load(
  path: str | Path,
  *,
  dtype: str | None = None,
  mesh: Mesh | Mapping[str, int] | None = None,
  plugins: Sequence[str] = (),
  trust_plugins: bool = False,
  member: str = "",
) -> tuple[LoadedModel, dict[str, PyTree]]:
  """Return (model, parameters) of a run's latest checkpoint or of a folder with config.json.

  The parameters are those that were trained, not their moving averages.

  Args:
    path: the run folder, or the folder with config.json.
    dtype: the type of parameters and activations, `float32` or `bfloat16`. The default is the
      run's; for a Hugging Face folder bfloat16 if it holds all weights exactly, else float32.
    mesh: {mesh axis: size}, such as {"fsdp": 8}, or a Mesh with such axes; default: one device.
    plugins: the plug-ins that the run needs. They are code, so the run alone cannot import them.
    trust_plugins: import the plug-ins that the run names.
    member: which member of an ensemble; `best` is the one with the lowest held-out loss.

  Raises:
    UserError: the folder is neither, or damaged, or needs plug-ins.
  """
  path = str(path)
  name = None
  if dtype is not None:
    name = jnp.dtype(dtype).name
    if name not in FLOAT_TYPES:
      raise UserError(f"dtype={dtype}: choose one of {', '.join(FLOAT_TYPES)}")
  keys = {"plugins": json.dumps(list(map(str, plugins))), "trust_plugins": show(trust_plugins)}
  command = load_config([f"{key}={value}" for key, value in keys.items()])
  folder, run = open_folder(path)
  if member and run:
    run = run.member(member)
    folder = run.directory
  if run and run.member_names():
    first = run.member_names()[0]
    raise UserError(f"{path} is an ensemble: load a member, with member=best or member={first}")
  if run and run.config.is_file():
    program, params = _load_run(run, name, mesh, command)
  elif (folder / "config.json").is_file():
    program, params = _load_hf(folder, name, mesh)
  else:
    raise UserError(f"{path} is not a run folder (config.yml) and has no config.json: correct it")
  return LoadedModel(program.spec.model, program.model, program.sharder), params


def open_folder(path: str) -> tuple[Path, RunFolder | None]:
  """Return (folder on this machine, run folder, unless `path` is of the Hugging Face Hub)."""
  if path.startswith(HUB):
    return local_folder(path), None
  run = RunFolder(os.path.expanduser(path))
  return run.directory, run


def program_of_model(
  model: ModelConfig,
  mesh: Mesh | Mapping[str, int] | None = None,
  optimizer: OptimizerConfig | None = None,
) -> Program:
  """Build a Program of `model` on `mesh` or one device, by default with the default optimizer."""
  degrees, devices = _devices(mesh)
  keys = {f"ici_{axis}_parallelism": degrees.get(axis, 1) for axis in MESH_AXES}
  keys |= {"dcn_data_parallelism": 1, "sharding_tolerance": 1}
  cfg: Config = build(Config, DEFAULTS | keys)
  num_later = max(model.num_draft_heads, model.mtp_num_layers)
  length = 2 * max(degrees.get("context", 1), num_later + 1)
  cfg = dataclasses.replace(
    cfg,
    model=model,
    data=DataConfig(max_target_length=length, per_device_batch_size=1),
    optimizer=optimizer or cfg.optimizer,
  )
  return build_program(spec_of(cfg), devices)


def abstract_params(model: ModelConfig) -> dict[str, jax.ShapeDtypeStruct]:
  """Return {path: abstract array} of the model's parameters."""
  return leaves_by_path(program_of_model(model).abstract_state.params)


def _devices(mesh: Mesh | Mapping[str, int] | None) -> tuple[dict[str, int], Sequence[jax.Device]]:
  """Return ({mesh axis: size}, devices) of a mesh, of sizes by axis, or of one device if None.

  Raises:
    UserError: an axis is unknown, or there are fewer devices than the sizes need.
  """
  degrees: dict[str, int] = {}
  if isinstance(mesh, Mesh):
    degrees = dict(mesh.shape)
  elif mesh is not None:
    degrees = dict(mesh)
  unknown = set(degrees) - set(MESH_AXES)
  if unknown:
    raise UserError(
      f"mesh has the axes {', '.join(sorted(unknown))}; choose from {', '.join(MESH_AXES)}"
    )
  if isinstance(mesh, Mesh):
    return degrees, list(mesh.devices.flat)
  num_devices = math.prod(degrees.values())
  if num_devices > len(jax.devices()):
    raise UserError(f"mesh={degrees} needs {num_devices} devices, of {len(jax.devices())} here")
  return degrees, jax.devices()[:num_devices]


def _load_run(
  folder: RunFolder, dtype: str | None, mesh: Mesh | Mapping[str, int] | None, command: Config
) -> tuple[Program, dict[str, PyTree]]:
  """Return (program, parameters) of a run's checkpoint, in `dtype` if it is given."""
  weights = RunWeights(folder.place, command)
  model = weights.model
  if dtype:
    model = dataclasses.replace(model, dtype=dtype, weight_dtype=dtype)
  program = program_of_model(model, mesh)
  params = weights.read(program_of_model(weights.model, mesh))
  abstract = program.abstract_state.params
  return program, jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), params, abstract)


def _load_hf(
  folder: Path, dtype: str | None, mesh: Mesh | Mapping[str, int] | None
) -> tuple[Program, dict[str, PyTree]]:
  """Return (program, parameters) of a Hugging Face folder, in `dtype` if it is given."""
  weights = HfWeights(folder, dtype=dtype)
  program = program_of_model(weights.model, mesh)
  return program, weights.read(program)


class HfWeights(ModelWeights):
  """A Hugging Face folder; the default dtype is as in `load`."""

  def __init__(self, folder: Path, command: Config | None = None, dtype: str | None = None):
    del command  # such a folder names no code
    self._folder = folder
    self._family, keys = model_keys(folder)
    if dtype is None:
      dtypes = {tensor.dtype for tensor in open_weights(folder).values()}
      dtype = "float32"
      if dtypes.isdisjoint({"F32", "F16"}):  # bfloat16 would round the fractions of float16
        dtype = "bfloat16"
    types = {"dtype": dtype, "weight_dtype": dtype}
    self.model = build(ModelConfig, DEFAULTS | keys | types)

  def read(self, program: Program) -> dict[str, PyTree]:
    """Return the parameters, placed as in `program`."""
    leaves = leaves_by_path(program.abstract_state.params)
    num_rows = self.model.vocab_size
    params = params_from_hf(self._folder, self._family, self.model, num_rows, leaves)
    arrays = {}
    for path, chunked in params.items():
      arrays[path] = to_array(chunked, leaves[path].sharding)
    return traverse_util.unflatten_dict(arrays, sep="/")
