"""The held-out loss of a run.

The evaluation step sums over the tokens of a held-out batch. For draft heads and layers of
multi-token prediction it counts how many drafts speculative decoding would accept
(`draft_acceptance.py`).
"""

import functools
from collections.abc import Callable, Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from maxlite.config.schema import Config, TrainingConfig
from maxlite.data.batch import DeviceBatch, HostBatch
from maxlite.data.loader import DataLoader
from maxlite.evaluation.draft_acceptance import acceptance_sums
from maxlite.metrics.step_row import bits_per_byte
from maxlite.models import Decoder
from maxlite.sharding.pytree import PyTree
from maxlite.training.feature import EvalStep
from maxlite.training.loss import next_token, run_forward
from maxlite.training.preference_loss import pair_means
from maxlite.training.program import Program

# Sums over the tokens of one or more batches: scalars by name, and the sums of draft heads.
Sums = dict[str, PyTree]


def build_evaluation(
  cfg: Config, program: Program, data: DataLoader
) -> Callable[[PyTree, PyTree, int], dict[str, float]] | None:
  """Build the evaluation of held-out data, an entry of EVALUATIONS; None if there are none."""
  if data.source.eval is None:
    return None
  eval_step = compile_eval_step(program, data.source.num_bytes_V)

  def evaluate_params(params: PyTree, averages: PyTree, step: int) -> dict[str, float]:
    del step
    batches = data.eval_batches_by_source(cfg.observe.eval_steps)
    return evaluate(program, eval_step, params, batches, averages)

  return evaluate_params


def evaluate(
  program: Program,
  eval_step: EvalStep,
  params: PyTree,
  batches: Mapping[str, Iterable[HostBatch]],
  averages: PyTree = None,
) -> dict[str, float]:
  """Compute `eval_loss` [nats per token], `eval_bits_per_byte` and `eval_tokens` of `batches`.

  Of pairs, `eval_loss` is the mean loss of a pair, and the others are from `pair_means`. With
  moving averages of the parameters also `eval_ema_loss` and so on.

  Args:
    batches: by source; with several sources, the results are over the tokens of all, and
      `eval_loss/SOURCE` is the loss of each.
  """

  def sums(host_batch: HostBatch) -> Sums:
    batch = program.place(host_batch)
    found = eval_step(params, batch)
    if averages is not None:
      found["ema"] = eval_step(averages, batch)
    return found

  return held_out_row({name: map(sums, each) for name, each in batches.items()})


def held_out_row(batches: Mapping[str, Iterable[Sums]]) -> dict[str, float]:
  """The results of `evaluate` from the evaluation step's sums of every batch, by source.

  With draft heads or multi-token prediction also `eval_acceptance_1`, ..., the share of the drafts
  of each head or layer that are accepted, and `eval_accepted_length`, the mean number of accepted
  drafts in a chain.
  """
  by_source = {name: _total(map(_in_float64, each)) for name, each in batches.items()}
  sums = _total(by_source.values())
  row = _results(sums)
  row["eval_tokens"] = int(sums["weight"])
  if len(by_source) > 1:
    for name, of_source in by_source.items():
      row[f"eval_loss/{name}"] = _results(of_source)["eval_loss"]
  if "ema" in sums:
    for name, value in _results(sums["ema"]).items():
      row[name.replace("eval_", "eval_ema_", 1)] = value
  return row


def _in_float64(sums: Sums) -> Sums:
  """The sums on the host: float32 rounds every sum, and cannot count beyond 2**24 tokens."""
  return jax.tree.map(np.float64, jax.device_get(sums))


def _total(sums: Iterable[Sums]) -> Sums:
  def add(left: Sums, right: Sums) -> Sums:
    return jax.tree.map(np.add, left, right)

  return functools.reduce(add, sums)


def _results(sums: Sums) -> dict[str, float]:
  """The results of one set of parameters."""
  if "pairs" in sums:
    return {f"eval_{name}": float(mean) for name, mean in pair_means(sums["pairs"]).items()}
  nll = float(sums["nll"])
  num_bytes = float(sums["num_bytes"])
  results = {"eval_loss": float(sums["nll"] / sums["weight"])}
  if num_bytes:
    results["eval_bits_per_byte"] = bits_per_byte(nll, num_bytes)
  drafts = sums.get("draft")
  if drafts:
    num_drafts_J = np.maximum(drafts["drafts_J"], 1)
    shares_J = drafts["accepted_J"] / num_drafts_J
    for j, share in enumerate(shares_J, start=1):
      results[f"eval_acceptance_{j}"] = float(share)
    num_chains = np.maximum(drafts["chains"], 1)
    results["eval_accepted_length"] = float(drafts["length"] / num_chains)
  return results


def compile_eval_step(program: Program, num_bytes_V: np.ndarray) -> EvalStep:
  """The compiled evaluation step, on the program's mesh."""
  for feature in program.features:
    eval_step = feature.build_eval_step(program.model)
    if eval_step is not None:
      return eval_step
  step = build_eval_step(program.model, program.spec.training, jnp.asarray(num_bytes_V))
  return jax.jit(step)


def build_eval_step(model: Decoder, cfg: TrainingConfig, num_bytes_V: jax.Array) -> EvalStep:
  """Build step(params, batch) -> sums of `nll` [nats], `weight` and `num_bytes` of the targets.

  With draft heads or multi-token prediction also `draft`, the result of `acceptance_sums`.
  """
  has_drafts = model.cfg.num_draft_heads + model.cfg.mtp_num_layers > 0

  def eval_step(params: PyTree, batch: DeviceBatch) -> Sums:
    hidden = run_forward(model, params, batch, jitter_key=None, drafts=has_drafts)
    sums = next_token(hidden, batch, cfg, model.sharder)
    num_bytes_BT = jnp.take(num_bytes_V, batch.targets_BT, mode="clip").astype(jnp.float32)
    num_bytes = jnp.sum(num_bytes_BT, where=batch.weight_BT > 0)
    counts: Sums = {"nll": sums.nll, "weight": sums.weight, "num_bytes": num_bytes}
    if has_drafts:
      counts["draft"] = acceptance_sums(hidden, batch, cfg.logits_chunk_tokens, model.sharder)
    return counts

  return eval_step
