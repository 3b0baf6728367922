"""The training streams of a run: one, or with phases one per data config."""

from collections.abc import Mapping

from maxlite.config.mixture import has_prompts
from maxlite.config.schema import DataConfig
from maxlite.data.batch import HostBatch
from maxlite.data.loader import DataLoader, PromptStream, TrainStream
from maxlite.errors import UserError
from maxlite.storage.json_values import JsonObject


class TrainStreams:
  """The streams of all objectives; objectives with equal DataConfigs share one stream."""

  def __init__(self, data: Mapping[str, DataLoader], teacher: str = "") -> None:
    """Open the streams.

    Args:
      data: by objective (a phase, or "train"), its loader.
      teacher: a hash of the models whose predictions are training data too; empty without any.
    """
    self._teacher = teacher
    # Streams are named by the first objective that reads them.
    reader_by_config: dict[DataConfig, str] = {}
    self._readers: dict[str, str] = {}
    for objective, loader in data.items():
      reader = reader_by_config.setdefault(loader.cfg, objective)
      self._readers[objective] = reader
    self._streams: dict[str, TrainStream | PromptStream] = {}
    for reader in reader_by_config.values():
      loader = data[reader]
      stream = PromptStream(loader) if has_prompts(loader.cfg) else loader.train_stream()
      self._streams[reader] = stream

  def take(self, objective: str) -> HostBatch:
    """Return the next batch of the objective's stream."""
    stream = self._stream(objective)
    assert isinstance(stream, TrainStream), "prompts are taken from `prompts`"
    return next(stream)

  def prompts(self, objective: str) -> PromptStream:
    """Return the stream of prompts that an objective reads."""
    stream = self._stream(objective)
    assert isinstance(stream, PromptStream)
    return stream

  def batch_shape(self, objective: str) -> tuple[int, int]:
    """Return (rows, positions) of the objective's latest batch over all hosts."""
    stream = self._stream(objective)
    assert isinstance(stream, TrainStream)
    return stream.batch_shape

  def state(self) -> JsonObject:
    """Return the state of the only stream, or of each by its first objective, as JSON values."""
    states = {reader: stream.state() for reader, stream in self._streams.items()}
    state: JsonObject = {}
    if self._teacher:
      state["teacher"] = self._teacher
    if len(states) > 1:
      state["streams"] = states
    else:
      (only_state,) = states.values()
      state.update(only_state)
    return state

  def describe(self) -> list[str]:
    """Return a line per stream and source on the data that was read."""
    lines = []
    for reader, stream in self._streams.items():
      prefix = "read of "
      if len(self._streams) > 1:
        prefix = f"read of {reader}, "
      for line in stream.describe():
        lines.append(f"{prefix}{line}")
    return lines

  def restore(self, state: JsonObject) -> None:
    """Continue after the batches that `state` counts. Raises UserError if the streams differ."""
    if "teacher" in state and self._teacher and state["teacher"] != self._teacher:
      raise UserError(
        "the checkpoint was trained with another teacher: restore teacher_path, teacher_members "
        "(of loss dpo: reference_path) and the weights there, or choose a new run_name"
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
        if len(readers) > 1:
          raise UserError(f"phase {reader}: {error}") from None
        raise UserError(str(error)) from None

  def close(self) -> None:
    for stream in self._streams.values():
      stream.close()

  def _stream(self, objective: str) -> TrainStream | PromptStream:
    """Return the stream that an objective reads."""
    reader = self._readers[objective]
    return self._streams[reader]
