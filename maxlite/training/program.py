"""A training step on a mesh, which `build_program` makes from a `StepSpec`."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.linen import meta
from jax.sharding import Mesh, NamedSharding
from jax.typing import ArrayLike

from maxlite.config.schema import Config, MeshConfig
from maxlite.data.batch import AbstractBatch, DeviceBatch, HostBatch, abstract_batch, to_global
from maxlite.data.host_batches import BatchSchedule
from maxlite.errors import UserError
from maxlite.kernels.xla_cpu import jit_init
from maxlite.layers.lora import add_missing_modules
from maxlite.layers.moe.dispatch import choose_dispatch
from maxlite.metrics.flops import train_flops
from maxlite.models import Decoder
from maxlite.models.routes import route_shape
from maxlite.optim import build_optimizer, learning_rate
from maxlite.optim.labels import (
  Labels,
  labels_by_phase,
  logical_names,
  partitioned,
  paths_in,
  split,
  state_names,
  trained_paths,
  union,
)
from maxlite.optim.parametrization import scale_initial
from maxlite.registry import LOSSES
from maxlite.sharding import MESH_AXES, Sharder, build_mesh
from maxlite.sharding.all_to_all import check_all_to_all
from maxlite.sharding.compiler_options import Options, compiler_options
from maxlite.sharding.pytree import PyTree
from maxlite.sharding.sharding_report import ParameterSharding, check_sharded, parameter_sharding
from maxlite.step.compile import compile_for_batches, compile_in_thread
from maxlite.step.gradients import StepInputs, build_gradients
from maxlite.step.train_state import TrainState, init_state
from maxlite.step.train_step import (
  SkipRule,
  Step,
  StepParts,
  build_step_parts,
  join_parts,
  repeat_on_batch,
)
from maxlite.training.batch_shape import batch_shape
from maxlite.training.feature import Feature, FeatureRequest, abstract_inputs, build_features
from maxlite.training.loss import DecoderLoss
from maxlite.training.routed_bias import build_routed_bias_update
from maxlite.training.spec import ObjectiveSpec, StepSpec

MAX_CHIPS_OF_V5E = 16  # with a ragged all-to-all


@dataclasses.dataclass(frozen=True, eq=False)
class Objective:
  """An objective on a mesh."""

  spec: ObjectiveSpec
  # What is trained and what is frozen; None: all parameters are trained.
  labels: Labels
  # The optimizer of the trained parameters.
  tx: optax.GradientTransformation
  # Rows over all devices, and positions.
  batch_shape: tuple[int, int]

  @property
  def name(self) -> str:
    return self.spec.name


class StepKind(NamedTuple):
  """The steps of an objective on batches of one shape, which one program takes."""

  objective: Objective
  batch_shape: tuple[int, int]  # rows over all devices, positions


def build_program(
  spec: StepSpec,
  devices: Sequence[jax.Device] | None = None,
  command: Config | None = None,
) -> "Program":
  """Build the step of `spec` on `devices`, which may be abstract; by default on all devices.

  Args:
    command: the config of the command, for features that read other models.

  Raises:
    UserError: mesh, batch and model do not fit together.
  """
  # The mesh, and the table from logical axes to its axes.
  mesh = build_mesh(mesh_degrees(spec.mesh, "ici"), mesh_degrees(spec.mesh, "dcn"), devices)
  sharder = Sharder(mesh, dict(spec.mesh.logical_axis_rules), spec.mesh.gather_by_permutes)

  # The shapes of the parameters, their logical names, and what each objective trains.
  boxed = _abstract_params(spec, sharder)
  names = logical_names(boxed)
  params = meta.unbox(boxed)
  labels: dict[str, Labels] = {}
  if spec.phases is not None:
    labels = labels_by_phase(params, {each.name: each.train or () for each in spec.objectives})

  # What is around the step: nothing in a plain run.
  features = build_features(FeatureRequest(spec, sharder, params, labels, command))

  # The parameters' shardings.
  shape_of = functools.partial(
    batch_shape, sharder=sharder, deterministic=spec.training.deterministic_reductions
  )
  shape = shape_of(spec.batches, spec.training.gradient_accumulation_steps)
  parameters = []
  leaves = zip(paths_in(params), jax.tree.leaves(params), jax.tree.leaves(names), strict=True)
  for path, leaf, leaf_names in leaves:
    parameters.append(parameter_sharding(path, leaf, leaf_names, sharder))
  check_sharded(parameters, sharder, spec.mesh.sharding_tolerance)

  # The objectives: the optimizer and the batches of each.
  objectives = []
  for each in spec.objectives:
    own_labels = labels.get(each.name)
    own_shape = shape
    if spec.phases is not None:
      try:
        own_shape = shape_of(each.batches, each.gradient_accumulation_steps)
      except UserError as error:
        raise UserError(f"phase {each.name}: {error}") from None
    trained_names, _ = split(names, own_labels)
    tx = build_optimizer(each.optimizer, trained_names, spec.model, spec.stored_hyperparameters)
    objectives.append(Objective(each, own_labels, partitioned(tx, own_labels), own_shape))

  # The program, whose state gets a sharding for every leaf.
  program_type: type[Program] = Program
  for feature in features:
    program_type = feature.program_type or program_type
  program = program_type(
    spec=spec,
    sharder=sharder,
    model=Decoder(spec.model, sharder),
    names=names,
    features=tuple(features),
    objectives=tuple(objectives),
    parameters=tuple(parameters),
    batch_shape=shape,
    abstract_state=None,
  )
  program = dataclasses.replace(program, abstract_state=abstract_state_of(program, params))
  _check_topology(program)
  return program


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
  """A training step on a mesh; everything is compiled on first use."""

  spec: StepSpec
  sharder: Sharder
  model: Decoder
  # The logical axis names of the parameters.
  names: PyTree
  # The innermost first.
  features: tuple[Feature, ...]
  objectives: tuple[Objective, ...]
  parameters: tuple[ParameterSharding, ...]
  # Rows over all devices, and positions, of evaluation batches; without phases of all batches.
  batch_shape: tuple[int, int]
  # ShapeDtypeStructs with shardings.
  abstract_state: Any

  @property
  def mesh(self) -> Mesh:
    return self.sharder.mesh

  @functools.cached_property
  def batch_sharding(self) -> NamedSharding:
    return self.sharder.sharding(("activation_batch", "activation_length"))

  @functools.cached_property
  def compiler_options(self) -> Options:
    """For training steps. Raises UserError if the compiler refuses one that the spec sets."""
    own = [d for d in self.mesh.devices.flat if d.process_index == jax.process_index()]
    return compiler_options(own[0], self.sharder.platform, self.spec.compiler_options)

  def init(self, seed: int, params: PyTree = None) -> TrainState:
    """Initialize the state, every leaf on its own devices; donates `params`, see `init_params`."""
    return self._init(np.uint32(seed), params)

  @functools.cached_property
  def _init(self) -> Callable[[ArrayLike, PyTree], TrainState]:
    def init(seed: ArrayLike, params: PyTree) -> TrainState:
      return first_state(self, meta.unbox(init_params(self, seed, params)), seed)

    return jit_init(init, out_shardings=shardings_of(self.abstract_state), donate_argnums=1)

  @functools.cached_property
  def step(self) -> Step:
    """Take the step that is due: (state, inputs) -> (state, metrics); it donates the state."""
    jitted = self._jit_step(self.objectives[0])
    shapes = self._schedule.shapes
    if len(shapes) == 1:
      return jitted
    batches = [self.abstract_inputs(self.objectives[0], shape) for shape in shapes]
    return compile_for_batches(jitted, self.abstract_state, batches)

  def _jit_step(self, objective: Objective) -> jax.stages.Wrapped:
    state_shardings = shardings_of(self.abstract_state)
    inputs = self.abstract_inputs(objective)
    return jax.jit(
      build_objective_step(self, objective),
      in_shardings=(state_shardings, shardings_of(inputs)),
      out_shardings=(state_shardings, self.sharder.sharding(())),
      donate_argnums=0,
      compiler_options=self.compiler_options or None,
    )

  def lower(self, objective: Objective) -> jax.stages.Lowered:
    """Lower the step of one objective for its batches."""
    inputs = self.abstract_inputs(objective)
    return self._jit_step(objective).lower(self.abstract_state, inputs)

  def compile(self) -> Future:
    """Compile the step, in a thread if there is one program; the first call does it otherwise."""
    shapes = self._schedule.shapes
    if len(shapes) == 1:
      assert isinstance(self.step, jax.stages.Wrapped)  # whose first call finds it in JAX's cache
      inputs = self.abstract_inputs(self.objectives[0], shapes[0])
      lowered = self.step.lower(self.abstract_state, inputs)
      return compile_in_thread(lowered)
    compiled: Future = Future()
    compiled.set_result(self.step)
    return compiled

  def due(self, state: TrainState) -> str:
    """The name of the objective of the step that is due."""
    del state
    return self.objectives[0].name

  @property
  def _schedule(self) -> BatchSchedule:
    (objective,) = self.objectives
    return BatchSchedule.of(objective.spec.batches, objective.batch_shape[0])

  @property
  def kinds(self) -> list[StepKind]:
    """All kinds of steps."""
    return [StepKind(self.objectives[0], shape) for shape in self._schedule.shapes]

  def kind_of(self, step: int, metrics: Mapping[str, np.ndarray]) -> int:
    """The index in `kinds` of `step`, which returned these metrics."""
    del metrics
    return self._schedule.shapes.index(self._schedule.shape(step - 1))

  def build_joint_step(self, *, freeze_diverged: bool = False) -> Step:
    """Build the step that is due as one pure function; see `build_objective_parts`."""
    return build_objective_step(self, self.objectives[0], freeze_diverged=freeze_diverged)

  def describe(self) -> list[str]:
    """Lines on how the steps are compiled."""
    return []

  def abstract_inputs(self, objective: Objective, shape: tuple[int, int] | None = None) -> PyTree:
    """The inputs of a step of `objective`, on a batch of this shape, as ShapeDtypeStructs."""
    kind = LOSSES[objective.spec.loss].batch
    experts = None
    if objective.spec.replays_routes:
      experts = route_shape(self.spec.model)
    batch = abstract_batch(shape or objective.batch_shape, self.batch_sharding, kind, experts)
    return join_inputs(batch, abstract_inputs(self.features))

  def with_extra_inputs(self, batch: DeviceBatch) -> PyTree:
    """The inputs of a step on this global batch."""
    extra: dict[str, PyTree] = {}
    for feature in self.features:
      extra |= feature.inputs()
    return join_inputs(batch, extra)

  def place(self, batch: HostBatch) -> DeviceBatch:
    """Make a global batch of size `batch_shape` from this host's rows (numpy)."""
    return to_global(batch, self.batch_sharding, self.batch_shape)


def build_objective_parts(
  program: Program,
  objective: Objective,
  *,
  freeze_diverged: bool = False,
  check_zero: Callable[[TrainState], jax.Array] | None = None,
) -> StepParts:
  """Build the two parts of the step of one objective, without `Feature.wrap_step`.

  Args:
    freeze_diverged: update nothing after `max_skipped_steps` skipped steps in a row, where a solo
      run would end but an ensemble continues.
    check_zero: whether a step, by the state before it, reports ZERO_GRADIENTS; None: it never does.
  """
  spec = program.spec
  training = spec.training
  loss = DecoderLoss(program.model, LOSSES[objective.spec.loss], training, spec.model.moe)
  for feature in program.features:
    loss = feature.wrap_loss(loss, objective.spec)
  gradients_of = build_gradients(loss, objective.spec.gradient_accumulation_steps)
  post_update = build_routed_bias_update(spec.model.moe) if spec.model.family.is_moe else None
  if training.qk_clip_threshold:
    # Only such a run opens the file.
    from maxlite.training.qk_clip import build_qk_clip, with_max_logits

    gradients_of = with_max_logits(gradients_of)
    num_plain_channels = spec.model.mla.qk_nope_head_dim
    post_update = build_qk_clip(training.qk_clip_threshold, num_plain_channels, post_update)
  for feature in program.features:
    gradients_of = feature.wrap_gradients(gradients_of)
  freeze_after = training.max_skipped_steps if freeze_diverged else None
  spikes = None
  if training.skip_step_on_spikes:
    # Only such a run opens the file.
    from maxlite.step.spikes import SpikeRule

    spikes = SpikeRule(objective.name, training.skip_step_scaling_factor)
  return build_step_parts(
    gradients_of,
    objective.tx,
    labels=objective.labels,
    learning_rate=lambda state: learning_rate(objective.spec.optimizer, state.opt_state),
    ema_decay=training.ema_decay,
    post_update=post_update,
    skip=SkipRule(
      freeze_after=freeze_after,
      spikes=spikes,
      selects=program.sharder.platform == "gpu",
    ),
    check_zero=check_zero,
  )


def build_objective_step(
  program: Program,
  objective: Objective,
  *,
  freeze_diverged: bool = False,
  check_zero: Callable[[TrainState], jax.Array] | None = None,
) -> Step:
  """Build the step of one objective as a pure function; arguments as of `build_objective_parts`."""
  parts = build_objective_parts(
    program, objective, freeze_diverged=freeze_diverged, check_zero=check_zero
  )
  step = repeat_on_batch(join_parts(parts), objective.spec.repeat_batch)
  for feature in program.features:
    step = feature.wrap_step(step, objective.spec)
  return step


def init_params(program: Program, seed: ArrayLike, params: PyTree = None) -> PyTree:
  """The parameters before the first step, with logical names (`nn.Partitioned`).

  They are a pure function of the seed and of `params` if given; adapters and draft heads that these
  lack are new.
  """
  boxed = _init_model(program.model, seed, program.batch_shape[1])
  new = scale_initial(meta.unbox(boxed), logical_names(boxed), program.spec.model)
  if params is not None:
    new = add_missing_modules(params, new)
  return meta.replace_boxed(boxed, new)


def first_state(program: Program, params: PyTree, seed: ArrayLike) -> TrainState:
  """The state before the first step, with these parameters (without logical names)."""
  state = _plain_state(program, params, seed)
  for feature in program.features:
    state = feature.start(state)
  return state


def _plain_state(program: Program, params: PyTree, seed: ArrayLike) -> TrainState:
  """The state before the first step, without the features."""
  trained: Labels = None
  if program.spec.phases is None:
    opt_state = program.objectives[0].tx.init(params)
  else:
    trained = union(each.labels for each in program.objectives)
    optimizers = {each.name: each.tx for each in program.objectives}
    (scheduler,) = [each for each in program.features if each.program_type is not None]
    opt_state = scheduler.init_opt_state(params, optimizers)
  averaged = None
  if program.spec.training.ema_decay:
    averaged, _ = split(params, trained)
  spikes = None
  if program.spec.training.skip_step_on_spikes:
    from maxlite.step.spikes import init_window

    interval = program.spec.training.skip_step_interval
    spikes = {each.name: init_window(interval) for each in program.objectives}
  return init_state(
    params,
    opt_state=opt_state,
    rng=jax.random.key_data(jax.random.fold_in(jax.random.key(seed), 1)),
    averaged=averaged,
    spikes=spikes,
  )


def abstract_state_of(program: Program, params: PyTree) -> TrainState:
  """The state of a program as ShapeDtypeStructs with shardings; `params` without them."""

  def shard(tree: PyTree) -> PyTree:
    names = state_names(tree, params, program.names)
    return jax.tree.map(lambda leaf_names: program.sharder.sharding(tuple(leaf_names)), names)

  state = jax.eval_shape(lambda params: _plain_state(program, params, jnp.uint32(0)), params)
  shardings = shard(state)
  for feature in program.features:
    shardings = feature.shard_state(shardings, state, shard)
    state = jax.eval_shape(feature.start, state)
  return jax.tree.map(lambda leaf, sharding: leaf.update(sharding=sharding), state, shardings)


def _abstract_params(spec: StepSpec, sharder: Sharder) -> PyTree:
  """The shapes of the parameters, with logical names (`nn.Partitioned`).

  They come from one device: on the mesh, JAX would fail first, with its own error messages.
  """
  one = sharder
  if sharder.mesh.size > 1:
    degrees = (1,) * len(MESH_AXES)
    one = Sharder(build_mesh(degrees, degrees, [sharder.mesh.devices.flat[0]]))
  model = Decoder(spec.model, one)
  length = spec.batches.max_target_length
  return jax.eval_shape(lambda: _init_model(model, np.uint32(0), length))


@functools.partial(jax.jit, static_argnums=(0, 2), inline=True)
def _init_model(model: Decoder, seed: ArrayLike, length: int) -> PyTree:
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


def mesh_degrees(cfg: MeshConfig, group: str) -> list[int]:
  """The degrees of `group`, "ici" or "dcn", in the order of the mesh axes."""
  return [getattr(cfg, f"{group}_{mesh_axis}_parallelism") for mesh_axis in MESH_AXES]


def shardings_of(tree: PyTree) -> PyTree:
  """The sharding of every leaf."""
  return jax.tree.map(lambda leaf: leaf.sharding, tree)


def join_inputs(batch: DeviceBatch | AbstractBatch, extra: dict[str, PyTree]) -> PyTree:
  """The inputs of a step: the batch alone if there are no others."""
  if not extra:
    return batch
  return StepInputs(batch, extra)


def with_routes(program: Program) -> Program:
  """The program whose batches have the experts of their tokens, which the steps replay."""
  objectives = []
  for each in program.objectives:
    spec = dataclasses.replace(each.spec, replays_routes=True)
    objectives.append(dataclasses.replace(each, spec=spec))
  return dataclasses.replace(program, objectives=tuple(objectives))


def inputs_hash(program: Program) -> str:
  """A hash of the inputs of a step besides its batch; empty if there are none."""
  return " ".join(each.inputs_hash for each in program.features if each.inputs_hash)


def parameter_sizes(program: Program) -> dict[str, int]:
  """The number of elements of every parameter, by path."""
  return {each.path: math.prod(each.shape) for each in program.parameters}


def step_flops(program: Program, kind: StepKind) -> float:
  """FLOPs of a step over all devices."""
  objective = kind.objective
  loss = LOSSES[objective.spec.loss]
  trained = None
  if objective.labels is not None:
    trained = trained_paths(objective.labels)
  flops = train_flops(
    program.spec.model,
    parameter_sizes(program),
    kind.batch_shape,
    trained,
    logits=loss.logits,
    drafts=loss.drafts or program.spec.model.mtp_num_layers > 0,
  ).total
  for feature in program.features:
    flops += feature.flops(objective.spec, kind.batch_shape)
  return flops * objective.spec.repeat_batch


def flops_per_step(program: Program) -> list[float]:
  """FLOPs of a step over all devices, by objective."""
  return [step_flops(program, StepKind(each, each.batch_shape)) for each in program.objectives]


def check_devices(program: Program) -> None:
  """Raise UserError if the ragged all-to-all gives wrong results on these accelerators."""
  if uses_all_to_all(program) and program.sharder.platform != "cpu":
    check_all_to_all(program.mesh, program.sharder.mesh_axes("exp"))


def uses_all_to_all(program: Program) -> bool:
  """Whether tokens reach their experts by the ragged all-to-all."""
  model = program.spec.model
  is_ragged = choose_dispatch(model.moe).collective == "ragged-all-to-all"
  return model.family.is_moe and is_ragged and program.sharder.num_shards("exp") > 1


def _check_topology(program: Program) -> None:
  """Raise UserError for the slices of TPU v5e that XLA has no ragged all-to-all for."""
  kind = program.mesh.devices.flat[0].device_kind
  num_devices = program.mesh.size
  is_v5e = kind in ("TPU v5 lite", "TPU v5e")
  if uses_all_to_all(program) and is_v5e and num_devices > MAX_CHIPS_OF_V5E:
    raise UserError(
      f"{num_devices} chips of {kind}: XLA has no ragged all-to-all for slices above 4x4; write "
      "use_ring_of_experts=true, or ici_expert_parallelism=1"
    )
