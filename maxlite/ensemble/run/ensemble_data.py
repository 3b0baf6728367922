"""The data of an ensemble's members, opened once per config."""

import functools
from pathlib import Path

import jax

from maxlite.config import Config
from maxlite.config.schema import DataConfig
from maxlite.data.batch import local_rows
from maxlite.data.loader import DataLoader, open_data
from maxlite.distributed.initialize import process_0_first
from maxlite.sharding import Sharder, build_mesh
from maxlite.training.program import mesh_degrees


class EnsembleData:
  """Loaders of the members' data, whose batches have all rows or those of this process."""

  def __init__(self, cfg: Config, batch_size: int, *, spread: bool):
    """
    Args:
      cfg: the config of the ensemble.
      batch_size: rows of a batch, over all processes.
      spread: whether each member is sharded over all devices.
    """
    self._cfg = cfg
    self._batch_size = batch_size
    self._spread = spread
    self._rows_here = self._local_rows()

  def local(self, data: DataConfig) -> DataLoader:
    """Batches with the rows that the devices of this process hold."""
    return self._open(data, self._rows_here)

  def whole(self, data: DataConfig) -> DataLoader:
    """Batches with all rows."""
    return self._open(data, range(self._batch_size))

  def _open(self, data: DataConfig, rows: range) -> DataLoader:
    def open_rows() -> DataLoader:
      return _open_data(data, self._cfg.model.vocab_size, self._batch_size, rows)

    return process_0_first(open_rows, "the data is tokenized")

  def _local_rows(self) -> range:
    """The rows of a batch that the devices of this process hold: all, if a device holds all."""
    if not self._spread or jax.process_count() == 1:
      return range(self._batch_size)
    mesh_config = self._cfg.mesh
    mesh = build_mesh(mesh_degrees(mesh_config, "ici"), mesh_degrees(mesh_config, "dcn"))
    sharder = Sharder(mesh, dict(mesh_config.logical_axis_rules))
    sharding = sharder.sharding(("activation_batch", "activation_length"))
    return local_rows(sharding, (self._batch_size, self._cfg.data.max_target_length))


@functools.cache
def _open_data(cfg: DataConfig, vocab_size: int, batch_size: int, rows: range) -> DataLoader:
  return open_data(
    cfg,
    vocab_size=vocab_size,
    global_batch_size=batch_size,
    rows=rows,
    cache_directory=Path(cfg.token_cache_directory).expanduser(),
  )
