"""The data of a run that resumes; does not import JAX, so that mistakes end early."""

import json
from typing import Any

from maxlite.checkpoint.run_folder import RunFolder, step_of
from maxlite.config import Config, UserError
from maxlite.config.mixture import mixture_of
from maxlite.config.phases import phases_of, reads_same_documents
from maxlite.config.schema import DataConfig
from maxlite.data.open_source import open_source
from maxlite.data.sources.file_paths import total_bytes
from maxlite.data.stream_facts import order_facts, require_same_facts
from maxlite.runs.saved_run import token_cache

_MAX_BYTES = 32 << 20  # of data that are tokenized here if they are new


def check_resumed_data(cfg: Config, folder: RunFolder) -> None:
  """Raise UserError if the run would resume with other batches than its latest checkpoint.

  `TrainStreams.restore` finds all differences, but needs JAX. This check leaves out the size of
  batches, which depends on the devices, and data that are large or on an object store.
  """
  state = _saved_state(folder) if cfg.checkpoint.enable_checkpointing else {}
  streams: dict[DataConfig, str] = {}
  for name, data in [(phase.name, phase.data) for phase in phases_of(cfg)] or [("train", cfg.data)]:
    streams.setdefault(data, name)
  states = state.get("streams", {next(iter(streams.values())): state} if state else {})
  for data, name in streams.items():
    try:
      if name in states:
        require_same_facts(states[name], order_facts(data) | _identities(cfg, data, states[name]))
    except UserError as error:
      raise UserError(f"phase {name}: {error}" if len(streams) > 1 else str(error)) from None


def _saved_state(folder: RunFolder) -> dict[str, Any]:
  """The data position of the latest checkpoint; empty if there is none that can be read here."""
  if folder.mirror:
    return {}
  steps = [step_of(path.name) or 0 for path in folder.checkpoints.glob("*")]
  manifest = folder.checkpoints / str(max(steps, default=0)) / "manifest" / "metadata"
  if not manifest.is_file():
    return {}
  try:
    return json.loads(manifest.read_bytes())["body"]["data"] or {}
  except (OSError, ValueError, KeyError, TypeError):  # `Checkpoints.restore` reports damage
    return {}


def _identities(cfg: Config, data: DataConfig, state: dict[str, Any]) -> dict[str, Any]:
  """The fact `data` of the stream, with the shares of `state`; empty if it is left out."""
  saved, cache = state.get("data"), token_cache(cfg)
  sources = saved["sources"] if isinstance(saved, dict) else {"data": saved}
  parts = {part.name: part.data for part in mixture_of(data) if part.name in sources}
  paths = [
    path for part in parts.values() for path in (*part.dataset_path, *part.eval_dataset_path)
  ]
  is_remote = any("://" in place for place in (*paths, data.tokenizer_path, str(cache)))
  if (
    is_remote
    or isinstance(saved, dict) != bool(data.dataset_mixture)
    or total_bytes(paths) > _MAX_BYTES
  ):
    return {}
  evaluates, size = reads_same_documents(cfg.data, data), cfg.model.vocab_size
  open_one = lambda part: open_source(part, size, cache, evaluates=evaluates).train.identity
  now = dict.fromkeys(sources) | {name: open_one(part) for name, part in parts.items()}
  return {"data": saved | {"sources": now} if isinstance(saved, dict) else now["data"]}
