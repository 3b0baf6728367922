"""What a compiled step is a function of: `StepSpec`, and the spec of a config.

Configs whose specs are equal have the same compiled step. A spec has no run name, seed, folder or
period; ensembles group their members by it, and tests share compiled programs by it.
"""

import dataclasses

from maxlite.config.mixture import has_pairs
from maxlite.config.phases import initial_phases_of, phases_of
from maxlite.config.raw_values import FrozenMapping
from maxlite.config.schema import (
  Config,
  DataConfig,
  LocalUpdatesConfig,
  MeshConfig,
  ModelConfig,
  OptimizerConfig,
  PhaseConfig,
  TrainingConfig,
)
from maxlite.optim.schedules import with_schedule_steps
from maxlite.registry import ROLLOUT_LOSSES
from maxlite.sharding.compiler_options import DETERMINISTIC_OPTIONS
from maxlite.sharding.logical_axis_rules import DEFAULT_RULES

# Keys of the data that determine the shapes of batches.
_SIZE_KEYS = (
  "max_target_length",
  "per_device_batch_size",
  "global_batch_size",
  "batch_size_schedule",
  "sequence_length_schedule",
)
# Logical axes of the rows of a batch.
_ROWS = ("activation_batch", "activation_batch_no_exp")


@dataclasses.dataclass(frozen=True)
class ObjectiveSpec:
  """A loss of a part of the parameters, with its optimizer and the size of its batches."""

  # The name of the phase, or "train" in a run without phases.
  name: str
  # A name in the table LOSSES.
  loss: str
  # Regexes of whole parameter paths; None: all parameters are trained.
  train: tuple[str, ...] | None
  # Its schedule has a length.
  optimizer: OptimizerConfig
  # The keys of sizes and lengths; the others have their defaults.
  batches: DataConfig
  gradient_accumulation_steps: int
  # The number of updates on each batch.
  repeat_batch: int = 1
  # Whether batches have the experts of every token (`Batch.expert_BTNK`).
  replays_routes: bool = False


@dataclasses.dataclass(frozen=True)
class PhasesSpec:
  """How several objectives alternate."""

  # In the order of the cycle, without their data.
  phases: tuple[PhaseConfig, ...]
  # (phase, steps that it takes alone before the cycle begins)
  initial: tuple[tuple[str, int], ...]
  # `phase_strategy`
  strategy: str


@dataclasses.dataclass(frozen=True)
class StepSpec:
  """What is compiled: mesh, model, objectives, and the features around the step."""

  mesh: MeshConfig
  model: ModelConfig
  training: TrainingConfig
  # The sizes of evaluation batches, and of a run without phases.
  batches: DataConfig
  objectives: tuple[ObjectiveSpec, ...]
  # Whether the held-out rows are pairs of answers.
  evaluates_pairs: bool
  local_updates: LocalUpdatesConfig
  compiler_options: FrozenMapping
  # None: there is one objective.
  phases: PhasesSpec | None = None
  # Names of hyperparameters that the optimizers have in their states.
  stored_hyperparameters: frozenset[str] = frozenset()


def spec_of(cfg: Config) -> StepSpec:
  """The spec of the training step of `cfg`."""
  phases = phases_of(cfg)
  objectives = []
  replays_routes = cfg.rollouts.rollout_routes == "replay"
  schedule = None
  if phases:
    # Only a run with phases opens their package.
    from maxlite.phases.phase_plan import num_updates_of

    initial = initial_phases_of(cfg)
    num_updates = num_updates_of(phases, initial, cfg.run.steps)
    schedule = PhasesSpec(
      tuple(dataclasses.replace(phase, data=DataConfig()) for phase in phases),
      tuple(initial.items()),
      cfg.phasing.phase_strategy,
    )
    for phase in phases:
      objectives.append(
        ObjectiveSpec(
          name=phase.name,
          loss=phase.loss,
          train=phase.train,
          optimizer=with_schedule_steps(phase.optimizer, num_updates[phase.name]),
          batches=_sizes_of(phase.data),
          gradient_accumulation_steps=phase.training.gradient_accumulation_steps,
          repeat_batch=phase.repeat_batch,
          replays_routes=replays_routes and phase.loss in ROLLOUT_LOSSES,
        )
      )
  else:
    objectives.append(
      ObjectiveSpec(
        name="train",
        loss=cfg.training.loss_type,
        train=None,
        optimizer=with_schedule_steps(cfg.optimizer, cfg.run.steps),
        batches=_sizes_of(cfg.data),
        gradient_accumulation_steps=cfg.training.gradient_accumulation_steps,
        replays_routes=replays_routes and cfg.training.loss_type in ROLLOUT_LOSSES,
      )
    )
  return StepSpec(
    mesh=_mesh_of(cfg),
    model=cfg.model,
    training=cfg.training,
    batches=_sizes_of(cfg.data),
    objectives=tuple(objectives),
    evaluates_pairs=has_pairs(cfg.data),
    phases=schedule,
    local_updates=cfg.local_updates,
    compiler_options=_compiler_options(cfg),
  )


def data_by_objective(cfg: Config) -> dict[str, DataConfig]:
  """By name of the objective, what it reads: the run's data, or the data of its phase."""
  phases = phases_of(cfg)
  if not phases:
    return {"train": cfg.data}
  return {phase.name: phase.data for phase in phases}


def _sizes_of(data: DataConfig) -> DataConfig:
  return dataclasses.replace(DataConfig(), **{key: getattr(data, key) for key in _SIZE_KEYS})


def _compiler_options(cfg: Config) -> FrozenMapping:
  if not cfg.training.deterministic_reductions:
    return cfg.run.compiler_options
  return FrozenMapping({**cfg.run.compiler_options, **DETERMINISTIC_OPTIONS}.items())


def _mesh_of(cfg: Config) -> MeshConfig:
  """The mesh; replicas of local updates divide the rows of a batch first."""
  if not cfg.local_updates.diloco_sync_period:
    return cfg.mesh
  rules = dict(cfg.mesh.logical_axis_rules)
  for name in _ROWS:
    rules[name] = ("ensemble", *rules.get(name, DEFAULT_RULES[name]))
  return dataclasses.replace(cfg.mesh, logical_axis_rules=tuple(rules.items()))
