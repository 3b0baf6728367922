"""Every knob of maxlite: its type, default, range and meaning. There is no default anywhere else.

Keys are flat on the command line and in YAML; `Config` groups them in sections, and from `layers`
up code is handed a section (`ModelConfig`), never the whole. Names are MaxText's wherever MaxText
has the knob. This module imports nothing but the standard library, so a wrong command line is
answered before JAX is loaded.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, get_type_hints


class ConfigError(ValueError):
  """What a user got wrong in one line: where, which key, the rule, and what to change."""


@dataclasses.dataclass(frozen=True)
class Knob:
  """What is known of one key beyond its name: kept in the dataclass field's metadata."""

  doc: str
  unit: str = ""
  choices: tuple[Any, ...] = ()  # of the value, or of each element where the type is a tuple
  low: float | None = None  # smallest value allowed
  high: float | None = None  # largest value allowed
  shapes_model: bool = False  # a run folder keeps this value for life: weights depend on it


def knob(default: Any, doc: str, **facts: Any) -> Any:
  return dataclasses.field(default=default, metadata={"knob": Knob(doc, **facts)})


def shape_knob(default: Any, doc: str, **facts: Any) -> Any:
  return knob(default, doc, shapes_model=True, **facts)


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


@dataclasses.dataclass(frozen=True)
class MoeConfig:
  """The mixture-of-experts block; read where decoder_block names a mixture."""

  num_experts: int = shape_knob(8, "Experts per MoE layer.", low=1)
  num_experts_per_tok: int = shape_knob(2, "Experts each token is sent to (top-k).", low=1)
  base_moe_mlp_dim: int = shape_knob(384, "Hidden width of one expert.", low=1)
  norm_topk_prob: bool = knob(True, "Make the chosen experts' weights sum to one.")
  load_balance_loss_weight: float = knob(0.01, "Weight of the load-balance loss.", low=0)
  router_z_loss_weight: float = knob(0.001, "Weight of the router z-loss.", low=0)
  router_jitter: float = knob(
    0.0, "In training, scale the router's input by uniform noise in 1 +- this.", low=0, high=1
  )
  grouped_matmul: str = knob(
    "auto", "Backend of the experts' matmuls.", choices=("auto", "tiled", "ragged_dot", "reference")
  )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """The decoder's architecture, number formats and memory policy."""

  decoder_block: str = shape_knob(
    "mixtral",
    "Family of the decoder's blocks: dense `llama`, MoE `mixtral`.",
    choices=("llama", "mixtral"),
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
  rope_max_timescale: float = shape_knob(10_000.0, "Base of the rotary embedding (theta).", low=1)
  scan_layers: bool = shape_knob(True, "Stack layers and scan over them: compiles once for all.")
  scan_unroll: int = knob(
    4, "Layers per iteration of that scan: more run faster on a CPU and compile longer.", low=1
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
    ),
  )
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
