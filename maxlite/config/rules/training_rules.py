"""Rules on the optimizer, the parametrization, phases, replicas and teachers."""

from maxlite.config.raw_values import FrozenMapping, Raw, show
from maxlite.config.rules.violation import (
  ENSEMBLE_KEYS,
  Violation,
  Violations,
  changed_keys,
  ensemble_key,
)
from maxlite.config.schema import DEFAULTS, Config, flatten
from maxlite.config.schema.training_config import (
  PREFERENCE_KEYS,
  REFERENCE_KEYS,
  TEACHER_KEYS,
)
from maxlite.registry import (
  DRAFT_LOSSES,
  OPTIMIZERS,
  PREFERENCE_LOSSES,
  ROLLOUT_LOSSES,
  SOURCES,
  TAUGHT_LOSSES,
  has_reference,
)


def optimizer(cfg: Config) -> Violations:
  """The rules on the optimizer and its schedule."""
  optimizer = cfg.optimizer
  if optimizer.learning_rate_schedule_steps == 0:
    yield Violation(
      ["learning_rate_schedule_steps"],
      "has no length; write 1 or more, or learning_rate_schedule_steps=-1 for all steps",
    )
  if optimizer.lr_schedule_type == "wsd":
    longest = 1 - optimizer.warmup_steps_fraction
    if optimizer.warmup_steps_fraction + optimizer.wsd_decay_steps_fraction > 1:
      yield Violation(
        ["warmup_steps_fraction", "wsd_decay_steps_fraction"],
        f"warm-up and decay overlap; write wsd_decay_steps_fraction={round(longest, 6)} or less",
      )
  values = flatten(optimizer)
  for key in ("adam_b1", "adam_b2", "muon_beta"):
    if values[key] == 1:
      yield Violation([key], f"would never change; write {key}={DEFAULTS[key]}")
  if cfg.training.ema_decay == 1:
    yield Violation(["ema_decay"], "the average would never change; write ema_decay=0.999, or 0")
  reads_eps = "adam_eps" in OPTIMIZERS.entry(optimizer.opt_type).hyperparameters
  if reads_eps and optimizer.adam_eps == 0:
    yield Violation(
      ["adam_eps"],
      f"divides by zero where a gradient is zero; write adam_eps={DEFAULTS['adam_eps']}",
    )


def parametrization(cfg: Config) -> Violations:
  """The rules of muP."""
  model = cfg.model
  scaling = model.scaling
  key = "parametrization"
  if scaling.parametrization != "mup":
    for name in changed_keys(cfg, ["mup_base_emb_dim", "mup_base_head_dim"]):
      yield Violation([name, key], f"is only read by mup; write parametrization=mup, or {name}=0")
    return
  if not scaling.mup_base_emb_dim:
    yield Violation(
      [key, "mup_base_emb_dim"],
      "needs the width at which rates were tuned; write mup_base_emb_dim=64, or "
      "parametrization=standard",
    )
  if model.lora.lora_rank:
    yield Violation(
      [key, "lora_rank"], "mup has no rule for adapters; write parametrization=standard"
    )
  optimizer = OPTIMIZERS.entry(cfg.optimizer.opt_type)
  if optimizer.mup_updates is None:
    yield Violation(
      ["opt_type", key], f"{optimizer.why_no_mup}; write opt_type=adamw, lion or muon"
    )
  if optimizer.mup_updates == "muon" and cfg.optimizer.muon_split == "heads":
    yield Violation(
      ["muon_split", key], "mup has no rule for matrices of heads; write muon_split=parts"
    )
  family = model.family
  has_norms = family.zero_centred_norms or family.norm_bias
  if family.scaled_embedding or has_norms or family.positions == "learned":
    yield Violation(
      [key, "decoder_block"],
      "mup has no rule for this family's embeddings and norms; write parametrization=standard",
    )
  has_fixed_scale = model.query_pre_attn_scalar or model.family.reads("mla")
  if scaling.mup_base_head_dim and has_fixed_scale:
    yield Violation(
      ["mup_base_head_dim", "decoder_block"],
      "attention scores have another scale; write mup_base_head_dim=0",
    )


def phases(cfg: Config) -> Violations:
  """The rules on phases, and on draft heads, which only phases train."""
  phasing = cfg.phasing
  if phasing.initial_phases and not phasing.phases:
    yield Violation(
      ["initial_phases", "phases"], "there are no phases; write phases, or no initial_phases"
    )
  own_ensemble_key = ensemble_key(cfg.ensemble)
  if own_ensemble_key and phasing.phase_strategy == "separate":
    yield Violation(
      ["phase_strategy", own_ensemble_key],
      "a member's phases are one program; write phase_strategy=auto or switch",
    )
  num_heads = cfg.model.num_draft_heads
  are_trained = any(phase.get("loss") in DRAFT_LOSSES for phase in phasing.phases)
  if num_heads and not are_trained:
    yield Violation(
      ["num_draft_heads"],
      "no phase trains them; write phases with loss: match_head, or num_draft_heads=0",
    )
  if num_heads >= cfg.data.max_target_length:
    limit = min(3, cfg.data.max_target_length - 1)
    yield Violation(
      ["num_draft_heads", "max_target_length"],
      f"rows are shorter; write num_draft_heads={limit}",
    )


def multi_token_prediction(cfg: Config) -> Violations:
  """The rules on the layers of multi-token prediction."""
  num_layers = cfg.model.mtp_num_layers
  if not num_layers:
    key = "mtp_loss_scaling_factor"
    for name in changed_keys(cfg, [key]):
      yield Violation(
        [name, "mtp_num_layers"],
        f"there are no such layers; write mtp_num_layers=1, or {name}={DEFAULTS[name]}",
      )
    return
  if cfg.model.num_draft_heads:
    yield Violation(
      ["mtp_num_layers", "num_draft_heads"],
      "both would propose tokens; write num_draft_heads=0, or mtp_num_layers=0",
    )
  if num_layers >= cfg.data.max_target_length:
    limit = min(1, cfg.data.max_target_length - 1)
    yield Violation(
      ["mtp_num_layers", "max_target_length"],
      f"rows are shorter; write mtp_num_layers={limit}",
    )
  if any(loss in PREFERENCE_LOSSES for loss in losses(cfg)):
    yield Violation(
      ["mtp_num_layers", "loss_type"],
      "these layers would also learn the rejected answers; write mtp_num_layers=0, also in "
      "maxlite.convert from_hf",
    )


def local_updates(cfg: Config) -> Violations:
  """The rules of DiLoCo."""
  local = cfg.local_updates
  period = local.diloco_sync_period
  if not period:
    for key in changed_keys(cfg, ["diloco_outer_lr", "diloco_outer_momentum"]):
      yield Violation(
        [key],
        f"there are no outer steps; write diloco_sync_period=100, or {key}={DEFAULTS[key]}",
      )
    return
  if cfg.run.steps % period:
    multiple = max(round(cfg.run.steps / period), 1) * period
    yield Violation(
      ["steps", "diloco_sync_period"],
      f"the last steps would not reach the model; write steps={multiple}",
    )
  if local.diloco_outer_momentum == 1:
    yield Violation(
      ["diloco_outer_momentum"],
      "old outer steps would never fade; write diloco_outer_momentum=0.9",
    )
  # Averages and teachers are of one model, and XLA cannot partition `capacity` in a shard_map.
  unsupported = [
    *ENSEMBLE_KEYS,
    "phases",
    "ema_decay",
    "teacher_path",
    "reference_path",
    "capacity_factor",
    "optimizer_memory_host_offload",
  ]
  for key in changed_keys(cfg, unsupported):
    yield Violation(
      [key, "diloco_sync_period"],
      f"is not supported with replicas; write {key}={show(DEFAULTS[key])} or diloco_sync_period=0",
    )


# Keys of one of the losses with a teacher.
_ONLY_IN = {
  "distill": ["distill_alpha", "distill_temperature", "distill_top_k"],
  "on_policy_distill": ["gkd_beta"],
}


def keys_of_teachers(cfg: Config) -> Violations:
  """Keys of one of the losses with a teacher, in a run with another."""
  used = {str(loss) for loss in losses(cfg)}
  for loss, keys in _ONLY_IN.items():
    if used.isdisjoint(TAUGHT_LOSSES) or loss in used:
      continue
    for name in changed_keys(cfg, keys):
      yield Violation(
        [name, "loss_type"], f"is only read by loss {loss}; write {name}={show(DEFAULTS[name])}"
      )


def teacher(cfg: Config) -> Violations:
  """The rules of loss `distill`."""
  training = cfg.training
  raw_phases = cfg.phasing.phases
  if not any(loss in TAUGHT_LOSSES for loss in losses(cfg)):
    for name in changed_keys(cfg, TEACHER_KEYS):
      yield Violation(
        [name, "loss_type"],
        f"is only read by loss distill; write loss_type=distill, or {name}={show(DEFAULTS[name])}",
      )
    return
  if not training.teacher_path:
    key = "loss_type"
    if raw_phases:
      key = "phases"
    yield Violation(
      [key, "teacher_path"],
      "needs a teacher; write teacher_path=FOLDER of a run, an ensemble or of Hugging Face",
    )
  own_ensemble_key = ensemble_key(cfg.ensemble)
  if own_ensemble_key:
    yield Violation(
      ["loss_type", own_ensemble_key],
      "members have no teacher; train students as solo runs, or write loss_type=next_token",
    )
  if training.distill_temperature == 0:
    yield Violation(
      ["distill_temperature"], "logits are divided by it; write distill_temperature=1"
    )
  if training.distill_top_k > cfg.model.vocab_size:
    yield Violation(
      ["distill_top_k", "vocab_size"],
      f"there are fewer tokens; write distill_top_k={cfg.model.vocab_size} or less, or 0 for all",
    )


def deterministic_reductions(cfg: Config) -> Violations:
  """The rules of steps whose bits do not depend on the number of devices."""
  key = "deterministic_reductions"
  if not cfg.training.deterministic_reductions:
    return
  for name, degree in flatten(cfg.mesh).items():
    may_shard = name.endswith(("_data_parallelism", "_fsdp_parallelism"))
    if name.endswith("_parallelism") and degree != 1 and not may_shard:
      yield Violation(
        [name, key], f"sums over this axis have an order that depends on it; write {name}=1"
      )
  unsupported = [
    *ENSEMBLE_KEYS,
    "diloco_sync_period",
    "logical_axis_rules",
    "optimizer_memory_host_offload",
  ]
  for name in changed_keys(cfg, unsupported):
    yield Violation(
      [name, key],
      f"the same bits are not proven with it; write {name}={show(DEFAULTS[name])} or {key}=false",
    )
  if any(loss in ROLLOUT_LOSSES for loss in losses(cfg)):
    yield Violation(
      [key, "loss_type"],
      f"the bits of rollouts depend on the number of devices; write {key}=false",
    )
  if "xla_disable_hlo_passes" in cfg.run.compiler_options:
    yield Violation(
      ["compiler_options", key], "this key sets xla_disable_hlo_passes; remove it from the options"
    )
  for phase in cfg.phasing.phases or [FrozenMapping()]:
    if phase.get("gradient_accumulation_steps", cfg.training.gradient_accumulation_steps) == 1:
      yield Violation(
        [key, "gradient_accumulation_steps"],
        "a device computes whole micro-batches; write gradient_accumulation_steps=8, or another "
        "number that the number of devices divides",
      )
    has_fixed_size = cfg.data.global_batch_size or cfg.data.batch_size_schedule
    if not has_fixed_size or "per_device_batch_size" in phase:
      yield Violation(
        [key, "per_device_batch_size"],
        "the batch would depend on the number of devices; write global_batch_size=N",
      )


def qk_clip(cfg: Config) -> Violations:
  """The rules of QK-clip, which scales weights so that logits are scaled alike."""
  key = "qk_clip_threshold"
  if not cfg.training.qk_clip_threshold:
    return
  if cfg.model.family.attention.qk_norm:
    yield Violation(
      [key, "decoder_block"],
      f"its queries and keys are normalised, whatever the size of their weights; write {key}=0",
    )
  unsupported = {
    "attn_logits_soft_cap": "the logits are bounded already",
    "clip_qkv": "queries and keys are bounded after their weights",
    "lora_rank": "logits follow weights and adapters together",
    "phases": "a phase may not train the weights that are scaled",
    "deterministic_reductions": "the same bits are not proven with it",
  }
  for name, reason in unsupported.items():
    for changed in changed_keys(cfg, [name]):
      yield Violation([changed, key], f"{reason}; write {key}=0, or {name}={show(DEFAULTS[name])}")


def step_audit(cfg: Config) -> Violations:
  """The rules on audits of steps."""
  if not cfg.training.audit_period:
    return
  unsupported = [
    *ENSEMBLE_KEYS,
    "diloco_sync_period",
    "deterministic_reductions",
    "optimizer_memory_host_offload",
  ]
  for key in changed_keys(cfg, unsupported):
    yield Violation(
      [key, "audit_period"],
      f"such steps are not audited; write audit_period=0, or {key}={show(DEFAULTS[key])}",
    )
  if cfg.model.family.is_moe and cfg.model.moe.replays_overflow:
    yield Violation(
      ["ragged_buffer_factor", "audit_period"],
      "steps that are replayed are not audited; write audit_period=0, or ragged_overflow=drop",
    )
  if any(loss in ROLLOUT_LOSSES for loss in losses(cfg)):
    yield Violation(
      ["audit_period", "loss_type"], "steps on rollouts are not audited; write audit_period=0"
    )


def losses(cfg: Config) -> list[Raw]:
  """The raw losses of all phases; in a run without phases, that of the run."""
  loss_type = cfg.training.loss_type
  losses = [phase.get("loss", loss_type) for phase in cfg.phasing.phases]
  return losses or [loss_type]


def preference(cfg: Config) -> Violations:
  """The rules of loss `dpo`."""
  training = cfg.training
  if not any(loss in PREFERENCE_LOSSES for loss in losses(cfg)):
    for name in changed_keys(cfg, PREFERENCE_KEYS):
      yield Violation(
        [name, "loss_type"],
        f"is only read by loss dpo; write loss_type=dpo, or {name}={show(DEFAULTS[name])}",
      )
  yield from _pairs(cfg)
  if not any(loss in PREFERENCE_LOSSES for loss in losses(cfg)):
    return
  own_ensemble_key = ensemble_key(cfg.ensemble)
  if own_ensemble_key:
    yield Violation(
      ["loss_type", own_ensemble_key],
      "members have no reference model; train solo runs, or write loss_type=next_token",
    )
  if cfg.model.mtp_num_layers and training.mtp_loss_scaling_factor:
    yield Violation(
      ["mtp_loss_scaling_factor", "loss_type"],
      "would train on rejected answers; write mtp_loss_scaling_factor=0",
    )
  if training.dpo_beta == 0:
    yield Violation(["dpo_beta"], "the loss would be constant; write dpo_beta=0.1")
  if cfg.data.sequence_length_schedule:
    yield Violation(
      ["sequence_length_schedule", "loss_type"],
      "would cut pairs; write sequence_length_schedule=[]",
    )


def reference(cfg: Config) -> Violations:
  """The rules on the reference model of a loss."""
  training = cfg.training
  if not any(has_reference(str(loss), training.grpo_beta) for loss in losses(cfg)):
    for name in changed_keys(cfg, REFERENCE_KEYS):
      yield Violation(
        [name, "loss_type"],
        f"is only read by loss dpo, and by loss grpo with grpo_beta; write one, or {name}=''",
      )
    return
  has_adapters_only = cfg.model.lora.lora_rank > 0 and bool(cfg.phasing.phases)
  if not training.reference_path and not has_adapters_only:
    yield Violation(
      ["loss_type", "reference_path"],
      "needs a reference model; write reference_path=FOLDER of what training starts from, or "
      "lora_rank=8 and phases that train only adapters (configs/chat/dpo.yml)",
    )


def _pairs(cfg: Config) -> Violations:
  """The rules on data of pairs in a run without phases; a mixture's sources are checked one by one.

  config/phases.py checks phases, which may have their own data.
  """
  if cfg.phasing.phases or cfg.data.dataset_mixture:
    return
  is_pairs = SOURCES.entry(cfg.data.dataset_type).has_pairs
  needs_pairs = cfg.training.loss_type in PREFERENCE_LOSSES
  if needs_pairs and not is_pairs:
    yield Violation(
      ["loss_type", "dataset_type"], "needs pairs of answers", {"dataset_type": "preference"}
    )
  if is_pairs and not needs_pairs:
    yield Violation(
      ["dataset_type", "loss_type"], "pairs are for preference losses; write loss_type=dpo"
    )


TRAINING_RULES = (
  optimizer,
  parametrization,
  phases,
  multi_token_prediction,
  local_updates,
  deterministic_reductions,
  qk_clip,
  step_audit,
  keys_of_teachers,
  teacher,
  preference,
  reference,
)
