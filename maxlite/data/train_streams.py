"""The training streams of a run: one, or with phases one per data config."""

from collections.abc import Mapping
from typing import Any

from maxlite.config.errors import UserError
from maxlite.config.schema import DataConfig
from maxlite.data.batch import Batch
from maxlite.data.loader import DataLoader


class TrainStreams:
  """The streams of all objectives; objectives with equal DataConfigs share one stream."""

  def __init__(self, data: Mapping[str, DataLoader], teacher: str = "") -> None:
    """
    Args:
      data: by objective (a phase, or "train"), its loader.
      teacher: a hash of the model whose predictions are training data too, if there is one.
    """
    self._teacher = {"teacher": teacher} if teacher else {}
    first_with: dict[DataConfig, str] = {}
    self._readers = {name: first_with.setdefault(each.cfg, name) for name, each in data.items()}
    self._streams = {name: data[name].train_stream() for name in first_with.values()}

  def take(self, objective: str) -> Batch:
    """Return the next batch of the objective's stream."""
    return next(self._streams[self._readers[objective]])

  def batch_shape(self, objective: str) -> tuple[int, int]:
    """(rows, positions) of the objective's latest batch over all hosts."""
    return self._streams[self._readers[objective]].batch_shape

  def state(self) -> dict[str, Any]:
    """The state of the only stream, or of each by its first objective, as JSON values."""
    states = {reader: stream.state() for reader, stream in self._streams.items()}
    return self._teacher | ({"streams": states} if len(states) > 1 else next(iter(states.values())))

  def describe(self) -> list[str]:
    """A line per stream and source on the data that was read."""
    prefix = "read of {}, " if len(self._streams) > 1 else "read of "
    return [
      prefix.format(reader) + line
      for reader, stream in self._streams.items()
      for line in stream.describe()
    ]

  def restore(self, state: dict[str, Any]) -> None:
    """Continue after the batches that `state` counts. Raises UserError if the streams differ."""
    if "teacher" in state and self._teacher and state["teacher"] != self._teacher["teacher"]:
      raise UserError(
        "the checkpoint was trained with another teacher: restore teacher_path, teacher_members "
        "and the weights there, or choose a new run_name"
      )
    readers = list(self._streams)
    states = state.get("streams", {readers[0]: state})
    if states.keys() != self._streams.keys():
      raise UserError(
        f"the checkpoint has a stream of batches for each of {', '.join(states)}, this run for "
        f"{', '.join(readers)}: have the same phases read the same data, or choose a new run_name"
      )
    for reader, stream in self._streams.items():
      try:
        stream.restore(states[reader])
      except ValueError as error:
        where = f"phase {reader}: " if len(readers) > 1 else ""
        raise UserError(f"{where}{error}") from None

  def close(self) -> None:
    for stream in self._streams.values():
      stream.close()
