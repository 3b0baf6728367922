"""Every knob of maxlite: its type, default, range and meaning. There is no default anywhere else.

Keys are flat on the command line and in YAML; `Config` groups them in sections, and from `layers`
up code is handed a section (`ModelConfig`), never the whole. Names are MaxText's wherever MaxText
has the knob. This module imports nothing but the standard library, so a wrong command line is
answered before JAX is loaded.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any, get_type_hints

from maxlite.config.config_field import ConfigField, field
from maxlite.config.model_sections import (
  LatentAttentionConfig,
  LoraConfig,
  ModelConfig,
  MoeConfig,
  RopeConfig,
  TilesConfig,
)
from maxlite.config.registry import OPTIMIZERS, SCHEDULES
from maxlite.config.run_sections import CheckpointConfig, HostsConfig
from maxlite.config.written import Table

__all__ = [
  "DEFAULTS",
  "KEYS",
  "MESH_AXES",
  "RENAMED_KEYS",
  "AxisRules",
  "CheckpointConfig",
  "Config",
  "ConvertConfig",
  "DataConfig",
  "EnsembleConfig",
  "GenerateConfig",
  "HostsConfig",
  "Key",
  "LatentAttentionConfig",
  "LoraConfig",
  "MeshConfig",
  "ModelConfig",
  "MoeConfig",
  "ObserveConfig",
  "OptimizerConfig",
  "PlanConfig",
  "RopeConfig",
  "RunConfig",
  "ServeConfig",
  "TilesConfig",
  "TrainingConfig",
  "build",
  "flatten",
]

MESH_AXES = ("ensemble", "data", "fsdp", "context", "expert", "tensor")
AxisRules = tuple[tuple[str, tuple[str, ...]], ...]


def _degree(kind: str, mesh_axis: str, default: int) -> Any:
  where = "within a slice" if kind == "ici" else "between slices"
  return field(
    default, f"Shards of the mesh axis `{mesh_axis}` {where}; -1: all that are left.", low=-1
  )


@dataclasses.dataclass(frozen=True)
class RunConfig:
  """What this run is called, how long it lasts and what it tells."""

  run_name: str = field("base", "Name of the run; its folder is base_output_directory/run_name.")
  base_output_directory: str = field("runs", "Folder that holds all runs.")
  model_name: str = field("", "Preset from configs/models/NAME.yml, applied after the YAML files.")
  steps: int = field(300, "Optimizer steps of the whole run.", unit="steps", low=1)
  init_weights_seed: int = field(
    0, "Seed of initial weights and of the steps' random draws.", low=0
  )
  step_timeout_seconds: int = field(
    0,
    "A step, evaluation or save that takes longer ends the process, with the stacks of all its "
    "threads; the first step includes its compilation. 0: nothing does.",
    unit="seconds",
    low=0,
  )
  jax_cache_dir: str = field(
    "~/.cache/maxlite/jax", "Persistent compilation cache; empty, or on several CPU devices: none."
  )


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
  logical_axis_rules: AxisRules = field(
    (),
    "Replaces rows of the sharding table (sharding/rules.py): [[logical axis, [mesh axes]], ...].",
  )
  sharding_tolerance: float = field(
    0.02,
    "Largest share of parameter bytes left whole on a mesh that could shard them.",
    low=0,
    high=1,
  )


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """Where tokens come from and how they fill batches."""

  dataset_type: str = field(
    "text",
    "Kind of data; `chat` are conversations in JSON lines, of which the assistant's answers are "
    "learned (data/sources/chat.py).",
    choices=("synthetic", "text", "jsonl", "parquet", "chat"),
  )
  dataset_path: tuple[str, ...] = field(
    ("stdlib",), "Files, folders or globs; `stdlib` is Python's own standard library sources."
  )
  eval_dataset_path: tuple[str, ...] = field(
    (), "Held-out files, folders or globs; empty: a part of dataset_path is held out."
  )
  eval_fraction: float = field(0.05, "Share of dataset_path that is held out.", low=0, high=0.9)
  eval_split: str = field(
    "documents",
    "What is held out: whole `documents` by the hash of their content, or the `tail` of the data.",
    choices=("documents", "tail"),
  )
  text_column: str = field("text", "Field or column that holds the text of jsonl and parquet data.")
  tokenizer_type: str = field(
    "byte",
    "Kind of tokenizer.",
    choices=("byte", "huggingface", "sentencepiece"),
    shapes_model=True,
  )
  tokenizer_path: str = field("", "tokenizer.json or SentencePiece model file.", shapes_model=True)
  chat_template_path: str = field(
    "", "Jinja2 template that renders conversations; empty: that which came with the tokenizer."
  )
  packing: bool = field(
    True, "Put several conversations of dataset_type=chat into a row; False: one into each."
  )
  token_cache_directory: str = field(
    "", "Where tokenized data is kept; empty: base_output_directory/.tokens."
  )
  max_target_length: int = field(256, "Positions per row.", unit="tokens", low=1)
  per_device_batch_size: float = field(
    8.0, "Rows per device and step; times all devices it must be whole.", unit="rows", low=0
  )
  global_batch_size: int = field(
    0,
    "Rows per step, whatever the number of devices; 0: per_device_batch_size times all devices.",
    unit="rows",
    low=0,
  )
  enable_data_shuffling: bool = field(True, "Shuffle documents, and rows anew in every epoch.")
  data_shuffle_seed: int = field(0, "Seed of the shuffling.", low=0, high=2**32 - 1)
  data_sampling: str = field(
    "shuffle",
    "Rows of an epoch: each once, or by `bootstrap` as many, drawn with replacement by "
    "data_shuffle_seed.",
    choices=("shuffle", "bootstrap"),
  )
  grain_worker_count: int = field(0, "Grain worker processes; 0: threads of this process.", low=0)
  grain_prefetch: int = field(16, "Batches read ahead of the step.", unit="batches", low=1)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """How gradients become new weights."""

  opt_type: str = field("adamw", "Optimizer.", choices=OPTIMIZERS, shapes_model=True)
  learning_rate: float = field(2e-3, "Peak learning rate.", low=0)
  lr_schedule_type: str = field("cosine", "Shape after warm-up.", choices=SCHEDULES)
  learning_rate_schedule_steps: int = field(
    -1, "Length of the schedule; -1: as many as `steps`.", unit="steps", low=-1
  )
  warmup_steps_fraction: float = field(
    0.1, "Share of the schedule spent warming up.", low=0, high=1
  )
  learning_rate_final_fraction: float = field(
    0.1, "Learning rate at the schedule's end, as a share of the peak.", low=0, high=1
  )
  wsd_decay_steps_fraction: float = field(
    0.1, "Share of the schedule spent decaying (wsd).", low=0, high=1
  )
  adam_b1: float = field(0.9, "Decay of the first moment; Lion's b1.", low=0, high=1)
  adam_b2: float = field(0.95, "Decay of the second moment; Lion's b2.", low=0, high=1)
  adam_eps: float = field(1e-8, "Added to the root of the second moment.", low=0)
  adam_weight_decay: float = field(
    0.1, "Decoupled weight decay of every optimizer; norms and biases are exempt.", low=0
  )
  muon_beta: float = field(0.95, "Momentum of Muon.", low=0, high=1)
  gradient_clipping_threshold: float = field(
    1.0, "Largest global gradient norm; 0: no clipping.", low=0
  )


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
  """What one step computes."""

  gradient_accumulation_steps: int = field(
    1,
    "Micro-batches a step's batch is cut into; but for the draws of router_jitter, no result "
    "depends on it.",
    low=1,
  )
  logits_chunk_tokens: int = field(
    2048, "Tokens per device whose logits exist at once.", unit="tokens", low=1
  )
  z_loss_multiplier: float = field(0.0, "Weight of the squared log-partition of the logits.", low=0)
  ema_decay: float = field(
    0.0,
    "Keep moving averages of the trained weights, so much of which stays in every step (0.999 is "
    "usual); they are evaluated beside the weights, and generate writes with them. 0: none.",
    low=0,
    high=1,
    shapes_model=True,
  )
  draft_loss_weight: float = field(
    0.2, "Weight of the draft heads' loss in a phase of loss: next_token_and_draft.", low=0
  )
  max_skipped_steps: int = field(
    10, "Steps in a row with a non-finite loss or gradient after which the run stops.", low=1
  )


@dataclasses.dataclass(frozen=True)
class EnsembleConfig:
  """Many members trained by one command; read where `members` or `sweep` has any."""

  members: tuple[Table, ...] = field(
    (),
    "Members, each {key: value} of what it has for itself, and a `name` if you like. Its keys may "
    "be those of model (without vocab_size), optimizer and training, phases, initial_phases, "
    "phase_optimizer_state, init_weights_seed, data_shuffle_seed, data_sampling, and model_name: "
    "of that preset, what a member may have.",
  )
  sweep: Table = field(
    Table(),
    "More members, by {grid: {key: [values]}} every combination, by {draw: {key: rule}, "
    "num_members: N, seed: 0} random ones, a rule being {log_uniform: [low, high]} (for learning "
    "rates), {uniform: [low, high]} or {choice: [values]}. With `members`: each of them with each.",
  )
  ensemble_strategy: str = field(
    "auto",
    "How members are trained: `stacked` as arrays of one program; `fused` stacks of each "
    "architecture in one program; `padded` to the largest; `switched` one per device; `submesh` "
    "some devices each; `processes` of their own.",
    choices=("auto", "stacked", "fused", "padded", "switched", "submesh", "processes"),
  )
  ensemble_data: str = field(
    "shared",
    "Batches: the same for all; `independent` in an order per member; `bootstrap` also drawn with "
    "replacement.",
    choices=("shared", "independent", "bootstrap"),
  )
  ensemble_executor: str = field(
    "local", "Who starts the workers of ensemble_strategy=processes.", choices=("local", "ray")
  )
  ensemble_memory_gb: float = field(
    0.0, "Budget on one device for all members' state; 0: what it has.", unit="GB", low=0
  )
  ensemble_num_workers: int = field(
    0, "Workers of ensemble_strategy=processes; 0: one per member, up to the cores.", low=0
  )
  halving_factor: int = field(
    0,
    "Successive halving (ASHA's eta): one of so many members goes on past a rung, and the next "
    "rung is so many times as many steps; 0: all members are trained to the end.",
    low=0,
  )
  halving_first_rung: int = field(100, "Steps before the first rung.", unit="steps", low=1)


@dataclasses.dataclass(frozen=True)
class PhasesConfig:
  """Phases that take turns, each training a part of the model; read where `phases` has any."""

  phases: tuple[Table, ...] = field(
    (),
    "Phases in their order, each {name: N, train: [path regexes], loss: L, steps: N}; a loss is "
    "`next_token` (where none is given), or of draft heads `match_head` or `next_token_and_draft`; "
    "in place of steps `until: {metric: M, max_steps: N, patience: N}` (or below: X, above: X); "
    "and what it has for itself of optimizer keys, gradient_accumulation_steps and keys of data, "
    "such as dataset_path and per_device_batch_size (not tokenizer_*, eval_*, max_target_length).",
    shapes_model=True,
  )
  initial_phases: Table = field(
    Table(), "{phase: steps} that a phase takes alone before all take turns.", shapes_model=True
  )
  phase_strategy: str = field(
    "auto",
    "`separate` programs, one per phase; `switch`, one program for all; `auto` by their number.",
    choices=("auto", "separate", "switch"),
  )
  phase_optimizer_state: str = field(
    "own",
    "Whether phases that train the same parameter keep `own` optimizer state for it or `shared`.",
    choices=("own", "shared"),
    shapes_model=True,
  )


@dataclasses.dataclass(frozen=True)
class ObserveConfig:
  """What is measured, written and drawn."""

  log_period: int = field(10, "Steps between lines of console and metrics.", unit="steps", low=1)
  enable_tensorboard: bool = field(True, "Also write TensorBoard event files.")
  eval_period: int = field(
    100, "Steps between evaluations; 0: only at the end.", unit="steps", low=0
  )
  eval_steps: int = field(
    16, "Batches of one evaluation; -1: all held-out data.", unit="batches", low=-1
  )
  eval_documents: bool = field(
    False,
    "maxlite.evaluate also writes the loss of every held-out document to eval_documents.jsonl in "
    "the run's folder.",
  )
  replica_check_period: int = field(
    0,
    "Steps between checks that devices which hold the same part of the state hold the same bits; "
    "0: none.",
    unit="steps",
    low=0,
  )
  profiler: str = field("", "Write a trace of some steps.", choices=("", "xplane"))
  skip_first_n_steps_for_profiler: int = field(5, "Steps before the trace.", unit="steps", low=0)
  profiler_steps: int = field(3, "Steps in the trace.", unit="steps", low=1)


@dataclasses.dataclass(frozen=True)
class GenerateConfig:
  """What `maxlite.generate` samples."""

  prompt: str = field("def ", "Text to continue.")
  prompt_file: str = field(
    "",
    'Texts to continue in place of `prompt`: JSON lines {"prompt": "..."}; written are JSON lines.',
  )
  max_new_tokens: int = field(200, "Tokens to add.", unit="tokens", low=1)
  temperature: float = field(0.8, "Softmax temperature; 0: the likeliest token.", low=0)
  top_k: int = field(0, "Sample from so many of the likeliest tokens; 0: from all.", low=0)
  top_p: float = field(
    1.0, "Sample from the fewest tokens that hold this share of the probability.", low=0, high=1
  )
  min_p: float = field(
    0.0, "Sample from tokens at least so likely as a share of the likeliest.", low=0, high=1
  )
  repetition_penalty: float = field(
    1.0, "Logits of tokens the text has are divided (negative: multiplied) by this.", low=0
  )
  stop: tuple[str, ...] = field((), "Strings before which the text ends, wherever one comes first.")
  decode_sampling_seed: int = field(
    0, "Seed of the sampling; the n-th text of prompt_file adds n.", low=0, high=2**32 - 1
  )
  decode_batch_size: int = field(8, "Texts generated at once, at most.", unit="rows", low=1)
  num_speculative_tokens: int = field(
    -1,
    "Tokens that draft heads propose for the model to check in one step (speculative decoding), at "
    "most num_draft_heads; 0: none, -1: as many as there are heads.",
    unit="tokens",
    low=-1,
  )


@dataclasses.dataclass(frozen=True)
class ServeConfig:
  """Where `maxlite.serve` listens."""

  serve_host: str = field(
    "127.0.0.1", "Address to listen on; by default this machine alone can reach it."
  )
  serve_port: int = field(8000, "Port to listen on; 0: any that is free.", low=0, high=65535)
  serve_queue_size: int = field(
    32, "Requests that may wait for a row; more are refused with status 429.", low=0
  )


@dataclasses.dataclass(frozen=True)
class PlanConfig:
  """What `maxlite.plan` compiles for."""

  compile_topology: str = field(
    "",
    "Accelerators to plan for: `v5p-64` and its like name a TPU slice by its TensorCores (v4, v5p, "
    "tpu7x: two a chip) or chips (v5e, v6e); `h200-8` eight GPUs. Empty: the devices at hand.",
  )
  compile_topology_num_slices: int = field(1, "Slices of that kind.", low=1)
  gpu_target_config: str = field(
    "", "GpuTargetConfigProto text file of the GPU to compile for; without: the estimate only."
  )
  save_hlo: str = field("", "Folder that the compiled program's text is written to; empty: none.")


@dataclasses.dataclass(frozen=True)
class ConvertConfig:
  """What `maxlite.convert` writes."""

  output_path: str = field("", "Folder that to_hf writes; name of the run that upcycle makes.")


@dataclasses.dataclass(frozen=True)
class Config:
  """The resolved configuration of one command."""

  run: RunConfig = dataclasses.field(default_factory=RunConfig)
  hosts: HostsConfig = dataclasses.field(default_factory=HostsConfig)
  mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
  model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
  data: DataConfig = dataclasses.field(default_factory=DataConfig)
  optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
  training: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)
  phasing: PhasesConfig = dataclasses.field(default_factory=PhasesConfig)
  ensemble: EnsembleConfig = dataclasses.field(default_factory=EnsembleConfig)
  checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
  observe: ObserveConfig = dataclasses.field(default_factory=ObserveConfig)
  generate: GenerateConfig = dataclasses.field(default_factory=GenerateConfig)
  serve: ServeConfig = dataclasses.field(default_factory=ServeConfig)
  plan: PlanConfig = dataclasses.field(default_factory=PlanConfig)
  convert: ConvertConfig = dataclasses.field(default_factory=ConvertConfig)


@dataclasses.dataclass(frozen=True)
class Key:
  """One flat key of the schema, with its section's class and its field."""

  name: str
  type: Any
  default: Any
  field: ConfigField
  section: type


def _walk(section: Any) -> Iterator[Key]:
  hints = get_type_hints(section)
  for entry in dataclasses.fields(section):
    hint = hints[entry.name]
    if dataclasses.is_dataclass(hint):
      yield from _walk(hint)
    else:
      yield Key(entry.name, hint, entry.default, entry.metadata["config"], section)


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
  for entry in dataclasses.fields(config):
    value = getattr(config, entry.name)
    flat.update(flatten(value) if dataclasses.is_dataclass(value) else {entry.name: value})
  return flat


KEYS: dict[str, Key] = {key.name: key for key in _walk(Config)}
DEFAULTS: dict[str, Any] = {key.name: key.default for key in KEYS.values()}
# Old name -> new name. A config.yml of an earlier run may have either; elsewhere the old name is
# an error that gives the new one.
RENAMED_KEYS: dict[str, str] = {
  "local_checkpoint_peer_copies": "local_checkpoint_replication",
  "output": "output_path",
  "phase_warmup": "initial_phases",
  "remat_save": "remat_saved_names",
}
