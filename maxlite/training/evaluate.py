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
  sums = None
  for local in batches:
    batch = to_global(local, trainer.batch_sharding, trainer.batch_shape)
    more = eval_step(params, batch)
    sums = more if sums is None else jax.tree.map(jax.numpy.add, sums, more)
  nll, tokens, num_bytes = (float(sums[name]) for name in ("nll", "weight", "num_bytes"))
  result = {"eval_loss": nll / tokens, "eval_tokens": int(tokens)}
  if num_bytes:
    result["eval_bits_per_byte"] = bits_per_byte(nll, num_bytes)
  return result
