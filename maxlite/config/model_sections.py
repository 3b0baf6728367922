"""The schema's sections on the architecture: what `layers` and `models` are handed."""

import dataclasses
from typing import Any

from maxlite.config.config_field import field, model_field
from maxlite.config.model_families import MODELS, ModelFamily
from maxlite.config.registry import ROUTERS

FLOAT_TYPES = ("float32", "bfloat16")


def _tiles(projection: str, pass_: str) -> Any:
  what = {"fwd": "forward", "dlhs": "rows' gradient", "drhs": "weights' gradient"}[pass_]
  return field(
    (),
    f"Megablox tile of {projection} in the {what}: [rows, embed, mlp]; empty: by chip and shape.",
    low=1,
  )


@dataclasses.dataclass(frozen=True)
class TilesConfig:
  """Tiles of the Megablox kernels, per projection and pass."""

  wi_tile_fwd: tuple[int, ...] = _tiles("wi", "fwd")
  wi_tile_dlhs: tuple[int, ...] = _tiles("wi", "dlhs")
  wi_tile_drhs: tuple[int, ...] = _tiles("wi", "drhs")
  wo_tile_fwd: tuple[int, ...] = _tiles("wo", "fwd")
  wo_tile_dlhs: tuple[int, ...] = _tiles("wo", "dlhs")
  wo_tile_drhs: tuple[int, ...] = _tiles("wo", "drhs")


@dataclasses.dataclass(frozen=True)
class MoeConfig:
  """The mixture-of-experts block; read where decoder_block names a mixture."""

  num_experts: int = model_field(8, "Experts per MoE layer.", low=1)
  num_experts_per_tok: int = model_field(2, "Experts each token is sent to (top-k).", low=1)
  base_moe_mlp_dim: int = model_field(384, "Hidden width of one expert.", low=1)
  shared_experts: int = model_field(
    0, "Experts that every token goes to, as one MLP of so many times base_moe_mlp_dim.", low=0
  )
  first_num_dense_layers: int = model_field(0, "Layers before the first MoE layer.", low=0)
  interleave_moe_layer_step: int = model_field(
    1, "Every so many layers (after the dense ones) the last is MoE, the others are dense.", low=1
  )
  expert_bias: bool = model_field(False, "Biases in the experts' projections.")
  mlp_activations_limit: float = field(
    0.0, "Clamp the gate from above and the linear part on both sides at this; 0: no.", low=0
  )
  router: str = field(
    "softmax_topk",
    "How experts are chosen and weighted (layers/moe/router.py): `softmax_topk` Mixtral; "
    "`topk_softmax` Qwen3-MoE, OLMoE and DeepSeek-V2 greedy; `group_limited_greedy` DeepSeek-V2; "
    "`sigmoid_group_topk` DeepSeek-V3.",
    choices=ROUTERS,
  )
  norm_topk_prob: bool = field(True, "Make the chosen experts' weights sum to one.")
  routed_scaling_factor: float = field(1.0, "Factor on the chosen experts' weights.", low=0)
  n_routing_groups: int = field(
    1, "Groups the experts are cut into for group-limited routing.", low=1
  )
  topk_routing_group: int = field(1, "Groups a token may go to.", low=1)
  routed_bias: bool = model_field(
    False, "A bias per expert that takes part in the choice only, moved to even out the load."
  )
  routed_bias_update_rate: float = field(0.001, "Step of that bias per optimizer step.", low=0)
  float32_gate_logits: bool = field(True, "Compute the router in float32 whatever dtype is.")
  router_jitter: float = field(
    0.0, "In training, scale the router's input by uniform noise in 1 +- this.", low=0, high=1
  )
  use_random_routing: bool = field(
    False, "Send every token to random experts: an even load, for benchmarks."
  )
  load_balance_loss_weight: float = field(0.01, "Weight of the load-balance loss.", low=0)
  load_balance_loss_scope: str = field(
    "batch",
    "Over what the load is balanced: the whole `batch`, or each `sequence` (row) by itself.",
    choices=("batch", "sequence"),
  )
  router_z_loss_weight: float = field(0.001, "Weight of the router z-loss.", low=0)
  sparse_matmul: bool = field(
    True, "Compute each token's own experts only; False: see capacity_factor."
  )
  capacity_factor: float = field(
    -1.0,
    "With sparse_matmul=false: slots per expert and row, as a multiple of an even load; what does "
    "not fit is dropped. -1: every expert on every token, nothing dropped.",
    low=-1,
  )
  use_ring_of_experts: bool = field(
    False,
    "Gather tokens over the expert axis and reduce-scatter results, instead of the ragged "
    "all-to-all.",
  )
  ragged_buffer_factor: float = field(
    -1.0,
    "Rows a shard of the expert axis can receive, as a multiple of an even load; what does not "
    "fit is dropped. -1: the worst case, nothing dropped.",
    low=-1,
  )
  megablox: bool = field(
    True, "Let grouped_matmul=auto take the Megablox kernels on TPU; False: XLA's ragged dot."
  )
  grouped_matmul: str = field(
    "auto",
    "Backend of the experts' matmuls.",
    choices=("auto", "tiled", "megablox", "triton", "ragged_dot", "reference"),
  )
  tiles: TilesConfig = dataclasses.field(default_factory=TilesConfig)


@dataclasses.dataclass(frozen=True)
class LatentAttentionConfig:
  """DeepSeek's multi-head latent attention; read where decoder_block has it."""

  q_lora_rank: int = model_field(0, "Width of the query latent; 0: queries without one.", low=0)
  kv_lora_rank: int = model_field(512, "Width of the key/value latent.", low=1)
  qk_nope_head_dim: int = model_field(128, "Channels of a head without rotary embedding.", low=1)
  qk_rope_head_dim: int = model_field(64, "Channels of a head with rotary embedding.", low=2)
  v_head_dim: int = model_field(128, "Channels of a head's values.", low=1)


@dataclasses.dataclass(frozen=True)
class RopeConfig:
  """Rotary position embedding."""

  rope_max_timescale: float = model_field(10_000.0, "Base of the rotary embedding (theta).", low=1)
  rope_type: str = model_field(
    "default",
    "Rotary embedding as it is, or stretched by rope_factor: in all frequencies (`linear`), or in "
    "the slow ones (`llama3.1`, `yarn`).",
    choices=("default", "linear", "llama3.1", "yarn"),
  )
  local_rope_max_timescale: float = model_field(
    0.0,
    "Base of the rotary embedding, there never stretched, of layers with a window, where others "
    "have none (gemma3); 0: as of the others.",
    low=0,
  )
  rope_factor: float = model_field(40.0, "Factor by which the context is stretched.", low=1)
  original_max_position_embeddings: int = model_field(
    4096, "Context the frequencies were trained for, before that.", unit="tokens", low=1
  )
  beta_fast: float = model_field(
    32.0, "Turns within that context from which on yarn keeps a frequency.", low=1
  )
  rope_truncate: bool = model_field(
    True, "Make the ends of yarn's ramp whole numbers of channel pairs; gpt_oss does not."
  )
  mscale: float = model_field(
    0.0,
    "YaRN's growth of attention scores: all are (0.1 mscale ln(rope_factor) + 1)^2 times as large, "
    "as in DeepSeek; 0: the rotated channels alone, with a 1 for mscale.",
    low=0,
  )


@dataclasses.dataclass(frozen=True)
class LoraConfig:
  """Low-rank adapters beside the projections of attention and MLP."""

  lora_rank: int = model_field(
    0,
    "Rank of adapters (`lora_a`, `lora_b`) beside the projections of attention, dense MLP and "
    "shared experts; train them alone by a phase with train: ['.*lora_.*']. 0: none.",
    low=0,
  )
  lora_alpha: float = field(16.0, "The adapters' product is scaled by this over lora_rank.", low=0)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """The decoder's architecture, number formats and memory policy."""

  decoder_block: str = model_field(
    "mixtral",
    "Model family (config/model_families.py): the first five are dense, the others mixtures of "
    "experts.",
    choices=MODELS,
  )
  vocab_size: int = model_field(
    320, "Rows of the token embedding; at least the tokenizer's size.", low=1
  )
  base_emb_dim: int = model_field(256, "Width of the residual stream.", low=1)
  base_num_decoder_layers: int = model_field(4, "Number of decoder blocks.", low=1)
  base_num_query_heads: int = model_field(8, "Query heads.", low=1)
  base_num_kv_heads: int = model_field(
    4, "Key/value heads; query heads share them in groups.", low=1
  )
  head_dim: int = model_field(32, "Channels of one attention head.", low=2)
  base_mlp_dim: int = model_field(1024, "Hidden width of the dense MLP.", low=1)
  mlp_activations: tuple[str, ...] = model_field(
    ("silu", "linear"),
    "Activation of the MLP (`gelu` is by tanh, `quick_gelu` x sigmoid(1.702 x)); with `linear` or "
    "`linear_plus_one` second, a gated MLP.",
    choices=("silu", "gelu", "quick_gelu", "relu", "linear", "linear_plus_one"),
  )
  logits_via_embedding: bool = model_field(False, "Tie the output projection to the embedding.")
  num_draft_heads: int = model_field(
    0,
    "Heads that predict the tokens after the next one, for speculative decoding; trained in phases "
    "by loss: match_head or next_token_and_draft.",
    low=0,
  )
  normalization_layer_epsilon: float = model_field(1e-5, "Epsilon inside RMSNorm.", low=0)
  scan_layers: bool = model_field(True, "Stack layers and scan over them: compiles once for all.")
  scan_unroll: int = field(
    0,
    "Layers per iteration of that scan: more compile longer and need more memory; 0: 4 on a CPU, "
    "where that is faster, and 1 elsewhere.",
    low=0,
  )
  dtype: str = field("float32", "Type of activations.", choices=FLOAT_TYPES)
  weight_dtype: str = field("float32", "Type of stored weights.", choices=FLOAT_TYPES)
  attention: str = field(
    "auto",
    "Backend of attention.",
    choices=("auto", "chunked", "dot_product", "reference"),
  )
  sliding_window_size: int = model_field(
    0,
    "Newest keys that a query attends, its own included: in every layer, or in those that the "
    "family has it in (gemma2, gemma3, gpt_oss); 0: all.",
    unit="positions",
    low=0,
  )
  attn_logits_soft_cap: float = model_field(
    0.0, "Bend attention's scores by tanh to stay within +- this; 0: no.", low=0
  )
  final_logits_soft_cap: float = model_field(
    0.0, "Bend the logits by tanh to stay within +- this; 0: no.", low=0
  )
  query_pre_attn_scalar: float = model_field(
    0.0, "Attention's scores are divided by its root; 0: by that of head_dim.", low=0
  )
  attention_block_q: int = field(
    64, "Queries scored at once by the chunked backend.", unit="positions", low=1
  )
  remat_policy: str = field(
    "none",
    "What the backward pass recomputes: `full` everything, `minimal` all but matmul outputs, "
    "`custom` all but remat_saved_names, `none` nothing.",
    choices=("none", "minimal", "full", "custom"),
  )
  remat_saved_names: tuple[str, ...] = field(
    (),
    "Tensors kept under remat_policy=custom.",
    choices=(
      "query_proj",
      "key_proj",
      "value_proj",
      "attention_out",
      "out_proj",
      "mlpwi",
      "mlpwo",
      "query_latent",
      "kv_latent",
      "moe_route",
      "moe_rows",
    ),
  )
  lora: LoraConfig = dataclasses.field(default_factory=LoraConfig)
  rope: RopeConfig = dataclasses.field(default_factory=RopeConfig)
  mla: LatentAttentionConfig = dataclasses.field(default_factory=LatentAttentionConfig)
  moe: MoeConfig = dataclasses.field(default_factory=MoeConfig)

  @property
  def family(self) -> ModelFamily:
    """The entry of MODELS that decoder_block names."""
    return MODELS[self.decoder_block]

  @property
  def layer_plan(self) -> tuple[int, int]:
    """(leading dense layers, layers per unit after them; only the last of a unit may be MoE)."""
    if not self.family.is_moe:
      return 0, 1
    return self.moe.first_num_dense_layers, self.moe.interleave_moe_layer_step
