"""Sizes of a model and the floating-point operations of a training step, by arithmetic alone.

Whether the blocks are dense or mixtures of experts is the family's to say, so it is an argument
here (`moe`) and not read from a name.
"""

from typing import NamedTuple

from maxlite.config.schema import ModelConfig

TRAIN_OVER_FORWARD = 3  # the backward pass multiplies twice for each multiplication of the forward
FLOPS_PER_MAC = 2  # one multiplication, one addition


class Flops(NamedTuple):
  """Floating-point operations of one training step, over all devices."""

  total: float
  attention: float  # the part of `total` that scores keys and mixes values


def train_flops_per_step(model: ModelConfig, tokens: int, row_length: int, *, moe: bool) -> Flops:
  """FLOPs of one step on `tokens` tokens in rows of `row_length`.

  Counted are the matmuls: projections, MLP or active experts, router and logits (tied or not), and
  causal attention at half of its square. Not counted are the embedding lookup, elementwise work
  and whatever rematerialization computes twice.
  """
  macs_per_token = model.base_num_decoder_layers * (
    _attention_weights(model) + _feed_forward_weights(model, moe, active_only=True)
  ) + (model.vocab_size * model.base_emb_dim)
  channels = model.base_num_query_heads * model.head_dim
  attention_macs_per_token = model.base_num_decoder_layers * 2 * channels * row_length / 2
  flops_per_mac = TRAIN_OVER_FORWARD * FLOPS_PER_MAC * tokens
  attention = flops_per_mac * attention_macs_per_token
  return Flops(flops_per_mac * macs_per_token + attention, attention)


def parameter_count(model: ModelConfig, *, moe: bool) -> int:
  """Weights the model holds."""
  return _parameters(model, moe, active_only=False)


def active_parameter_count(model: ModelConfig, *, moe: bool) -> int:
  """Weights that take part in the computation of one token: all but the experts not chosen."""
  return _parameters(model, moe, active_only=True)


def _parameters(model: ModelConfig, moe: bool, active_only: bool) -> int:
  norms = 2 * model.base_emb_dim
  block = _attention_weights(model) + _feed_forward_weights(model, moe, active_only) + norms
  embeddings = (1 if model.logits_via_embedding else 2) * model.vocab_size * model.base_emb_dim
  return model.base_num_decoder_layers * block + embeddings + model.base_emb_dim


def _attention_weights(model: ModelConfig) -> int:
  query_and_out = 2 * model.base_num_query_heads
  key_and_value = 2 * model.base_num_kv_heads
  return model.base_emb_dim * model.head_dim * (query_and_out + key_and_value)


def _feed_forward_weights(model: ModelConfig, moe: bool, active_only: bool) -> int:
  """Weights of one block's MLP, or of its router and its experts (all, or those of one token)."""
  num_matrices = len(model.mlp_activations) + 1  # one in for each activation, one out
  if not moe:
    return num_matrices * model.base_emb_dim * model.base_mlp_dim
  num_experts = model.moe.num_experts_per_tok if active_only else model.moe.num_experts
  router = model.base_emb_dim * model.moe.num_experts
  return router + num_experts * num_matrices * model.base_emb_dim * model.moe.base_moe_mlp_dim
