"""QK-clip: after an update, attention logits above a threshold are scaled down, head by head.

For a head whose largest logit over the step's batch is S > threshold, g = threshold / S multiplies
its logits by scaling weights:

| | query | key |
|---|---|---|
| a head with its own key head | sqrt(g) | sqrt(g) |
| a head that shares its key head with others | g | 1 |
| latent attention, channels without position | sqrt(g) | sqrt(g) |
| latent attention, rotary channels | g | 1, as all heads share them |

So heads below the threshold compute what they did. S is measured with the parameters before the
update, over all devices and micro-batches. The optimizer's state is not changed.

Source: Kimi K2 (2025), section 2.1 and algorithm 1, which has no shared key heads: what is shared
is left as it is, as the paper does with rotary channels.
"""

import re
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

from maxlite.kernels.numerics import accumulator_dtype
from maxlite.layers.max_logits import NAME
from maxlite.optim.labels import merge, path_of, paths_in
from maxlite.sharding.pytree import PyTree
from maxlite.step.gradients import GradientFunction, GradientResult
from maxlite.step.train_state import Metrics
from maxlite.step.train_step import PostUpdate

# {path of an attention: max_H, of stacked layers max_NH}
MaxLogits = Mapping[str, jax.Array]
_MEASURED = "max_logits"  # the metric: first by head, then of all
_QUERIES = re.compile(r"(.*\battention)/query/kernel")
_CLIPPED = re.compile(r"(.*\battention)/(query|key|kv_up)/(kernel|bias)")


def by_attention(recorded: PyTree) -> dict[str, jax.Array]:
  """The collection MAX_LOGITS as MaxLogits."""
  flat = flatten_dict(recorded, sep="/")
  return {path.removesuffix(f"/{NAME}"): max_H for path, max_H in flat.items()}


def larger(max_logits: MaxLogits, recorded: PyTree) -> MaxLogits:
  """The maxima of some micro-batches and of another one, whose collection MAX_LOGITS is given."""
  largest = {}
  for path, max_H in by_attention(recorded).items():
    largest[path] = jnp.maximum(max_logits[path], max_H.astype(max_logits[path].dtype))
  return largest


def with_max_logits(gradients_of: GradientFunction) -> GradientFunction:
  """`gradients_of` a DecoderLoss that measures, with the maxima over the batch in the metrics."""

  def measured(
    trained: PyTree, frozen: PyTree, collections: PyTree, inputs: PyTree, key: jax.Array
  ) -> GradientResult:
    params = merge(trained, frozen)
    lowest = {}
    for path, kernel in zip(paths_in(params), jax.tree.leaves(params), strict=True):
      match = _QUERIES.fullmatch(path)
      if match:  # [D, H, C], or [N, D, H, C] of stacked layers
        shape = (*kernel.shape[:-3], kernel.shape[-2])
        lowest[match[1]] = jnp.full(shape, -jnp.inf, accumulator_dtype(kernel.dtype))
    result = gradients_of(trained, frozen, lowest, inputs, key)
    metrics = result.metrics | {_MEASURED: result.collections}
    return result._replace(metrics=metrics, collections=collections)

  return measured


def build_qk_clip(
  threshold: float, num_plain_channels: int, before: PostUpdate | None
) -> PostUpdate:
  """Build the `post_update` that clips, after another one.

  Args:
    num_plain_channels: channels without position of a head of latent attention.
  """

  def update(params: PyTree, metrics: Metrics, applies: jax.Array) -> PyTree:
    if before is not None:
      params = before(params, metrics, applies)
    max_logits: PyTree = metrics.pop(_MEASURED)
    factors = {}
    for path, max_H in max_logits.items():
      is_above = applies & (max_H > threshold)
      factors[path] = jnp.where(is_above, threshold / max_H, 1)
    flat = jnp.concatenate([max_H.reshape(-1) for max_H in max_logits.values()])
    metrics[_MEASURED] = jnp.max(flat)
    metrics["clipped_heads"] = jnp.sum(flat > threshold, dtype=jnp.int32)
    return scale_logits(params, factors, num_plain_channels)

  return update


def scale_logits(params: PyTree, factors: MaxLogits, num_plain_channels: int) -> PyTree:
  """Parameters with which the logits of every head are its factor times as large.

  Args:
    factors: by path of an attention, of its heads.
  """
  shapes = dict(zip(paths_in(params), map(jnp.shape, jax.tree.leaves(params)), strict=True))

  def scale(key_path: tuple, leaf: jax.Array) -> jax.Array:
    match = _CLIPPED.fullmatch(path_of(key_path))
    if match is None:
      return leaf
    attention, projection, kind = match.groups()
    factor_H1 = factors[attention][..., None]
    if f"{attention}/kv_up/kernel" in shapes:
      others = factor_H1 if projection == "query" else jnp.ones_like(factor_H1)
      is_plain_C = np.arange(leaf.shape[-1]) < num_plain_channels
      factor_HC = jnp.where(is_plain_C, jnp.sqrt(factor_H1), others)
    elif shapes[f"{attention}/key/kernel"][-2] == factor_H1.shape[-2]:
      factor_HC = jnp.sqrt(factor_H1)
    elif projection == "query":
      factor_HC = factor_H1
    else:
      return leaf
    if kind == "kernel":
      factor_HC = factor_HC[..., None, :, :]
    return (leaf * factor_HC).astype(leaf.dtype)

  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    return jax.tree.map_with_path(scale, params)
