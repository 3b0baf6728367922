"""Read and write the parameters of a checkpoint in chunks, in Orbax's format on disk.

A checkpoint written here has parameters and no other state: its manifest has `"data": null`, and
training starts from it with a new optimizer state.
"""

import functools
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from flax import traverse_util

from maxlite.checkpoint.checksum import chunk_checksum
from maxlite.checkpoint.chunked_array import ChunkedArray, Index, relative, split
from maxlite.checkpoint.folders import COMMITTED
from maxlite.checkpoint.manager import PARAMS
from maxlite.checkpoint.manifest import Manifest, manifest_leaves, seal_manifest
from maxlite.checkpoint.orbax_object_store import key_value_store
from maxlite.checkpoint.repeated_read import first_line, is_environment_error
from maxlite.config.model_function import sealed_keys
from maxlite.config.schema import ModelConfig
from maxlite.errors import UserError
from maxlite.storage.json_values import JsonObject
from maxlite.storage.object_store import AnyPath

METADATA = "_CHECKPOINT_METADATA"
_MAX_REASON = 200  # characters in a message


def write_parameters(
  directory: Path, params: Mapping[str, ChunkedArray], model: ModelConfig | None = None
) -> None:
  """Write a new checkpoint `directory`, named by its step, with {path: array} of all parameters.

  The keys of `model` that determine its function are sealed with them.
  """
  handler = _ChunkedArrayHandler()
  registry = ocp.type_handlers.create_type_handler_registry(
    (ChunkedArray, handler),
    (jax.Array, handler),  # required by Orbax
  )
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(type_handler_registry=registry)) as writer:
    tree = {"params": traverse_util.unflatten_dict(dict(params), sep="/")}
    state_args = ocp.args.PyTreeSave(tree)
    writer.save(directory / "state", args=state_args)
  leaves = {PARAMS + path: chunked for path, chunked in params.items()}
  body: JsonObject = {
    "step": int(directory.name),
    "run": "",
    "leaves": manifest_leaves(leaves, handler.checksums),
    "data": None,
  }
  if model is not None:
    body["function"] = sealed_keys(model)
  with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as writer:
    manifest_args = ocp.args.JsonSave(seal_manifest(body))
    writer.save(directory / "manifest", args=manifest_args)
  # Orbax's CheckpointManager, which writes both items at once, expects this file in a checkpoint.
  shutil.copyfile(directory / "manifest" / METADATA, directory / METADATA)
  (directory / COMMITTED).touch()  # it may be copied to an object store


class StoredParameters:
  """Reads the parameters of the checkpoint in `directory` in chunks."""

  def __init__(self, directory: AnyPath, manifest: Manifest) -> None:
    self.directory = directory
    self.leaves: dict[str, JsonObject] = {}
    for name, leaf in manifest["body"]["leaves"].items():
      if name.startswith(PARAMS):
        self.leaves[name.removeprefix(PARAMS)] = leaf
    self._checksums: dict[str, int] = {}
    self._open = functools.cache(self._open_array)

  def read(self, path: str, index: Index) -> np.ndarray:
    """Read the part of a parameter at `index`; raise UserError if it cannot be read."""
    try:
      part = self._open(path)[index].read().result()
    except ValueError as error:  # TensorStore raises it whenever it cannot read
      reason = first_line(error)[:_MAX_REASON]
      problem = "cannot be read" if is_environment_error(error) else "is damaged"
      raise UserError(f"checkpoint {self.directory} {problem}: {path}: {reason}") from None
    shape = tuple(self.leaves[path]["shape"])
    checksum = self._checksums.get(path, 0)
    for chunk_index in split(index, part.dtype):
      chunk = part[relative(chunk_index, index)]
      start = [axis.start for axis in chunk_index]
      checksum += chunk_checksum(chunk, start, shape)
    self._checksums[path] = checksum % 2**32
    return part

  def verify(self) -> None:
    """Raise UserError if the parameters read, each element once, are not those saved."""
    for path, checksum in self._checksums.items():
      if checksum != self.leaves[path]["checksum"]:
        raise UserError(
          f"checkpoint {self.directory} is damaged: the bits of {path} are not those saved"
        )

  def _open_array(self, path: str) -> ts.TensorStore:
    """Open the array of a parameter."""
    name = path.replace("/", ".")
    store = {
      "driver": "ocdbt",
      "base": key_value_store(self.directory / "state"),
      "path": f"params.{name}/",
    }
    opening = ts.open({"driver": "zarr", "kvstore": store}, open=True, read=True)
    return opening.result()


class _ChunkedArrayHandler(ocp.type_handlers.ArrayHandler):
  """Lets Orbax write a ChunkedArray like an array, and collects checksums by name."""

  def __init__(self) -> None:
    super().__init__()
    self.checksums: dict[str, int] = {}

  async def serialize(
    self,
    values: Sequence[ChunkedArray],
    infos: Sequence[ocp.type_handlers.ParamInfo],
    args: Sequence[ocp.type_handlers.SaveArgs] | None = None,
  ) -> Sequence[Future[None]]:
    for chunked, info in zip(values, infos, strict=True):
      await info.await_path_creation()
      store = await _create_store(chunked, info)
      checksum = 0
      for index, chunk in chunked.chunks():
        start = [axis.start for axis in index]
        checksum += chunk_checksum(chunk, start, chunked.shape)
        await store[index].write(chunk)
      path = info.name.replace(".", "/")
      self.checksums[path] = checksum % 2**32
    return []


async def _create_store(chunked: ChunkedArray, info: ocp.type_handlers.ParamInfo) -> ts.TensorStore:
  """Create the array in an unfinished checkpoint, with the array's chunks."""
  spec = ocp.type_handlers.get_json_tspec_write(
    info,
    use_ocdbt=info.is_ocdbt_checkpoint,
    global_shape=chunked.shape,
    local_shape=chunked.chunk_shape,
    dtype=chunked.dtype,
    process_index=0,
  )
  return await ts.open(ts.Spec(spec), create=True, open=True, context=info.ts_context)
