"""Folders of models that have not been trained."""

import jax

from maxlite.checkpoint.checksum import leaves_by_path
from maxlite.checkpoint.chunked_array import ChunkedArray, whole
from maxlite.checkpoint.parameters import write_parameters
from maxlite.config import save_resolved


def save_run(folder, params, cfg):
  """Write `params` as the weights of a run that has not been trained."""

  def stored(x):
    return ChunkedArray(x.shape, x.dtype, x.shape, lambda: [(whole(x.shape), x)])

  leaves = {path: stored(leaf) for path, leaf in leaves_by_path(jax.device_get(params)).items()}
  write_parameters(folder / "checkpoints" / "0", leaves)
  save_resolved(cfg, folder / "config.yml")
