"""The run: processes, mesh, checkpoints and metrics."""

import dataclasses

from maxlite.config.config_field import field, machine_field
from maxlite.config.raw_values import FrozenMapping
from maxlite.registry import CALLBACKS

MESH_AXES = ("ensemble", "data", "fsdp", "context", "expert", "tensor")  # outermost first
AxisRules = tuple[tuple[str, tuple[str, ...]], ...]


def _degree(kind: str, mesh_axis: str, default: int) -> int:
  where = "within a slice" if kind == "ici" else "across slices"
  doc = f"Shards of the mesh axis `{mesh_axis}` {where}; -1: all remaining devices."
  degree: int = field(default, doc, low=-1)
  return degree


@dataclasses.dataclass(frozen=True)
class RunConfig:
  """Name, length and seed of the run."""

  run_name: str = field("base", "Name of the run; its folder is base_output_directory/run_name.")
  base_output_directory: str = field("runs", "Folder of all runs.")
  member: str = field(
    "", "Member of an ensemble to evaluate, serve or export; `best` has the lowest held-out loss."
  )
  model_name: str = field(
    "", "Preset configs/models/NAME.yml, applied after the YAML files (except dtype, remat_policy)."
  )
  plugins: tuple[str, ...] = field(
    (),
    "Modules, or paths of .py files, that add entries to the tables of registry.py.",
    runs_code=True,
  )
  trust_plugins: bool = field(
    False,
    "Also obey what run folders say about code and this machine: their plugins, compiler_options, "
    "caches, folders and addresses. Only for folders whose code you trust.",
    runs_code=True,
  )
  callbacks: tuple[str, ...] = field(
    (),
    "Callbacks of the run; `completions`: complete `prompt` or `prompt_file` at checkpoints.",
    choices=CALLBACKS,
  )
  allow_changes: tuple[str, ...] = field(
    (),
    "Keys of the model that may differ from those of the trained run, although it then computes "
    "another function, such as `lora_alpha` and `router`.",
  )
  steps: int = field(300, "Optimizer steps of the run.", low=1)
  init_weights_seed: int = field(0, "Seed of the initial weights and of random draws.", low=0)
  step_timeout_seconds: int = field(
    -1,
    "Time limit of a step, an evaluation or a save, without compilation. When it is exceeded, the "
    "process prints the stacks of all threads and exits. -1: 20 times the longest step so far, at "
    "least 1800 s, for steps only; 0: none.",
    low=-1,
  )
  jax_cache_dir: str = field(
    "~/.cache/maxlite/jax",
    "Persistent compilation cache; disabled if empty, or with multiple CPU devices.",
    runs_code=True,
  )
  compiler_options: FrozenMapping = field(
    FrozenMapping(),
    "{option: value} of XLA for training steps; adds to, or replaces, those that the run prints.",
    runs_code=True,
  )


@dataclasses.dataclass(frozen=True)
class HostsConfig:
  """Processes of the run; detected under SLURM, Open MPI, Kubernetes and Cloud TPU."""

  coordinator_address: str = machine_field("", "HOST:PORT of process 0; empty: auto-detect.")
  num_processes: int = machine_field(
    -1, "Processes of the run; 1: this one only; -1: auto-detect.", low=-1
  )
  process_id: int = machine_field(-1, "Index of this process, from 0; -1: auto-detect.", low=-1)
  jax_distributed_initialization_timeout: int = machine_field(
    300, "Seconds to wait for all processes to connect.", low=1
  )
  jax_distributed_heartbeat_timeout_seconds: int = machine_field(
    100, "Seconds of silence after which a process counts as lost and all others exit.", low=1
  )


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """The device mesh and the sharding of arrays."""

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
    "Replacements of rows in sharding/logical_axis_rules.py: [[logical axis, [mesh axes]], ...].",
  )
  gather_by_permutes: bool = field(
    False,
    "Gather weights over fsdp, and scatter their gradients, by permutes between pairs of devices "
    "instead of collectives. XLA:TPU schedules permutes behind matmuls, but each uses the links of "
    "one direction only, and copies between them cost HBM bandwidth.",
  )
  sharding_tolerance: float = field(
    0.02, "Maximum fraction of parameter bytes left unsharded on a sharded mesh.", low=0, high=1
  )
  optimizer_memory_host_offload: bool = field(
    False,
    "Keep the optimizer state in pinned memory of the host; each step moves it to the device and "
    "back.",
  )


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """Checkpoints: what is saved, when and where."""

  enable_checkpointing: bool = field(True, "Save checkpoints, and resume from the latest.")
  checkpoint_period: int = field(100, "Steps between checkpoints.", low=1)
  checkpoint_period_minutes: float = field(
    0.0,
    "Also save when this long has passed since the last checkpoint, which is checked every "
    "log_period steps; 0: never.",
    low=0,
  )
  async_checkpointing: bool = field(True, "Save while training continues.")
  max_num_checkpoints_to_keep: int = field(3, "Latest checkpoints that are kept.", low=1)
  keep_best_checkpoint: bool = field(
    False,
    "Save and always keep the checkpoint with the lowest held-out loss (of averages, if any).",
  )
  load_parameters_path: str = field(
    "",
    "Run folder or Hugging Face folder with whose parameters a new run starts, or all members of "
    "a new ensemble; empty: none. Its tokenizer and the keys of its model are the defaults.",
  )
  from_run: str = field(
    "",
    "Run in base_output_directory with whose parameters a new run starts: short for "
    "load_parameters_path with its folder.",
  )
  load_checkpoint: str = field(
    "latest",
    "Checkpoint that is evaluated, served, exported or started from: `latest`, `best`, which has "
    "the lowest held-out loss, or a step.",
  )
  checkpoint_keep_period: int = field(
    0, "Also keep every multiple of this many steps; 0: none.", low=0
  )
  local_checkpoint_directory: str = machine_field(
    "",
    "Folder on each host, such as /dev/shm/maxlite, for checkpoints between the shared ones; "
    "empty: none.",
  )
  local_checkpoint_period: int = field(10, "Steps between local checkpoints.", low=1)
  local_checkpoint_replication: bool = field(
    False,
    "Each process also stores the local checkpoint of a process on another host, unless another "
    "host has the same part of the state.",
  )


@dataclasses.dataclass(frozen=True)
class ObserveConfig:
  """Metrics, evaluation and profiling."""

  log_period: int = field(10, "Steps between log lines and metrics.", low=1)
  log_format: str = field(
    "text",
    "Lines on stdout: `text`, or `json`, an object per line.",
    choices=("text", "json"),
  )
  metrics_port: int = machine_field(
    0, "Port of an endpoint /metrics for Prometheus, in process 0; 0: none.", low=0, high=65535
  )
  metrics_host: str = machine_field(
    "127.0.0.1",
    "Address to bind metrics_port to; by default only this machine has access, 0.0.0.0: all.",
  )
  enable_tensorboard: bool = field(True, "Also write TensorBoard event files.")
  wandb_project_name: str = machine_field(
    "", "Project of Weights & Biases that also receives the metrics; empty: none."
  )
  eval_interval: int = field(100, "Steps between evaluations; -1 or 0: only at the end.", low=-1)
  eval_steps: int = field(16, "Batches per evaluation; -1: all held out.", low=-1)
  eval_tasks: tuple[FrozenMapping, ...] = field(
    (),
    "Tasks at evaluations, for which the model writes answers: {name: N, path: [FILES], "
    "reward_functions: [equal_answer]} with further keys, which are below (docs/rl.md).",
    runs_code=True,
  )
  early_stopping_patience: int = field(
    0, "Evaluations without a lower held-out loss after which the run ends; 0: never.", low=0
  )
  eval_documents: bool = field(
    False,
    "maxlite.evaluate also writes the loss of every held-out document to eval_documents.jsonl in "
    "the run folder.",
  )
  replica_check_period: int = field(0, "Steps between bitwise checks of replicas; 0: none.", low=0)
  profiler: str = field("", "Write a trace of some steps.", choices=("", "xplane"))
  skip_first_n_steps_for_profiler: int = field(5, "Steps before the trace.", low=0)
  profiler_steps: int = field(3, "Steps in the trace.", low=1)
