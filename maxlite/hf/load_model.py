"""A model and its parameters, from a run folder or from a folder in Hugging Face's format."""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.sharding import Mesh

from maxlite.checkpoint.checksum import leaves_by_path
from maxlite.checkpoint.chunked_array import to_array
from maxlite.checkpoint.manager import Checkpoints
from maxlite.checkpoint.run_folder import RunFolder
from maxlite.checkpoint.safetensors import DTYPES
from maxlite.config import Config, read_saved
from maxlite.config.errors import UserError
from maxlite.config.rules import validate
from maxlite.config.schema import (
  DEFAULTS,
  FLOAT_TYPES,
  MESH_AXES,
  DataConfig,
  MeshConfig,
  ModelConfig,
  build,
)
from maxlite.hf.hf_checkpoint import streams_from_hf
from maxlite.hf.hf_config import model_keys
from maxlite.hf.hf_folder import read_tensors
from maxlite.models.decoder import Decoder
from maxlite.sharding import Sharder
from maxlite.training.trainer import Trainer, build_trainer


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
  """A decoder on its mesh."""

  cfg: ModelConfig
  decoder: Decoder
  sharder: Sharder

  def apply(
    self,
    params: Mapping[str, Any],
    tokens_BT: jax.Array,
    *,
    segment_ids: jax.Array | None = None,
    positions: jax.Array | None = None,
  ) -> jax.Array:
    """logits_BTV, float32; `params` as `load` returns them, or as {"params": them}.

    Documents packed into a row have different `segment_ids` from 1 on, and padding 0; by default a
    row is one document. `positions` count from 0 within a document.
    """
    bare = params["params"] if set(params) == {"params"} else params
    arrays = (tokens_BT, segment_ids, positions)
    return self.decoder.apply(
      {"params": bare}, *(None if array is None else jnp.asarray(array) for array in arrays)
    )


def load(
  path: str | Path, *, dtype: str | None = None, mesh: Mesh | Mapping[str, int] | None = None
) -> tuple[Model, dict[str, Any]]:
  """(model, parameters) of a run's newest checkpoint, or of a folder with config.json.

  Args:
    dtype: of parameters and activations, `float32` or `bfloat16`; by default those of the run, and
      of a folder float32 if a weight is of that type, else bfloat16.
    mesh: {mesh axis: size}, such as {"fsdp": 8}, or a Mesh with such axes; by default one device.

  Raises:
    UserError: the folder is none of both, or damaged.
  """
  folder = Path(path).expanduser()
  if dtype is not None and jnp.dtype(dtype).name not in FLOAT_TYPES:
    raise UserError(f"dtype={dtype}: choose one of {', '.join(FLOAT_TYPES)}")
  name = None if dtype is None else jnp.dtype(dtype).name
  if RunFolder(folder).config.is_file():
    trainer, params = _load_run(RunFolder(folder), name, mesh)
  elif (folder / "config.json").is_file():
    trainer, params = _load_hf(folder, name, mesh)
  else:
    raise UserError(f"{path} is no run folder (config.yml) and has no config.json: correct it")
  return Model(trainer.cfg.model, trainer.model, trainer.sharder), params


def trainer_of_model(
  model: ModelConfig, mesh: Mesh | Mapping[str, int] | None = None, **sections: Any
) -> Trainer:
  """The Trainer of `model` on `mesh` or one device; `sections` are others of Config."""
  degrees, devices = _devices(mesh)
  of_mesh = {f"ici_{axis}_parallelism": degrees.get(axis, 1) for axis in MESH_AXES}
  cfg: Config = build(Config, DEFAULTS)
  length = 2 * max(degrees.get("context", 1), model.num_draft_heads + 1)
  cfg = dataclasses.replace(
    cfg,
    model=model,
    mesh=dataclasses.replace(MeshConfig(dcn_data_parallelism=1, sharding_tolerance=1), **of_mesh),
    data=DataConfig(max_target_length=length, per_device_batch_size=1),
    **sections,
  )
  return build_trainer(cfg, devices)


def abstract_params(model: ModelConfig) -> dict[str, jax.ShapeDtypeStruct]:
  """{path: shape and type} of the model's parameters."""
  return leaves_by_path(trainer_of_model(model).abstract_state.params)


def _devices(mesh: Mesh | Mapping[str, int] | None) -> tuple[dict[str, int], Sequence[jax.Device]]:
  """(size of each mesh axis, devices)"""
  degrees = dict(mesh.shape if isinstance(mesh, Mesh) else mesh or {})
  unknown = set(degrees) - set(MESH_AXES)
  if unknown:
    raise UserError(
      f"mesh has the axes {', '.join(sorted(unknown))}; choose from {', '.join(MESH_AXES)}"
    )
  if isinstance(mesh, Mesh):
    return degrees, list(mesh.devices.flat)
  num_devices = int(np.prod(list(degrees.values()) or [1]))
  if num_devices > len(jax.devices()):
    raise UserError(f"mesh={degrees} needs {num_devices} devices, of {len(jax.devices())} here")
  return degrees, jax.devices()[:num_devices]


def _with_dtype(model: ModelConfig, dtype: str) -> ModelConfig:
  return dataclasses.replace(model, dtype=dtype, weight_dtype=dtype)


def _load_run(folder: RunFolder, dtype: str | None, mesh: Any) -> tuple[Trainer, dict[str, Any]]:
  cfg: Config = build(Config, read_saved(folder.config))
  stored = trainer_of_model(cfg.model, mesh).abstract_state.params
  trainer = trainer_of_model(_with_dtype(cfg.model, dtype) if dtype else cfg.model, mesh)
  checkpoints = Checkpoints(cfg.checkpoint, folder.checkpoints, report=_to_stderr)
  parts, _ = checkpoints.restore_parts({"params": stored})
  params = parts["params"]
  wanted = trainer.abstract_state.params
  return trainer, jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), params, wanted)


def _load_hf(folder: Path, dtype: str | None, mesh: Any) -> tuple[Trainer, dict[str, Any]]:
  family, keys, _ = model_keys(folder)
  if dtype is None:
    types = {DTYPES.get(tensor.dtype) for tensor in read_tensors(folder).values()}
    dtype = "float32" if np.dtype("float32") in types else "bfloat16"
  cfg: Config = build(Config, DEFAULTS | keys | {"dataset_type": "synthetic"})
  validate(cfg, dict.fromkeys(keys, f"{folder}/config.json"), needs_data=False)
  model = _with_dtype(cfg.model, dtype)
  trainer = trainer_of_model(model, mesh)
  wanted = leaves_by_path(trainer.abstract_state.params)
  streams = streams_from_hf(folder, family, model, model.vocab_size, wanted)
  arrays = {path: to_array(stream, wanted[path].sharding) for path, stream in streams.items()}
  return trainer, traverse_util.unflatten_dict(arrays, sep="/")


def _to_stderr(line: str) -> None:
  sys.stderr.write(f"{line}\n")
