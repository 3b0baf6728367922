"""The keys of a model that determine which function it computes of its weights."""

from typing import get_args

from maxlite.config.config_field import KeyValue
from maxlite.config.model_families import Section
from maxlite.config.schema import ModelConfig, TilesConfig, flatten
from maxlite.config.schema.training_config import ParametrizationConfig
from maxlite.registry import GROUP_ROUTERS
from maxlite.storage.json_values import Json

# Keys of the types in which a model computes, which are the same for all models of a run.
PRECISION = ("dtype", "quantization", "float32_gate_logits")
# Keys of ModelConfig that determine how to compute or train the model, not which function it is.
EXECUTION = {
  "dtype", "weight_dtype", "quantization", "attention", "attention_block_q",
  "context_parallel_strategy", "remat_policy", "remat_saved_names",
  "scan_layers", "scan_unroll", "routed_bias_update_rate", "float32_gate_logits",
  "router_jitter", "load_balance_loss_weight", "load_balance_loss_scope",
  "router_z_loss_weight", "sparse_matmul", "capacity_factor", "use_ring_of_experts",
  "ragged_buffer_factor", "ragged_overflow", "megablox", "grouped_matmul", "lora_alpha",
  "gdn_chunk_size", "mamba_chunk_size", "rope_long_context",
  *flatten(TilesConfig()),
  *flatten(ParametrizationConfig()),
}  # fmt: skip

# Keys of modules that a run may add to the model that it starts from.
ADDED_MODULES = {"lora_rank", "lora_experts", "num_draft_heads", "mtp_num_layers", "use_indexer"}


def function_keys(cfg: ModelConfig) -> dict[str, KeyValue]:
  """Return {key: value} of the keys that determine the model's function and are in use."""
  flat = flatten(cfg)
  names = set(flat) - EXECUTION - {"decoder_block"} - unused_keys(cfg)
  if cfg.global_head_dim == cfg.head_dim:
    flat["global_head_dim"] = 0
  if cfg.global_num_kv_heads == cfg.base_num_kv_heads:
    flat["global_num_kv_heads"] = 0
  bases = {"rope_max_timescale", "local_rope_max_timescale"}
  always = {"rope_type", "partial_rotary_factor"}
  if cfg.rope.rope_type == "linear":
    names -= {"original_max_position_embeddings"}
  if cfg.rope.rope_type in ("default", "proportional"):
    names -= set(flatten(cfg.rope)) - {*always, *bases}
    if cfg.rope.query_scaling_beta:  # of a family that reads it with every type
      names |= {"query_scaling_beta", "original_max_position_embeddings"}
    if len({flat[base] for base in bases}) == 1:  # all layers have the same rotary embedding
      flat["local_rope_max_timescale"] = 0.0
  return {name: value for name, value in flat.items() if name in names}


def sealed_keys(cfg: ModelConfig) -> dict[str, Json]:
  """Return {key: value}, as JSON, of the keys with which a checkpoint computes what it did.

  Modules that a run may add, such as adapters, are not among them: their arrays are in a checkpoint
  or not.
  """
  keys: dict[str, Json] = {"decoder_block": cfg.decoder_block}
  for name, value in function_keys(cfg).items():
    if name not in ADDED_MODULES:
      keys[name] = list(value) if isinstance(value, tuple) else value
  if cfg.lora.lora_rank:
    keys["lora_alpha"] = cfg.lora.lora_alpha
  if cfg.family.is_moe and not cfg.moe.sparse_matmul:
    keys["capacity_factor"] = cfg.moe.capacity_factor
  return keys


def unused_keys(cfg: ModelConfig) -> set[str]:
  """The keys of layers that the family does not have."""
  family = cfg.family
  unused = _unused_by_experts(cfg) | _unused_positions(cfg)
  if family.reads("mla"):
    unused |= {"base_num_kv_heads", "head_dim"}
    if not cfg.mla.use_indexer:
      unused |= {key for key in flatten(cfg.mla) if key.startswith("indexer_")}
  for section in get_args(Section):
    if not family.reads(section):
      unused |= set(flatten(getattr(cfg, section)))
  if not family.reads("gdn") and not family.reads("cycle"):
    unused |= {"inhomogeneous_layer_cycle_interval"}
  if not cfg.global_layers:
    unused |= {"global_layers"}
  if family.layout != "listed_attention":
    unused |= {"attention_layers"}
  if family.layout != "hybrid_pattern":
    unused |= {"hybrid_override_pattern"}
  return unused


def _unused_by_experts(cfg: ModelConfig) -> set[str]:
  """The keys of other experts and routers, and of dense layers next to them, than the config's."""
  unused: set[str] = set()
  if not cfg.family.is_moe:
    unused |= set(flatten(cfg.moe))
  elif not cfg.has_dense_mlp:
    unused |= {"base_mlp_dim"}
  if not cfg.moe.mlp_only_layers:
    unused |= {"mlp_only_layers"}
  if cfg.moe.router not in GROUP_ROUTERS:
    unused |= {"n_routing_groups", "topk_routing_group"}
  return unused


def _unused_positions(cfg: ModelConfig) -> set[str]:
  """The keys of other kinds of positions than the family's."""
  family = cfg.family
  unused: set[str] = set()
  no_layer_rotates = not family.global_rope and not family.global_layer_every
  if family.positions != "rope" or no_layer_rotates:
    unused |= set(flatten(cfg.rope))
  if family.positions != "learned":
    unused |= {"trainable_position_size"}
  return unused
