"""The parameters of a checkpoint, written and read in parts and by the folder Orbax keeps them in.

A checkpoint that is made of parts holds parameters and no other state: its manifest says
`"data": null`, and training starts from them with an optimizer state of its own.
"""

import functools
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from maxlite.checkpoint.checksum import part_checksum
from maxlite.checkpoint.chunked_array import Index, Stream, cuts
from maxlite.checkpoint.manager import PARAMS, Manifest, sealed
from maxlite.config.errors import UserError

METADATA = "_CHECKPOINT_METADATA"


def write_parameters(directory: Path, streams: Mapping[str, Stream]) -> None:
  """Writes the checkpoint `directory`, which is new, from {path: Stream} of all parameters."""
  handler = _StreamHandler()
  tree: dict[str, Any] = {}
  for path, stream in streams.items():
    *parents, name = path.split("/")
    functools.reduce(lambda node, key: node.setdefault(key, {}), parents, tree)[name] = stream
  arrays = (jax.Array, ocp.type_handlers.ArrayHandler())  # there are none, yet Orbax asks for it
  registry = ocp.type_handlers.create_type_handler_registry((Stream, handler), arrays)
  with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(type_handler_registry=registry)) as writer:
    writer.save(directory / "state", args=ocp.args.PyTreeSave({"params": tree}))
  leaves = {
    PARAMS + path: {
      "shape": list(stream.shape),
      "dtype": str(stream.dtype),
      "checksum": handler.checksums[PARAMS + path],
    }
    for path, stream in streams.items()
  }
  manifest = sealed({"leaves": leaves, "data": None})
  with ocp.Checkpointer(ocp.JsonCheckpointHandler()) as writer:
    writer.save(directory / "manifest", args=ocp.args.JsonSave(manifest))
  # Orbax's manager of checkpoints, which writes both at once, looks for this in each of its own.
  shutil.copyfile(directory / "manifest" / METADATA, directory / METADATA)


class StoredParameters:
  """The parameters of the checkpoint in `directory`, whose manifest is given, read in parts."""

  def __init__(self, directory: Path, manifest: Manifest):
    self.directory = directory
    leaves = manifest["body"]["leaves"]
    self.leaves: dict[str, dict[str, Any]] = {
      name.removeprefix(PARAMS): leaf for name, leaf in leaves.items() if name.startswith(PARAMS)
    }
    self._checksums: dict[str, int] = {}
    self._open = functools.cache(self._open_array)

  def read(self, path: str, index: Index) -> np.ndarray:
    """The part of a parameter at `index`.

    Raises:
      UserError: it cannot be read.
    """
    try:
      part = self._open(path)[index].read().result()
    except ValueError as error:  # as TensorStore raises it for whatever it cannot read
      first = str(error).split("\n", 1)[0].split(" See full", 1)[0][:200]
      raise UserError(f"checkpoint {self.directory} is damaged: {path}: {first}") from None
    shape = tuple(self.leaves[path]["shape"])
    for cut in cuts(index, part.dtype):
      inside = tuple(
        slice(c.start - i.start, c.stop - i.start) for c, i in zip(cut, index, strict=True)
      )
      added = part_checksum(part[inside], [axis.start for axis in cut], shape)
      self._checksums[path] = (self._checksums.get(path, 0) + added) % 2**32
    return part

  def require_whole(self) -> None:
    """Checks what was read since it was opened, every element of a parameter once.

    Raises:
      UserError: these are not the bits that were saved.
    """
    for path, checksum in self._checksums.items():
      if checksum != self.leaves[path]["checksum"]:
        raise UserError(
          f"checkpoint {self.directory} is damaged: the bits of {path} are not those saved"
        )

  def _open_array(self, path: str) -> ts.TensorStore:
    name = ".".join(["params", *path.split("/")])
    base = f"file://{(self.directory / 'state').absolute()}/"
    store = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
    return ts.open({"driver": "zarr", "kvstore": store}, open=True, read=True).result()


class _StreamHandler(ocp.type_handlers.TypeHandler):
  """Has Orbax write Streams as the arrays they are, and keeps their checksums by name."""

  def __init__(self) -> None:
    self.checksums: dict[str, int] = {}

  def typestr(self) -> str:
    return "jax.Array"

  async def serialize(
    self,
    values: Sequence[Stream],
    infos: Sequence[ocp.type_handlers.ParamInfo],
    args: Sequence[ocp.type_handlers.SaveArgs] | None = None,
  ) -> Sequence[Future]:
    for stream, info in zip(values, infos, strict=True):
      await info.await_path_creation()
      store = await _create(stream, info)
      checksum = 0
      for index, part in stream.parts():
        start = [axis.start for axis in index]
        checksum = (checksum + part_checksum(part, start, stream.shape)) % 2**32
        await store[index].write(part)
      self.checksums[info.name.replace(".", "/")] = checksum
    return []

  async def deserialize(self, infos: Any, args: Any = None) -> Any:
    raise NotImplementedError("arrays are read by Orbax's own handler")

  async def metadata(self, infos: Any) -> Any:
    raise NotImplementedError("arrays are read by Orbax's own handler")


async def _create(stream: Stream, info: ocp.type_handlers.ParamInfo) -> ts.TensorStore:
  """The store of `stream` in an unfinished checkpoint, in chunks of its parts."""
  spec = ocp.type_handlers.get_json_tspec_write(
    info,
    use_ocdbt=info.is_ocdbt_checkpoint,
    global_shape=stream.shape,
    local_shape=stream.part_shape,
    dtype=stream.dtype,
    process_index=0,
  )
  return await ts.open(ts.Spec(spec), create=True, open=True, context=info.ts_context)
