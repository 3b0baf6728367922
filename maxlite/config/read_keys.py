"""The keys that each command reads: one that is typed and not read is an error.

This is about keys that somebody typed. Files may set more: they serve several commands.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from maxlite.config.config_field import KeyValue
from maxlite.config.members import members_of
from maxlite.config.mixture import mixture_of
from maxlite.config.model_function import unused_keys
from maxlite.config.phases import phases_of
from maxlite.config.raw_values import show
from maxlite.config.rules.rollout_rules import has_rollouts
from maxlite.config.schema import (
  KEYS,
  AuditConfig,
  CheckpointConfig,
  Config,
  ConvertConfig,
  DataConfig,
  EnsembleConfig,
  GenerateConfig,
  HostsConfig,
  InspectConfig,
  LocalUpdatesConfig,
  MeshConfig,
  ModelConfig,
  PlanConfig,
  RolloutConfig,
  SectionClass,
  ServeConfig,
  TokenizerConfig,
  flatten,
)
from maxlite.config.values import Setting
from maxlite.errors import raise_all
from maxlite.registry import DRAFT_LOSSES, OPTIMIZERS, SOURCES, SourceEntry


def _keys_of(*sections: SectionClass) -> set[str]:
  keys: set[str] = set()
  for section in sections:
    keys |= flatten(section()).keys()
  return keys


_ALL = set(KEYS)
# Which run is opened, where it is, and how its programs are cached.
_NAMING = {"run_name", "base_output_directory", "member", "load_checkpoint", "model_name"}
_NAMING |= {"plugins", "trust_plugins", "jax_cache_dir", "allow_changes"}
_TRAINING_MODEL = {
  "remat_policy", "remat_saved_names", "router_jitter", "routed_bias_update_rate",
  "load_balance_loss_weight", "load_balance_loss_scope", "router_z_loss_weight",
  "wi_tile_dlhs", "wi_tile_drhs", "wo_tile_dlhs", "wo_tile_drhs",
}  # fmt: skip
_MODEL = _keys_of(ModelConfig) - _TRAINING_MODEL
_TOKENIZER = {"tokenizer_type", "tokenizer_path", "chat_template_path", "add_bos"}
_TRAINING_DATA = {
  "batch_size_schedule", "sequence_length_schedule", "packing_strategy", "enable_data_shuffling",
  "data_shuffle_seed", "data_sampling", "skip_rows", "grain_worker_count", "megatron_num_samples",
  "reset_attention_mask", "eod_mask_loss",
}  # fmt: skip
_MESH = _keys_of(MeshConfig) - {"optimizer_memory_host_offload"}
_INFERENCE = _NAMING | _MODEL | _MESH | _TOKENIZER | {"max_target_length"}
_ADAPTERS = {"max_loras", "max_lora_rank", "served_model_name"}
_OTHER_COMMANDS = _keys_of(PlanConfig, AuditConfig, ConvertConfig, TokenizerConfig, InspectConfig)
_DATA = _keys_of(DataConfig) | {"vocab_size", "base_output_directory", "plugins", "trust_plugins"}
_IMPORT = _ALL - _OTHER_COMMANDS - _keys_of(HostsConfig) - {"member", "load_checkpoint"}
_TRAIN = _ALL - _OTHER_COMMANDS - _keys_of(ServeConfig) - {"eval_documents", "member"}
# By command. A config that a command writes counts as read.
READ_KEYS: dict[str, set[str]] = {
  "maxlite.train": _TRAIN,
  "maxlite.plan": _TRAIN | _keys_of(PlanConfig),
  "maxlite.audit": _TRAIN | _keys_of(AuditConfig),
  "maxlite.evaluate": _NAMING
  | _MODEL
  | _MESH
  | _keys_of(HostsConfig)
  | (_keys_of(DataConfig) - _TRAINING_DATA)
  | {"eval_steps", "eval_documents", "eval_tasks", "rollout_batch_size"}
  | {"logits_chunk_tokens", "loss_type"}
  | {"reference_path", "dpo_beta", "dpo_label_smoothing"},
  "maxlite.generate": _INFERENCE | _keys_of(GenerateConfig),
  "maxlite.rollout": _INFERENCE
  | _keys_of(HostsConfig, RolloutConfig)
  | {"loss_type", "dataset_type", "dataset_path", "dataset_mixture", "data_columns", "on_bad_row"}
  | {"max_prefill_predict_length", "rollout_temperature", "max_completion_length", "phases"}
  | {"global_batch_size", "per_device_batch_size", "init_weights_seed", "output_path"},
  "maxlite.serve": _INFERENCE
  | (_keys_of(ServeConfig) - _ADAPTERS)
  | {"decode_batch_size", "num_speculative_tokens"},
  "maxlite.tinker": _INFERENCE
  | (_keys_of(ServeConfig) - {"serve_queue_size"})
  | {"decode_batch_size"},
  "maxlite.data tokenize": _DATA,
  "maxlite.data inspect": _DATA | _keys_of(InspectConfig),
  "maxlite.data export": _DATA | {"output_path"},
  "maxlite.data train_tokenizer": _DATA | _keys_of(TokenizerConfig),
  # Keys of training are those of `train_on`.
  "maxlite.open_run": _TRAIN - {"load_parameters_path", "from_run"} | {"member"},
  "maxlite.convert from_hf": _IMPORT - {"load_parameters_path", "from_run"},
  "maxlite.convert from_peft": _IMPORT - {"load_parameters_path", "from_run"},
  "maxlite.convert to_hf": _NAMING | _TOKENIZER | {"output_path", "max_target_length"},
  "maxlite.convert to_peft": _NAMING | {"output_path"},
  "maxlite.convert upcycle": _IMPORT | {"output_path", "load_checkpoint"},
}


class _Condition(NamedTuple):
  """Keys that are read under a condition."""

  keys: Collection[str]
  is_met: Callable[[Config], bool]
  fix: str  # how to meet it


def _uses_optimizer(key: str) -> Callable[[Config], bool]:
  def is_met(cfg: Config) -> bool:
    optimizers = {cfg.optimizer.opt_type}
    optimizers |= {phase.optimizer.opt_type for phase in phases_of(cfg)}
    return any(key in OPTIMIZERS.entry(name).hyperparameters for name in optimizers)

  return is_met


def _uses_schedule(*names: str) -> Callable[[Config], bool]:
  def is_met(cfg: Config) -> bool:
    schedules = {cfg.optimizer.lr_schedule_type}
    schedules |= {phase.optimizer.lr_schedule_type for phase in phases_of(cfg)}
    return not schedules.isdisjoint(names)

  return is_met


def _trains_drafts(cfg: Config) -> bool:
  return any(phase.loss in DRAFT_LOSSES for phase in phases_of(cfg))


def _has_text_column(cfg: Config) -> bool:
  return bool(cfg.data.dataset_mixture) or SOURCES.entry(cfg.data.dataset_type).has_text_column


def _sources(cfg: Config) -> list[SourceEntry]:
  """The kinds of all sources of a run and its phases."""
  sources = [*mixture_of(cfg.data)]
  for phase in phases_of(cfg):
    sources += mixture_of(phase.data)
  return [SOURCES.entry(source.data.dataset_type) for source in sources]


def _has_columns(cfg: Config) -> bool:
  return any(source.has_conversations or source.has_prompts for source in _sources(cfg))


def _has_prompts(cfg: Config) -> bool:
  return any(source.has_prompts for source in _sources(cfg))


def _has_token_ids(cfg: Config) -> bool:
  return any(source.has_token_ids for source in _sources(cfg))


def _has_text(cfg: Config) -> bool:
  return not all(source.has_token_ids for source in _sources(cfg))


def _holds_out(cfg: Config) -> bool:
  return not all(source.has_prompts for source in _sources(cfg))


_CONDITIONS = (
  _Condition(["adam_b1"], _uses_optimizer("adam_b1"), "write opt_type=adamw"),
  _Condition(["adam_b2"], _uses_optimizer("adam_b2"), "write opt_type=adamw"),
  _Condition(["adam_eps"], _uses_optimizer("adam_eps"), "write opt_type=adamw"),
  _Condition(["opt_kwargs"], _uses_optimizer("opt_kwargs"), "write opt_type=optax.NAME"),
  _Condition(["muon_beta"], _uses_optimizer("muon_beta"), "write opt_type=muon"),
  _Condition(["muon_split"], _uses_optimizer("muon_split"), "write opt_type=muon"),
  _Condition(["wsd_decay_steps_fraction"], _uses_schedule("wsd"), "write lr_schedule_type=wsd"),
  _Condition(
    ["lora_alpha", "lora_experts"], lambda cfg: cfg.model.lora.lora_rank > 0, "write lora_rank=8"
  ),
  _Condition(
    ["audit_meshes", "audit_seed"],
    lambda cfg: cfg.audit.audit_devices == "simulated",
    "write audit_devices=simulated",
  ),
  _Condition(
    ["audit_action"], lambda cfg: cfg.training.audit_period > 0, "write audit_period=1000"
  ),
  _Condition(
    ["skip_step_interval", "skip_step_scaling_factor"],
    lambda cfg: cfg.training.skip_step_on_spikes,
    "write skip_step_on_spikes=true",
  ),
  _Condition(["phase_strategy"], lambda cfg: bool(cfg.phasing.phases), "write phases"),
  _Condition(
    ["draft_loss_weight"], _trains_drafts, "write a phase with loss: next_token_and_draft"
  ),
  _Condition(
    _keys_of(LocalUpdatesConfig) - {"diloco_sync_period"},
    lambda cfg: cfg.local_updates.diloco_sync_period > 0,
    "write diloco_sync_period=N",
  ),
  _Condition(
    _keys_of(EnsembleConfig) - {"members", "sweep", "search", "ladder"},
    lambda cfg: cfg.ensemble.is_set,
    "write members, sweep, search or ladder",
  ),
  _Condition(
    ["steps"], lambda cfg: not cfg.ensemble.ladder, "the budgets of ladder set the steps of members"
  ),
  _Condition(
    ["asha_min_steps"],
    lambda cfg: cfg.ensemble.asha_reduction_factor > 0,
    "write asha_reduction_factor=3",
  ),
  _Condition(["pbt_fraction"], lambda cfg: cfg.ensemble.pbt_period > 0, "write pbt_period=N"),
  _Condition(
    ["local_checkpoint_period", "local_checkpoint_replication"],
    lambda cfg: bool(cfg.checkpoint.local_checkpoint_directory),
    "write local_checkpoint_directory=FOLDER",
  ),
  _Condition(
    [
      key
      for key in flatten(CheckpointConfig())
      if not key.startswith(("enable_", "load_", "from_"))
    ],
    lambda cfg: cfg.checkpoint.enable_checkpointing,
    "write enable_checkpointing=true",
  ),
  _Condition(
    ["load_checkpoint"],
    lambda cfg: bool(cfg.checkpoint.load_parameters_path),
    "write from_run=NAME",
  ),
  _Condition(
    ["skip_first_n_steps_for_profiler", "profiler_steps"],
    lambda cfg: bool(cfg.observe.profiler),
    "write profiler=xplane",
  ),
  _Condition(["data_columns"], _has_columns, "write dataset_type=chat, preference or prompts"),
  _Condition(["reward_functions", "rollout_environment"], has_rollouts, "write loss_type=grpo"),
  _Condition(["max_prefill_predict_length"], _has_prompts, "write dataset_type=prompts"),
  _Condition(
    ["eval_fraction", "eval_split", "eval_dataset_path"], _holds_out, "no prompts are held out"
  ),
  _Condition(["token_dtype", "document_end_id"], _has_token_ids, "write dataset_type=tokens"),
  _Condition(["on_bad_row"], _has_text, "write dataset_type=text, or another source with rows"),
  _Condition(
    ["megatron_num_samples", "megatron_split", "reset_attention_mask", "eod_mask_loss"],
    lambda cfg: cfg.data.megatron_order,
    "write megatron_order=true",
  ),
  _Condition(
    ["eval_fraction", "eval_split"],
    lambda cfg: not cfg.data.megatron_order,
    "write megatron_split",
  ),
  _Condition(["text_column"], _has_text_column, "write dataset_type=jsonl, parquet or arrow"),
  _Condition(
    ["data_shuffle_seed"],
    lambda cfg: cfg.data.enable_data_shuffling,
    "write enable_data_shuffling=true",
  ),
  _Condition(
    ["eval_fraction", "eval_split"],
    lambda cfg: not cfg.data.eval_dataset_path,
    "write eval_dataset_path=[]",
  ),
  _Condition(
    ["dataset_path", "dataset_type", "text_column"],
    lambda cfg: not cfg.data.dataset_mixture,
    "write dataset_mixture=[]",
  ),
  _Condition(
    ["per_device_batch_size"],
    lambda cfg: not (cfg.data.global_batch_size or cfg.data.batch_size_schedule),
    "write global_batch_size=0 and batch_size_schedule=[]",
  ),
  _Condition(
    _keys_of(GenerateConfig), lambda cfg: bool(cfg.run.callbacks), "write callbacks=[completions]"
  ),
)
# Those that only training has; other commands read these keys without a condition.
_OF_TRAINING = {"load_checkpoint", *_keys_of(GenerateConfig)}
_TRAINING_COMMANDS = ("maxlite.train", "maxlite.plan", "maxlite.audit")
_CONVERSIONS = tuple(f"maxlite.convert {name}" for name in ("from_hf", "from_peft", "upcycle"))


def check_typed(
  command: str,
  typed: Iterable[Setting],
  cfg: Config,
  saved: Mapping[str, KeyValue] | None = None,
) -> None:
  """Raise UserError for the typed keys that a command does not read, all at once.

  Args:
    command: a name of READ_KEYS.
    typed: the settings of the command line.
    cfg: the resolved config.
    saved: the values of the run that the command opens; a key that only repeats one is accepted.
  """
  values = flatten(cfg)
  errors = []
  for setting in typed:
    key = setting.name
    if key not in READ_KEYS[command]:
      if saved is None:
        errors.append(setting.error(f"is not read by {command}; remove it"))
      elif saved[key] != values[key]:
        errors.append(
          setting.error(
            f"is not read by {command}, and the run was made with {show(saved[key])}; remove it"
          )
        )
    elif command in _CONVERSIONS:  # the model is that of the folder or of the run
      continue
    elif fix := _missing_condition(key, cfg, is_training=command in _TRAINING_COMMANDS):
      errors.append(setting.error(f"has no effect; {fix}, or remove it"))
  raise_all(errors)


def _missing_condition(key: str, cfg: Config, *, is_training: bool) -> str:
  """How to make `key` one that is read; empty if it is."""
  if key in _OF_TRAINING and not is_training:
    return ""
  if cfg.ensemble.search:  # its members are not known yet
    return ""
  members: Sequence[Config] = [member.config for member in members_of(cfg)] or [cfg]
  if all(key in unused_keys(member.model) for member in members):
    return f"decoder_block={members[0].model.decoder_block} has no such part: write another model"
  for condition in _CONDITIONS:
    if key in condition.keys and not any(condition.is_met(each) for each in (cfg, *members)):
      return condition.fix
  return ""
