"""Every knob of maxlite: its type, default, range and meaning. There is no default anywhere else.

Keys are flat on the command line and in YAML; `Config` groups them in sections, and from `layers`
up code is handed a section (`ModelConfig`), never the whole. Names are MaxText's wherever MaxText
has the knob. This module imports nothing but the standard library, so a wrong command line is
answered before JAX is loaded.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, get_type_hints

from maxlite.config.knob import Knob, knob, shape_knob

MESH_AXES = ("ensemble", "data", "fsdp", "context", "expert", "tensor")
AxisRules = tuple[tuple[str, tuple[str, ...]], ...]
FLOAT_TYPES = ("float32", "bfloat16")


def _degree(kind: str, mesh_axis: str, default: int) -> Any:
  where = "within a slice" if kind == "ici" else "between slices"
  return knob(
    default, f"Shards of the mesh axis `{mesh_axis}` {where}; -1: all that are left.", low=-1
  )


@dataclasses.dataclass(frozen=True)
class RunConfig:
  """What this run is called, how long it lasts and what it tells."""

  run_name: str = knob("base", "Name of the run; its folder is base_output_directory/run_name.")
  base_output_directory: str = knob("runs", "Folder that holds all runs.")
  model_name: str = knob("", "Preset from configs/models/NAME.yml, applied after the YAML files.")
  steps: int = knob(300, "Optimizer steps of the whole run.", unit="steps", low=1)
  init_weights_seed: int = knob(0, "Seed of initial weights and of the steps' random draws.", low=0)
  jax_cache_dir: str = knob("~/.cache/maxlite/jax", "Persistent compilation cache; empty: none.")


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """How devices are arranged and which array axis lies on which of them."""

  ici_ensemble_parallelism: int = _degree("ici", "ensemble", 1)
  ici_data_parallelism: int = _degree("ici", "data", 1)
  ici_fsdp_parallelism: int = _degree("ici", "fsdp", -1)
  ici_context_parallelism: int = _degree("ici", "context", 1)
  ici_expert_parallelism: int = _degree("ici", "expert", 1)
  ici_tensor_parallelism: int = _degree("ici", "tensor", 1)
  dcn_ensemble_parallelism: int = _degree("dcn", "ensemble", 1)
  dcn_data_parallelism: int = _degree("dcn", "data", -1)
  dcn_fsdp_parallelism: int = _degree("dcn", "fsdp", 1)
  dcn_context_parallelism: int = _degree("dcn", "context", 1)
  dcn_expert_parallelism: int = _degree("dcn", "expert", 1)
  dcn_tensor_parallelism: int = _degree("dcn", "tensor", 1)
  logical_axis_rules: AxisRules = knob(
    (),
    "Replaces rows of the sharding table (parallel/rules.py): [[logical axis, [mesh axes]], ...].",
  )
  sharding_tolerance: float = knob(
    0.02,
    "Largest share of parameter bytes left whole on a mesh that could shard them.",
    low=0,
    high=1,
  )


def _tiles(projection: str, pass_: str) -> Any:
  what = {"fwd": "forward", "dlhs": "rows' gradient", "drhs": "weights' gradient"}[pass_]
  return knob(
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

  num_experts: int = shape_knob(8, "Experts per MoE layer.", low=1)
  num_experts_per_tok: int = shape_knob(2, "Experts each token is sent to (top-k).", low=1)
  base_moe_mlp_dim: int = shape_knob(384, "Hidden width of one expert.", low=1)
  shared_experts: int = shape_knob(
    0, "Experts that every token goes to, as one MLP of so many times base_moe_mlp_dim.", low=0
  )
  first_num_dense_layers: int = shape_knob(0, "Layers before the first MoE layer.", low=0)
  interleave_moe_layer_step: int = shape_knob(
    1, "Every so many layers (after the dense ones) the last is MoE, the others are dense.", low=1
  )
  expert_bias: bool = shape_knob(False, "Biases in the experts' projections.")
  mlp_activations_limit: float = knob(
    0.0, "Clamp the gate from above and the linear part on both sides at this; 0: no.", low=0
  )
  router: str = knob(
    "softmax_topk",
    "How experts are chosen and weighted (layers/moe/router.py): `softmax_topk` Mixtral; "
    "`topk_softmax` Qwen3-MoE, OLMoE and DeepSeek-V2 greedy; `group_limited_greedy` DeepSeek-V2; "
    "`sigmoid_group_topk` DeepSeek-V3.",
    choices=("softmax_topk", "topk_softmax", "group_limited_greedy", "sigmoid_group_topk"),
  )
  norm_topk_prob: bool = knob(True, "Make the chosen experts' weights sum to one.")
  routed_scaling_factor: float = knob(1.0, "Factor on the chosen experts' weights.", low=0)
  n_routing_groups: int = knob(
    1, "Groups the experts are cut into for group-limited routing.", low=1
  )
  topk_routing_group: int = knob(1, "Groups a token may go to.", low=1)
  routed_bias: bool = shape_knob(
    False, "A bias per expert that takes part in the choice only, moved to even out the load."
  )
  routed_bias_update_rate: float = knob(0.001, "Step of that bias per optimizer step.", low=0)
  float32_gate_logits: bool = knob(True, "Compute the router in float32 whatever dtype is.")
  router_jitter: float = knob(
    0.0, "In training, scale the router's input by uniform noise in 1 +- this.", low=0, high=1
  )
  use_random_routing: bool = knob(
    False, "Send every token to random experts: an even load, for benchmarks."
  )
  load_balance_loss_weight: float = knob(0.01, "Weight of the load-balance loss.", low=0)
  load_balance_loss_scope: str = knob(
    "batch",
    "Over what the load is balanced: the whole `batch`, or each `sequence` (row) by itself.",
    choices=("batch", "sequence"),
  )
  router_z_loss_weight: float = knob(0.001, "Weight of the router z-loss.", low=0)
  sparse_matmul: bool = knob(
    True, "Compute each token's own experts only; False: see capacity_factor."
  )
  capacity_factor: float = knob(
    -1.0,
    "With sparse_matmul=false: slots per expert and row, as a multiple of an even load; what does "
    "not fit is dropped. -1: every expert on every token, nothing dropped.",
    low=-1,
  )
  use_ring_of_experts: bool = knob(
    False,
    "Gather tokens over the expert axis and reduce-scatter results, instead of the ragged "
    "all-to-all.",
  )
  ragged_buffer_factor: float = knob(
    -1.0,
    "Rows a shard of the expert axis can receive, as a multiple of an even load; what does not "
    "fit is dropped. -1: the worst case, nothing dropped.",
    low=-1,
  )
  megablox: bool = knob(
    True, "Let grouped_matmul=auto take the Megablox kernels on TPU; False: XLA's ragged dot."
  )
  grouped_matmul: str = knob(
    "auto",
    "Backend of the experts' matmuls.",
    choices=("auto", "tiled", "megablox", "triton", "ragged_dot", "reference"),
  )
  tiles: TilesConfig = dataclasses.field(default_factory=TilesConfig)


@dataclasses.dataclass(frozen=True)
class LatentAttentionConfig:
  """DeepSeek's multi-head latent attention; read where decoder_block has it."""

  q_lora_rank: int = shape_knob(0, "Width of the query latent; 0: queries without one.", low=0)
  kv_lora_rank: int = shape_knob(512, "Width of the key/value latent.", low=1)
  qk_nope_head_dim: int = shape_knob(128, "Channels of a head without rotary embedding.", low=1)
  qk_rope_head_dim: int = shape_knob(64, "Channels of a head with rotary embedding.", low=2)
  v_head_dim: int = shape_knob(128, "Channels of a head's values.", low=1)


@dataclasses.dataclass(frozen=True)
class RopeConfig:
  """Rotary position embedding."""

  rope_max_timescale: float = shape_knob(10_000.0, "Base of the rotary embedding (theta).", low=1)
  rope_type: str = shape_knob(
    "default", "Rotary embedding as it is, or stretched by `yarn`.", choices=("default", "yarn")
  )
  rope_factor: float = shape_knob(40.0, "Factor by which yarn stretches the context.", low=1)
  original_max_position_embeddings: int = shape_knob(
    4096, "Context the frequencies were trained for, before yarn.", unit="tokens", low=1
  )
  mscale: float = shape_knob(
    0.0,
    "YaRN's growth of attention scores: all are (0.1 mscale ln(rope_factor) + 1)^2 times as large, "
    "as in DeepSeek; 0: the rotated channels alone, with a 1 for mscale.",
    low=0,
  )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """The decoder's architecture, number formats and memory policy."""

  decoder_block: str = shape_knob(
    "mixtral",
    "Family of the decoder's blocks (models/): dense `llama`; the others are mixtures of experts.",
    choices=("llama", "mixtral", "deepseek", "qwen3_moe", "olmoe"),
  )
  vocab_size: int = shape_knob(
    320, "Rows of the token embedding; at least the tokenizer's size.", low=1
  )
  base_emb_dim: int = shape_knob(256, "Width of the residual stream.", low=1)
  base_num_decoder_layers: int = shape_knob(4, "Number of decoder blocks.", low=1)
  base_num_query_heads: int = shape_knob(8, "Query heads.", low=1)
  base_num_kv_heads: int = shape_knob(
    4, "Key/value heads; query heads share them in groups.", low=1
  )
  head_dim: int = shape_knob(32, "Channels of one attention head.", low=2)
  base_mlp_dim: int = shape_knob(1024, "Hidden width of the dense MLP.", low=1)
  mlp_activations: tuple[str, ...] = shape_knob(
    ("silu", "linear"),
    "Activation of the MLP; with `linear` second, a gated MLP.",
    choices=("silu", "gelu", "relu", "linear"),
  )
  logits_via_embedding: bool = shape_knob(False, "Tie the output projection to the embedding.")
  normalization_layer_epsilon: float = shape_knob(1e-5, "Epsilon inside RMSNorm.", low=0)
  scan_layers: bool = shape_knob(True, "Stack layers and scan over them: compiles once for all.")
  scan_unroll: int = knob(
    0,
    "Layers per iteration of that scan: more compile longer and need more memory; 0: 4 on a CPU, "
    "where that is faster, and 1 elsewhere.",
    low=0,
  )
  dtype: str = knob("float32", "Type of activations.", choices=FLOAT_TYPES)
  weight_dtype: str = knob("float32", "Type of stored weights.", choices=FLOAT_TYPES)
  attention: str = knob(
    "auto",
    "Backend of attention.",
    choices=("auto", "chunked", "dot_product", "reference"),
  )
  attention_block_q: int = knob(
    64, "Queries scored at once by the chunked backend.", unit="positions", low=1
  )
  remat_policy: str = knob(
    "none",
    "What the backward pass recomputes: `full` everything, `minimal` all but matmul outputs, "
    "`custom` all but remat_save, `none` nothing.",
    choices=("none", "minimal", "full", "custom"),
  )
  remat_save: tuple[str, ...] = knob(
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
  rope: RopeConfig = dataclasses.field(default_factory=RopeConfig)
  mla: LatentAttentionConfig = dataclasses.field(default_factory=LatentAttentionConfig)
  moe: MoeConfig = dataclasses.field(default_factory=MoeConfig)


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """Where tokens come from and how they fill batches."""

  dataset_type: str = knob(
    "text", "Kind of data.", choices=("synthetic", "text", "jsonl", "parquet")
  )
  dataset_path: tuple[str, ...] = knob(
    ("stdlib",), "Files, folders or globs; `stdlib` is Python's own standard library sources."
  )
  eval_dataset_path: tuple[str, ...] = knob(
    (), "Held-out files, folders or globs; empty: a part of dataset_path is held out."
  )
  eval_fraction: float = knob(0.05, "Share of dataset_path that is held out.", low=0, high=0.9)
  eval_split: str = knob(
    "documents",
    "What is held out: whole `documents` by the hash of their content, or the `tail` of the data.",
    choices=("documents", "tail"),
  )
  text_column: str = knob("text", "Field or column that holds the text of jsonl and parquet data.")
  tokenizer_type: str = knob(
    "byte",
    "Kind of tokenizer.",
    choices=("byte", "huggingface", "sentencepiece"),
    shapes_model=True,
  )
  tokenizer_path: str = knob("", "tokenizer.json or SentencePiece model file.", shapes_model=True)
  token_cache_directory: str = knob(
    "", "Where tokenized data is kept; empty: base_output_directory/.tokens."
  )
  max_target_length: int = knob(256, "Positions per row.", unit="tokens", low=1)
  per_device_batch_size: float = knob(
    8.0, "Rows per device and step; times all devices it must be whole.", unit="rows", low=0
  )
  enable_data_shuffling: bool = knob(True, "Shuffle documents, and rows anew in every epoch.")
  data_shuffle_seed: int = knob(0, "Seed of the shuffling.", low=0, high=2**32 - 1)
  grain_worker_count: int = knob(0, "Grain worker processes; 0: threads of this process.", low=0)
  grain_prefetch: int = knob(16, "Batches read ahead of the step.", unit="batches", low=1)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """How gradients become new weights."""

  opt_type: str = knob(
    "adamw", "Optimizer.", choices=("adamw", "lion", "adafactor", "muon"), shapes_model=True
  )
  learning_rate: float = knob(2e-3, "Peak learning rate.", low=0)
  lr_schedule_type: str = knob(
    "cosine", "Shape after warm-up.", choices=("cosine", "wsd", "constant")
  )
  learning_rate_schedule_steps: int = knob(
    -1, "Length of the schedule; -1: as many as `steps`.", unit="steps", low=-1
  )
  warmup_steps_fraction: float = knob(0.1, "Share of the schedule spent warming up.", low=0, high=1)
  learning_rate_final_fraction: float = knob(
    0.1, "Learning rate at the schedule's end, as a share of the peak.", low=0, high=1
  )
  wsd_decay_steps_fraction: float = knob(
    0.1, "Share of the schedule spent decaying (wsd).", low=0, high=1
  )
  adam_b1: float = knob(0.9, "Decay of the first moment; Lion's b1.", low=0, high=1)
  adam_b2: float = knob(0.95, "Decay of the second moment; Lion's b2.", low=0, high=1)
  adam_eps: float = knob(1e-8, "Added to the root of the second moment.", low=0)
  adam_weight_decay: float = knob(
    0.1, "Decoupled weight decay of every optimizer; norms and biases are exempt.", low=0
  )
  muon_beta: float = knob(0.95, "Momentum of Muon.", low=0, high=1)
  gradient_clipping_threshold: float = knob(
    1.0, "Largest global gradient norm; 0: no clipping.", low=0
  )


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
  """What one step computes."""

  gradient_accumulation_steps: int = knob(
    1,
    "Micro-batches a step's batch is cut into; but for the draws of router_jitter, no result "
    "depends on it.",
    low=1,
  )
  logits_chunk_tokens: int = knob(
    2048, "Tokens per device whose logits exist at once.", unit="tokens", low=1
  )
  z_loss_multiplier: float = knob(0.0, "Weight of the squared log-partition of the logits.", low=0)
  max_skipped_steps: int = knob(
    10, "Steps in a row with a non-finite loss or gradient after which the run stops.", low=1
  )


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """What is written to disk to go on from."""

  enable_checkpointing: bool = knob(True, "Write checkpoints, and go on from the newest.")
  checkpoint_period: int = knob(100, "Steps between checkpoints.", unit="steps", low=1)
  async_checkpointing: bool = knob(True, "Write while training goes on.")
  max_num_checkpoints_to_keep: int = knob(3, "Newest checkpoints that are kept.", low=1)
  checkpoint_keep_period: int = knob(
    0, "Also keep every checkpoint at a multiple of this; 0: none.", unit="steps", low=0
  )


@dataclasses.dataclass(frozen=True)
class ObserveConfig:
  """What is measured, written and drawn."""

  log_period: int = knob(10, "Steps between lines of console and metrics.", unit="steps", low=1)
  enable_tensorboard: bool = knob(True, "Also write TensorBoard event files.")
  eval_period: int = knob(
    100, "Steps between evaluations; 0: only at the end.", unit="steps", low=0
  )
  eval_steps: int = knob(
    16, "Batches of one evaluation; -1: all held-out data.", unit="batches", low=-1
  )
  profiler: str = knob("", "Write a trace of some steps.", choices=("", "xplane"))
  skip_first_n_steps_for_profiler: int = knob(5, "Steps before the trace.", unit="steps", low=0)
  profiler_steps: int = knob(3, "Steps in the trace.", unit="steps", low=1)


@dataclasses.dataclass(frozen=True)
class GenerateConfig:
  """What `maxlite.generate` samples."""

  prompt: str = knob("def ", "Text to continue.")
  max_new_tokens: int = knob(200, "Tokens to add.", unit="tokens", low=1)
  temperature: float = knob(0.8, "Softmax temperature; 0: the likeliest token.", low=0)
  decode_sampling_seed: int = knob(0, "Seed of the sampling.", low=0)


@dataclasses.dataclass(frozen=True)
class PlanConfig:
  """What `maxlite.plan` compiles for."""

  compile_topology: str = knob(
    "",
    "Accelerators to plan for: `v5p-64` and its like name a TPU slice by its TensorCores (v4, v5p, "
    "tpu7x: two a chip) or chips (v5e, v6e); `h200-8` eight GPUs. Empty: the devices at hand.",
  )
  compile_topology_num_slices: int = knob(1, "Slices of that kind.", low=1)
  gpu_target_config: str = knob(
    "", "GpuTargetConfigProto text file of the GPU to compile for; without: the estimate only."
  )
  save_hlo: str = knob("", "Folder that the compiled program's text is written to; empty: none.")


@dataclasses.dataclass(frozen=True)
class Config:
  """The resolved configuration of one command."""

  run: RunConfig = dataclasses.field(default_factory=RunConfig)
  mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
  model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
  data: DataConfig = dataclasses.field(default_factory=DataConfig)
  optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
  training: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)
  checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
  observe: ObserveConfig = dataclasses.field(default_factory=ObserveConfig)
  generate: GenerateConfig = dataclasses.field(default_factory=GenerateConfig)
  plan: PlanConfig = dataclasses.field(default_factory=PlanConfig)


@dataclasses.dataclass(frozen=True)
class Key:
  """One flat key of the schema, with its section's class and its knob."""

  name: str
  type: Any
  default: Any
  knob: Knob
  section: type


def _walk(section: Any) -> Iterator[Key]:
  hints = get_type_hints(section)
  for field in dataclasses.fields(section):
    hint = hints[field.name]
    if dataclasses.is_dataclass(hint):
      yield from _walk(hint)
    else:
      yield Key(field.name, hint, field.default, field.metadata["knob"], section)


def build(section: type, values: dict[str, Any]) -> Any:
  """The (nested) section filled from flat `values`, which holds every key it needs."""
  hints = get_type_hints(section)
  return section(
    **{
      field.name: build(hints[field.name], values)
      if dataclasses.is_dataclass(hints[field.name])
      else values[field.name]
      for field in dataclasses.fields(section)
    }
  )


def flatten(config: Any) -> dict[str, Any]:
  """Flat {key: value} of a (nested) section, in the schema's order."""
  flat: dict[str, Any] = {}
  for field in dataclasses.fields(config):
    value = getattr(config, field.name)
    flat.update(flatten(value) if dataclasses.is_dataclass(value) else {field.name: value})
  return flat


KEYS: dict[str, Key] = {key.name: key for key in _walk(Config)}
DEFAULTS: dict[str, Any] = {key.name: key.default for key in KEYS.values()}
