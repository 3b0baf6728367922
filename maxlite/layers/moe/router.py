"""Which experts a token goes to, and with what weight."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import struct


@struct.dataclass
class RouterSums:
  """Sums over real tokens (padding excluded) from which losses and metrics are made.

  Being sums they add up over micro-batches and devices, so whatever is made of them is a global
  figure. All float32; stacked by layer they gain a leading N.
  """

  tokens: jax.Array  # how many there are
  count_E: jax.Array  # assignments per expert; no gradient
  prob_E: jax.Array  # router probability per expert
  z: jax.Array  # squared log-partition of the router's logits


@struct.dataclass
class Route:
  """The router's decision for every token."""

  expert_BTK: jax.Array
  weight_BTK: jax.Array  # float32
  sums: RouterSums


def softmax_topk(logits_BTE: jax.Array, num_chosen: int, norm_topk_prob: bool) -> tuple:
  """(probability_BTE, expert_BTK, weight_BTK): the most probable experts, weighted by probability.

  Source: Jiang et al., Mixtral of Experts (2024), section 2.1 (with norm_topk_prob).
  """
  probability_BTE = jax.nn.softmax(logits_BTE, axis=-1)
  weight_BTK, expert_BTK = jax.lax.top_k(probability_BTE, num_chosen)
  if norm_topk_prob:
    weight_BTK /= jnp.sum(weight_BTK, axis=-1, keepdims=True)
  return probability_BTE, expert_BTK, weight_BTK


ROUTERS = {"softmax_topk": softmax_topk}


class Router(nn.Module):
  """Route of every token, computed in float32."""

  num_experts: int
  num_chosen: int
  norm_topk_prob: bool
  jitter: float
  weight_dtype: jnp.dtype
  kind: str = "softmax_topk"

  @nn.compact
  def __call__(self, x_BTD: jax.Array, segment_BT: jax.Array) -> Route:
    init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
    init = nn.with_logical_partitioning(init, ("embed", "router"))
    shape = (x_BTD.shape[-1], self.num_experts)
    kernel_DE = self.param("kernel", init, shape, self.weight_dtype)
    x32_BTD = x_BTD.astype(np.promote_types(x_BTD.dtype, jnp.float32))
    if self.jitter and self.has_rng("jitter"):
      low, high = 1 - self.jitter, 1 + self.jitter
      key = self.make_rng("jitter")
      x32_BTD *= jax.random.uniform(key, x32_BTD.shape, x32_BTD.dtype, low, high)
    logits_BTE = jnp.einsum("btd,de->bte", x32_BTD, kernel_DE.astype(x32_BTD.dtype))
    choose = ROUTERS[self.kind]
    probability_BTE, expert_BTK, weight_BTK = choose(
      logits_BTE, self.num_chosen, self.norm_topk_prob
    )
    return Route(expert_BTK, weight_BTK, _sums(logits_BTE, probability_BTE, expert_BTK, segment_BT))


def _sums(
  logits_BTE: jax.Array, probability_BTE: jax.Array, expert_BTK: jax.Array, segment_BT: jax.Array
) -> RouterSums:
  dtype = logits_BTE.dtype
  real_BT = (segment_BT > 0).astype(dtype)
  chosen_BTE = jnp.sum(jax.nn.one_hot(expert_BTK, logits_BTE.shape[-1], dtype=dtype), axis=2)
  z_BT = jnp.square(jax.nn.logsumexp(logits_BTE, axis=-1))
  return RouterSums(
    tokens=jnp.sum(real_BT),
    count_E=jax.lax.stop_gradient(jnp.einsum("bt,bte->e", real_BT, chosen_BTE)),
    prob_E=jnp.einsum("bt,bte->e", real_BT, probability_BTE),
    z=jnp.sum(real_BT * z_BT),
  )
