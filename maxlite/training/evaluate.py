"""The held-out loss."""

from collections.abc import Callable, Iterable
from typing import Any

import jax

from maxlite.data.batch import Batch, to_global
from maxlite.observe.metrics import bits_per_byte
from maxlite.training.setup import Trainer


def evaluate(
  trainer: Trainer, eval_step: Callable[[Any, Batch], dict], params: Any, batches: Iterable[Batch]
) -> dict[str, float]:
  """`eval_loss` [nats per token], `eval_bits_per_byte`, `eval_tokens` over all `batches`."""
  nll = tokens = num_bytes = 0.0
  for local in batches:
    batch = to_global(local, trainer.batch_sharding, trainer.batch_shape)
    # Added up in Python: in float32 every batch would round, and counting end at 2**24 tokens.
    sums = jax.device_get(eval_step(params, batch))
    nll += float(sums["nll"])
    tokens += float(sums["weight"])
    num_bytes += float(sums["num_bytes"])
  result = {"eval_loss": nll / tokens, "eval_tokens": int(tokens)}
  if num_bytes:
    result["eval_bits_per_byte"] = bits_per_byte(nll, num_bytes)
  return result
