"""Parameter counts and FLOPs of a training step, from the config alone."""

import dataclasses
from typing import NamedTuple

from maxlite.config.schema import LoraConfig, ModelConfig

TRAIN_OVER_FORWARD = 3  # the backward pass has two multiplications for each of the forward pass
FLOPS_PER_MAC = 2  # one multiplication, one addition


class Flops(NamedTuple):
  """FLOPs of one training step, over all devices."""

  total: float
  attention: float  # the part of `total` in attention scores and weighted values


@dataclasses.dataclass(frozen=True)
class _Weights:
  """Numbers of parameters."""

  matmul: int  # multiplied with each token
  other: int  # norms and biases

  def __add__(self, more: "_Weights") -> "_Weights":
    return _Weights(self.matmul + more.matmul, self.other + more.other)

  def times(self, number: int) -> "_Weights":
    return _Weights(number * self.matmul, number * self.other)


def train_flops_per_step(model: ModelConfig, tokens: int, row_length: int) -> Flops:
  """FLOPs of one step that trains all parameters on `tokens` tokens in rows of `row_length`.

  Counts the matmuls: projections, MLP or active experts, router and logits (tied or not), and
  causal attention at half of its square, less what sliding windows exclude. Does not count the
  embedding lookup, elementwise operations and rematerialization.
  """
  macs_per_token = _layers(model, active_only=True).matmul + model.vocab_size * model.base_emb_dim
  score_channels, value_channels = _head_channels(model)
  channels = model.base_num_query_heads * (score_channels + value_channels)
  attention_macs_per_token = channels * _keys_per_query(model, row_length)
  flops_per_mac = TRAIN_OVER_FORWARD * FLOPS_PER_MAC * tokens
  attention = flops_per_mac * attention_macs_per_token
  return Flops(flops_per_mac * macs_per_token + attention, attention)


def _keys_per_query(model: ModelConfig, row_length: int) -> float:
  """Mean number of keys per query over a row, summed over layers."""
  num_layers, every = model.base_num_decoder_layers, model.family.global_layer_every
  num_global = num_layers // every if every else 0
  window = min(model.sliding_window_size or row_length, row_length)
  hidden = (row_length - window) ** 2 / (2 * row_length)
  return num_layers * row_length / 2 - (num_layers - num_global) * hidden


def parameter_count(model: ModelConfig) -> int:
  """Number of parameters of the model."""
  return _parameters(model, active_only=False)


def active_parameter_count(model: ModelConfig) -> int:
  """Number of parameters used per token: all except the experts that are not chosen."""
  return _parameters(model, active_only=True)


def num_moe_layers(model: ModelConfig) -> int:
  """Number of decoder layers that are mixtures of experts."""
  if not model.family.is_moe:
    return 0
  num_dense, step = model.layer_plan
  return (model.base_num_decoder_layers - num_dense) // step


def _parameters(model: ModelConfig, active_only: bool) -> int:
  embeddings = (1 if model.logits_via_embedding else 2) * model.vocab_size * model.base_emb_dim
  layers = _layers(model, active_only)
  draft_heads = model.num_draft_heads * model.base_emb_dim**2
  return layers.matmul + layers.other + embeddings + model.base_emb_dim + draft_heads


def _layers(model: ModelConfig, active_only: bool) -> _Weights:
  """Parameters of all decoder layers."""
  num_layers, num_moe = model.base_num_decoder_layers, num_moe_layers(model)
  latent = model.family.latent_attention
  attention = _latent_attention(model) if latent else _attention(model)
  norms = _Weights(0, (4 if model.family.post_norms else 2) * model.base_emb_dim)
  dense = _mlp(model, model.base_mlp_dim).times(num_layers - num_moe)
  return (attention + norms).times(num_layers) + dense + _moe(model, active_only).times(num_moe)


def _head_channels(model: ModelConfig) -> tuple[int, int]:
  """(channels of queries and keys, channels of values) of one head."""
  if model.family.latent_attention:
    return model.mla.qk_nope_head_dim + model.mla.qk_rope_head_dim, model.mla.v_head_dim
  return model.head_dim, model.head_dim


def _attention(model: ModelConfig) -> _Weights:
  query_heads, kv_heads = model.base_num_query_heads, model.base_num_kv_heads
  block = model.family
  normed = {"": 0, "head": 2, "projection": query_heads + kv_heads}
  queries, keys = query_heads * model.head_dim, kv_heads * model.head_dim
  sides = [(model.base_emb_dim, heads) for heads in (queries, keys, keys, queries)]
  other = model.head_dim * normed[block.qk_norm]
  other += queries + 2 * keys if block.qkv_bias else 0
  other += model.base_emb_dim if block.out_bias else 0
  other += query_heads if block.sinks else 0
  return _Weights(_linears(model, *sides), other)


def _latent_attention(model: ModelConfig) -> _Weights:
  mla, dim, num_heads = model.mla, model.base_emb_dim, model.base_num_query_heads
  score_channels, value_channels = _head_channels(model)
  sides = [(mla.q_lora_rank or dim, num_heads * score_channels)]
  if mla.q_lora_rank:
    sides.append((dim, mla.q_lora_rank))
  sides.append((dim, mla.kv_lora_rank + mla.qk_rope_head_dim))
  sides.append((mla.kv_lora_rank, num_heads * (mla.qk_nope_head_dim + value_channels)))
  sides.append((num_heads * value_channels, dim))
  return _Weights(_linears(model, *sides), mla.q_lora_rank + mla.kv_lora_rank)


def _linears(model: ModelConfig, *sides: tuple[int, int]) -> int:
  """Parameters of matrices with these (inputs, outputs), each with its LoRA adapter."""
  return sum(a * b + model.lora.lora_rank * (a + b) for a, b in sides)


def _mlp(model: ModelConfig, hidden_dim: int) -> _Weights:
  num_matrices = len(model.mlp_activations) + 1  # an input matrix per activation, one output matrix
  sides = [(model.base_emb_dim, hidden_dim)] * num_matrices
  return _Weights(_linears(model, *sides) if hidden_dim else 0, 0)


def _moe(model: ModelConfig, active_only: bool) -> _Weights:
  """Parameters of a router and all experts, or those used per token."""
  moe, dim = model.moe, model.base_emb_dim
  num_biases = moe.routed_bias + model.family.router_bias
  router = _Weights(dim * moe.num_experts, num_biases * moe.num_experts)
  bare = dataclasses.replace(model, lora=LoraConfig())  # experts have no adapters
  expert = _mlp(bare, moe.base_moe_mlp_dim)
  if moe.expert_bias:
    expert += _Weights(0, len(model.mlp_activations) * moe.base_moe_mlp_dim + dim)
  num_experts = moe.num_experts_per_tok if active_only else moe.num_experts
  shared = _mlp(model, moe.shared_experts * moe.base_moe_mlp_dim)
  return router + expert.times(num_experts) + shared
