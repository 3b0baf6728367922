"""Optimizer, training step, phases, local updates and parametrization."""

import dataclasses

from maxlite.config.config_field import field, model_field
from maxlite.config.raw_values import FrozenMapping
from maxlite.registry import OPTIMIZERS, RUN_LOSSES, SCHEDULES

AUDIT_ACTIONS = ("stop", "warn")
PHASE_STRATEGIES = ("auto", "separate", "switch")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """Optimizer and learning-rate schedule."""

  opt_type: str = model_field(
    "adamw",
    "Optimizer; `optax.NAME` is any of optax that takes a learning rate, as optax has it.",
    choices=OPTIMIZERS,
  )
  opt_kwargs: FrozenMapping = model_field(
    FrozenMapping(),
    "{argument: value} of opt_type=optax.NAME, besides learning_rate, weight_decay and mask.",
  )
  learning_rate: float = field(2e-3, "Peak learning rate.", low=0)
  lr_schedule_type: str = field("cosine", "Schedule after the warm-up.", choices=SCHEDULES)
  learning_rate_schedule_steps: int = field(-1, "Length of the schedule; -1: `steps`.", low=-1)
  warmup_steps_fraction: float = field(0.1, "Warm-up, as a part of the schedule.", low=0, high=1)
  learning_rate_final_fraction: float = field(
    0.1, "Final rate, relative to the peak.", low=0, high=1
  )
  wsd_decay_steps_fraction: float = field(
    0.1, "Decay of the wsd schedule, as a fraction of the schedule.", low=0, high=1
  )
  adam_b1: float = field(0.9, "Decay rate of the first moment; Lion's b1.", low=0, high=1)
  adam_b2: float = field(0.95, "Decay rate of the second moment; Lion's b2.", low=0, high=1)
  adam_eps: float = field(1e-8, "Added to the root of the second moment.", low=0)
  adam_weight_decay: float = field(
    0.1, "Decoupled weight decay of every optimizer, except on norms and biases.", low=0
  )
  muon_beta: float = field(0.95, "Momentum of Muon.", low=0, high=1)
  muon_split: str = field(
    "parts",
    "What Muon takes for a matrix: every kernel (`none`); the `parts` of kernels that hold several "
    "matrices, in latent attention; or in addition the `heads` of queries, keys and values.",
    choices=("none", "parts", "heads"),
  )
  gradient_clipping_threshold: float = field(1.0, "Maximum global gradient norm; 0: none.", low=0)
  pbt_hyperparameters: FrozenMapping = model_field(
    FrozenMapping(),
    "Hyperparameters in the optimizer state, which population-based training changes: {key: "
    "[factors]}, of which one is drawn, or {key: rule} with a rule as in `sweep`. Keys: "
    "learning_rate (the peak of the schedule), adam_weight_decay, adam_eps, and, by a rule only, "
    "adam_b1, adam_b2 and muon_beta.",
  )


@dataclasses.dataclass(frozen=True)
class TrainingConfig:
  """The training step."""

  gradient_accumulation_steps: int = field(
    1,
    "Micro-batches per step. Results do not depend on it, except through router_jitter's noise.",
    low=1,
  )
  loss_type: str = field(
    "next_token",
    "Loss: `next_token`; `distill`, which also follows a teacher's predictions; `dpo`, direct "
    "preference optimization, which trains on dataset_type=preference; `grpo`, which trains on the "
    "model's own completions of dataset_type=prompts by their rewards; or `on_policy_distill`, "
    "which follows a teacher on them (docs/rl.md).",
    choices=RUN_LOSSES,
  )
  teacher_path: str = field(
    "",
    "Teacher of losses distill and on_policy_distill: a run folder, a Hugging Face folder, or the "
    "folder of an ensemble, whose members' probabilities are averaged. Its vocabulary must be the "
    "student's.",
  )
  teacher_members: tuple[str, ...] = field((), "Members of the teacher that are averaged; []: all.")
  distill_alpha: float = field(
    0.5, "Weight of the teacher in loss distill; the next token has the rest.", low=0, high=1
  )
  distill_temperature: float = field(
    1.0, "Temperature of teacher and student in loss distill.", low=0
  )
  gkd_beta: float = field(
    1.0,
    "Divergence in loss on_policy_distill: 0, of the student from the teacher (forward KL); 1, of "
    "the teacher from the student (reverse KL); between, Jensen-Shannon's.",
    low=0,
    high=1,
  )
  distill_top_k: int = field(
    0, "Likeliest tokens of the teacher that loss distill keeps, renormalized; 0: all.", low=0
  )
  reference_path: str = field(
    "",
    "Reference model of loss dpo, and of loss grpo with grpo_beta: a run folder or a Hugging Face "
    "folder. Empty: the model without its adapters, which must then be all that is trained.",
  )
  dpo_beta: float = field(
    0.1, "Scale of the rewards in loss dpo: the strength of the pull to the reference.", low=0
  )
  dpo_label_smoothing: float = field(
    0.0,
    "Assumed share of pairs in which the wrong answer is preferred, in loss dpo.",
    low=0,
    high=0.5,
  )
  rollout_temperature: float = field(
    1.0, "Temperature at which a model writes rollouts, and of its log-probabilities in the loss."
  )
  max_completion_length: int = field(
    -1,
    "Tokens of a completion in rollouts at most; -1: max_target_length less the longest prompt.",
    low=-1,
  )
  grpo_epsilon: float = field(
    0.2, "How far the probability ratio of a token is followed below 1 in loss grpo.", low=0
  )
  grpo_epsilon_high: float = field(
    -1.0, "The same above 1; -1: as grpo_epsilon (DAPO's higher bound is 0.28).", low=-1
  )
  grpo_beta: float = field(
    0.0, "Weight of the divergence from the reference in loss grpo; 0: no reference.", low=0
  )
  use_bias_correction_kl: bool = field(
    True,
    "The divergence is weighted by the probability ratio, so that its gradient is unbiased too; "
    "false: as in the first GRPO paper.",
  )
  importance_sampling_level: str = field(
    "token",
    "Probability ratio in loss grpo: of each `token`, or the geometric mean over the `sequence` "
    "(GSPO).",
    choices=("token", "sequence"),
  )
  loss_aggregation: str = field(
    "token",
    "Mean in loss grpo: over all `token`s (DAPO); over the means of each `sequence` (GRPO); or "
    "`constant`, the sum by max_completion_length, over the completions (Dr. GRPO).",
    choices=("token", "sequence", "constant"),
  )
  logits_chunk_tokens: int = field(2048, "Tokens per device with logits in memory at once.", low=1)
  z_loss_multiplier: float = field(0.0, "Weight of the logits' z-loss.", low=0)
  indexer_loss_scaling_factor: float = field(
    1.0,
    "Weight of the indexer's loss (use_indexer), whose gradient reaches only the indexer. 0: the "
    "indexer has no gradient.",
    low=0,
  )
  ema_decay: float = model_field(
    0.0,
    "Decay of an exponential moving average of the weights (0.999 is usual). The average is "
    "evaluated alongside the weights, and generate uses it. 0: no average.",
    low=0,
    high=1,
  )
  draft_loss_weight: float = field(
    0.2, "Weight of the draft heads' loss in phases with loss: next_token_and_draft.", low=0
  )
  mtp_loss_scaling_factor: float = field(
    0.1, "Weight of the mean loss of the layers of multi-token prediction (mtp_num_layers).", low=0
  )
  deterministic_reductions: bool = field(
    False,
    "The same bits of loss and parameters on any number of devices over `data` and `fsdp`: every "
    "micro-batch is computed by one device, and their gradients are added in one order.",
  )
  audit_period: int = field(
    0,
    "Steps between audits, which compute a step again, also in another arrangement, and compare: "
    "faults of the hardware are found by them. 0: none.",
    low=0,
  )
  audit_action: str = field(
    "stop", "What a difference does: `stop` the run, or `warn`.", choices=AUDIT_ACTIONS
  )
  max_skipped_steps: int = field(
    10, "Consecutive steps with a non-finite loss or gradient before the run stops.", low=1
  )
  qk_clip_threshold: float = field(
    0.0,
    "Attention logits above which, after an update, the queries and keys of a head are scaled down "
    "(QK-clip of MuonClip; 100 is usual). 0: none.",
    low=0,
  )
  skip_step_on_spikes: bool = field(
    False,
    "Skip the update of a step whose loss or gradient norm is far above those of the latest steps: "
    "parameters and optimizer stay as they are, and the schedule does not advance.",
  )
  skip_step_interval: int = field(
    128, "Latest steps that are compared; half of them must be known.", low=4
  )
  skip_step_scaling_factor: float = field(
    6.0, "Standard deviations above the mean from which on a step is a spike.", low=0
  )


_TRAINING_KEYS = [entry.name for entry in dataclasses.fields(TrainingConfig)]
# Keys that only loss `distill` reads, only preference losses, and losses with a reference model.
TEACHER_KEYS = tuple(
  key for key in _TRAINING_KEYS if key.startswith(("teacher_", "distill_", "gkd_"))
)
PREFERENCE_KEYS = tuple(key for key in _TRAINING_KEYS if key.startswith("dpo_"))
REFERENCE_KEYS = ("reference_path",)
# Keys that only losses of rollouts read, beside those of `RolloutConfig`.
POLICY_KEYS = (
  "rollout_temperature",
  "max_completion_length",
  "use_bias_correction_kl",
  "importance_sampling_level",
  "loss_aggregation",
  *(key for key in _TRAINING_KEYS if key.startswith("grpo_")),
)


@dataclasses.dataclass(frozen=True)
class PhasesConfig:
  """Alternating training: phases that each train a part of the model; read if `phases` is set."""

  phases: tuple[FrozenMapping, ...] = model_field(
    (),
    "Phases in order, each {name: N, train: [path regexes], steps: N} with further keys, which are "
    "below. A phase has its own loss, optimizer and data where it sets their keys.",
  )
  initial_phases: FrozenMapping = model_field(
    FrozenMapping(),
    "{phase: steps}: phases that run once, in order, before the alternation. A phase that is named "
    "here may leave out steps: then it runs only here.",
  )
  phase_strategy: str = field(
    "auto",
    "`separate`: one program per phase; `switch`: one program for all; `auto`: by their number.",
    choices=PHASE_STRATEGIES,
  )


@dataclasses.dataclass(frozen=True)
class LocalUpdatesConfig:
  """Replicas that train alone and are averaged periodically (DiLoCo)."""

  diloco_sync_period: int = field(
    0,
    "Steps that each replica along mesh axis `ensemble` trains alone on its share of the batch, "
    "before an outer step moves the model to where the replicas are on average and all continue "
    "from there (DiLoCo). 0: no replicas.",
    low=0,
  )
  diloco_outer_lr: float = field(
    0.7, "Learning rate of outer steps; 1 without momentum: the replicas' mean.", low=0
  )
  diloco_outer_momentum: float = field(0.9, "Nesterov momentum of outer steps.", low=0, high=1)


@dataclasses.dataclass(frozen=True)
class ParametrizationConfig:
  """How initial weights and updates depend on the width of the model."""

  parametrization: str = model_field(
    "standard",
    "`standard`, or `mup`: initial weights and updates scaled for the width, so that the best "
    "learning rate of a model of the base width is that of wider ones (docs/tuning.md).",
    choices=("standard", "mup"),
  )
  mup_base_emb_dim: int = model_field(
    0, "base_emb_dim at which mup is the standard parametrization.", low=0
  )
  mup_base_head_dim: int = model_field(
    0, "head_dim at which mup is the standard parametrization; 0: head_dim.", low=0
  )
