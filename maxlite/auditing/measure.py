"""Takes one step of every objective in one way, and returns all of its results on the host."""

import dataclasses
import functools
import re
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.linen import meta

from maxlite.auditing.shrink import LENGTH, ROWS, VOCAB
from maxlite.auditing.variants import Variant
from maxlite.config.schema import Config, LoraConfig, ModelConfig
from maxlite.data.batch import Batch, HostBatch
from maxlite.models.layer_stacks import layer_stacks
from maxlite.optim.labels import paths_in, split
from maxlite.registry import PREFERENCE_LOSSES, ROLLOUT_LOSSES
from maxlite.sharding import Sharder
from maxlite.sharding.logical_axis_rules import LogicalNames
from maxlite.sharding.pytree import PyTree
from maxlite.step.train_state import TrainState
from maxlite.training.feature import Feature
from maxlite.training.features.frozen_models import FrozenModel, FrozenModels
from maxlite.training.features.reference import REFERENCE, Reference
from maxlite.training.features.teacher import Teacher
from maxlite.training.model_weights import ModelWeights
from maxlite.training.policy_loss import ON_POLICY, PolicyBatch
from maxlite.training.program import (
  Objective,
  Program,
  abstract_state_of,
  build_objective_step,
  build_program,
  first_state,
  shardings_of,
)
from maxlite.training.spec import StepSpec

# A step runs once: LLVM's optimizations would take longer than they save.
QUICK_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
Arrays = dict[str, np.ndarray]  # by path


@dataclasses.dataclass(frozen=True)
class StepResults:
  """All results of a step of one objective, on the host; layers are stacked."""

  gradients: Arrays
  update: Arrays  # the change of every parameter
  state: Arrays  # optimizer state, averages and counters
  metrics: Arrays

  @property
  def loss(self) -> np.ndarray:
    return self.metrics["total_loss"] if "total_loss" in self.metrics else self.metrics["loss"]


class Recorded(NamedTuple):
  """The state of an optimizer, with the gradients of its last update."""

  gradients: PyTree
  inner: optax.OptState


class Steps:
  """The steps of a tiny spec, one per objective; each is compiled on first use."""

  def __init__(self, spec: StepSpec, num_devices: int):
    """Raises UserError if the model does not fit this mesh, or its config this path."""
    self.program = build_tiny_program(spec, jax.devices()[:num_devices])
    # The logical axes of its parameters and, once it is traced, of its activations.
    self.used_axes = {name for each in self.program.parameters for name in each.names if name}
    if num_devices == 1:
      plain = self.program.sharder
      sharder = _RecordingSharder(
        plain.mesh, plain.overrides, plain.gather_by_permutes, self.used_axes
      )
      model = self.program.model.clone(sharder=sharder)
      self.program = dataclasses.replace(self.program, model=model)
    self.jaxprs: dict[str, Any] = {}  # by objective, what was traced
    self._compiled: dict[tuple[str, tuple[int, ...]], Callable[..., Any]] = {}

  @property
  def objectives(self) -> dict[str, Objective]:
    return {each.name: each for each in self.program.objectives}

  @functools.cached_property
  def _axes(self) -> dict[str, tuple[str | None, ...]]:
    names = self.program.names
    return {
      self.stacked_path(path): tuple(axes)
      for path, axes in zip(paths_in(names), jax.tree.leaves(names), strict=True)
    }

  def axes(self, path: str) -> tuple[str | None, ...]:
    """The logical axes of a parameter; `path` is that of stacked layers."""
    return self._axes[path]

  def stacked_path(self, path: str) -> str:
    """The path of a parameter of one layer in a tree with stacked layers."""
    if self.program.spec.model.scan_layers:
      return path
    return _layer_number(self.program.spec.model).sub(r"\1\2", path)

  def start(self) -> TrainState:
    """The state before the first step, of tiny_params."""
    run = jax.jit(lambda params: first_state(self.program, params, 0))
    return jax.device_get(run(tiny_params(self.program)))

  def take(
    self, name: str, state: TrainState, batch: HostBatch, extra: PyTree = None
  ) -> tuple[TrainState, Arrays]:
    """(state, metrics) on the host after a step of this objective.

    Args:
      extra: other inputs besides the batch than the program's own.
    """
    program = self.program
    placed = jax.device_put(state, shardings_of(program.abstract_state))
    inputs = program.with_extra_inputs(jax.device_put(batch, program.batch_sharding))
    if extra is not None:
      inputs = dataclasses.replace(inputs, extra=inputs.extra | extra)
    key = name, batch.tokens_BT.shape
    if key not in self._compiled:
      step = build_objective_step(program, self.objectives[name])
      traced = jax.jit(step, compiler_options=QUICK_COMPILE).trace(placed, inputs)
      self.jaxprs[name] = traced.jaxpr
      self._compiled[key] = traced.lower().compile()
    new, metrics = jax.device_get(self._compiled[key](placed, inputs))
    return new, _flat(dict(metrics))

  def flat(self, state: TrainState) -> Arrays:
    """The leaves of a state by path, with layers stacked."""
    return _stacked(self.program.spec.model, _flat(state))

  def unflat(self, arrays: Arrays) -> TrainState:
    """The state of which `arrays` are the leaves by path, with layers stacked."""
    like = self.program.abstract_state
    pattern = _layer_number(self.program.spec.model)
    leaves = []
    for path in paths_in(like):
      match = None if path in arrays else pattern.search(path)
      if match is None:
        leaves.append(arrays[path])
      else:
        leaves.append(arrays[pattern.sub(r"\1\2", path)][int(match[3])])
    return jax.tree.unflatten(jax.tree.structure(like), leaves)

  def results(self, before: TrainState, after: TrainState, metrics: Arrays) -> StepResults:
    """The results of a step between two states."""
    model = self.program.spec.model

    def is_recorded(node: object) -> bool:
      return isinstance(node, Recorded)

    gradients: Arrays = {}
    for record in jax.tree.leaves(after.opt_state, is_leaf=is_recorded):
      for path, leaf in _stacked(model, _flat(record.gradients)).items():
        # An optimizer state that several objectives have is zero in all but this objective's.
        gradients[path] = gradients.get(path, 0) + leaf
    inner = jax.tree.map(lambda record: record.inner, after.opt_state, is_leaf=is_recorded)
    rest = {"optimizer": inner, "ema": after.ema, "clock": after.clock}
    rest |= {"skipped": after.skipped, "step": after.step}
    update = jax.tree.map(np.subtract, after.params, before.params)
    return StepResults(
      gradients=gradients,
      update=_stacked(model, _flat(update)),
      state=_stacked(model, _flat(rest)),
      metrics=metrics,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _RecordingSharder(Sharder):
  """Records the logical axes for which it is asked."""

  used_axes: set[str] = dataclasses.field(default_factory=set)

  def constrain(self, x: jax.Array, names: LogicalNames) -> jax.Array:
    self.used_axes.update(name for name in names if name)
    return super().constrain(x, names)

  def mesh_axes(self, name: str | None) -> tuple[str, ...]:
    self.used_axes.update([name] if name else [])
    return super().mesh_axes(name)


class Measured(NamedTuple):
  """A variant's results."""

  results: dict[str, StepResults]  # by objective
  seconds: float
  steps: Steps
  start: Arrays  # the state before the step, by path
  fresh: Arrays  # the state before the first step, which only the reference takes


def measure(spec: StepSpec, variant: Variant, start: Arrays | None = None) -> Measured:
  """Take one step of every objective of the tiny `spec` in the way of `variant`.

  Args:
    start: the state before it, by path, with layers stacked; None: the state after a first step
      of every objective, so that no moment of the optimizer is zero.

  Raises:
    UserError: the model does not fit this mesh, or its config this path.
  """
  begin = time.perf_counter()
  results = {}
  with jax.enable_x64(True):
    steps = Steps(variant.spec_of(spec), variant.num_devices)
    fresh: Arrays = {}
    if start is None:
      first = steps.start()
      fresh = steps.flat(first)
      start = steps.flat(_after_a_step(steps, first))
    state = steps.unflat(start)
    for name, objective in steps.objectives.items():
      batch = tiny_batch(objective.spec.loss, rows=variant.rows)
      after, metrics = steps.take(name, state, batch)
      results[name] = steps.results(state, after, metrics)
  return Measured(results, time.perf_counter() - begin, steps, start, fresh)


def _after_a_step(steps: Steps, state: TrainState) -> TrainState:
  """The state after a step of every objective on other rows."""
  params = state.params
  for name, objective in steps.objectives.items():
    batch = tiny_batch(objective.spec.loss, seed=1)
    state, _ = steps.take(name, state, batch)

  def clear(node: PyTree) -> PyTree:
    if isinstance(node, Recorded):
      return Recorded(jax.tree.map(np.zeros_like, node.gradients), node.inner)
    return node

  cleared = jax.tree.map(clear, state.opt_state, is_leaf=lambda node: isinstance(node, Recorded))
  if steps.program.spec.training.qk_clip_threshold:  # of which the step clips what is above
    state = state.replace(params=params)
  # A small learning rate would leave averages and parameters nearly the same.
  apart = jax.tree.map(lambda mean: 1.1 * mean + 0.01, state.ema)
  return state.replace(opt_state=cleared, ema=apart)


def build_tiny_program(spec: StepSpec, devices: Sequence[jax.Device]) -> Program:
  """The program, with optimizers whose states have the gradients of the step."""
  program = build_program(spec, devices, Config())

  def record(objective: Objective) -> Objective:
    tx = objective.tx

    def init(params: PyTree) -> Recorded:
      trained, _ = split(params, objective.labels)
      return Recorded(jax.tree.map(jnp.zeros_like, trained), tx.init(params))

    def update(
      gradients: PyTree, state: Recorded, params: PyTree = None
    ) -> tuple[PyTree, Recorded]:
      updates, inner = tx.update(gradients, state.inner, params)
      return updates, Recorded(gradients, inner)

    return dataclasses.replace(objective, tx=optax.GradientTransformation(init, update))

  params = program.abstract_state.params
  program = dataclasses.replace(
    program,
    objectives=tuple(map(record, program.objectives)),
    features=tuple(_with_tiny_models(feature, spec, devices) for feature in program.features),
  )
  return dataclasses.replace(program, abstract_state=abstract_state_of(program, params))


def _with_tiny_models(feature: Feature, spec: StepSpec, devices: Sequence[jax.Device]) -> Feature:
  """A feature with random models instead of those in folders."""
  is_reference = isinstance(feature, Reference) and bool(spec.training.reference_path)
  if not is_reference and not isinstance(feature, Teacher):
    return feature
  plain = dataclasses.replace(spec.objectives[0], name="train", loss="next_token", train=None)
  model = dataclasses.replace(spec.model, lora=LoraConfig(), mtp_num_layers=0, num_draft_heads=0)
  frozen = dataclasses.replace(spec, model=model, objectives=(plain,), phases=None)
  program = build_program(frozen, devices)
  models = [FrozenModel(_RandomWeights(seed), program, program) for seed in (1, 2)]
  if isinstance(feature, Teacher):
    feature.models = models  # two, whose predictions are averaged
    return feature
  folder = FrozenModels(REFERENCE, Config(), program.mesh, lambda _: ())
  folder.models = models[:1]
  return Reference(spec, folder)


class _RandomWeights(ModelWeights):
  """Random parameters of a model."""

  def __init__(self, seed: int):
    self._seed = seed

  def read(self, program: Program) -> PyTree:
    shardings = shardings_of(program.abstract_state.params)
    return jax.device_put(tiny_params(program, self._seed), shardings)


def _flat(tree: PyTree) -> Arrays:
  leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
  return dict(zip(paths_in(tree), leaves, strict=True))


def _layer_number(model: ModelConfig) -> re.Pattern:
  """Matches the part of a path that names one layer of a stack that is not scanned.

  Those of multi-token prediction never are.
  """
  names = "|".join(stack.name for stack in layer_stacks(model))
  return re.compile(rf"(^|(?<!\bmtp)/)({names})_(\d+)(?=/)")


def _stacked(model: ModelConfig, arrays: Arrays) -> Arrays:
  """layers_0/x, layers_1/x, ... as one layers/x, which a scan has; other arrays as they are."""
  if model.scan_layers:
    return arrays
  pattern = _layer_number(model)
  flat: Arrays = {}
  layers: dict[str, dict[int, np.ndarray]] = {}
  for path, leaf in arrays.items():
    match = pattern.search(path)
    if match is None:
      flat[path] = leaf
    else:
      layers.setdefault(pattern.sub(r"\1\2", path), {})[int(match[3])] = leaf
  for path, by_layer in layers.items():
    flat[path] = np.stack([by_layer[i] for i in sorted(by_layer)])
  return flat


def tiny_params(program: Program, seed: int = 0) -> PyTree:
  """Random parameters, functions of path and layer alone: no gradient is zero by their symmetry."""
  model = program.spec.model
  pattern = _layer_number(model)
  centre = 0.0 if model.family.zero_centred_norms else 1.0
  shapes = program.abstract_state.params
  leaves = []
  names = jax.tree.leaves(program.names)
  for path, leaf, axes in zip(paths_in(shapes), jax.tree.leaves(shapes), names, strict=True):
    match = None if model.scan_layers else pattern.search(path)
    stacked_path = path if match is None else pattern.sub(r"\1\2", path)
    numbers = [0] if match is None else [int(match[3])]
    shape = leaf.shape
    axis = axes.index("layers") if "layers" in axes else None
    if axis is not None:
      numbers = list(range(shape[axis]))
      shape = (*shape[:axis], *shape[axis + 1 :])
    layers = [_draw(stacked_path, [number, seed], shape, centre) for number in numbers]
    leaves.append(layers[0] if axis is None else np.stack(layers, axis))
  return meta.unbox(jax.tree.unflatten(jax.tree.structure(shapes), leaves))


def _draw(path: str, seeds: list[int], shape: tuple[int, ...], centre: float) -> np.ndarray:
  noise = np.random.default_rng([zlib.crc32(path.encode()), *seeds]).normal(size=shape)
  if "scale" in path:
    return centre + noise / 4
  return noise / 3


def tiny_batch(loss: str, *, rows: str = "", seed: int = 0) -> HostBatch:
  """Rows of several documents and unequal length, some of padding only, with random weights.

  Args:
    loss: a name in the table LOSSES, which may need pairs or weights of 0 and 1.
  """
  draw = np.random.default_rng(seed)
  has_pairs = loss in PREFERENCE_LOSSES
  tokens_BT = draw.integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32)
  is_start_BT = np.diff(np.sort(draw.integers(1, 4, (ROWS, LENGTH))), prepend=0) > 0
  segment_BT = np.cumsum(is_start_BT, axis=1, dtype=np.int32)  # without gaps in the numbers
  length_B = draw.integers(LENGTH // 2, LENGTH + 1, ROWS)
  length_B[[2, 7, 8, 9]] = 0
  if has_pairs:  # segments 1 and 2 of a row
    segment_BT = np.ones_like(segment_BT)
    segment_BT[:, LENGTH // 4 :] = 2
  segment_BT *= np.arange(LENGTH) < length_B[:, None]
  batch = Batch.of(tokens_BT, segment_BT)
  # Some are zero, as those of prompts.
  weight_BT = batch.weight_BT * (draw.random((ROWS, LENGTH)) > 0.2)
  if not has_pairs and loss not in ROLLOUT_LOSSES:
    weight_BT = weight_BT * draw.uniform(0.2, 2, (ROWS, LENGTH))
  batch = batch.replace(weight_BT=weight_BT.astype(np.float64))
  if loss in ROLLOUT_LOSSES:
    behaviour_BT = draw.uniform(-6, -1, (ROWS, LENGTH))
    behaviour_BT[draw.random((ROWS, LENGTH)) < 0.3] = ON_POLICY
    batch = PolicyBatch(
      **vars(batch),
      advantage_BT=draw.normal(size=(ROWS, LENGTH)),
      behaviour_BT=behaviour_BT,
    )
  return ROW_CHANGES[rows](batch)


def _shuffle(batch: HostBatch) -> HostBatch:
  order_B = np.random.default_rng(1).permutation(ROWS)
  return jax.tree.map(lambda x_BT: x_BT[order_B], batch)


def _unpack(batch: HostBatch) -> HostBatch:
  """Each document in a row of its own, and rows of padding."""
  rows = []
  for row in range(ROWS):
    for segment in range(1, 4):
      is_own_T = batch.segment_BT[row] == segment
      start = int(np.argmax(is_own_T))
      document = {
        field.name: np.roll(np.where(is_own_T, getattr(batch, field.name)[row], 0), -start)
        for field in dataclasses.fields(batch)
        if getattr(batch, field.name) is not None
      }
      rows.append(type(batch)(**document))
  unpacked = jax.tree.map(lambda *x_T: np.stack(x_T), *rows)
  return unpacked.replace(segment_BT=np.minimum(unpacked.segment_BT, 1))


ROW_CHANGES: dict[str, Callable[[HostBatch], HostBatch]] = {
  "": lambda batch: batch,
  "shuffled": _shuffle,
  "a document each": _unpack,
}
