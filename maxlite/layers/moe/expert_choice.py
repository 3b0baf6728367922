"""The ROUTERS: how a token's experts and their weights follow from the router's logits.

Each is a function (logits_BTE, bias_E, cfg, given_BTK=None) -> ExpertChoice, listed in registry.py.
The bias affects the choice of experts only. With `given_BTK` there is no choice: these are the
experts, and their weights follow from the logits as for any others (routes.py).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from maxlite.config.schema import MoeConfig


class ExpertChoice(NamedTuple):
  """The experts of every token."""

  probability_BTE: jax.Array  # For the auxiliary losses; sums to one over the experts.
  expert_BTK: jax.Array  # int32
  weight_BTK: jax.Array


def softmax_topk(
  logits_BTE: jax.Array, bias_E: jax.Array, cfg: MoeConfig, given_BTK: jax.Array | None = None
) -> ExpertChoice:
  """The experts with the highest logits, weighted by a softmax over these logits.

  Source: Jiang et al., Mixtral of Experts (2024), section 2.1.
  """
  choice_BTE = _biased(logits_BTE, bias_E)
  expert_BTK = _best(choice_BTE, cfg, given_BTK)
  chosen_logits_BTK = _at(expert_BTK, logits_BTE)
  weight_BTK = jax.nn.softmax(chosen_logits_BTK, axis=-1)
  probability_BTE = jax.nn.softmax(logits_BTE, axis=-1)
  return ExpertChoice(probability_BTE, expert_BTK, weight_BTK)


def topk_softmax(
  logits_BTE: jax.Array, bias_E: jax.Array, cfg: MoeConfig, given_BTK: jax.Array | None = None
) -> ExpertChoice:
  """The most probable experts, weighted by their probabilities.

  With groups (`group_limited_greedy`), only those whose best expert is most probable.

  Source: Muennighoff et al., OLMoE (2024), section 2; with norm_topk_prob, Yang et al., Qwen3
  Technical Report (2025); with groups, DeepSeek-AI, DeepSeek-V2 (2024), section 2.2.2.
  """
  probability_BTE = jax.nn.softmax(logits_BTE, axis=-1)
  choice_BTE = _biased(probability_BTE, bias_E)
  choice_BTE = _limit_to_groups(choice_BTE, cfg, num_best=1)
  expert_BTK = _best(choice_BTE, cfg, given_BTK)
  weight_BTK = _weights(probability_BTE, expert_BTK, cfg)
  return ExpertChoice(probability_BTE, expert_BTK, weight_BTK)


def topk_sigmoid(
  logits_BTE: jax.Array, bias_E: jax.Array, cfg: MoeConfig, given_BTK: jax.Array | None = None
) -> ExpertChoice:
  """The experts with the highest logits, weighted by a sigmoid of each.

  Source: the code published with Llama 4 (2025).
  """
  expert_BTK = _best(_biased(logits_BTE, bias_E), cfg, given_BTK)
  affinity_BTE = jax.nn.sigmoid(logits_BTE)
  weight_BTK = _weights(affinity_BTE, expert_BTK, cfg)
  return ExpertChoice(_normalized(affinity_BTE), expert_BTK, weight_BTK)


def sigmoid_group_topk(
  logits_BTE: jax.Array, bias_E: jax.Array, cfg: MoeConfig, given_BTK: jax.Array | None = None
) -> ExpertChoice:
  """The experts with the highest affinity within the groups with the highest sum of the two best.

  Source: DeepSeek-AI, DeepSeek-V3 (2024), eq. 13 to 16; probabilities as in eq. 19.
  """
  affinity_BTE = jax.nn.sigmoid(logits_BTE)
  choice_BTE = _biased(affinity_BTE, bias_E)
  choice_BTE = _limit_to_groups(choice_BTE, cfg, num_best=2)
  expert_BTK = _best(choice_BTE, cfg, given_BTK)
  probability_BTE = _normalized(affinity_BTE)
  weight_BTK = _weights(affinity_BTE, expert_BTK, cfg)
  return ExpertChoice(probability_BTE, expert_BTK, weight_BTK)


def _biased(score_BTE: jax.Array, bias_E: jax.Array) -> jax.Array:
  """choice_BTE: the scores by which experts are chosen; no gradient."""
  return jax.lax.stop_gradient(score_BTE + bias_E[None, None])


def _limit_to_groups(choice_BTE: jax.Array, cfg: MoeConfig, *, num_best: int) -> jax.Array:
  """`choice_BTE`, with -inf outside the topk_routing_group best groups.

  A group consists of adjacent experts; its score is the sum of its `num_best` best.
  """
  num_groups = cfg.n_routing_groups
  num_kept = cfg.topk_routing_group
  if num_kept >= num_groups:
    return choice_BTE
  num_rows, num_tokens, num_experts = choice_BTE.shape
  group_size = num_experts // num_groups
  group_BTGe = choice_BTE.reshape(num_rows, num_tokens, num_groups, group_size)
  best_BTGe, _ = jax.lax.top_k(group_BTGe, min(num_best, group_size))
  _, kept_group_BTK = jax.lax.top_k(best_BTGe.sum(-1), num_kept)
  is_kept_BTG = is_chosen(kept_group_BTK, num_groups).any(2)
  limited_BTGe = jnp.where(is_kept_BTG[..., None], group_BTGe, -jnp.inf)
  return limited_BTGe.reshape(choice_BTE.shape)


def _best(choice_BTE: jax.Array, cfg: MoeConfig, given_BTK: jax.Array | None) -> jax.Array:
  """expert_BTK: the given experts, or those with the highest `choice_BTE`, best first."""
  if given_BTK is not None:
    expert_BTK = given_BTK
  elif cfg.use_random_routing:
    expert_BTK = _round_robin(choice_BTE.shape, cfg.num_experts_per_tok)
  else:
    _, expert_BTK = jax.lax.top_k(choice_BTE, cfg.num_experts_per_tok)
  return checkpoint_name(expert_BTK, "moe_route")


def _round_robin(shape_BTE: tuple[int, ...], num_chosen: int) -> jax.Array:
  """expert_BTK with the same load for every expert over any E consecutive tokens."""
  num_rows, num_positions, num_experts = shape_BTE
  order_E = np.random.default_rng(0).permutation(num_experts)
  offset_K = order_E[:num_chosen].astype(np.int32)
  token_A = jnp.arange(num_rows * num_positions, dtype=jnp.int32)
  token_BT = token_A.reshape(num_rows, num_positions)
  return (token_BT[..., None] + offset_K[None, None]) % num_experts


def is_chosen(index_BTK: jax.Array, size: int) -> jax.Array:
  """chosen_BTKE: whether the k-th choice is e."""
  index_BTK1 = index_BTK[..., None]
  index_111E = jnp.arange(size, dtype=index_BTK.dtype)[None, None, None]
  return index_BTK1 == index_111E


def _at(expert_BTK: jax.Array, value_BTE: jax.Array) -> jax.Array:
  """value_BTK of the chosen experts, without a gather, whose gradient would be a scatter."""
  num_experts = value_BTE.shape[-1]
  chosen_BTKE = is_chosen(expert_BTK, num_experts)
  value_BTKE = jnp.where(chosen_BTKE, value_BTE[:, :, None], 0)
  return jnp.sum(value_BTKE, axis=-1)


def _weights(score_BTE: jax.Array, expert_BTK: jax.Array, cfg: MoeConfig) -> jax.Array:
  """weight_BTK: the scores of the chosen experts, normalised with norm_topk_prob."""
  weight_BTK = _at(expert_BTK, score_BTE)
  if cfg.norm_topk_prob:
    return _normalized(weight_BTK)
  return weight_BTK


def _normalized(x: jax.Array) -> jax.Array:
  """x divided by its sum over the last axis."""
  total = jnp.sum(x, axis=-1, keepdims=True)
  return x / (total + 1e-20)
