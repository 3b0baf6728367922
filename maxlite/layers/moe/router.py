"""The router: logits, the experts of each token and their weights, and sums for the losses."""

import functools
import inspect

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import struct
from jax.ad_checkpoint import checkpoint_name

from maxlite.config.schema import MoeConfig
from maxlite.errors import UserError
from maxlite.kernels.numerics import accumulator_dtype
from maxlite.layers.moe import routes
from maxlite.layers.moe.expert_choice import is_chosen
from maxlite.layers.norm import RMSNorm
from maxlite.layers.partitioned import partitioned
from maxlite.registry import ROUTERS


class RouterSums(struct.PyTreeNode):
  """Sums over tokens (without padding) for losses and metrics, in float32.

  Because sums add up over micro-batches and devices, losses and metrics computed from them are
  global. Stacked over layers, they have a leading N.
  """

  tokens: jax.Array  # Number of tokens.
  count_E: jax.Array  # Assignments to each expert; no gradient.
  prob_E: jax.Array  # The router's probability of each expert.
  z: jax.Array  # Squared log-partition of the router's logits.
  rows: jax.Array  # Number of rows with at least one token.
  # The sum over these rows of E * sum_e (share of assignments to e) * (mean probability of e).
  row_balance: jax.Array
  dropped: jax.Array  # Assignments dropped by the dispatch; the router returns 0.
  # With bounded receive buffers, by factor, those that overflow (receive_buffer.py).
  overfull_F: jax.Array | None = None


class Route(struct.PyTreeNode):
  """The experts of every token."""

  expert_BTK: jax.Array  # int32, distinct along K.
  weight_BTK: jax.Array  # float32.
  sums: RouterSums


class Router(nn.Module):
  """Computes the `Route` of every token.

  With `use_bias`, the logits have a bias, which affects both choice and weights. With
  cfg.routed_bias, the parameter `bias` affects the choice only; it has no gradient, and
  training/routed_bias.py updates it. With `is_scaled`, x is normalised and divided by sqrt(D),
  and each of its channels and the weight of each expert is multiplied by a parameter.
  """

  cfg: MoeConfig
  weight_dtype: jnp.dtype
  use_bias: bool = False
  is_scaled: bool = False
  epsilon: float = 0.0  # Of the norm of x.

  @nn.compact
  def __call__(self, x_BTD: jax.Array, segment_BT: jax.Array) -> Route:
    cfg = self.cfg
    if self.is_scaled:
      x_BTD = self._scale_input(x_BTD)
    logits_BTE = self._logits(x_BTD)
    bias_E = jnp.zeros(cfg.num_experts, logits_BTE.dtype)
    if cfg.routed_bias:
      # float32 regardless of weight_dtype: bfloat16 would round its small updates away.
      zeros = partitioned(nn.initializers.zeros, ("router",))
      bias_E += self.param("bias", zeros, (cfg.num_experts,), jnp.float32).astype(bias_E.dtype)
    choose_experts = ROUTERS[cfg.router]
    given_BTK = routes.given(self)
    if given_BTK is not None:  # without, a router of a plugin needs no such parameter
      if "given_BTK" not in inspect.signature(choose_experts).parameters:
        raise UserError(
          f"router={cfg.router} cannot replay experts: give its function a parameter "
          "given_BTK=None as docs/examples/plugin.py does, or write rollout_routes=live"
        )
      choose_experts = functools.partial(choose_experts, given_BTK=given_BTK)
    probability_BTE, expert_BTK, weight_BTK = choose_experts(logits_BTE, bias_E, cfg)
    routes.record(self, expert_BTK)
    if self.is_scaled:
      weight_BTK = weight_BTK * self._expert_scale(expert_BTK).astype(weight_BTK.dtype)
    weight_BTK = checkpoint_name(weight_BTK * cfg.routed_scaling_factor, "moe_route")
    sums = _router_sums(logits_BTE, probability_BTE, expert_BTK, segment_BT)
    return Route(expert_BTK, weight_BTK, sums)

  def _logits(self, x_BTD: jax.Array) -> jax.Array:
    """logits_BTE in float32, from float32 operands or from operands in x's type."""
    cfg = self.cfg
    values = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
    init = partitioned(values, ("embed", "router"))
    kernel_DE = self.param("kernel", init, (x_BTD.shape[-1], cfg.num_experts), self.weight_dtype)
    dtype = accumulator_dtype(x_BTD.dtype)
    precision = None
    if cfg.float32_gate_logits:
      x_BTD = x_BTD.astype(dtype)
      # The default precision of accelerators would round float32 operands to bfloat16 or TF32.
      precision = "highest"
    if cfg.router_jitter and self.has_rng("jitter"):
      x_BTD *= self._jitter(x_BTD)
    logits_BTE = jnp.einsum(
      "btd,de->bte",
      x_BTD,
      kernel_DE.astype(x_BTD.dtype),
      precision=precision,
      preferred_element_type=dtype,
    )
    logits_BTE = checkpoint_name(logits_BTE, "router_logits")
    if self.use_bias:
      zeros = partitioned(nn.initializers.zeros, ("router",))
      bias_E = self.param("logits_bias", zeros, (cfg.num_experts,), self.weight_dtype)
      logits_BTE += bias_E.astype(dtype)[None, None]
    return logits_BTE

  def _scale_input(self, x_BTD: jax.Array) -> jax.Array:
    """x_BTD, normalised and divided by sqrt(D), with a learned scale per channel."""
    num_channels = x_BTD.shape[-1]
    norm = RMSNorm(self.epsilon, self.weight_dtype, name="norm")
    return norm(x_BTD) * jnp.asarray(num_channels**-0.5, x_BTD.dtype)

  def _expert_scale(self, expert_BTK: jax.Array) -> jax.Array:
    """The learned factor of the weight of each chosen expert."""
    init = partitioned(nn.initializers.ones, ("router",))
    scale_E = self.param("expert_scale", init, (self.cfg.num_experts,), self.weight_dtype)
    # In float32, so that the gradient of the lookup is summed in it.
    wide_E = scale_E.astype(accumulator_dtype(scale_E.dtype))
    return jnp.take(wide_E, expert_BTK, axis=0, mode="clip")

  def _jitter(self, x_BTD: jax.Array) -> jax.Array:
    """Uniform noise in 1 +- router_jitter, with x's shape and type."""
    return jax.random.uniform(
      self.make_rng("jitter"),
      x_BTD.shape,
      x_BTD.dtype,
      minval=1 - self.cfg.router_jitter,
      maxval=1 + self.cfg.router_jitter,
    )


def _router_sums(
  logits_BTE: jax.Array,
  probability_BTE: jax.Array,
  expert_BTK: jax.Array,
  segment_BT: jax.Array,
) -> RouterSums:
  dtype = logits_BTE.dtype
  num_experts = logits_BTE.shape[-1]
  num_chosen = expert_BTK.shape[-1]
  real_BT = segment_BT > 0
  real_BT1 = real_BT[..., None]
  chosen_BTE = is_chosen(expert_BTK, num_experts).any(2) & real_BT1
  count_BE = jnp.sum(chosen_BTE, axis=1, dtype=dtype)
  prob_BE = jnp.sum(jnp.where(real_BT1, probability_BTE, 0), axis=1)
  tokens_B = jnp.sum(real_BT, axis=1, dtype=dtype)
  at_least_one_B = jnp.maximum(tokens_B, 1)
  share_BE = count_BE / (at_least_one_B * num_chosen)[:, None]
  z_BT = jnp.square(jax.nn.logsumexp(logits_BTE, axis=-1))
  return RouterSums(
    tokens=jnp.sum(tokens_B),
    count_E=jnp.sum(count_BE, axis=0),
    prob_E=jnp.sum(prob_BE, axis=0),
    z=jnp.sum(jnp.where(real_BT, z_BT, 0)),
    rows=jnp.sum(tokens_B > 0, dtype=dtype),
    row_balance=num_experts * jnp.sum(share_BE * prob_BE / at_least_one_B[:, None]),
    dropped=jnp.zeros((), dtype),
  )
