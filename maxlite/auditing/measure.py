"""Takes one step of every objective in one way, and returns all of its results on the host."""

import dataclasses
import re
import time
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.linen import meta

from maxlite.auditing.shrink import LENGTH, ROWS, VOCAB
from maxlite.auditing.variants import Variant
from maxlite.config.layer_stacks import layer_stacks
from maxlite.config.schema import ModelConfig
from maxlite.data.batch import Batch, HostBatch
from maxlite.optim.labels import paths_in, split, state_names
from maxlite.registry import PREFERENCE_LOSSES
from maxlite.sharding.pytree import PyTree
from maxlite.step.train_state import TrainState
from maxlite.training.program import (
  Objective,
  Program,
  build_objective_step,
  build_program,
  first_state,
  join_inputs,
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


class Measured(NamedTuple):
  """A variant's results."""

  results: dict[str, StepResults]  # by objective
  seconds: float
  jaxprs: dict[str, Any]  # by objective, what was traced
  program: Program


class Recorded(NamedTuple):
  """The state of an optimizer, with the gradients of its last update."""

  gradients: PyTree
  inner: optax.OptState


def measure(spec: StepSpec, variant: Variant) -> Measured:
  """Take one step of every objective of the tiny `spec` in the way of `variant`.

  Raises:
    UserError: the model does not fit this mesh, or its config this path.
  """
  start = time.perf_counter()
  results = {}
  jaxprs = {}
  with jax.enable_x64(True):
    devices = jax.devices()[: variant.num_devices]
    program = _recording(build_program(variant.spec_of(spec), devices))
    params = tiny_params(program)
    for objective in program.objectives:
      batch = tiny_batch(has_pairs=objective.spec.loss in PREFERENCE_LOSSES, rows=variant.rows)
      results[objective.name], jaxprs[objective.name] = _take_step(
        program, objective, params, batch
      )
  return Measured(results, time.perf_counter() - start, jaxprs, program)


def _recording(program: Program) -> Program:
  """The program with optimizers whose states have the gradients of the step."""

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

  return dataclasses.replace(program, objectives=tuple(map(record, program.objectives)))


def _take_step(
  program: Program, objective: Objective, params: PyTree, batch: HostBatch
) -> tuple[StepResults, Any]:
  """(results, the traced step)."""
  sharder = program.sharder
  step = build_objective_step(program, objective)

  def run(params: PyTree, batch: Batch) -> tuple[TrainState, PyTree]:
    state = first_state(program, params, 0)
    names = state_names(state.opt_state, params, program.names)
    shardings = jax.tree.map(lambda axes: sharder.sharding(tuple(axes)), names)
    state = state.replace(opt_state=jax.lax.with_sharding_constraint(state.opt_state, shardings))
    return step(state, join_inputs(batch, {}))

  param_shardings = jax.tree.map(lambda leaf: leaf.sharding, program.abstract_state.params)
  jitted = jax.jit(run, compiler_options=QUICK_COMPILE)
  placed = jax.device_put(params, param_shardings)
  rows = jax.device_put(batch, program.batch_sharding)
  traced = jitted.trace(placed, rows)
  state, metrics = jax.device_get(traced.lower().compile()(placed, rows))

  model = program.spec.model

  def is_recorded(node: object) -> bool:
    return isinstance(node, Recorded)

  gradients: Arrays = {}
  for record in jax.tree.leaves(state.opt_state, is_leaf=is_recorded):
    for path, leaf in _stacked(model, _flat(record.gradients)).items():
      # An optimizer state that several objectives have is zero in all but this objective's.
      gradients[path] = gradients.get(path, 0) + leaf
  inner = jax.tree.map(lambda record: record.inner, state.opt_state, is_leaf=is_recorded)
  update = jax.tree.map(np.subtract, state.params, params)
  rest = {"optimizer": inner, "ema": state.ema, "clock": state.clock}
  rest |= {"skipped": state.skipped, "step": state.step}
  results = StepResults(
    gradients=gradients,
    update=_stacked(model, _flat(update)),
    state=_stacked(model, _flat(rest)),
    metrics=_flat(dict(metrics)),
  )
  return results, traced.jaxpr


def _flat(tree: PyTree) -> Arrays:
  leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
  return dict(zip(paths_in(tree), leaves, strict=True))


def _layer_number(model: ModelConfig) -> re.Pattern:
  """Matches the part of a path that names one layer of a stack that is not scanned."""
  names = "|".join(stack.name for stack in layer_stacks(model))
  return re.compile(rf"(^|/)({names})_(\d+)(?=/)")


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


def tiny_params(program: Program) -> PyTree:
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
    layers = [_draw(stacked_path, number, shape, centre) for number in numbers]
    leaves.append(layers[0] if axis is None else np.stack(layers, axis))
  return meta.unbox(jax.tree.unflatten(jax.tree.structure(shapes), leaves))


def _draw(path: str, number: int, shape: tuple[int, ...], centre: float) -> np.ndarray:
  noise = np.random.default_rng([zlib.crc32(path.encode()), number]).normal(size=shape)
  if "scale" in path:
    return centre + noise / 4
  return noise / 3


def tiny_batch(*, has_pairs: bool, rows: str) -> HostBatch:
  """Rows of several documents and unequal length, some of padding only, with random weights."""
  draw = np.random.default_rng(0)
  tokens_BT = draw.integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32)
  segment_BT = np.sort(draw.integers(1, 4, (ROWS, LENGTH)), axis=1).astype(np.int32)
  length_B = draw.integers(LENGTH // 2, LENGTH + 1, ROWS)
  length_B[[2, 7, 8, 9]] = 0
  if has_pairs:  # segments 1 and 2 of a row
    segment_BT = np.ones_like(segment_BT)
    segment_BT[:, LENGTH // 4 :] = 2
  segment_BT *= np.arange(LENGTH) < length_B[:, None]
  batch = Batch.of(tokens_BT, segment_BT)
  weight_BT = batch.weight_BT
  if not has_pairs:
    weight_BT = weight_BT * draw.uniform(0.2, 2, (ROWS, LENGTH))
  batch = batch.replace(weight_BT=weight_BT.astype(np.float64))
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
      rows.append(Batch(**document))
  unpacked = jax.tree.map(lambda *x_T: np.stack(x_T), *rows)
  return unpacked.replace(segment_BT=np.minimum(unpacked.segment_BT, 1))


ROW_CHANGES: dict[str, Callable[[HostBatch], HostBatch]] = {
  "": lambda batch: batch,
  "shuffled": _shuffle,
  "a document each": _unpack,
}
