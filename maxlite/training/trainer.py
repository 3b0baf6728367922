"""The trainer: mesh, model, objectives and compiled steps, built from a Config."""

import dataclasses
import functools
import math
import re
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.linen import meta
from jax.sharding import Mesh, NamedSharding

from maxlite.config.errors import UserError
from maxlite.config.phases import initial_phases_of, phases_of
from maxlite.config.registry import LOSSES
from maxlite.config.schema import Config, MeshConfig
from maxlite.data.batch import Batch, abstract_batch, to_global
from maxlite.data.host_batches import BatchSchedule
from maxlite.data.train_streams import TrainStreams
from maxlite.kernels.xla_cpu import jit_init
from maxlite.layers.lora import add_missing_modules
from maxlite.layers.moe.dispatch import choose_dispatch
from maxlite.metrics.flops import train_flops
from maxlite.models import Decoder
from maxlite.optim.labels import (
  frozen_paths,
  logical_names,
  paths_in,
  split,
  state_names,
  trained_paths,
)
from maxlite.optim.parametrization import scale_initial
from maxlite.phases.phase_opt_states import init_opt_states
from maxlite.phases.phase_plan import PhasePlan
from maxlite.phases.phase_programs import (
  PhasePrograms,
  build_phase_step,
  compile_for_batches,
  repeat_on_batch,
  switch_step,
)
from maxlite.phases.zero_gradients import check_any_gradient, zero_among
from maxlite.sharding import MESH_AXES, Sharder, build_mesh
from maxlite.sharding.all_to_all import check_all_to_all
from maxlite.sharding.compiler_options import Options, compiler_options
from maxlite.sharding.host_memory import offload_optimizer, place_state
from maxlite.sharding.sharding_report import ParameterSharding, check_sharded, parameter_sharding
from maxlite.step.train_state import TrainState, init_state
from maxlite.step.train_step import (
  SkipRule,
  Step,
  StepParts,
  build_gradients,
  build_step_parts,
  join_parts,
)
from maxlite.training.batch_shape import batch_shape
from maxlite.training.loss import DecoderLoss
from maxlite.training.objective import Objective, build_objectives
from maxlite.training.routed_bias import BIAS, build_routed_bias_update
from maxlite.training.transforms import local_updates
from maxlite.training.transforms.local_updates import OuterOptimizer


@dataclasses.dataclass(frozen=True, eq=False)
class Trainer:
  """All that a run needs except its data and its folder."""

  cfg: Config
  mesh: Mesh
  sharder: Sharder
  model: Decoder
  objectives: list[Objective]  # one per phase; one in a run without phases
  phase_plan: PhasePlan | None  # of a run with phases
  parameter_shardings: list[ParameterSharding]
  abstract_state: TrainState  # ShapeDtypeStructs with their shardings
  batch_shape: tuple[int, int]  # rows over all devices, positions
  outer: OuterOptimizer | None  # of a run with replicas

  @property
  def is_moe(self) -> bool:
    return self.cfg.model.family.is_moe

  @property
  def parameter_sizes(self) -> dict[str, int]:
    """The number of elements of every parameter, by path."""
    return {each.path: math.prod(each.shape) for each in self.parameter_shardings}

  @property
  def uses_all_to_all(self) -> bool:
    """Whether tokens reach their experts by the ragged all-to-all."""
    dispatch = choose_dispatch(self.cfg.model.moe)
    is_ragged = dispatch.collective == "ragged-all-to-all"
    return self.is_moe and is_ragged and self.sharder.num_shards("exp") > 1

  def check_devices(self) -> None:
    """Raise UserError if the ragged all-to-all gives wrong results on these accelerators."""
    if self.uses_all_to_all and self.sharder.platform != "cpu":
      check_all_to_all(self.mesh, self.sharder.mesh_axes("exp"))

  @functools.cached_property
  def batch_sharding(self) -> NamedSharding:
    return self.sharder.sharding(("activation_batch", "activation_length"))

  @functools.cached_property
  def state_shardings(self) -> TrainState:
    return jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)

  @property
  def abstract_batch(self) -> Batch:
    """Shapes, types and sharding of the run's batches; a phase may have batches of another size."""
    return abstract_batch(self.batch_shape, self.batch_sharding)

  def build_step(self, *, freeze_diverged: bool = False) -> Step:
    """Build the training step as one pure function, also for all phases; see `build_parts`."""
    steps = self._build_steps(freeze_diverged=freeze_diverged)
    if self.phase_plan is None:
      return steps["train"]
    schedule = self.phase_plan.schedule
    return switch_step(steps, schedule, self.abstract_state, self.abstract_batch)

  def _build_steps(
    self, *, freeze_diverged: bool = False, check_zero: bool = False
  ) -> dict[str, Step]:
    steps = {}
    for n, each in enumerate(self.objectives):
      steps[each.name] = self._build_step(n, freeze_diverged=freeze_diverged, check_zero=check_zero)
    return steps

  def build_parts(
    self, index: int, *, freeze_diverged: bool = False, check_zero: bool = False
  ) -> StepParts:
    """Build the two parts of the step of one objective.

    Args:
      freeze_diverged: update nothing after `max_skipped_steps` skipped steps in a row, where a solo
        run would end but an ensemble continues.
      check_zero: report ZERO_GRADIENTS of the first step of each phase.
    """
    objective = self.objectives[index]
    moe = self.cfg.model.moe
    cfg = objective.training

    def learning_rate(state: TrainState) -> jax.Array:
      return objective.learning_rate(state.opt_state)

    def is_first(state: TrainState) -> jax.Array:
      return state.clock.taken_P[index] == 0

    model = self.outer.model_of_one(self.model) if self.outer else self.model
    entry = LOSSES[objective.loss]
    loss = DecoderLoss(model, entry, cfg, moe, entry.open_teacher and self.teacher)
    return build_step_parts(
      build_gradients(loss, cfg.gradient_accumulation_steps),
      objective.tx,
      labels=objective.labels,
      learning_rate=learning_rate,
      ema_decay=cfg.ema_decay,
      post_update=build_routed_bias_update(moe) if self.is_moe else None,
      skip=SkipRule(freeze_after=cfg.max_skipped_steps if freeze_diverged else None),
      check_zero=is_first if check_zero else None,
    )

  def _build_step(
    self, index: int, *, freeze_diverged: bool = False, check_zero: bool = False
  ) -> Step:
    objective = self.objectives[index]
    parts = self.build_parts(index, freeze_diverged=freeze_diverged, check_zero=check_zero)
    step = repeat_on_batch(join_parts(parts), objective.repeat_batch)
    if self.cfg.mesh.optimizer_memory_host_offload:
      step = offload_optimizer(step)
    step = self.outer.build_step(step) if self.outer else step
    if self.phase_plan is not None:
      owner = self.phase_plan.owners[objective.name]
      step = build_phase_step(step, index, self.phase_plan.schedule, owner)
    return self.teacher.with_teacher(step) if self.teacher else step

  @functools.cached_property
  def teacher(self) -> Any:
    """The FrozenModels that a loss needs, or None; their parameters are read on first use."""
    openers = (LOSSES[each.loss].open_teacher for each in self.objectives)
    open_teacher = next(filter(None, openers), None)
    return open_teacher(self) if open_teacher else None

  @functools.cached_property
  def train_step(self) -> Step:
    """The compiled training step; it donates the state."""
    if self.phase_plan is not None:
      return self.phase_programs.step
    batches = [self._abstract_input(shape) for shape in self.batch_schedule.shapes]
    step = self._jit_step(0)
    return step if len(batches) == 1 else compile_for_batches(step, self.abstract_state, batches)

  @functools.cached_property
  def batch_schedule(self) -> BatchSchedule:
    """The shapes of the batches of a run without phases."""
    return BatchSchedule.of(self.cfg.data, self.batch_shape[0])

  def _abstract_input(self, shape: tuple[int, int]) -> Any:
    """The second argument of a step: a batch of this shape, with the teacher's parameters."""
    batch = abstract_batch(shape, self.batch_sharding)
    return self.teacher.with_params(batch, abstract=True) if self.teacher else batch

  def _jit_step(self, index: int) -> Any:
    inputs = self._abstract_input(self.batch_shape)
    return jax.jit(
      self._build_step(index),
      in_shardings=(self.state_shardings, jax.tree.map(lambda leaf: leaf.sharding, inputs)),
      out_shardings=(self.state_shardings, self.sharder.sharding(())),
      donate_argnums=0,
      compiler_options=self.compiler_options or None,
    )

  @functools.cached_property
  def compiler_options(self) -> Options:
    """For training steps. Raises UserError if the compiler refuses one that the config sets."""
    device = next(d for d in self.mesh.devices.flat if d.process_index == jax.process_index())
    return compiler_options(device, self.sharder.platform, self.cfg.run.compiler_options)

  def lower_step(self, index: int = 0) -> jax.stages.Lowered:
    """Lower the step of one objective for its batches."""
    inputs = self._abstract_input(self.objectives[index].batch_shape)
    return self._jit_step(index).lower(self.abstract_state, inputs)

  @functools.cached_property
  def phase_programs(self) -> PhasePrograms:
    """The compiled steps of all phases."""
    assert self.phase_plan is not None
    return PhasePrograms(
      self._build_steps(check_zero=True),
      self.phase_plan.schedule,
      self.cfg.phasing.phase_strategy,
      self.abstract_state,
      {each.name: self._abstract_input(each.batch_shape) for each in self.objectives},
      self.compiler_options,
      self._check_gradients,
    )

  def _check_gradients(self, phase: str, zero_N: np.ndarray) -> None:
    """Raise UserError if the loss of `phase` does not depend on what it trains."""
    assert self.phase_plan is not None
    trained = trained_paths(self.phase_plan.labels[phase])
    if self.cfg.model.moe.routed_bias:  # moved without a gradient
      trained = [path for path in trained if not re.search(BIAS, path)]
    paths = paths_in(self.abstract_state.params)
    check_any_gradient(phase, trained, zero_among(paths, zero_N))

  @property
  def frozen_paths(self) -> list[str]:
    """Paths of the parameters that no step trains."""
    return frozen_paths(*(each.labels for each in self.objectives))

  @property
  def flops_per_step(self) -> list[float]:
    """FLOPs of a step over all devices, by objective."""
    return [self.flops_of(each, each.batch_shape) for each in self.objectives]

  def flops_of(self, objective: Objective, batch_shape: tuple[int, int]) -> float:
    """FLOPs of a step on one batch over all devices."""
    loss = LOSSES[objective.loss]
    trained = None if objective.labels is None else trained_paths(objective.labels)
    flops = train_flops(
      self.cfg.model,
      self.parameter_sizes,
      batch_shape,
      trained,
      logits=loss.logits,
      drafts=loss.drafts,
    ).total
    if loss.open_teacher:
      flops += self.teacher.flops(batch_shape)
    return flops * objective.repeat_batch

  def place(self, batch: Batch) -> Batch:
    """Make a global batch of the run's size from this host's rows (numpy)."""
    return to_global(batch, self.batch_sharding, self.batch_shape)

  def next_batch(self, stream: TrainStreams, state: TrainState) -> Any:
    """The global batch of the next step, with the teacher's parameters if there is one."""
    name = self.phase_programs.phase(state) if self.phase_plan else "train"
    rows = stream.take(name)  # sets the shape
    batch = to_global(rows, self.batch_sharding, stream.batch_shape(name))
    return self.teacher.with_params(batch) if self.teacher else batch

  def init_params(self, seed: jax.Array, params: Any = None) -> Any:
    """The parameters before the first step, with logical names (`nn.Partitioned`).

    They are a pure function of the seed and of `params` if given; adapters and draft heads that
    these lack are new.
    """
    boxed = _init_params(self.model, seed, self.batch_shape)
    new = scale_initial(meta.unbox(boxed), logical_names(boxed), self.cfg.model)
    if params is not None:
      new = add_missing_modules(params, new)
    return meta.replace_boxed(boxed, new)

  def first_state(self, params: Any, seed: jax.Array) -> TrainState:
    """The state before the first step, with these parameters (without logical names)."""
    state = _first_state(params, seed, self.cfg, self.objectives, self.phase_plan)
    return state if self.outer is None else self.outer.start(state)

  def init(self, seed: jax.Array, params: Any = None) -> TrainState:
    """The state before the first step, from `init_params`."""
    return self.first_state(meta.unbox(self.init_params(seed, params)), seed)

  def init_state(self, params: Any = None) -> TrainState:
    """Initialize the state, every leaf on its own devices; it donates `params`, see `init`."""
    init = jit_init(self.init, out_shardings=self.state_shardings, donate_argnums=1)
    return init(jnp.uint32(self.cfg.run.init_weights_seed), params)


def build_trainer(
  cfg: Config,
  devices: Sequence[jax.Device] | None = None,
  stored_numbers: Collection[str] = (),
) -> Trainer:
  """Build the Trainer of `cfg` on `devices`, which may be abstract; by default on all devices.

  Args:
    stored_numbers: numbers of the optimizer, of `optim.build.NUMBERS`, that are in its state.

  Raises:
    UserError: mesh, batch and model do not fit together.
  """
  mesh = build_mesh(mesh_degrees(cfg.mesh, "ici"), mesh_degrees(cfg.mesh, "dcn"), devices)
  outer = OuterOptimizer(cfg.local_updates, mesh) if cfg.local_updates.diloco_sync_period else None
  rules = dict(cfg.mesh.logical_axis_rules)
  sharder = local_updates.shard_rows(Sharder(mesh, rules)) if outer else Sharder(mesh, rules)
  shape = batch_shape(cfg.data, cfg.training, sharder)
  # Shapes come from one device: on the mesh, JAX would fail first, with its own error messages.
  one = Sharder(build_mesh((1,) * len(MESH_AXES), (1,) * len(MESH_AXES), [mesh.devices.flat[0]]))
  boxed = jax.eval_shape(lambda: _init_params(Decoder(cfg.model, one), jnp.uint32(0), shape))
  names, params = logical_names(boxed), meta.unbox(boxed)
  leaves = zip(paths_in(params), jax.tree.leaves(params), jax.tree.leaves(names), strict=True)
  shardings = [parameter_sharding(*leaf, sharder) for leaf in leaves]
  check_sharded(shardings, sharder, cfg.mesh.sharding_tolerance)
  plan = PhasePlan(phases_of(cfg), initial_phases_of(cfg), params) if cfg.phasing.phases else None
  objectives = build_objectives(cfg, plan, names, sharder, stored_numbers)
  state = jax.eval_shape(lambda p: _first_state(p, jnp.uint32(0), cfg, objectives, plan), params)
  axes = state_names(state, params, names)
  if outer is not None:
    axes = outer.names(axes, state, names)
    state = jax.eval_shape(outer.start, state)
  trainer = Trainer(
    cfg=cfg,
    mesh=mesh,
    sharder=sharder,
    model=Decoder(cfg.model, sharder),
    objectives=objectives,
    phase_plan=plan,
    parameter_shardings=shardings,
    abstract_state=place_state(state, axes, sharder, cfg.mesh.optimizer_memory_host_offload),
    batch_shape=shape,
    outer=outer,
  )
  _check_topology(trainer)
  return trainer


def _check_topology(trainer: Trainer) -> None:
  """Raise UserError for the slices of TPU v5e that XLA has no ragged all-to-all for."""
  kind, num_devices = trainer.mesh.devices.flat[0].device_kind, trainer.mesh.size
  if trainer.uses_all_to_all and kind in ("TPU v5 lite", "TPU v5e") and num_devices > 16:
    raise UserError(
      f"{num_devices} chips of {kind}: XLA has no ragged all-to-all for slices above 4x4; write "
      "use_ring_of_experts=true, or ici_expert_parallelism=1"
    )


def mesh_degrees(cfg: MeshConfig, group: str) -> list[int]:
  """The degrees of `group`, "ici" or "dcn", in the order of the mesh axes."""
  return [getattr(cfg, f"{group}_{mesh_axis}_parallelism") for mesh_axis in MESH_AXES]


def _init_params(model: Decoder, seed: jax.Array, batch_shape: tuple[int, int]) -> Any:
  tokens_BT = jnp.zeros(batch_shape, jnp.int32)
  key = jax.random.fold_in(jax.random.key(seed), 0)
  inputs = (tokens_BT, tokens_BT, tokens_BT)
  return model.init({"params": key}, *inputs, method=model.hidden_and_unembedding)["params"]


def _first_state(
  params: Any,
  seed: jax.Array,
  cfg: Config,
  objectives: Sequence[Objective],
  plan: PhasePlan | None,
) -> TrainState:
  rng = jax.random.key_data(jax.random.fold_in(jax.random.key(seed), 1))
  if plan is None:
    opt_state = objectives[0].tx.init(params)
    clock = None
    averaged = params
  else:
    opt_state = init_opt_states(
      params, {each.name: each.tx for each in objectives}, plan.labels, plan.owners
    )
    clock = plan.schedule.start()
    averaged, _ = split(params, plan.trained)
  if not cfg.training.ema_decay:
    averaged = None
  return init_state(params, opt_state, rng, clock, averaged)
