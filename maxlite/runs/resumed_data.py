"""The data of a run that resumes; does not import JAX, so that mistakes end early."""

import json
from collections.abc import Iterable

from maxlite.checkpoint.manifest import verify_manifest
from maxlite.checkpoint.run_folder import RunFolder, step_of
from maxlite.config import Config
from maxlite.config.mixture import mixture_of
from maxlite.config.phases import phases_of, reads_same_documents
from maxlite.config.schema import DataConfig
from maxlite.data.open_source import open_source
from maxlite.data.sources.file_paths import total_bytes
from maxlite.data.stream_fingerprint import order_fingerprint, require_same_fingerprint
from maxlite.errors import UserError
from maxlite.runs.saved_run import token_cache
from maxlite.storage.file_io import MAX_JSON_BYTES, read_regular
from maxlite.storage.json_values import Json, JsonObject

_MAX_BYTES = 32 << 20  # of data that are tokenized here if they are new


def check_resumed_data(cfg: Config, folder: RunFolder) -> None:
  """Raise UserError if the run would resume with other batches than its latest checkpoint.

  `TrainStreams.restore` finds all differences, but needs JAX. This check leaves out the size of
  batches, which depends on the devices, and data that are large or on an object store.
  """
  streams = _name_streams(cfg)
  states = {}
  if cfg.checkpoint.enable_checkpointing:
    states = _saved_states(folder, only=next(iter(streams.values())))
  for data, name in streams.items():
    if name not in states:
      continue
    try:
      fingerprint = order_fingerprint(data) | _identities(cfg, data, states[name])
      require_same_fingerprint(states[name], fingerprint)
    except UserError as error:
      if len(streams) > 1:
        raise UserError(f"phase {name}: {error}") from None
      raise UserError(str(error)) from None


def _name_streams(cfg: Config) -> dict[DataConfig, str]:
  """By data config, the name of its stream: the first phase that reads it, or "train"."""
  phases = phases_of(cfg)
  if not phases:
    return {cfg.data: "train"}
  names: dict[DataConfig, str] = {}
  for phase in phases:
    names.setdefault(phase.data, phase.name)
  return names


def _saved_states(folder: RunFolder, only: str) -> JsonObject:
  """By name of a stream, its state in the latest checkpoint.

  Args:
    only: the name of the stream of a run with a single one, whose checkpoint does not name it.
  """
  state = _saved_state(folder)
  if not state:
    return {}
  return state.get("streams", {only: state})


def _saved_state(folder: RunFolder) -> JsonObject:
  """The data position of the latest checkpoint; empty if there is none that can be read here."""
  if folder.mirror:
    return {}
  steps = [step_of(path.name) or 0 for path in folder.checkpoints.glob("*")]
  latest = max(steps, default=0)
  manifest = folder.checkpoints / str(latest) / "manifest" / "metadata"
  if not manifest.is_file():
    return {}
  try:
    written = json.loads(read_regular(manifest, MAX_JSON_BYTES))
    return verify_manifest(written)["body"]["data"] or {}
  # `Checkpoints.restore` reports damage.
  except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
    return {}


def _identities(cfg: Config, data: DataConfig, state: JsonObject) -> JsonObject:
  """The entry `data` of a stream's fingerprint, computed from the files as they are now.

  It is the identity of the stream's source. Of a mixture it is a mapping, whose entry `sources` has
  the identity of each source by name; a source that is no longer in the mixture has None.

  Args:
    cfg: the config of the run.
    data: the config of the stream.
    state: the saved state of the stream, which has the same entry.

  Returns:
    {"data": identity}. It is empty if the sources are not read here, or if only one of the saved
    stream and the present one is a mixture, which `TrainStreams.restore` compares.
  """
  saved: Json = state.get("data")
  was_mixture = isinstance(saved, dict)
  if was_mixture != bool(data.dataset_mixture):
    return {}
  saved_names: Iterable[str] = ["data"]
  if was_mixture:
    saved_names = saved["sources"]
  parts = {part.name: part.data for part in mixture_of(data) if part.name in saved_names}
  if not are_read_here(cfg, data, parts.values()):
    return {}
  identities: dict[str, str | None] = dict.fromkeys(saved_names)
  for name, part in parts.items():
    identities[name] = _identity(cfg, data, part)
  if was_mixture:
    return {"data": saved | {"sources": identities}}
  return {"data": identities["data"]}


def are_read_here(cfg: Config, data: DataConfig, parts: Iterable[DataConfig]) -> bool:
  """Whether all sources are small, and on this machine with their tokenizer and cache."""
  paths: list[str] = []
  for part in parts:
    paths += part.dataset_path
    paths += part.eval_dataset_path
  for place in (*paths, data.tokenizer_path, str(token_cache(cfg))):
    if "://" in place:
      return False
  return total_bytes(paths) <= _MAX_BYTES


def _identity(cfg: Config, data: DataConfig, part: DataConfig) -> str:
  """The identity of the training documents of one source of the stream `data`."""
  source = open_source(
    part,
    cfg.model.vocab_size,
    token_cache(cfg),
    evaluates=reads_same_documents(cfg.data, data),
  )
  return source.train.identity
