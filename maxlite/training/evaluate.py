"""The held-out loss."""

from collections.abc import Callable, Iterable
from typing import Any

import jax

from maxlite.data.batch import Batch
from maxlite.observe.metrics import bits_per_byte
from maxlite.training.setup import Trainer


def evaluate(
  trainer: Trainer, eval_step: Callable[[Any, Batch], dict], params: Any, batches: Iterable[Batch]
) -> dict[str, float]:
  """`eval_loss` [nats per token], `eval_bits_per_byte`, `eval_tokens` over all `batches`."""
  return held_out_row(eval_step(params, trainer.place(batch)) for batch in batches)


def held_out_row(batches: Iterable[dict]) -> dict[str, float]:
  """The same figures from the evaluation step's sums over every batch."""
  nll = tokens = num_bytes = 0.0
  for batch in batches:
    # Added up in Python: in float32 every batch would round, and counting end at 2**24 tokens.
    sums = jax.device_get(batch)
    nll += float(sums["nll"])
    tokens += float(sums["weight"])
    num_bytes += float(sums["num_bytes"])
  result = {"eval_loss": nll / tokens, "eval_tokens": int(tokens)}
  if num_bytes:
    result["eval_bits_per_byte"] = bits_per_byte(nll, num_bytes)
  return result
