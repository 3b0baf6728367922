"""What the batches of a stream depend on, as checkpoints store it, and how it may not change."""

from collections.abc import Mapping

from maxlite.config.schema import DataConfig
from maxlite.errors import UserError
from maxlite.storage.json_values import Json, JsonObject


def order_fingerprint(cfg: DataConfig) -> JsonObject:
  """Return the keys of `cfg` that length and order of the rows depend on, as JSON values."""
  seed = None
  if cfg.enable_data_shuffling:
    seed = cfg.data_shuffle_seed
  of_megatron = {}
  if cfg.megatron_order:
    of_megatron["megatron_num_samples"] = cfg.megatron_num_samples
  return {
    **of_megatron,
    "max_target_length": cfg.max_target_length,
    "enable_data_shuffling": cfg.enable_data_shuffling,
    "data_sampling": cfg.data_sampling,
    "data_shuffle_seed": seed,
  }


def require_same_fingerprint(state: Mapping[str, Json], fingerprint: Mapping[str, Json]) -> None:
  """Raise UserError if a value of `fingerprint` differs from a stream's state in a checkpoint."""
  for name, now in fingerprint.items():
    then = state.get(name)
    if name == "skip_rows":  # a stream that has skipped none stores none
      then = then or []
    if then != now:
      raise UserError(_difference(name, then, now, state["num_batches"]))


def _difference(name: str, then: object, now: object, num_batches: int) -> str:
  """Return the error for a fact that was `then` in the checkpoint and is `now` in this run."""
  if name == "data":
    return _other_data(then, now, num_batches)
  if name == "skip_rows":
    return (
      f"the checkpoint was written with skip_rows={then}, this run has {now} up to its step: "
      "restore these ranges (later ones may change), or go back to a checkpoint before them"
    )
  if isinstance(then, list) or isinstance(now, list):
    return (
      f"the checkpoint was written with {name}={then}, this run has {now} up to its step: restore "
      "these entries of batch_size_schedule (later ones may change)"
    )
  if name == "global_batch_size":
    return (
      f"the checkpoint was written with a global batch of {then} rows, this run has {now}: "
      f"set global_batch_size={then}, which is valid on any number of devices; or, for {now} rows "
      f"from now on, global_batch_size=0 batch_size_schedule=[[0, {then}], [{num_batches}, {now}]]"
    )
  return f"the checkpoint was written with {name}={then}, this run has {now}: set {name}={then}"


def _other_data(then: object, now: object, num_batches: int) -> str:
  """Return the error for two different results of `MixtureOrder.history`."""
  if not isinstance(then, dict) or not isinstance(now, dict):
    return (
      "the checkpoint was trained on other data than this run would read: restore the files, "
      "dataset_path, the eval_* keys and the tokenizer, or choose a new run_name"
    )
  old = then["sources"]
  new = now["sources"]
  changed = [name for name in old | new if old.get(name) != new.get(name)]
  if changed:
    what = f"other data of {', '.join(changed)}"
    also = ", and their data"
  else:
    what = "other shares of its sources"
    also = ""
  return (
    f"the first {num_batches} batches would have {what} than the checkpoint was trained on: "
    f"restore the entries of dataset_mixture with from_step below {num_batches}{also} (later ones "
    "may change), or choose a new run_name"
  )
