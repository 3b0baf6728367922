"""The entries of keys that hold mappings: their keys, declared with the fields of sections."""

import dataclasses
from collections.abc import Collection

from maxlite.config.config_field import Section, SectionClass, field, flatten, inherit
from maxlite.config.raw_values import FrozenMapping
from maxlite.config.schema.data_config import SCHEDULE_KEYS, DataConfig
from maxlite.config.schema.model_config import ModelConfig
from maxlite.config.schema.run_config import RunConfig
from maxlite.config.schema.training_config import (
  POLICY_KEYS,
  PREFERENCE_KEYS,
  REFERENCE_KEYS,
  TEACHER_KEYS,
  OptimizerConfig,
  PhasesConfig,
  TrainingConfig,
)
from maxlite.registry import LOSSES, SAMPLERS

MAX_MEMBERS = 4096
TASK_FORM = "{name: NAME, path: [FILES], reward_functions: [equal_answer]}"
SOURCE_FORM = "{name: NAME, path: [FILES], weight: 1}"
_RULE = "{log_uniform: [low, high]} (for learning rates), {uniform: [low, high]} or {choice: [...]}"
SEARCH_FORM = "{sampler: tpe, rounds: 4, num_members: 8, space: {key: {uniform: [low, high]}}}"
LADDER_FORM = "{budgets: {1e12: [32, 64, 96, 128]}, seeds: 2}"
# Keys of training that need another model, or rollouts.
_OF_OTHER_MODELS = (*TEACHER_KEYS, *PREFERENCE_KEYS, *REFERENCE_KEYS, *POLICY_KEYS)
# Keys of data, or their beginnings, that apply to the whole run.
_RUN_DATA = ("tokenizer", "token_cache", "eval", "grain", "max_target_length", *SCHEDULE_KEYS)
DATA_KEYS = tuple(key for key in flatten(DataConfig()) if not key.startswith(_RUN_DATA))


def _keys(section: Section, without: Collection[str]) -> list[str]:
  """The keys of a section except those of `without`."""
  return [key for key in flatten(section) if key not in without]


@dataclasses.dataclass(frozen=True)
class UntilConfig:
  """The end of a phase by a metric: `patience` steps without a decrease, or a threshold."""

  metric: str = field("", "Metric of the training log; always given, with max_steps.")
  max_steps: int = field(0, "Steps after which the phase ends anyway.", low=1)
  patience: int | None = field(None, "Steps without a decrease of the metric.", low=1)
  min_delta: float = field(0.0, "The smallest change that counts as a decrease.")
  below: float | None = field(None, "The phase ends when the metric is below this value.")
  above: float | None = field(None, "The phase ends when the metric is above this value.")


@dataclasses.dataclass(frozen=True)
class PhaseConfig:
  """A phase of alternating training. It has `steps` or `until`, unless it is an initial phase."""

  name: str = field("", "Name of the phase.", required="name: fit")
  train: tuple[str, ...] = field(
    (),
    "What it trains: regexes of whole parameter paths, or one regex.",
    required='train: ["layers/.*"]',
  )
  loss: str = field(
    "",
    "Loss, by default loss_type; `match_head` and `next_token_and_draft` are for draft heads.",
    choices=LOSSES,
  )
  steps: int | None = field(None, "Steps of each turn.", low=1)
  until: UntilConfig | None = field(
    None,
    "Instead of steps: {metric: M, max_steps: N, patience: N}, with an optional min_delta; or "
    "below: X or above: X in place of patience.",
  )
  repeat_batch: int = field(1, "Updates on each batch.", low=1)
  share_optimizer_state: str | None = field(
    None, "Another phase, which trains the same parameters and whose optimizer state is used."
  )
  optimizer: OptimizerConfig = inherit(
    OptimizerConfig(),
    _keys(OptimizerConfig(), ["opt_type", "pbt_hyperparameters"]),
    optimizer="opt_type",
  )
  training: TrainingConfig = inherit(TrainingConfig(), ["gradient_accumulation_steps"])
  # Phases with equal data share one stream of batches.
  data: DataConfig = inherit(DataConfig(), DATA_KEYS)


@dataclasses.dataclass(frozen=True)
class MixtureEntry:
  """A source of a mixture, or, with name, weight and from_step only, a later weight of one."""

  name: str = field("", "Name of letters, digits, `.`, `_` and `-`.", required=SOURCE_FORM)
  weight: float = field(
    0.0, "Share of the tokens, relative to the other sources.", low=0, required=SOURCE_FORM
  )
  from_step: int = field(0, "Steps that are done before the weight applies.", low=0)
  max_epochs: float | None = field(
    None, "How often the source is read before it ends; by default without an end.", low=1e-3
  )
  data: DataConfig = inherit(
    DataConfig(),
    ["text_column"],
    path="dataset_path",
    type="dataset_type",
    eval_path="eval_dataset_path",
    columns="data_columns",
  )


@dataclasses.dataclass(frozen=True)
class EvalTaskEntry:
  """A task at evaluations: prompts that the model completes, and rewards of the completions."""

  name: str = field("", "Name of its metrics.", required=TASK_FORM)
  path: tuple[str, ...] = field((), "Prompts, as of dataset_type=prompts.", required=TASK_FORM)
  reward_functions: tuple[str, ...] = field(
    (), "Rewards, which are added, as in reward_functions.", required=TASK_FORM
  )
  max_new_tokens: int = field(64, "Tokens of a completion at most.", low=1)
  num_samples: int = field(1, "Completions of each prompt.", low=1)
  temperature: float = field(0.0, "Softmax temperature; 0: greedy.", low=0)
  max_prompts: int = field(-1, "Prompts, the first of the files; -1: all.", low=-1)


@dataclasses.dataclass(frozen=True)
class MemberEntry:
  """A member of an ensemble: what distinguishes it from the others."""

  name: str = field("", "Name of its folder; by default m00, m01 and so on.")
  run: RunConfig = inherit(RunConfig(), ["init_weights_seed", "model_name", "steps"])
  model: ModelConfig = inherit(ModelConfig(), _keys(ModelConfig(), ["vocab_size"]))
  data: DataConfig = inherit(DataConfig(), ["data_shuffle_seed", "data_sampling"])
  optimizer: OptimizerConfig = inherit(
    OptimizerConfig(), _keys(OptimizerConfig(), ["pbt_hyperparameters"])
  )
  training: TrainingConfig = inherit(TrainingConfig(), _keys(TrainingConfig(), _OF_OTHER_MODELS))
  phasing: PhasesConfig = inherit(PhasesConfig(), ["phases", "initial_phases"])


@dataclasses.dataclass(frozen=True)
class SweepEntry:
  """Generated members: a grid, or random draws; with `members`, the product of both."""

  grid: FrozenMapping = field(FrozenMapping(), "{key: [values]}: every combination.")
  draw: FrozenMapping = field(FrozenMapping(), f"{{key: rule}}: random values. A rule is {_RULE}.")
  num_members: int = field(1, "Members to draw.", low=1, high=MAX_MEMBERS)
  seed: int = field(0, "Seed of the draws.", low=0)
  seeds: int = field(
    1, "Trains every point with init_weights_seed 0, 1, ... below this.", low=1, high=MAX_MEMBERS
  )


@dataclasses.dataclass(frozen=True)
class SearchEntry:
  """Members in rounds, proposed by Optuna from the held-out losses of earlier rounds."""

  sampler: str = field("", "Sampler of Optuna.", choices=SAMPLERS, required=SEARCH_FORM)
  rounds: int = field(0, "Rounds.", low=1, high=MAX_MEMBERS, required=SEARCH_FORM)
  num_members: int = field(0, "Members of a round.", low=1, high=MAX_MEMBERS, required=SEARCH_FORM)
  space: FrozenMapping = field(
    FrozenMapping(), "{key: rule}, with rules as in `draw` of a sweep.", required=SEARCH_FORM
  )
  seed: int = field(0, "Seed of the sampler.", low=0)


@dataclasses.dataclass(frozen=True)
class LadderEntry:
  """Members of several widths and equal FLOPs, of which the best width per budget is fitted."""

  budgets: FrozenMapping = field(
    FrozenMapping(),
    "{FLOPs: [widths]}: for every budget at least four values of base_emb_dim. MLPs and heads are "
    "as many times larger than the run's, and each member has the steps that cost the budget.",
    required=LADDER_FORM,
  )
  seeds: int = field(
    2, "Trains every width with init_weights_seed 0, 1, ... below this.", low=1, high=MAX_MEMBERS
  )


# By key, the record of its mappings.
ENTRIES: dict[str, SectionClass] = {
  "phases": PhaseConfig,
  "until": UntilConfig,
  "members": MemberEntry,
  "sweep": SweepEntry,
  "search": SearchEntry,
  "ladder": LadderEntry,
  "dataset_mixture": MixtureEntry,
  "eval_tasks": EvalTaskEntry,
}
