"""Routers: the experts of each token, and their weights.

A router is a function (logits_BTE, bias_E, cfg) -> (probability_BTE, expert_BTK, weight_BTK) in
`config.registry.ROUTERS`. The bias affects the choice of experts only. The probabilities are for
the auxiliary losses and sum to one over the experts.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import struct
from jax.ad_checkpoint import checkpoint_name

from maxlite.config.registry import ROUTERS
from maxlite.config.schema import MoeConfig


@struct.dataclass
class RouterSums:
  """Sums over tokens (without padding) for losses and metrics, in float32.

  Because sums add up over micro-batches and devices, losses and metrics computed from them are
  global. Stacked over layers, they have a leading N.
  """

  tokens: jax.Array  # number of tokens
  count_E: jax.Array  # assignments per expert; no gradient
  prob_E: jax.Array  # router probability per expert
  z: jax.Array  # squared log-partition of the router's logits
  rows: jax.Array  # rows with at least one token
  row_balance: jax.Array  # over these rows, E * sum_e (share of assignments) * (mean probability)
  dropped: jax.Array  # assignments dropped by the dispatch; 0 from the router


@struct.dataclass
class Route:
  """The experts of every token."""

  expert_BTK: jax.Array  # int32, distinct along K
  weight_BTK: jax.Array  # float32
  sums: RouterSums


def softmax_topk(logits_BTE: jax.Array, bias_E: jax.Array, cfg: MoeConfig) -> tuple:
  """The experts with the highest logits, weighted by a softmax over these logits.

  Source: Jiang et al., Mixtral of Experts (2024), section 2.1.
  """
  expert_BTK = _best(_biased(logits_BTE, bias_E), cfg)
  weight_BTK = jax.nn.softmax(_at(expert_BTK, logits_BTE), axis=-1)
  return jax.nn.softmax(logits_BTE, axis=-1), expert_BTK, weight_BTK


def topk_softmax(logits_BTE: jax.Array, bias_E: jax.Array, cfg: MoeConfig) -> tuple:
  """The most probable experts, weighted by their probabilities.

  Source: Muennighoff et al., OLMoE (2024), section 2; with norm_topk_prob, Yang et al., Qwen3
  Technical Report (2025).
  """
  probability_BTE = jax.nn.softmax(logits_BTE, axis=-1)
  expert_BTK = _best(_biased(probability_BTE, bias_E), cfg)
  return probability_BTE, expert_BTK, _weights(probability_BTE, expert_BTK, cfg)


def group_limited_greedy(logits_BTE: jax.Array, bias_E: jax.Array, cfg: MoeConfig) -> tuple:
  """The most probable experts within the groups whose best expert is most probable.

  Source: DeepSeek-AI, DeepSeek-V2 (2024), section 2.2.2.
  """
  probability_BTE = jax.nn.softmax(logits_BTE, axis=-1)
  choice_BTE = _limit_to_groups(_biased(probability_BTE, bias_E), 1, cfg)
  expert_BTK = _best(choice_BTE, cfg)
  return probability_BTE, expert_BTK, _weights(probability_BTE, expert_BTK, cfg)


def sigmoid_group_topk(logits_BTE: jax.Array, bias_E: jax.Array, cfg: MoeConfig) -> tuple:
  """The experts with the highest affinity within the groups with the highest sum of the two best.

  Source: DeepSeek-AI, DeepSeek-V3 (2024), eq. 13 to 16; probabilities as in eq. 19.
  """
  affinity_BTE = jax.nn.sigmoid(logits_BTE)
  choice_BTE = _limit_to_groups(_biased(affinity_BTE, bias_E), 2, cfg)
  expert_BTK = _best(choice_BTE, cfg)
  return _normalized(affinity_BTE), expert_BTK, _weights(affinity_BTE, expert_BTK, cfg)


def _biased(score_BTE: jax.Array, bias_E: jax.Array) -> jax.Array:
  """choice_BTE: the scores by which experts are chosen; no gradient."""
  return jax.lax.stop_gradient(score_BTE + bias_E[None, None])


def _limit_to_groups(choice_BTE: jax.Array, num_best: int, cfg: MoeConfig) -> jax.Array:
  """`choice_BTE`, with -inf outside the topk_routing_group best groups.

  A group consists of adjacent experts; its score is the sum of its `num_best` best.
  """
  num_groups, num_kept = cfg.n_routing_groups, cfg.topk_routing_group
  if num_kept >= num_groups:
    return choice_BTE
  group_BTGe = choice_BTE.reshape(*choice_BTE.shape[:2], num_groups, -1)
  best_BTG = jax.lax.top_k(group_BTGe, min(num_best, group_BTGe.shape[-1]))[0].sum(-1)
  kept_BTG = _is_chosen(jax.lax.top_k(best_BTG, num_kept)[1], num_groups).any(2)
  return jnp.where(kept_BTG[..., None], group_BTGe, -jnp.inf).reshape(choice_BTE.shape)


def _best(choice_BTE: jax.Array, cfg: MoeConfig) -> jax.Array:
  """expert_BTK: the experts with the highest `choice_BTE`, best first."""
  if cfg.use_random_routing:
    expert_BTK = _round_robin(choice_BTE.shape, cfg.num_experts_per_tok)
  else:
    expert_BTK = jax.lax.top_k(choice_BTE, cfg.num_experts_per_tok)[1]
  return checkpoint_name(expert_BTK, "moe_route")


def _round_robin(shape_BTE: tuple[int, ...], num_chosen: int) -> jax.Array:
  """expert_BTK with the same load for every expert over any E consecutive tokens."""
  num_rows, num_positions, num_experts = shape_BTE
  offset_K = np.random.default_rng(0).permutation(num_experts)[:num_chosen].astype(np.int32)
  token_BT = jnp.arange(num_rows * num_positions, dtype=jnp.int32).reshape(num_rows, -1)
  return (token_BT[..., None] + offset_K[None, None]) % num_experts


def _is_chosen(index_BTK: jax.Array, size: int) -> jax.Array:
  """chosen_BTKE: whether the k-th choice is e."""
  return index_BTK[..., None] == jnp.arange(size, dtype=index_BTK.dtype)[None, None, None]


def _at(expert_BTK: jax.Array, value_BTE: jax.Array) -> jax.Array:
  """value_BTK of the chosen experts, without a gather, whose gradient would be a scatter."""
  chosen_BTKE = _is_chosen(expert_BTK, value_BTE.shape[-1])
  return jnp.sum(jnp.where(chosen_BTKE, value_BTE[:, :, None], 0), axis=-1)


def _weights(score_BTE: jax.Array, expert_BTK: jax.Array, cfg: MoeConfig) -> jax.Array:
  weight_BTK = _at(expert_BTK, score_BTE)
  return _normalized(weight_BTK) if cfg.norm_topk_prob else weight_BTK


def _normalized(x: jax.Array) -> jax.Array:
  return x / (jnp.sum(x, axis=-1, keepdims=True) + 1e-20)


class Router(nn.Module):
  """Computes the `Route` of every token.

  With cfg.routed_bias, the parameter `bias` has no gradient; training/routed_bias.py updates it.
  """

  cfg: MoeConfig
  weight_dtype: jnp.dtype
  use_bias: bool = False  # a bias of the logits, which affects both choice and weights

  @nn.compact
  def __call__(self, x_BTD: jax.Array, segment_BT: jax.Array) -> Route:
    cfg = self.cfg
    logits_BTE = self._logits(x_BTD)
    bias_E = jnp.zeros(cfg.num_experts, logits_BTE.dtype)
    if cfg.routed_bias:
      # float32 regardless of weight_dtype: bfloat16 would round its small updates away.
      zeros = nn.with_logical_partitioning(nn.initializers.zeros, ("router",))
      bias_E += self.param("bias", zeros, (cfg.num_experts,), jnp.float32).astype(bias_E.dtype)
    probability_BTE, expert_BTK, weight_BTK = ROUTERS[cfg.router](logits_BTE, bias_E, cfg)
    weight_BTK = checkpoint_name(weight_BTK * cfg.routed_scaling_factor, "moe_route")
    return Route(expert_BTK, weight_BTK, _sums(logits_BTE, probability_BTE, expert_BTK, segment_BT))

  def _logits(self, x_BTD: jax.Array) -> jax.Array:
    """logits_BTE in float32, from float32 operands or from operands in x's type."""
    cfg = self.cfg
    init = nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
    init = nn.with_logical_partitioning(init, ("embed", "router"))
    kernel_DE = self.param("kernel", init, (x_BTD.shape[-1], cfg.num_experts), self.weight_dtype)
    dtype = np.promote_types(x_BTD.dtype, jnp.float32)
    # The default precision of accelerators would round float32 operands to bfloat16 or TF32.
    precision = "highest" if cfg.float32_gate_logits else None
    x_BTD = x_BTD.astype(dtype) if cfg.float32_gate_logits else x_BTD
    if cfg.router_jitter and self.has_rng("jitter"):
      low, high = 1 - cfg.router_jitter, 1 + cfg.router_jitter
      x_BTD *= jax.random.uniform(self.make_rng("jitter"), x_BTD.shape, x_BTD.dtype, low, high)
    logits_BTE = jnp.einsum(
      "btd,de->bte",
      x_BTD,
      kernel_DE.astype(x_BTD.dtype),
      precision=precision,
      preferred_element_type=dtype,
    )
    if self.use_bias:
      zeros = nn.with_logical_partitioning(nn.initializers.zeros, ("router",))
      bias_E = self.param("logits_bias", zeros, (cfg.num_experts,), self.weight_dtype)
      logits_BTE += bias_E.astype(dtype)[None, None]
    return logits_BTE


def _sums(
  logits_BTE: jax.Array, probability_BTE: jax.Array, expert_BTK: jax.Array, segment_BT: jax.Array
) -> RouterSums:
  dtype, num_experts = logits_BTE.dtype, logits_BTE.shape[-1]
  real_BT = segment_BT > 0
  real_BT1 = real_BT[..., None]
  chosen_BTE = _is_chosen(expert_BTK, num_experts).any(2) & real_BT1
  count_BE = jnp.sum(chosen_BTE, axis=1, dtype=dtype)
  prob_BE = jnp.sum(jnp.where(real_BT1, probability_BTE, 0), axis=1)
  tokens_B = jnp.sum(real_BT, axis=1, dtype=dtype)
  least_one_B = jnp.maximum(tokens_B, 1)
  share_BE = count_BE / (least_one_B * expert_BTK.shape[-1])[:, None]
  z_BT = jnp.square(jax.nn.logsumexp(logits_BTE, axis=-1))
  return RouterSums(
    tokens=jnp.sum(tokens_B),
    count_E=jnp.sum(count_BE, axis=0),
    prob_E=jnp.sum(prob_BE, axis=0),
    z=jnp.sum(jnp.where(real_BT, z_BT, 0)),
    rows=jnp.sum(tokens_B > 0, dtype=dtype),
    row_balance=num_experts * jnp.sum(share_BE * prob_BE / least_one_B[:, None]),
    dropped=jnp.zeros((), dtype),
  )
