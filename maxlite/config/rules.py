"""Rules between keys: their form, and those on several models, such as ensembles and teachers.

A rule function takes the values of all keys, the `family` of the model, and as `ensemble_key` the
first set key that defines an ensemble (empty: none). It yields `(violated, keys, text)` for each of
its rules, in order: whether the values violate it, the keys that it is about, and the rule with
what to write instead.
"""

from collections.abc import Iterator
from math import isqrt
from types import SimpleNamespace
from typing import Any

from maxlite.config.raw_values import show
from maxlite.config.registry import TAUGHT_LOSSES
from maxlite.config.schema import DEFAULTS, EnsembleConfig, flatten

Values = SimpleNamespace
Rules = Iterator[tuple[Any, str, str]]
ENSEMBLE_KEYS = ("members", "sweep", "search")
TEACHER_KEYS = tuple(key for key in DEFAULTS if key.startswith(("teacher_", "distill_")))


def largest_divisor(number: int, limit: int) -> int:
  """The largest divisor of `number` up to `limit`."""
  small = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
  return max(d for low in small for d in (low, number // low) if d <= limit)


def ensemble(v: Values) -> Rules:
  is_set = lambda key: vars(v)[key] != DEFAULTS[key]
  for key in flatten(EnsembleConfig()):
    text = f"there is no ensemble; write members or sweep, or {key}={show(DEFAULTS[key])}"
    yield not v.ensemble_key and is_set(key), key, text
  for key in ("ensemble_executor", "ensemble_num_workers"):
    is_unused = v.ensemble_strategy not in ("auto", "processes")
    text = "this strategy starts no processes; write ensemble_strategy=processes"
    yield is_unused and is_set(key), f"{key} ensemble_strategy", text
  text = "its workers share a local folder; write base_output_directory=FOLDER on this machine"
  is_remote = "://" in v.base_output_directory and v.ensemble_strategy == "processes"
  yield is_remote, "base_output_directory ensemble_strategy", text
  text = "runs in one process; write ensemble_strategy=stacked or fused, or num_processes=1"
  is_local = v.ensemble_strategy in ("switched", "processes")
  yield v.num_processes > 1 and is_local, "ensemble_strategy num_processes", text
  text = "halving would compare members of all hosts; write ensemble_strategy=stacked or fused"
  is_divided = v.num_processes > 1 and v.ensemble_strategy == "submesh"
  yield is_divided and v.asha_reduction_factor, "asha_reduction_factor ensemble_strategy", text
  text = "members keep their optimizer states on the devices; write false"
  keys = f"optimizer_memory_host_offload {v.ensemble_key}"
  yield v.optimizer_memory_host_offload and v.ensemble_key, keys, text
  text = "would stop no member; write asha_reduction_factor=2 or more, or 0 for no early stopping"
  yield v.asha_reduction_factor == 1, "asha_reduction_factor", text
  text = f"the run ends before that rung; write asha_min_steps={max(v.steps // 4, 1)}"
  yield v.asha_reduction_factor and v.asha_min_steps >= v.steps, "asha_min_steps steps", text
  in_other_processes = v.ensemble_strategy == "processes" or is_divided
  text = "members of other processes are read from checkpoints; write enable_checkpointing=true"
  keys = "ensemble_strategy enable_checkpointing"
  yield in_other_processes and not v.enable_checkpointing, keys, text


def population(v: Values) -> Rules:
  text = "only stacked members are exchanged on their devices; write ensemble_strategy=stacked"
  is_other = v.ensemble_strategy not in ("auto", "stacked")
  yield v.pbt_period and is_other, "pbt_period ensemble_strategy", text
  text = "the population keeps its size; write asha_reduction_factor=0 or pbt_period=0"
  yield v.pbt_period and v.asha_reduction_factor, "pbt_period asha_reduction_factor", text
  text = f"no exchange before the last step; write pbt_period={max(v.steps // 4, 1)}"
  yield v.pbt_period >= v.steps, "pbt_period steps", text
  text = "a member saved later than others resumes where they do; write 2 or more"
  keys = "max_num_checkpoints_to_keep pbt_period"
  one_kept = v.max_num_checkpoints_to_keep == 1
  yield v.pbt_period and one_kept and v.enable_checkpointing, keys, text
  text = "nothing changes them; write pbt_period=100, or pbt_hyperparameters={}"
  is_unused = v.ensemble_key and v.pbt_hyperparameters and not v.pbt_period
  yield is_unused, "pbt_hyperparameters pbt_period", text
  text = "each phase has its optimizer; write pbt_hyperparameters={}"
  yield v.pbt_hyperparameters and v.phases, "pbt_hyperparameters phases", text


def search(v: Values) -> Rules:
  for key in ("members", "sweep"):
    text = f"a search proposes the members; write search={{}}, or no {key}"
    yield v.search and vars(v)[key], f"search {key}", text
  for key in ("pbt_period", "asha_reduction_factor"):
    text = f"compares members of one start, not of several rounds; write {key}=0"
    yield v.search and vars(v)[key], f"{key} search", text
  text = "later rounds need the members of earlier ones; write enable_checkpointing=true"
  yield v.search and not v.enable_checkpointing, "search enable_checkpointing", text


def local_updates(v: Values) -> Rules:
  """The rules of DiLoCo."""
  period = v.diloco_sync_period
  if not period:
    for key in ("diloco_outer_lr", "diloco_outer_momentum"):
      text = f"there are no outer steps; write diloco_sync_period=100, or {key}={DEFAULTS[key]}"
      yield vars(v)[key] != DEFAULTS[key], key, text
    return
  multiple = max(round(v.steps / period), 1) * period
  text = f"the last steps would not reach the model; write steps={multiple}"
  yield v.steps % period, "steps diloco_sync_period", text
  text = "old outer steps would never fade; write diloco_outer_momentum=0.9"
  yield v.diloco_outer_momentum == 1, "diloco_outer_momentum", text
  # Averages and teachers are of one model, and XLA cannot partition `capacity` in a shard_map.
  of_one_model = ("phases", "ema_decay", "teacher_path", "capacity_factor")
  for key in (*ENSEMBLE_KEYS, *of_one_model, "optimizer_memory_host_offload"):
    fix = f"write {key}={show(DEFAULTS[key])} or diloco_sync_period=0"
    text = f"is not supported with replicas; {fix}"
    yield vars(v)[key] != DEFAULTS[key], f"{key} diloco_sync_period", text


def generation(v: Values) -> Rules:
  """The rules of sampling."""
  key = "max_new_tokens"
  yield v.max_new_tokens == 0, key, f"generates nothing; write {key}=1 or more, or {key}=-1"
  key = "decode_sampling_nucleus_p"
  yield v.decode_sampling_nucleus_p == 0, key, f"keeps no token; write {key}=0.95, or 1 for all"
  key = "decode_sampling_repetition_penalty"
  text = f"logits are divided by it; write {key}=1 for none"
  yield v.decode_sampling_repetition_penalty == 0, key, text


def teacher(v: Values) -> Rules:
  """The rules of loss `distill`."""
  losses = [phase.get("loss", v.loss_type) for phase in v.phases] or [v.loss_type]
  is_taught = any(loss in TAUGHT_LOSSES for loss in losses)
  key = "loss_type"
  text = "needs a teacher; write teacher_path=FOLDER of a run, an ensemble or of Hugging Face"
  keys = "phases teacher_path" if v.phases else f"{key} teacher_path"
  yield is_taught and not v.teacher_path, keys, text
  for name in TEACHER_KEYS:
    text = f"is only read by loss distill; write {key}=distill, or {name}={show(DEFAULTS[name])}"
    yield not is_taught and vars(v)[name] != DEFAULTS[name], f"{name} {key}", text
  text = f"members have no teacher; train students as solo runs, or write {key}=next_token"
  yield is_taught and v.ensemble_key, f"{key} {v.ensemble_key}", text
  text = "logits are divided by it; write distill_temperature=1"
  yield v.distill_temperature == 0, "distill_temperature", text
  text = f"there are fewer tokens; write distill_top_k={v.vocab_size} or less, or 0 for all"
  yield v.distill_top_k > v.vocab_size, "distill_top_k vocab_size", text
