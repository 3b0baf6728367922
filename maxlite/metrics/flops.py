"""Parameter counts and FLOPs of a training step, from the config alone."""

from typing import NamedTuple

from maxlite.config.schema import ModelConfig

TRAIN_OVER_FORWARD = 3  # the backward pass has two multiplications for each of the forward pass
FLOPS_PER_MAC = 2  # one multiplication, one addition


class Flops(NamedTuple):
  """FLOPs of one training step, over all devices."""

  total: float
  attention: float  # the part of `total` in attention scores and weighted values


def train_flops_per_step(model: ModelConfig, tokens: int, row_length: int) -> Flops:
  """FLOPs of one step that trains all parameters on `tokens` tokens in rows of `row_length`.

  Counts the matmuls: projections, MLP or active experts, router and logits (tied or not), and
  causal attention at half of its square, less what sliding windows exclude. Does not count the
  embedding lookup, elementwise operations and rematerialization.
  """
  macs_per_token = _matmul_parameters(model, active_only=True)
  macs_per_token += model.vocab_size * model.base_emb_dim
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
  draft_heads = model.num_draft_heads * model.base_emb_dim**2
  layers = _matmul_parameters(model, active_only) + _other_parameters(model, active_only)
  return layers + embeddings + model.base_emb_dim + draft_heads


def _matmul_parameters(model: ModelConfig, active_only: bool) -> int:
  """Parameters of all layers that are multiplied with each token."""
  num_layers, num_moe = model.base_num_decoder_layers, num_moe_layers(model)
  dense = _mlp(model, model.base_mlp_dim, model.lora.lora_rank)
  moe_layers = num_moe * _moe(model, active_only)
  return num_layers * _attention(model) + (num_layers - num_moe) * dense + moe_layers


def _other_parameters(model: ModelConfig, active_only: bool) -> int:
  """Norms and biases of all layers."""
  family, mla, moe, dim = model.family, model.mla, model.moe, model.base_emb_dim
  query_heads, kv_heads = model.base_num_query_heads, model.base_num_kv_heads
  per_layer = (4 if family.post_norms else 2) * dim
  if family.latent_attention:
    per_layer += mla.q_lora_rank + mla.kv_lora_rank
  else:
    normed_heads = {"": 0, "head": 2, "projection": query_heads + kv_heads}[family.qk_norm]
    biased_heads = (query_heads + 2 * kv_heads) * family.qkv_bias
    per_layer += (normed_heads + biased_heads) * model.head_dim
    per_layer += dim * family.out_bias + query_heads * family.sinks
  per_moe_layer = (moe.routed_bias + family.router_bias) * moe.num_experts
  expert_biases = len(model.mlp_activations) * moe.base_moe_mlp_dim + dim
  per_moe_layer += _num_experts(model, active_only) * expert_biases * moe.expert_bias
  return model.base_num_decoder_layers * per_layer + num_moe_layers(model) * per_moe_layer


def _num_experts(model: ModelConfig, active_only: bool) -> int:
  return model.moe.num_experts_per_tok if active_only else model.moe.num_experts


def _head_channels(model: ModelConfig) -> tuple[int, int]:
  """(channels of queries and keys, channels of values) of one head."""
  if model.family.latent_attention:
    return model.mla.qk_nope_head_dim + model.mla.qk_rope_head_dim, model.mla.v_head_dim
  return model.head_dim, model.head_dim


def _attention(model: ModelConfig) -> int:
  mla, dim, num_heads = model.mla, model.base_emb_dim, model.base_num_query_heads
  if not model.family.latent_attention:
    queries, keys = num_heads * model.head_dim, model.base_num_kv_heads * model.head_dim
    return _linears(model.lora.lora_rank, *((dim, out) for out in (queries, keys, keys, queries)))
  score_channels, value_channels = _head_channels(model)
  return _linears(
    model.lora.lora_rank,
    *([(dim, mla.q_lora_rank)] if mla.q_lora_rank else []),
    (mla.q_lora_rank or dim, num_heads * score_channels),
    (dim, mla.kv_lora_rank + mla.qk_rope_head_dim),
    (mla.kv_lora_rank, num_heads * (mla.qk_nope_head_dim + value_channels)),
    (num_heads * value_channels, dim),
  )


def _mlp(model: ModelConfig, hidden_dim: int, lora_rank: int) -> int:
  num_matrices = len(model.mlp_activations) + 1  # an input matrix per activation, one output matrix
  sides = [(model.base_emb_dim, hidden_dim)] * num_matrices
  return _linears(lora_rank, *sides) if hidden_dim else 0


def _moe(model: ModelConfig, active_only: bool) -> int:
  """A router, its experts (all or those of a token, without adapters) and shared experts."""
  moe = model.moe
  experts = _num_experts(model, active_only) * _mlp(model, moe.base_moe_mlp_dim, lora_rank=0)
  shared = _mlp(model, moe.shared_experts * moe.base_moe_mlp_dim, model.lora.lora_rank)
  return model.base_emb_dim * moe.num_experts + experts + shared


def _linears(lora_rank: int, *sides: tuple[int, int]) -> int:
  """Parameters of matrices with these (inputs, outputs), each with its LoRA adapter."""
  return sum(a * b + lora_rank * (a + b) for a, b in sides)
