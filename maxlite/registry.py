"""Every implementation that a config key or an argument selects by name.

To add one, write it and add a line here: the key's `choices` and the contract tests follow. An
entry names the implementation as "module:attribute", which is imported on first use, so the names
and the other fields of entries can be read without JAX. Code that needs to know something about an
implementation reads it from the entry, and never compares names.
"""

import dataclasses
import pkgutil
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from maxlite.errors import UserError

# What a table registers: a function, class or value of the kind that the table describes.
Implementation: TypeAlias = Any


@dataclasses.dataclass(frozen=True)
class Entry:
  """An implementation: the object itself, or "module:attribute"."""

  implementation: Implementation


def imported(implementation: Implementation) -> Implementation:
  """The object itself, or what "module:attribute" names."""
  if isinstance(implementation, str):
    return pkgutil.resolve_name(implementation)
  return implementation


EntryT = TypeVar("EntryT", bound=Entry)


class Registry(MutableMapping[str, Implementation], Generic[EntryT]):
  """Implementations by name, each with an entry of the type of this table.

  `registry[name]` is the implementation, imported if needed, and `registry.entry(name)` its entry.
  `registry[name] = implementation` registers it with the defaults of the other fields, which assume
  nothing about it; `registry[name] = SourceEntry(implementation, ...)` sets them. Assigning another
  implementation to a name keeps the other fields of its entry.
  """

  def __init__(self, entry_type: type[EntryT], **entries: EntryT | str) -> None:
    self._entry_type = entry_type
    self._entries: dict[str, EntryT] = {}
    for name, entry in entries.items():
      self[name] = entry

  def __getitem__(self, name: str) -> Implementation:
    return imported(self._entries[name].implementation)

  def __setitem__(self, name: str, entry: Implementation) -> None:
    if isinstance(entry, self._entry_type):
      self._entries[name] = entry
    elif name in self._entries:
      self._entries[name] = dataclasses.replace(self._entries[name], implementation=entry)
    else:
      self._entries[name] = self._entry_type(entry)

  def __delitem__(self, name: str) -> None:
    del self._entries[name]

  def __contains__(self, name: object) -> bool:  # the inherited one imports the implementation
    return name in self._entries

  def __iter__(self) -> Iterator[str]:
    return iter(self._entries)

  def __len__(self) -> int:
    return len(self._entries)

  def entry(self, name: str) -> EntryT:
    """The entry of `name`; KeyError if there is none. Nothing is imported."""
    return self._entries[name]

  def entries(self) -> Mapping[str, EntryT]:
    """All entries by name. Nothing is imported."""
    return self._entries


def with_auto(registry: Registry[EntryT]) -> Mapping[str, Implementation]:
  """A live view of `registry` that begins with the name "auto"."""
  return ChainMap(registry, {"auto": None})


def resolve_backend(
  key: str,
  backends: Registry[Entry],
  auto: Sequence[str],
  name: str,
  supports: Callable[[Implementation], bool],
) -> str:
  """The name of the entry of `backends` that `name` selects.

  Args:
    key: the config key that selects the backend, for the error message.
    auto: the names of which "auto" chooses the first that supports the call; the last one does.
    supports: whether an entry supports the call.

  Raises:
    UserError: there is no such backend.
  """
  if name == "auto":
    return next(candidate for candidate in auto if supports(backends[candidate]))
  if name not in backends:
    known = ", ".join(backends)
    raise UserError(f"{key}={name!r} is not a backend; choose auto or one of: {known}")
  return name


# The suffixes of JSON lines, plain and compressed.
_PLAIN_JSON_LINES = (".jsonl", ".ndjson")
_JSON_LINES = (*_PLAIN_JSON_LINES, ".jsonl.gz", ".jsonl.zst", ".ndjson.gz", ".ndjson.zst")


@dataclasses.dataclass(frozen=True)
class SourceEntry(Entry):
  """A data source: (DataConfig, vocab_size, token cache directory) -> DataSource."""

  # It draws token ids itself, so it needs neither files nor a tokenizer.
  is_synthetic: bool = False
  # It reads plain text, so it can read the standard library, `dataset_path=stdlib`.
  is_plain_text: bool = False
  # It reads the text of the column (field, feature) `text_column`.
  has_text_column: bool = False
  # It reads conversations: they need a chat template, and may have a row each.
  has_conversations: bool = False
  # It reads pairs of answers, of which one is preferred; PREFERENCE_LOSSES train on them.
  has_pairs: bool = False
  # It reads prompts, which the model completes; ROLLOUT_LOSSES train on the completions.
  has_prompts: bool = False
  # It reads files of token ids, which no tokenizer of the run has made.
  has_token_ids: bool = False
  # Suffixes of the files whose format is that of this source.
  suffixes: tuple[str, ...] = ()
  # Further suffixes that it reads. If it has no suffixes at all, it may read any file.
  also_reads: tuple[str, ...] = ()


# dataset_type
SOURCES = Registry(
  SourceEntry,
  synthetic=SourceEntry("maxlite.data.sources:synthetic_source", is_synthetic=True),
  text=SourceEntry(
    "maxlite.data.sources:text_source",
    is_plain_text=True,
    also_reads=_PLAIN_JSON_LINES,
  ),
  jsonl=SourceEntry(
    "maxlite.data.sources:jsonl_source",
    has_text_column=True,
    suffixes=_JSON_LINES,
  ),
  parquet=SourceEntry(
    "maxlite.data.sources:parquet_source",
    has_text_column=True,
    suffixes=(".parquet", ".parquet.gz", ".parquet.zst"),
  ),
  arrow=SourceEntry(
    "maxlite.data.sources:arrow_source",
    has_text_column=True,
    suffixes=(".arrow", ".arrow.gz", ".arrow.zst"),
  ),
  array_record=SourceEntry(
    "maxlite.data.sources:array_record_source",
    has_text_column=True,
    suffixes=(".array_record", ".array_record.gz", ".array_record.zst"),
  ),
  chat=SourceEntry(
    "maxlite.data.sources:chat_source",
    has_conversations=True,
    also_reads=(*_JSON_LINES, ".parquet", ".arrow"),
  ),
  preference=SourceEntry(
    "maxlite.data.sources:preference_source",
    has_conversations=True,
    has_pairs=True,
    also_reads=(*_JSON_LINES, ".parquet", ".arrow"),
  ),
  prompts=SourceEntry(
    "maxlite.data.sources:prompts_source",
    has_prompts=True,
    also_reads=(*_JSON_LINES, ".parquet", ".arrow"),
  ),
  tokens=SourceEntry(
    "maxlite.data.sources:tokens_source",
    has_token_ids=True,
    suffixes=(".bin", ".npy"),
  ),
)


def other_dataset_type(file: str, dataset_type: str) -> str:
  """The dataset_type whose format a file has, if `dataset_type` does not read it; else empty.

  Args:
    file: its name or path; only its suffixes matter.
    dataset_type: a name of SOURCES. A source without suffixes may read any file.
  """
  path = PurePosixPath(file)
  suffix = path.suffix
  if suffix in (".gz", ".zst"):
    suffix = PurePosixPath(path.stem).suffix + suffix
  source = SOURCES.entry(dataset_type)
  readable = (*source.suffixes, *source.also_reads)
  if not readable or suffix in readable:
    return ""
  for other, entry in SOURCES.entries().items():
    if suffix in entry.suffixes:
      return other
  return ""


# packing_strategy -> (Tokens, row length, seed of the order or None) -> PackedRows
PACKING_STRATEGIES = Registry(
  Entry,
  concatenate="maxlite.data.packing:PackedDocuments",
  best_fit="maxlite.data.packing:BestFitDocuments",
)
# data_sampling -> (number of rows, seed) -> order of one epoch
ROW_ORDERS = Registry(
  Entry,
  shuffle="maxlite.data.row_order:shuffled_order",
  bootstrap="maxlite.data.row_order:BootstrapOrder",
)


@dataclasses.dataclass(frozen=True)
class TokenizerEntry(Entry):
  """A tokenizer: (tokenizer_path) -> Tokenizer."""

  # What its ids stand for, in error messages.
  units: str = "its tokens"
  # `tokenizer_path` must name its file.
  needs_file: bool = True
  # The number of its ids, which vocab_size must reach; 0: its file decides.
  min_vocab_size: int = 0
  # It can encode the control tokens of chats.
  has_control_tokens: bool = True
  # Its file may hold a chat template.
  has_chat_template: bool = True


# tokenizer_type
TOKENIZERS = Registry(
  TokenizerEntry,
  byte=TokenizerEntry(
    "maxlite.data.tokenizer:ByteTokenizer",
    units="bytes",
    needs_file=False,
    min_vocab_size=258,
    has_chat_template=False,
  ),
  huggingface="maxlite.data.tokenizer:HuggingFaceTokenizer",
  sentencepiece=TokenizerEntry(
    "maxlite.data.tokenizer:SentencePieceTokenizer",
    has_control_tokens=False,
  ),
)


# The kind of the updates of an optimizer, by which muP scales them: the updates of `adam` have
# a size per element, those of `muon` a spectral norm (optim/parametrization.py).
MupUpdates = Literal["adam", "muon"]


@dataclasses.dataclass(frozen=True)
class OptimizerEntry(Entry):
  """An optimizer: (OptimizerConfig, logical names of the parameters) -> GradientTransformation."""

  # The kind of its updates; None: muP refuses it.
  mup_updates: MupUpdates | None = None
  # Why muP refuses it, as a part of an error message.
  why_no_mup: str = "mup has no rule for its updates"
  # The keys of OptimizerConfig that it reads besides the learning rate and the weight decay.
  hyperparameters: tuple[str, ...] = ()
  # Its updates have the learning rate and the weight decay, which are added to others.
  has_rate: bool = False
  # It also takes the ModelConfig, as `model`.
  reads_model: bool = False


class OptimizerRegistry(Registry[OptimizerEntry]):
  """Also has every optimizer of optax, as `optax.NAME`, which are not listed."""

  def __contains__(self, name: object) -> bool:
    return super().__contains__(name) or _of_optax(name)

  def __getitem__(self, name: str) -> Implementation:
    if _of_optax(name):
      return imported("maxlite.optim.build:of_optax")
    return super().__getitem__(name)

  def entry(self, name: str) -> OptimizerEntry:
    if _of_optax(name):
      return OptimizerEntry("", hyperparameters=("opt_kwargs",), has_rate=True)
    return super().entry(name)


def _of_optax(name: object) -> bool:
  return isinstance(name, str) and name.startswith("optax.")


# opt_type
OPTIMIZERS = OptimizerRegistry(
  OptimizerEntry,
  adamw=OptimizerEntry(
    "maxlite.optim.build:adamw",
    mup_updates="adam",
    hyperparameters=("adam_b1", "adam_b2", "adam_eps"),
  ),
  lion=OptimizerEntry(
    "maxlite.optim.build:lion",
    mup_updates="adam",
    hyperparameters=("adam_b1", "adam_b2"),
  ),
  adafactor=OptimizerEntry(
    "maxlite.optim.build:adafactor",
    why_no_mup="its updates follow the size of the weights",
  ),
  muon=OptimizerEntry(
    "maxlite.optim.muon:muon",
    mup_updates="muon",
    hyperparameters=("adam_b1", "adam_b2", "adam_eps", "muon_beta", "muon_split"),
    reads_model=True,
  ),
)


@dataclasses.dataclass(frozen=True)
class ScheduleEntry(Entry):
  """A learning-rate schedule: (OptimizerConfig, steps after the warm-up) -> optax.Schedule."""

  # The lengths in the config may be arrays, so that ensemble members may differ in them.
  takes_arrays: bool = False


# lr_schedule_type
SCHEDULES = Registry(
  ScheduleEntry,
  cosine=ScheduleEntry("maxlite.optim.schedules:cosine", takes_arrays=True),
  wsd=ScheduleEntry("maxlite.optim.schedules:wsd", takes_arrays=True),
  constant=ScheduleEntry("maxlite.optim.schedules:constant", takes_arrays=True),
)
# router: see layers/moe/expert_choice.py. GROUP_ROUTERS use n_routing_groups.
PLAIN_ROUTERS = Registry(
  Entry,
  softmax_topk="maxlite.layers.moe.expert_choice:softmax_topk",
  topk_softmax="maxlite.layers.moe.expert_choice:topk_softmax",
  topk_sigmoid="maxlite.layers.moe.expert_choice:topk_sigmoid",
)
GROUP_ROUTERS = Registry(
  Entry,
  group_limited_greedy="maxlite.layers.moe.expert_choice:topk_softmax",
  sigmoid_group_topk="maxlite.layers.moe.expert_choice:sigmoid_group_topk",
)
ROUTERS: Mapping[str, Implementation] = ChainMap(GROUP_ROUTERS, PLAIN_ROUTERS)
# How tokens reach their experts: see layers/moe/dispatch. Each entry is a `Dispatch`, which states
# by which keys it is selected; of several that are, the last one is used.
DISPATCHES = Registry(
  Entry,
  ragged="maxlite.layers.moe.dispatch.ragged:DISPATCH",
  all_gather="maxlite.layers.moe.dispatch.all_gather:DISPATCH",
  dense="maxlite.layers.moe.dispatch.dense:DISPATCH",
  capacity="maxlite.layers.moe.dispatch.capacity:DISPATCH",
)


# attention -> AttentionBackend.
ATTENTION_BACKENDS = Registry(
  Entry,
  reference="maxlite.kernels.attention.backend:REFERENCE",
  chunked="maxlite.kernels.attention.backend:CHUNKED",
  dot_product="maxlite.kernels.attention.backend:DOT_PRODUCT",
  splash="maxlite.kernels.attention.backend:SPLASH",
  cudnn="maxlite.kernels.attention.backend:CUDNN",
  tokamax="maxlite.kernels.attention.backend:TOKAMAX",
)
# grouped_matmul -> GroupedMatmulBackend.
GROUPED_MATMUL_BACKENDS = Registry(
  Entry,
  reference="maxlite.kernels.grouped_matmul.backend:REFERENCE",
  tiled="maxlite.kernels.grouped_matmul.backend:TILED",
  megablox="maxlite.kernels.grouped_matmul.backend:MEGABLOX",
  ragged_dot="maxlite.kernels.grouped_matmul.backend:RAGGED_DOT",
  mosaic_gpu="maxlite.kernels.grouped_matmul.backend:MOSAIC_GPU",
)


@dataclasses.dataclass(frozen=True)
class StrategyEntry(Entry):
  """A strategy of ensembles: (EngineRequest) -> EnsembleEngine; see ensemble/engines."""

  # `ensemble_strategy=auto` may choose it.
  is_automatic: bool = True
  # It starts worker processes on this machine, which train the members one by one.
  starts_processes: bool = False
  # What the processes of a run on several hosts do: train all members `together`, or each its own
  # members, `separate`; `none`: the strategy does not support such runs.
  hosts: Literal["none", "together", "separate"] = "none"
  # It can copy members on their devices, as population-based training does.
  exchanges_members: bool = False


# ensemble_strategy, simplest first
ENSEMBLE_STRATEGIES = Registry(
  StrategyEntry,
  stacked=StrategyEntry(
    "maxlite.ensemble.engines.stack_strategies:build_stacked",
    hosts="together",
    exchanges_members=True,
  ),
  fused=StrategyEntry("maxlite.ensemble.engines.stack_strategies:build_fused", hosts="together"),
  switched="maxlite.ensemble.engines.switched:SwitchEngine",
  submesh=StrategyEntry("maxlite.ensemble.engines.submesh:SubmeshEngine", hosts="separate"),
  processes=StrategyEntry(
    "maxlite.ensemble.engines.processes:ProcessEngine",
    starts_processes=True,
  ),
  padded=StrategyEntry(
    "maxlite.ensemble.engines.padded:PaddedEngine",
    is_automatic=False,
  ),
)


@dataclasses.dataclass(frozen=True)
class SamplerEntry(Entry):
  """A sampler of `search`: (seed) -> optuna.samplers.BaseSampler."""

  # Packages that must be installed.
  packages: tuple[str, ...] = ("optuna",)


# sampler of `search`
SAMPLERS = Registry(
  SamplerEntry,
  tpe="optuna.samplers:TPESampler",
  cma=SamplerEntry("optuna.samplers:CmaEsSampler", packages=("optuna", "cmaes")),
  random="optuna.samplers:RandomSampler",
)
# ensemble_executor -> () -> WorkerExecutor; see ensemble/workers/worker_pool.py.
ENSEMBLE_EXECUTORS = Registry(
  Entry,
  local="maxlite.ensemble.workers.worker_process:LocalExecutor",
  ray="maxlite.ensemble.workers.ray_executor:RayExecutor",
)
# callbacks -> () -> Callback; see training/callbacks.py.
CALLBACKS = Registry(Entry, completions="maxlite.inference.generation:CompletionsCallback")
# Losses: see training/loss.py. DRAFT_LOSSES need draft heads, and a phase that trains them;
# TAUGHT_LOSSES need a teacher; PREFERENCE_LOSSES need pairs of answers and a reference model;
# ROLLOUT_LOSSES train on what the model writes (maxlite/rollouts).
TOKEN_LOSSES = Registry(Entry, next_token="maxlite.training.loss:NEXT_TOKEN")
DRAFT_LOSSES = Registry(
  Entry,
  match_head="maxlite.training.draft_loss:MATCH_HEAD",
  next_token_and_draft="maxlite.training.draft_loss:NEXT_TOKEN_AND_DRAFT",
)
TAUGHT_LOSSES = Registry(
  Entry,
  distill="maxlite.training.features.teacher:DISTILL",
  on_policy_distill="maxlite.training.on_policy_distill:ON_POLICY_DISTILL",
)
PREFERENCE_LOSSES = Registry(Entry, dpo="maxlite.training.preference_loss:DPO")


@dataclasses.dataclass(frozen=True)
class RolloutLossEntry(Entry):
  """A loss of rollouts."""

  # It compares the rewards of completions.
  has_rewards: bool = True


ROLLOUT_LOSSES = Registry(
  RolloutLossEntry,
  grpo="maxlite.training.policy_loss:GRPO",
  on_policy_distill=RolloutLossEntry(
    "maxlite.training.on_policy_distill:ON_POLICY_DISTILL", has_rewards=False
  ),
)
RUN_LOSSES: Mapping[str, Implementation] = ChainMap(
  ROLLOUT_LOSSES, PREFERENCE_LOSSES, TAUGHT_LOSSES, TOKEN_LOSSES
)
LOSSES: Mapping[str, Implementation] = ChainMap(
  DRAFT_LOSSES, ROLLOUT_LOSSES, PREFERENCE_LOSSES, TAUGHT_LOSSES, TOKEN_LOSSES
)
# reward_functions -> function of a batch of completions; see rollouts/rewards.py.
REWARDS = Registry(
  Entry,
  equal_answer="maxlite.rollouts.rewards:equal_answer",
  regex="maxlite.rollouts.rewards:regex",
  json_valid="maxlite.rollouts.rewards:json_valid",
  length="maxlite.rollouts.rewards:length",
)
# advantage_estimator -> (reward_NG) -> advantage_NG; see rollouts/advantages.py.
ADVANTAGES = Registry(
  Entry,
  group="maxlite.rollouts.advantages:group_normalized",
  group_mean="maxlite.rollouts.advantages:group_mean",
  leave_one_out="maxlite.rollouts.advantages:leave_one_out",
)


@dataclasses.dataclass(frozen=True)
class FeatureEntry(Entry):
  """A feature around the training step: (FeatureRequest) -> Feature; see training/feature.py."""

  # (StepSpec) -> whether the step has the feature, whose file is opened only then.
  is_used: Callable[[Any], bool] = lambda spec: True


def _has_loss_of(losses: Mapping[str, Implementation]) -> Callable[[Any], bool]:
  """A predicate: whether a spec has an objective with one of these losses."""
  return lambda spec: any(objective.loss in losses for objective in spec.objectives)


def has_reference(loss: str, grpo_beta: float) -> bool:
  """Whether a loss compares the model with a reference."""
  if loss in ROLLOUT_LOSSES and ROLLOUT_LOSSES.entry(loss).has_rewards:
    return grpo_beta > 0
  return loss in PREFERENCE_LOSSES


# The innermost first.
FEATURES = Registry(
  FeatureEntry,
  host_offload=FeatureEntry(
    "maxlite.training.features.host_offload:HostOffload",
    is_used=lambda spec: spec.mesh.optimizer_memory_host_offload,
  ),
  local_updates=FeatureEntry(
    "maxlite.training.features.local_updates:build_local_updates",
    is_used=lambda spec: spec.local_updates.diloco_sync_period > 0,
  ),
  phases=FeatureEntry(
    "maxlite.training.features.phases:AlternatingPhases",
    is_used=lambda spec: spec.phases is not None,
  ),
  teacher=FeatureEntry(
    "maxlite.training.features.teacher:build_teacher", is_used=_has_loss_of(TAUGHT_LOSSES)
  ),
  reference=FeatureEntry(
    "maxlite.training.features.reference:build_reference",
    is_used=lambda spec: any(
      has_reference(each.loss, spec.training.grpo_beta) for each in spec.objectives
    ),
  ),
  rollouts=FeatureEntry("maxlite.rollouts.feature:Rollouts", is_used=_has_loss_of(ROLLOUT_LOSSES)),
  overflow_replay=FeatureEntry(
    "maxlite.training.features.overflow_replay:build_overflow_replay",
    is_used=lambda spec: spec.model.family.is_moe and spec.model.moe.replays_overflow,
  ),
  deterministic_reductions=FeatureEntry(
    "maxlite.training.features.deterministic_reductions:DeterministicReductions",
    is_used=lambda spec: spec.training.deterministic_reductions,
  ),
  step_audit=FeatureEntry(
    "maxlite.training.features.step_audit:StepAudit",
    is_used=lambda spec: spec.training.audit_period > 0,
  ),
)


@dataclasses.dataclass(frozen=True)
class EvaluationEntry(Entry):
  """What a run evaluates: (Config, Program, DataLoader) -> Evaluation (runs/evaluations.py)."""

  # (Config) -> whether a run evaluates it; its file is opened only then.
  is_used: Callable[[Any], bool] = lambda cfg: True


EVALUATIONS = Registry(
  EvaluationEntry,
  held_out="maxlite.evaluation.held_out:build_evaluation",
  tasks=EvaluationEntry(
    "maxlite.rollouts.eval_tasks:build_evaluation",
    is_used=lambda cfg: bool(cfg.observe.eval_tasks),
  ),
)


@dataclasses.dataclass(frozen=True)
class WeightEntry(Entry):
  """A kind of folder with the parameters of a model: see training/model_weights.py."""

  # "module:function": (folder) -> {key: value} of its model and its tokenizer, without JAX.
  keys: str = ""

  @property
  def read_keys(self) -> Implementation:
    return pkgutil.resolve_name(self.keys)


WEIGHT_FORMATS = Registry(
  WeightEntry,
  run=WeightEntry(
    "maxlite.training.model_weights:RunWeights", keys="maxlite.config.start_model:keys_of_run"
  ),
  huggingface=WeightEntry(
    "maxlite.hf.load_model:HfWeights", keys="maxlite.hf.hf_config:keys_of_folder"
  ),
)
