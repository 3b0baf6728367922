"""Architecture, number formats and memory policy of the decoder."""

import dataclasses

from maxlite.config.config_field import field, model_field
from maxlite.config.model_families import MODELS, ModelFamily
from maxlite.config.schema.moe_config import MoeConfig
from maxlite.config.schema.training_config import ParametrizationConfig
from maxlite.registry import ATTENTION_BACKENDS, with_auto

FLOAT_TYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True)
class LatentAttentionConfig:
  """DeepSeek's multi-head latent attention; read if the model family has it."""

  q_lora_rank: int = model_field(0, "Width of the query latent; 0: no query latent.", low=0)
  kv_lora_rank: int = model_field(512, "Width of the key/value latent.", low=1)
  qk_nope_head_dim: int = model_field(128, "Channels per head without rotary embedding.", low=1)
  qk_rope_head_dim: int = model_field(64, "Channels per head with rotary embedding.", low=2)
  v_head_dim: int = model_field(128, "Value channels per head.", low=1)
  use_indexer: bool = model_field(
    False,
    "Sparse attention (DSA, as in DeepSeek-V3.2): an indexer scores all keys for each query, which "
    "attends the indexer_topk best.",
  )
  indexer_n_heads: int = model_field(64, "Query heads of the indexer, which share a key.", low=1)
  indexer_head_dim: int = model_field(
    128, "Channels of an indexer's head, of which the first qk_rope_head_dim rotate.", low=1
  )
  indexer_topk: int = model_field(2048, "Keys that a query attends.", low=1)
  indexer_rope_interleave: bool = model_field(
    False,
    "The indexer rotates interleaved pairs of channels, as in GLM-5; else channel c and the one "
    "half of them further, as in DeepSeek-V3.2.",
  )
  indexer_sparse_training: bool = field(
    True,
    "Attend only the keys that the indexer selects, and train it on them. False: attend all keys "
    "and train it on all, as in the dense warm-up before.",
  )


@dataclasses.dataclass(frozen=True)
class GatedDeltaConfig:
  """Layers with a gated delta net instead of attention; read if the model family has them."""

  gdn_num_key_heads: int = model_field(
    16, "Query and key heads of a gated delta net, each shared by value heads.", low=1
  )
  gdn_num_value_heads: int = model_field(32, "Value heads, each with a state.", low=1)
  gdn_key_head_dim: int = model_field(128, "Channels of queries and keys per head.", low=1)
  gdn_value_head_dim: int = model_field(128, "Channels of values per head.", low=1)
  gdn_conv_kernel_dim: int = model_field(
    4, "Positions that the convolution of queries, keys and values covers.", low=1
  )
  gdn_chunk_size: int = field(
    64, "Positions per chunk, within which the recurrence is solved by matrix products.", low=1
  )


@dataclasses.dataclass(frozen=True)
class MambaConfig:
  """State-space layers (Mamba-2); read if the model family has them."""

  mamba_num_heads: int = model_field(64, "Heads of a Mamba-2 layer, each with a state.", low=1)
  mamba_head_dim: int = model_field(64, "Channels of values per head.", low=1)
  mamba_num_groups: int = model_field(
    1, "Groups of heads that share queries and keys (C and B of the paper).", low=1
  )
  mamba_state_dim: int = model_field(128, "Channels of queries and keys.", low=1)
  mamba_conv_kernel_dim: int = model_field(
    4, "Positions that the convolution of queries, keys and values covers.", low=1
  )
  mamba_norm: str = model_field(
    "after_gate",
    "RMSNorm of a layer's output over each group of heads: `after_gate`, `before_gate`, or `none` "
    "(Falcon-H1).",
    choices=("after_gate", "before_gate", "none"),
  )
  mamba_chunk_size: int = field(
    128, "Positions per chunk, within which the recurrence is matrix products.", low=1
  )


@dataclasses.dataclass(frozen=True)
class MultiplierConfig:
  """Fixed factors of attention, state-space layers and MLPs; read if the model family has them."""

  attention_in_multiplier: float = model_field(1.0, "Factor of the input of attention.")
  attention_out_multiplier: float = model_field(1.0, "Factor of the output of attention.")
  key_multiplier: float = model_field(1.0, "Factor of the keys of attention.")
  ssm_in_multiplier: float = model_field(1.0, "Factor of the input of a state-space layer.")
  ssm_out_multiplier: float = model_field(1.0, "Factor of the output of a state-space layer.")
  ssm_multipliers: tuple[float, ...] = model_field(
    (1.0, 1.0, 1.0, 1.0, 1.0),
    "Factors of a state-space layer's projections: gate, value, key, query and step.",
  )
  mlp_multipliers: tuple[float, ...] = model_field(
    (1.0, 1.0), "Factors of an MLP's gate, before its activation, and of its output."
  )


@dataclasses.dataclass(frozen=True)
class ShortConvConfig:
  """Layers with a short convolution instead of attention; read if the model family has them."""

  short_conv_kernel_dim: int = model_field(
    3, "Positions that the convolution of a layer without attention covers.", low=1
  )


@dataclasses.dataclass(frozen=True)
class CycleConfig:
  """Layers in cycles of local layers and a global one; read if the model family has them."""

  global_head_dim: int = model_field(
    0, "Channels per attention head of global layers; 0: head_dim.", low=0
  )
  global_num_kv_heads: int = model_field(
    0, "Key/value heads of global layers; 0: base_num_kv_heads.", low=0
  )
  share_kv_projections: bool = model_field(
    False, "The values of global layers are their keys, before norm and rotary embedding."
  )
  num_kv_shared_layers: int = model_field(
    0,
    "Last layers without keys and values: they attend to those of the last layer before them that "
    "is local or global as they are.",
    low=0,
  )
  use_double_wide_mlp: bool = model_field(
    False, "The MLP of the num_kv_shared_layers has twice base_mlp_dim."
  )
  hidden_size_per_layer_input: int = model_field(
    0, "Width of the embedding that each layer has of every token; 0: none.", low=0
  )


@dataclasses.dataclass(frozen=True)
class RopeConfig:
  """Rotary position embedding."""

  rope_max_timescale: float = model_field(10_000.0, "Base of the rotary embedding (theta).", low=1)
  rope_type: str = model_field(
    "default",
    "Context extension by rope_factor: `default` none, `linear` scales all frequencies, "
    "`llama3.1`, `llama4` and `yarn` the low ones, `longrope` each by its own factor; `dynamic` "
    "none, for models that extend it only beyond original_max_position_embeddings. `proportional`: "
    "none, and partial_rotary_factor keeps the frequencies and pairs of the whole head (gemma4).",
    choices=(
      *("default", "linear", "llama3.1", "llama4", "yarn", "longrope", "dynamic", "proportional"),
    ),
  )
  local_rope_max_timescale: float = model_field(
    0.0,
    "Base of the rotary embedding of layers with a sliding window, without context extension "
    "(gemma3, gemma4); 0: the same as in the other layers.",
    low=0,
  )
  partial_rotary_factor: float = model_field(
    1.0,
    "Share of a head's channels that rotate, the first ones; the others carry no position "
    "(as in GLM-4.5 and MiniMax-M2). In gemma4 of global layers; local ones rotate all.",
    low=0,
    high=1,
  )
  rope_factor: float = model_field(40.0, "Factor of context extension.", low=1)
  original_max_position_embeddings: int = model_field(
    4096, "Tokens of context before extension.", low=1
  )
  beta_fast: float = model_field(
    32.0, "yarn keeps frequencies with at least this many rotations in that context.", low=1
  )
  rope_truncate: bool = model_field(
    True, "Round yarn's ramp to whole channel pairs; not in gpt_oss."
  )
  mscale: float = model_field(
    0.0,
    "yarn multiplies all attention scores by (0.1 mscale ln(rope_factor) + 1)^2, as in DeepSeek; "
    "0: only the rotated channels are scaled, with mscale 1.",
    low=0,
  )
  rope_attention_factor: float = model_field(
    0.0,
    "yarn and longrope multiply the rotated channels of queries and keys by it; 0: the factor that "
    "they derive from rope_factor.",
    low=0,
  )
  rope_short_factor: tuple[float, ...] = model_field(
    (),
    "longrope divides the frequency of each channel pair by its factor; these are for texts of up "
    "to original_max_position_embeddings tokens.",
  )
  rope_long_factor: tuple[float, ...] = model_field((), "The same for longer texts.")
  rope_long_context: bool = field(
    False, "Whether longrope uses rope_long_factor, for texts of all lengths."
  )
  query_scaling_beta: float = model_field(
    0.0,
    "With yarn, queries are multiplied by 1 + this * ln(1 + floor(position / "
    "original_max_position_embeddings)), as in Mistral Small 4. In llama4 with any rope_type, in "
    "layers without a rotary embedding, and positions count from 1.",
    low=0,
  )


@dataclasses.dataclass(frozen=True)
class LoraConfig:
  """Low-rank adapters of attention and MLP projections."""

  lora_rank: int = model_field(
    0,
    "Rank of the adapters (`lora_a`, `lora_b`) of attention, dense MLP and shared expert "
    "projections. To train only them, write a phase with train: ['.*lora_.*']. 0: no adapters.",
    low=0,
  )
  lora_experts: bool = model_field(
    False, "Also adapters of the projections of routed experts, each with a pair of matrices."
  )
  lora_alpha: float = field(16.0, "Adapter outputs are scaled by lora_alpha / lora_rank.", low=0)

  @property
  def adapts_experts(self) -> bool:
    return self.lora_rank > 0 and self.lora_experts


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """The decoder's architecture, number formats and memory policy."""

  decoder_block: str = model_field(
    "mixtral",
    "Model family (config/model_families.py): those from mixtral on are MoE, the others dense.",
    choices=MODELS,
  )
  vocab_size: int = model_field(320, "Rows of the embedding; at least the tokenizer's size.", low=1)
  base_emb_dim: int = model_field(256, "Width of the residual stream.", low=1)
  base_num_decoder_layers: int = model_field(4, "Number of decoder layers.", low=1)
  inhomogeneous_layer_cycle_interval: int = model_field(
    4,
    "Every n-th layer attends, and the others are gated delta nets; in gemma4 it attends globally, "
    "and the others locally.",
    low=1,
  )
  global_layers: tuple[int, ...] = model_field(
    (),
    "Numbers, from 0, of the layers that attend globally in families in which the others attend "
    "locally or have a rotary embedding. Empty: every n-th layer, as published with the family.",
    low=0,
  )
  attention_layers: tuple[int, ...] = model_field(
    (),
    "Numbers, from 0, of the layers that attend in families in which the others are state-space "
    "layers (bamba, granite_hybrid, granite_moe_hybrid) or short convolutions (lfm2, lfm2_moe).",
    low=0,
  )
  hybrid_override_pattern: str = model_field(
    "",
    "A letter for each layer of families whose layers have one part (nemotron_h, nemotron_h_moe): "
    "`M` a state-space layer, `*` attention, `-` an MLP, `E` experts.",
  )
  base_num_query_heads: int = model_field(8, "Query heads.", low=1)
  base_num_kv_heads: int = model_field(4, "Key/value heads, each shared by query heads.", low=1)
  head_dim: int = model_field(32, "Channels per attention head.", low=2)
  base_mlp_dim: int = model_field(1024, "Hidden width of the dense MLP.", low=1)
  mlp_activations: tuple[str, ...] = model_field(
    ("silu", "linear"),
    "Activation of the MLP (`gelu` is the tanh form, `exact_gelu` that of the error function, "
    "`quick_gelu` x sigmoid(1.702 x), `squared_relu` the square of `relu`, "
    "`xielu` that of Apertus, with two trained numbers). With `linear` or `linear_plus_one` "
    "second, the MLP is gated.",
    choices=(
      *("silu", "gelu", "exact_gelu", "quick_gelu", "relu", "squared_relu", "xielu"),
      *("linear", "linear_plus_one"),
    ),
  )
  logits_via_embedding: bool = model_field(False, "Tie the output projection to the embedding.")
  num_draft_heads: int = model_field(
    0,
    "Heads that predict further tokens, for speculative decoding; trained in phases with loss: "
    "match_head or next_token_and_draft.",
    low=0,
  )
  mtp_num_layers: int = model_field(
    0,
    "Layers of multi-token prediction, as in DeepSeek-V3, trained with the model: layer k predicts "
    "the token k + 1 positions ahead. Each proposes a token in speculative decoding.",
    low=0,
  )
  embedding_multiplier: float = model_field(1.0, "Embeddings are multiplied by it.", low=0)
  residual_multiplier: float = model_field(
    1.0, "The outputs of attention and MLP are multiplied by it before they are added.", low=0
  )
  logits_scaling: float = model_field(1.0, "Logits are divided by it.", low=0.001)
  normalization_layer_epsilon: float = model_field(1e-5, "Epsilon of the norms.", low=0)
  trainable_position_size: int = model_field(
    0,
    "Positions that have a learned embedding, which is added to that of the token; in families "
    "whose positions are learned (gpt2, opt) at least max_target_length, in others 0.",
    low=0,
  )
  scan_layers: bool = model_field(
    True,
    "Stack the parameters of layers and scan over them, with `scan_unroll` layers per iteration.",
  )
  scan_unroll: int = field(
    0,
    "Layers per iteration of `scan_layers`; larger values need more compile time. The parameters "
    "are stacked with any. 0: on CPUs 4; on GPUs all layers of a stack of at most 32, which moves "
    "fewer bytes; else 1.",
    low=0,
  )
  dtype: str = field("float32", "Type of activations.", choices=FLOAT_TYPES)
  weight_dtype: str = field("float32", "Type of stored weights.", choices=FLOAT_TYPES)
  quantization: str = field(
    "",
    "Type that operands of linear layers and experts are rounded to in the forward pass.",
    choices=("", "int8", "fp8"),
  )
  attention: str = field("auto", "Backend of attention.", choices=with_auto(ATTENTION_BACKENDS))
  context_parallel_strategy: str = field(
    "all_gather",
    "How queries reach the keys of other context shards: each shard gathers all keys, keys visit "
    "the shards in a `ring`, or an all-to-all gives each shard a part of the heads (`ulysses`).",
    choices=("all_gather", "ring", "ulysses"),
  )
  clip_qkv: float = model_field(
    0.0, "Queries, keys and values are clipped to [-clip_qkv, clip_qkv]; 0: not.", low=0
  )
  sliding_window_size: int = model_field(
    0,
    "Keys that a query attends, including its own: in every layer, or in the local layers of "
    "families that have them (cohere2, exaone4, gemma2, gemma3, gemma4, gpt_oss, olmo3); 0: all. "
    "In llama4 the size of the chunks of a document within which its local layers attend.",
    low=0,
  )
  attn_logits_soft_cap: float = model_field(0.0, "Soft cap of attention scores; 0: none.", low=0)
  final_logits_soft_cap: float = model_field(0.0, "Soft cap of the logits; 0: none.", low=0)
  query_pre_attn_scalar: float = model_field(
    0.0, "Attention scores are divided by its square root; 0: head_dim.", low=0
  )
  attention_block_q: int = field(64, "Queries per block of the chunked backend.", low=1)
  remat_policy: str = field(
    "none",
    "What the backward pass recomputes: `full` everything, `minimal` all except matmul outputs, "
    "`custom` all except remat_saved_names, `none` nothing. `offload` is `minimal` with the matmul "
    "outputs in the memory of the host.",
    choices=("none", "minimal", "full", "custom", "offload"),
  )
  remat_saved_names: tuple[str, ...] = field(
    (),
    "Activations saved by remat_policy=custom.",
    choices=(
      *("query_proj", "key_proj", "value_proj", "attention_out", "out_proj", "mlpwi", "mlpwo"),
      *("query_latent", "kv_latent", "router_logits", "moe_route", "moe_rows"),
    ),
  )
  lora: LoraConfig = LoraConfig()
  scaling: ParametrizationConfig = ParametrizationConfig()
  rope: RopeConfig = RopeConfig()
  mla: LatentAttentionConfig = LatentAttentionConfig()
  gdn: GatedDeltaConfig = GatedDeltaConfig()
  mamba: MambaConfig = MambaConfig()
  multipliers: MultiplierConfig = MultiplierConfig()
  short_conv: ShortConvConfig = ShortConvConfig()
  cycle: CycleConfig = CycleConfig()
  moe: MoeConfig = MoeConfig()

  @property
  def family(self) -> ModelFamily:
    """The entry of MODELS that decoder_block names."""
    return MODELS[self.decoder_block]

  @property
  def has_dense_mlp(self) -> bool:
    """Whether any layer has an MLP of base_mlp_dim."""
    if self.family.moe is None or self.family.moe.beside_mlp:
      return True
    if self.family.layout == "hybrid_pattern":
      return "-" in self.hybrid_override_pattern
    moe = self.moe
    return bool(
      moe.mlp_only_layers or moe.first_num_dense_layers > 0 or moe.interleave_moe_layer_step > 1
    )

  @property
  def global_head_dim(self) -> int:
    """Channels per attention head of layers that attend globally."""
    if self.family.reads("cycle") and self.cycle.global_head_dim:
      return self.cycle.global_head_dim
    return self.head_dim

  @property
  def global_num_kv_heads(self) -> int:
    """Key/value heads of layers that attend globally."""
    if self.family.reads("cycle") and self.cycle.global_num_kv_heads:
      return self.cycle.global_num_kv_heads
    return self.base_num_kv_heads
