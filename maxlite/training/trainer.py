"""The trainer: mesh, model, objectives and compiled steps, built from a Config."""

import dataclasses
import functools
import math
from collections.abc import Collection, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax.linen import meta
from jax.sharding import Mesh, NamedSharding
from jax.typing import ArrayLike

from maxlite.config.schema import Config, MeshConfig
from maxlite.data.batch import AbstractBatch, DeviceBatch, HostBatch, abstract_batch, to_global
from maxlite.data.train_streams import TrainStreams
from maxlite.errors import UserError
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
from maxlite.phases.phase_programs import repeat_on_batch
from maxlite.registry import LOSSES
from maxlite.sharding import MESH_AXES, Sharder, build_mesh
from maxlite.sharding.all_to_all import check_all_to_all
from maxlite.sharding.compiler_options import Options, compiler_options
from maxlite.sharding.pytree import PyTree
from maxlite.sharding.sharding_report import ParameterSharding, check_sharded, parameter_sharding
from maxlite.step.gradients import StepInputs, build_gradients
from maxlite.step.train_state import TrainState, init_state
from maxlite.step.train_step import SkipRule, Step, StepParts, build_step_parts, join_parts
from maxlite.training.batch_shape import batch_shape
from maxlite.training.loss import DecoderLoss
from maxlite.training.objective import Objective, ObjectiveBuilder
from maxlite.training.objective_plan import (
  ObjectivePlan,
  SingleObjective,
  StepPrograms,
  ZeroCheck,
)
from maxlite.training.routed_bias import build_routed_bias_update
from maxlite.training.transforms.step_transform import (
  StepTransform,
  TransformRequest,
  build_transforms,
)

MAX_CHIPS_OF_V5E = 16  # with a ragged all-to-all


@dataclasses.dataclass(frozen=True, eq=False)
class Trainer:
  """All that a run needs except its data and its folder."""

  cfg: Config
  mesh: Mesh
  sharder: Sharder
  model: Decoder
  # The features beside a plain run, the innermost first.
  transforms: list[StepTransform]
  objective_plan: ObjectivePlan
  objectives: list[Objective]
  parameter_shardings: list[ParameterSharding]
  # ShapeDtypeStructs with shardings.
  abstract_state: TrainState
  # Rows over all devices, and positions.
  batch_shape: tuple[int, int]

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
    return _shardings(self.abstract_state)

  def build_parts(
    self, index: int, *, freeze_diverged: bool = False, check_zero: ZeroCheck | None = None
  ) -> StepParts:
    """Build the two parts of the step of one objective, without the transforms around it.

    Args:
      freeze_diverged: update nothing after `max_skipped_steps` skipped steps in a row, where a solo
        run would end but an ensemble continues.
      check_zero: whether a step reports ZERO_GRADIENTS; None: it never does.
    """
    objective = self.objectives[index]
    moe = self.cfg.model.moe
    cfg = objective.training

    def learning_rate(state: TrainState) -> jax.Array:
      return objective.learning_rate(state.opt_state)

    loss = DecoderLoss(self.model, LOSSES[objective.loss], cfg, moe)
    for transform in self.transforms:
      loss = transform.wrap_loss(loss, objective)
    gradients_of = build_gradients(loss, cfg.gradient_accumulation_steps)
    for transform in self.transforms:
      gradients_of = transform.wrap_gradients(gradients_of)
    return build_step_parts(
      gradients_of,
      objective.tx,
      labels=objective.labels,
      learning_rate=learning_rate,
      ema_decay=cfg.ema_decay,
      post_update=build_routed_bias_update(moe) if self.is_moe else None,
      skip=SkipRule(freeze_after=cfg.max_skipped_steps if freeze_diverged else None),
      check_zero=check_zero,
    )

  def build_objective_step(
    self, index: int, *, freeze_diverged: bool = False, check_zero: ZeroCheck | None = None
  ) -> Step:
    """Build the step of one objective as a pure function; arguments as of `build_parts`."""
    parts = self.build_parts(index, freeze_diverged=freeze_diverged, check_zero=check_zero)
    step = repeat_on_batch(join_parts(parts), self.objectives[index].repeat_batch)
    return self.wrap_step(step, index)

  def wrap_step(self, step: Step, index: int) -> Step:
    """Put all transforms around the step, or the update, of one objective."""
    for transform in self.transforms:
      step = transform.wrap_step(step, index)
    return step

  def build_step(self, *, freeze_diverged: bool = False) -> Step:
    """Build the training step of all objectives as one pure function."""
    steps = {}
    for index, each in enumerate(self.objectives):
      steps[each.name] = self.build_objective_step(index, freeze_diverged=freeze_diverged)
    inputs = self.abstract_inputs(self.batch_shape)
    return self.objective_plan.join_steps(steps, self.abstract_state, inputs)

  @functools.cached_property
  def step_programs(self) -> StepPrograms:
    """The compiled training steps."""
    programs = self.objective_plan.build_programs(self)
    for transform in self.transforms:
      build = functools.partial(self._build_programs_with, transform)
      programs = transform.wrap_programs(programs, build)
    return programs

  def _build_programs_with(self, transform: StepTransform, other: StepTransform) -> StepPrograms:
    """Build the compiled steps with `other` in the place of `transform`."""
    transforms = list(self.transforms)
    transforms[transforms.index(transform)] = other
    trainer = dataclasses.replace(self, transforms=transforms)
    return trainer.objective_plan.build_programs(trainer)

  @functools.cached_property
  def train_step(self) -> Step:
    """The compiled training step; it donates the state."""
    return self.step_programs.step

  def confirm(self, state: TrainState) -> TrainState:
    """The state after the steps taken so far, when none of them is provisional any more."""
    return self.step_programs.confirm(state)

  def jit_step(self, index: int) -> jax.stages.Wrapped:
    """The step of one objective under `jax.jit`; it donates the state."""
    inputs = self.abstract_inputs(self.batch_shape)
    return jax.jit(
      self.build_objective_step(index),
      in_shardings=(self.state_shardings, _shardings(inputs)),
      out_shardings=(self.state_shardings, self.sharder.sharding(())),
      donate_argnums=0,
      compiler_options=self.compiler_options or None,
    )

  def lower_step(self, index: int = 0) -> jax.stages.Lowered:
    """Lower the step of one objective for its batches."""
    inputs = self.abstract_inputs(self.objectives[index].batch_shape)
    return self.jit_step(index).lower(self.abstract_state, inputs)

  @functools.cached_property
  def compiler_options(self) -> Options:
    """For training steps. Raises UserError if the compiler refuses one that the config sets."""
    own = [d for d in self.mesh.devices.flat if d.process_index == jax.process_index()]
    return compiler_options(own[0], self.sharder.platform, self.cfg.run.compiler_options)

  def abstract_inputs(self, batch_shape: tuple[int, int]) -> PyTree:
    """The inputs of a step on a batch of this shape, as ShapeDtypeStructs."""
    batch = abstract_batch(batch_shape, self.batch_sharding)
    return _join_inputs(batch, self.abstract_extra_inputs)

  @property
  def abstract_extra_inputs(self) -> dict[str, PyTree]:
    """The inputs of a step beside its batch, as ShapeDtypeStructs, by name."""
    extra: dict[str, PyTree] = {}
    for transform in self.transforms:
      extra |= transform.abstract_inputs()
    return extra

  def with_extra_inputs(self, batch: DeviceBatch) -> PyTree:
    """The inputs of a step on this global batch."""
    extra: dict[str, PyTree] = {}
    for transform in self.transforms:
      extra |= transform.inputs()
    return _join_inputs(batch, extra)

  @property
  def inputs_hash(self) -> str:
    """A hash of the inputs of a step beside its batch; empty if there are none."""
    return " ".join(each.inputs_hash for each in self.transforms if each.inputs_hash)

  def place(self, batch: HostBatch) -> DeviceBatch:
    """Make a global batch of the run's size from this host's rows (numpy)."""
    return to_global(batch, self.batch_sharding, self.batch_shape)

  def next_batch(self, stream: TrainStreams, state: TrainState) -> PyTree:
    """The inputs of the next step, on the next batch of its objective."""
    name = self.step_programs.next_objective(state)
    rows = stream.take(name)
    batch = to_global(rows, self.batch_sharding, stream.batch_shape(name))
    return self.with_extra_inputs(batch)

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
    trained = None
    if objective.labels is not None:
      trained = trained_paths(objective.labels)
    flops = train_flops(
      self.cfg.model,
      self.parameter_sizes,
      batch_shape,
      trained,
      logits=loss.logits,
      drafts=loss.drafts or self.cfg.model.mtp_num_layers > 0,
    ).total
    for transform in self.transforms:
      flops += transform.flops(objective, batch_shape)
    return flops * objective.repeat_batch

  def init_params(self, seed: ArrayLike, params: PyTree = None) -> PyTree:
    """The parameters before the first step, with logical names (`nn.Partitioned`).

    They are a pure function of the seed and of `params` if given; adapters and draft heads that
    these lack are new.
    """
    boxed = _init_params(self.model, seed, self.batch_shape[1])
    new = scale_initial(meta.unbox(boxed), logical_names(boxed), self.cfg.model)
    if params is not None:
      new = add_missing_modules(params, new)
    return meta.replace_boxed(boxed, new)

  def first_state(self, params: PyTree, seed: ArrayLike) -> TrainState:
    """The state before the first step, with these parameters (without logical names)."""
    state = _plain_state(params, seed, self.cfg, self.objective_plan, self.objectives)
    for transform in self.transforms:
      state = transform.start(state)
    return state

  def init(self, seed: ArrayLike, params: PyTree = None) -> TrainState:
    """The state before the first step, from `init_params`."""
    return self.first_state(meta.unbox(self.init_params(seed, params)), seed)

  def init_state(self, params: PyTree = None) -> TrainState:
    """Initialize the state, every leaf on its own devices; it donates `params`, see `init`."""
    init = jit_init(self.init, out_shardings=self.state_shardings, donate_argnums=1)
    return init(np.uint32(self.cfg.run.init_weights_seed), params)


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
  sharder = Sharder(mesh, dict(cfg.mesh.logical_axis_rules))
  boxed = _abstract_params(cfg, sharder)
  names = logical_names(boxed)
  params = meta.unbox(boxed)
  transforms = build_transforms(TransformRequest(cfg, mesh, params))
  for transform in transforms:
    sharder = transform.shard(sharder)
  shape = batch_shape(cfg.data, cfg.training, sharder)
  shardings = _shard_parameters(params, names, sharder)
  check_sharded(shardings, sharder, cfg.mesh.sharding_tolerance)
  plan = _choose_objective_plan(cfg, transforms)
  builder = ObjectiveBuilder(cfg.model, names, sharder, stored_numbers)
  objectives = plan.build_objectives(builder)
  trainer = Trainer(
    cfg=cfg,
    mesh=mesh,
    sharder=sharder,
    model=Decoder(cfg.model, sharder),
    transforms=transforms,
    objective_plan=plan,
    objectives=objectives,
    parameter_shardings=shardings,
    abstract_state=_abstract_state(cfg, plan, objectives, transforms, sharder, params, names),
    batch_shape=shape,
  )
  _check_topology(trainer)
  return trainer


def _check_topology(trainer: Trainer) -> None:
  """Raise UserError for the slices of TPU v5e that XLA has no ragged all-to-all for."""
  kind = trainer.mesh.devices.flat[0].device_kind
  num_devices = trainer.mesh.size
  is_v5e = kind in ("TPU v5 lite", "TPU v5e")
  if trainer.uses_all_to_all and is_v5e and num_devices > MAX_CHIPS_OF_V5E:
    raise UserError(
      f"{num_devices} chips of {kind}: XLA has no ragged all-to-all for slices above 4x4; write "
      "use_ring_of_experts=true, or ici_expert_parallelism=1"
    )


def mesh_degrees(cfg: MeshConfig, group: str) -> list[int]:
  """The degrees of `group`, "ici" or "dcn", in the order of the mesh axes."""
  return [getattr(cfg, f"{group}_{mesh_axis}_parallelism") for mesh_axis in MESH_AXES]


def _abstract_params(cfg: Config, sharder: Sharder) -> PyTree:
  """The shapes of the parameters, with logical names (`nn.Partitioned`).

  They come from one device: on the mesh, JAX would fail first, with its own error messages.
  """
  one = sharder
  if sharder.mesh.size > 1:
    degrees = (1,) * len(MESH_AXES)
    one = Sharder(build_mesh(degrees, degrees, [sharder.mesh.devices.flat[0]]))
  model = Decoder(cfg.model, one)

  def init() -> PyTree:
    return _init_params(model, np.uint32(0), cfg.data.max_target_length)

  return jax.eval_shape(init)


@functools.partial(jax.jit, static_argnums=(0, 2), inline=True)
def _init_params(model: Decoder, seed: ArrayLike, length: int) -> PyTree:
  """The initial parameters of a model on sequences of this length, with logical names.

  It is jitted so that a model is traced once: for the shapes of its parameters and, on one device,
  for their values.
  """
  num_rows = model.sharder.num_shards("activation_batch")
  tokens_BT = jnp.zeros((num_rows, length), jnp.int32)
  key = jax.random.fold_in(jax.random.key(seed), 0)
  variables = model.init(
    {"params": key}, tokens_BT, tokens_BT, tokens_BT, method=model.hidden_and_unembedding
  )
  return variables["params"]


def _shard_parameters(params: PyTree, names: PyTree, sharder: Sharder) -> list[ParameterSharding]:
  """The sharding of every parameter."""
  paths = paths_in(params)
  leaves = jax.tree.leaves(params)
  axes = jax.tree.leaves(names)
  shardings = []
  for path, leaf, leaf_names in zip(paths, leaves, axes, strict=True):
    shardings.append(parameter_sharding(path, leaf, leaf_names, sharder))
  return shardings


def _choose_objective_plan(cfg: Config, transforms: Sequence[StepTransform]) -> ObjectivePlan:
  """The plan of the transform that has one; without such a transform, that of a plain run."""
  for transform in transforms:
    plan = transform.objective_plan()
    if plan is not None:
      return plan
  return SingleObjective(cfg)


def _plain_state(
  params: PyTree,
  seed: ArrayLike,
  cfg: Config,
  plan: ObjectivePlan,
  objectives: Sequence[Objective],
) -> TrainState:
  """The state before the first step, without the transforms."""
  averaged = None
  if cfg.training.ema_decay:
    averaged, _ = split(params, plan.trained)
  return init_state(
    params,
    opt_state=plan.init_opt_state(params, objectives),
    rng=jax.random.key_data(jax.random.fold_in(jax.random.key(seed), 1)),
    averaged=averaged,
  )


def _abstract_state(
  cfg: Config,
  plan: ObjectivePlan,
  objectives: Sequence[Objective],
  transforms: Sequence[StepTransform],
  sharder: Sharder,
  params: PyTree,
  parameter_names: PyTree,
) -> TrainState:
  """The state of a run as ShapeDtypeStructs with shardings."""

  def plain_state(params: PyTree) -> TrainState:
    return _plain_state(params, jnp.uint32(0), cfg, plan, objectives)

  def place(leaf: jax.ShapeDtypeStruct, leaf_names: jax.P) -> jax.ShapeDtypeStruct:
    return leaf.update(sharding=sharder.sharding(tuple(leaf_names)))

  state = jax.eval_shape(plain_state, params)
  names = state_names(state, params, parameter_names)
  for transform in transforms:
    names = transform.names(names, state, parameter_names)
    state = jax.eval_shape(transform.start, state)
  placed = jax.tree.map(place, state, names)
  for transform in transforms:
    placed = transform.place(placed)
  return placed


def _shardings(tree: PyTree) -> PyTree:
  return jax.tree.map(lambda leaf: leaf.sharding, tree)


def _join_inputs(batch: DeviceBatch | AbstractBatch, extra: dict[str, PyTree]) -> PyTree:
  """The inputs of a step: the batch alone if there are no others."""
  if not extra:
    return batch
  return StepInputs(batch, extra)
