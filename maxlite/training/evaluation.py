"""The held-out loss."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from maxlite.data.batch import Batch
from maxlite.metrics.step_row import bits_per_byte
from maxlite.training.trainer import Trainer


def evaluate(
  trainer: Trainer,
  eval_step: Callable[[Any, Batch], dict],
  params: Any,
  batches: Iterable[Batch],
  averages: Any = None,
) -> dict[str, float]:
  """`eval_loss` [nats per token], `eval_bits_per_byte`, `eval_tokens` over all `batches`.

  With moving averages of the parameters also `eval_ema_loss` and its like, of those.
  """

  def sums(batch: Batch) -> dict:
    batch = trainer.place(batch)
    found = eval_step(params, batch)
    return found if averages is None else found | {"ema": eval_step(averages, batch)}

  return held_out_row(map(sums, batches))


def held_out_row(batches: Iterable[dict]) -> dict[str, float]:
  """The same figures from the evaluation step's sums over every batch.

  With draft heads also `eval_acceptance_1`, ... , the share of each head's drafts that are
  accepted, and `eval_accepted_length`, how many of a chain of drafts are.
  """
  # Added up in float64: in float32 every batch would round, and counting end at 2**24 tokens.
  in_float64 = lambda sums: jax.tree.map(np.float64, jax.device_get(sums))
  sums = functools.reduce(functools.partial(jax.tree.map, np.add), map(in_float64, batches))
  row = _figures(sums) | {"eval_tokens": int(sums["weight"])}
  averaged = _figures(sums["ema"]) if "ema" in sums else {}
  return row | {name.replace("eval_", "eval_ema_", 1): x for name, x in averaged.items()}


def _figures(sums: dict) -> dict[str, float]:
  figures = {"eval_loss": float(sums["nll"] / sums["weight"])}
  if sums["num_bytes"]:
    figures["eval_bits_per_byte"] = bits_per_byte(float(sums["nll"]), float(sums["num_bytes"]))
  return figures | (_draft_figures(sums["draft"]) if "draft" in sums else {})


def _draft_figures(sums: dict) -> dict[str, float]:
  shares_J = sums["accepted_J"] / np.maximum(sums["drafts_J"], 1)
  figures = {f"eval_acceptance_{j}": float(share) for j, share in enumerate(shares_J, start=1)}
  return figures | {"eval_accepted_length": float(sums["length"] / np.maximum(sums["chains"], 1))}
