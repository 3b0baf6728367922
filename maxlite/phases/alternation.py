"""Alternating training from Python: phases that train one part of any model, the rest frozen.

    alternation = Alternation([Phase("fit", train=["a/.*"], loss=fit_loss, ...), Phase(...)])
    state = alternation.init(params)
    state, metrics = alternation.step(state, batch)

Instead of parameters, `init` takes a model of Equinox or NNX; the losses then get the model.

A frozen leaf gets no gradient, weight decay, share of the clipping norm or EMA update: it keeps its
bits.
"""

import os
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import SupportsIndex, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding

from maxlite.config.schema import PHASE_STRATEGIES
from maxlite.errors import UserError
from maxlite.libraries.as_model import as_model, library_of
from maxlite.libraries.model import Model
from maxlite.metrics.waits import report_wait
from maxlite.optim.labels import (
  Labels,
  frozen_paths,
  labels_by_phase,
  partitioned,
  path_of,
  paths_in,
  split,
  state_names,
  trained_paths,
  union,
)
from maxlite.phases.module_collections import freeze_collections
from maxlite.phases.phase import Phase, check_phases
from maxlite.phases.phase_functions import PhaseLoss, check_divides
from maxlite.phases.phase_opt_states import init_opt_states, owners_of
from maxlite.phases.phase_programs import PhasePrograms, build_phase_step
from maxlite.phases.phase_schedule import PhaseSchedule
from maxlite.phases.update_step import build_update_step
from maxlite.phases.zero_gradients import check_any_gradient, shown_paths, zero_among
from maxlite.sharding.pytree import PyTree
from maxlite.step.api_checks import check_not_donated
from maxlite.step.fit import FitKeywords, FitOptions, Fitted, check_fit, fit, read_states
from maxlite.step.gradients import build_gradients
from maxlite.step.train_state import Metrics, TrainState, averaged_params, init_state
from maxlite.step.train_step import (
  SkipRule,
  Step,
  StepResult,
  build_train_step,
  repeat_on_batch,
)

_STEPS_IN_FLIGHT = 2  # steps after which the host reads whether a step was skipped


class Alternation:
  """Phases that train one tree of parameters alternately.

  The state is a `TrainState`; every step donates it. It has the sharding of the parameters, also on
  a mesh. A step whose loss or gradient is not finite updates nothing and is counted in the metrics
  `skipped` and `skipped_in_a_row`.
  """

  def __init__(
    self,
    phases: Sequence[Phase],
    *,
    initial_phases: Mapping[str, int] | None = None,
    strategy: str = "auto",
    ema_decay: float | None = None,
    max_skipped_steps: int = 10,
  ):
    """
    Args:
      initial_phases: by phase, steps that it takes alone before the cycle begins. A phase without
        `steps` and `until` is not in the cycle.
      strategy: `separate`, a program per phase; `switch`, one for all; or `auto`.
      ema_decay: keeps a moving average of the parameters, updated in steps that train them.
      max_skipped_steps: consecutive skipped steps after which `step` raises UserError.

    Raises:
      UserError: no phases, a duplicate name, or an invalid length, name or choice.
    """
    check_phases(phases)
    if strategy not in PHASE_STRATEGIES:
      raise UserError(f"no strategy {strategy!r}; choose one of {', '.join(PHASE_STRATEGIES)}")
    if ema_decay is not None and not 0 <= ema_decay < 1:
      raise UserError(f"ema_decay={ema_decay} is not from 0 to below 1; 0.999 is usual")
    if not isinstance(max_skipped_steps, SupportsIndex) or int(max_skipped_steps) < 1:
      raise UserError(f"max_skipped_steps={max_skipped_steps}: give an integer, at least 1")
    self.phases = list(phases)
    self.names = [phase.name for phase in phases]
    lengths = {phase.name: phase.until or phase.steps for phase in phases}
    self._schedule = PhaseSchedule(lengths, initial_phases)
    with_gradient = [phase for phase in phases if phase.update is None]
    # By phase with a gradient, the phase whose optimizer state it updates.
    self._owners = owners_of({phase.name: phase.share_optimizer_state for phase in with_gradient})
    self._strategy = strategy
    self._ema_decay = ema_decay
    self._max_skipped_steps = max_skipped_steps
    self._programs: PhasePrograms | None = None
    self._model: Model | None = None  # None: the state has a tree of parameters
    self._labels: dict[str, Labels] = {}  # by phase, of the parameters that are compiled for
    self._paths: list[str] = []  # of these parameters
    # Metrics of the latest steps, and the count of steps in the state that the last one returned.
    self._latest: deque[Metrics] = deque()
    self._last_count: jax.Array | None = None

  @property
  def reason(self) -> str:
    """The strategy in use and its reason; empty before anything is compiled."""
    if self._programs is None:
      return ""
    return f"{self._programs.strategy}: {self._programs.reason}"

  @property
  def num_compiled(self) -> int:
    """Number of programs compiled so far."""
    return len(self.programs)

  @property
  def programs(self) -> dict[str, jax.stages.Compiled]:
    """The compiled programs: by phase, or one called `switch`."""
    if self._programs is None:
      return {}
    return dict(self._programs.compiled)

  def timeline(self, num_steps: int) -> list[tuple[int, int, str]]:
    """(first step, last step, phase) of each span in `num_steps` steps, counted from 1.

    Raises:
      UserError: a phase ends on a condition.
    """
    return self._schedule.timeline(num_steps)

  def untrained(self, params: PyTree) -> list[str]:
    """Paths of the parameters, which may be a model's, that no phase trains."""
    _, params, _ = _open_model(params, None, seed=0)
    return frozen_paths(*self._labels_of(params).values())

  def init(self, params: PyTree, collections: PyTree = None, seed: int = 0) -> TrainState:
    """Initialize the state from copies of `params`.

    Args:
      params: any tree of arrays; or a model: an Equinox module (or one and its state), an NNX
        module, or a function of a random key (of `rngs`, for NNX) that makes one.
      seed: of the random keys that losses get, and of a model that is made.

    Raises:
      UserError: a regex is invalid or matches no parameter.
    """
    self._model, params, collections = _open_model(params, collections, seed)
    shapes = self._abstract_state(params, collections)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, shapes)
    init = jax.jit(self._init, out_shardings=shardings)
    return init(params, collections, jnp.uint32(seed))

  def abstract_state(self, params: PyTree, collections: PyTree = None) -> TrainState:
    """Shapes, types and shardings of the state, for restoring a checkpoint.

    The state is on the mesh of `params`; an optimizer's slots are sharded like their parameters.
    """
    self._model, params, collections = _open_model(params, collections, seed=0)
    return self._abstract_state(params, collections)

  def model(self, state: TrainState) -> PyTree:
    """A copy of the trained model in the form that `init` got; of a tree, the parameters."""
    _check_state(state)
    params, collections = jax.tree.map(jnp.copy, (state.params, state.collections))
    return self._own(params, collections)

  def _own(self, params: PyTree, collections: PyTree) -> PyTree:
    if self._model is None:
      return params
    return self._model.own({"params": params, **collections})

  def _abstract_state(self, params: PyTree, collections: PyTree) -> TrainState:
    _check_arrays(params)
    shapes = jax.eval_shape(self._init, params, collections, jnp.uint32(0))
    specs = state_names(shapes, params, jax.tree.map(_spec, params))
    specs = specs.replace(collections=jax.tree.map(_spec, collections))
    mesh = _mesh_of(params)

    def place(leaf: jax.ShapeDtypeStruct, spec: jax.P) -> jax.ShapeDtypeStruct:
      return leaf.update(sharding=NamedSharding(mesh, spec))

    return jax.tree.map(place, shapes, specs)

  def compile(
    self, state: PyTree, batch: PyTree, own_batches: Mapping[str, PyTree] | None = None
  ) -> None:
    """Compile all phases for a state and batches of these shapes; by default the first step does.

    `own_batches` has, by phase, batches that are not shaped like `batch`.
    """
    batches = dict.fromkeys(self.names, batch)
    if own_batches is not None:
      batches |= own_batches
    self._labels = self._labels_of(state.params)
    self._paths = paths_in(state.params)
    steps = {}
    for index, name in enumerate(self.names):
      steps[name] = self._build_step(index, self._labels[name])
    with report_wait(f"compiling the phases {', '.join(self.names)}"):
      self._programs = PhasePrograms(
        steps,
        self._schedule,
        self._strategy,
        state,
        batches,
        check_gradients=self._check_gradients,
      )

  def step(self, state: TrainState, batch: PyTree) -> StepResult:
    """Take a step of the phase that is due: (state, metrics).

    The metrics are `loss`, those of the phase's loss, `phase`, an index into `names`, and
    `grad_norm`, `skipped` and `skipped_in_a_row`. A phase without a gradient has no `loss` and
    `grad_norm`.

    Raises:
      UserError: `state` was given to an earlier step, or differs in shape from the compiled one;
        in the first step of a phase, all its gradients are zero; or too many consecutive steps
        were skipped, as known two steps later.
    """
    _check_state(state)
    if self._programs is None:
      self.compile(state, batch)
    assert self._programs is not None
    if state.clock.step is not self._last_count:  # the state of another training
      self._latest.clear()
    state, metrics = self._programs.step(state, batch)
    self._last_count = state.clock.step
    self._check_skipped(metrics)
    return state, metrics

  def fit(
    self,
    batches: Iterable[PyTree],
    num_steps: int,
    *,
    state: TrainState,
    eval_loss: Callable[[PyTree, PyTree], jax.Array] | None = None,
    eval_batches: Sequence[PyTree] = (),
    **options: Unpack[FitKeywords],
  ) -> Fitted:
    """Train for a number of steps: (state, rows of metrics), with lines of progress.

    Args:
      batches: an iterable of at least `num_steps` batches.
      state: of `init`, or from which to continue. It is donated.
      eval_loss: (parameters or model, batch) -> scalar; `eval_loss` in a row is its mean over
        eval_batches.
      options: `period` (steps between two rows, 100), `patience` and `report` (of lines). With a
        patience, training ends after so many evaluations without a lower held-out loss, and the
        state is that of the lowest.

    Raises:
      UserError: there are too few batches, or an option is out of range.
    """
    chosen = FitOptions(num_steps, **options)
    check_fit(chosen, has_eval=bool(eval_batches))
    if (eval_loss is None) != (not eval_batches):
      raise UserError("fit takes eval_loss and eval_batches together")
    kept: list[TrainState] = []
    model = self._model

    @jax.jit
    def evaluate_batch(params: PyTree, collections: PyTree, batch: PyTree) -> jax.Array:
      assert eval_loss is not None
      if model is None:
        return eval_loss(params, batch)
      return model.predict(eval_loss, {"params": params, **collections}, batch)

    def evaluate(state: TrainState) -> np.ndarray:
      losses = [evaluate_batch(state.params, state.collections, batch) for batch in eval_batches]
      return np.mean(jax.device_get(losses), axis=0)

    def keep(state: TrainState, _improved: np.ndarray) -> None:
      kept[:] = [jax.tree.map(jnp.copy, state)]

    fitted = fit(
      self.step,
      state,
      batches,
      chosen,
      evaluate=evaluate if eval_batches else None,
      keep=keep,
      describe=lambda name, value: f"{name.replace('_', ' ')} {float(value):.4f}",
    )
    for row in fitted.rows:
      row["phase"] = np.asarray(self.names[int(row["phase"])])
    if kept:
      return fitted._replace(state=kept[0])
    return fitted

  def save(self, state: TrainState, path: str | os.PathLike[str]) -> None:
    """Write the state to a new folder, or replace what `save` wrote there, by Orbax."""
    _check_state(state)
    with ocp.StandardCheckpointer() as checkpointer:
      checkpointer.save(os.path.abspath(path), state, force=True)

  def load(
    self, path: str | os.PathLike[str], params: PyTree, collections: PyTree = None
  ) -> TrainState:
    """The state that `save` wrote, on the mesh of `params`, of which only the shapes are read.

    Raises:
      UserError: there is none, or it is of other parameters or phases.
    """
    return read_states(path, self.abstract_state(params, collections))

  def next_phase(self, state: TrainState) -> str:
    """Name of the phase whose step is due."""
    _check_state(state)
    if self._programs is None:
      return self.names[int(self._schedule.phase(state.clock))]
    return self._programs.phase(state)

  def ema_params(self, state: TrainState) -> PyTree:
    """The parameters' moving averages; parameters that no phase trains are unchanged.

    In the form that `model` returns.
    """
    if self._ema_decay is None:
      raise UserError("there is no moving average: give Alternation an ema_decay")
    _check_state(state)
    return self._own(averaged_params(state), state.collections)

  def _labels_of(self, params: PyTree) -> dict[str, Labels]:
    labels = labels_by_phase(params, {phase.name: phase.train for phase in self.phases})
    for phase in self.phases:
      if phase.update is None:
        trained, _ = split(params, labels[phase.name])
        _check_differentiable(phase.name, trained)
    return labels

  def _optimizers(self, labels: Mapping[str, Labels]) -> dict[str, optax.GradientTransformation]:
    """By phase with a gradient, its optimizer."""
    optimizers = {}
    for phase in self.phases:
      if phase.optimizer is not None:
        optimizers[phase.name] = partitioned(phase.optimizer, labels[phase.name])
    return optimizers

  def _init(self, params: PyTree, collections: PyTree, seed: jax.Array) -> TrainState:
    labels = self._labels_of(params)
    averaged = None
    if self._ema_decay is not None:
      averaged = _averaged_part(params, union(labels.values()))
    return init_state(
      params=jax.tree.map(jnp.copy, params),  # the caller's own must not be donated
      opt_state=init_opt_states(params, self._optimizers(labels), labels, self._owners),
      rng=jax.random.key_data(jax.random.key(seed)),
      clock=self._schedule.start(),
      averaged=averaged,
      collections=jax.tree.map(jnp.copy, collections),
    )

  def _build_step(self, index: int, labels: Labels) -> Step:
    phase = self.phases[index]
    skip = SkipRule()
    ema_decay = self._ema_decay or 0.0

    def is_first(state: TrainState) -> jax.Array:
      return state.clock.taken_P[index] == 0

    if phase.update is not None:
      step = build_update_step(phase, self._model, labels, ema_decay, skip)
    else:
      assert phase.optimizer is not None
      step = build_train_step(
        build_gradients(PhaseLoss(phase, self._model), phase.accumulate),
        partitioned(phase.optimizer, labels),
        labels=labels,
        ema_decay=ema_decay,
        skip=skip,
        check_zero=is_first,
      )

    def step_and_freeze(state: TrainState, batch: PyTree) -> StepResult:
      check_divides(phase, batch)
      before = state.collections
      state, metrics = step(state, batch)
      collections = freeze_collections(before, state.collections, labels)
      return state.replace(collections=collections), metrics

    repeated = repeat_on_batch(step_and_freeze, phase.repeat_batch)
    return build_phase_step(repeated, index, self._schedule, self._owners.get(phase.name))

  def _check_gradients(self, phase: str, zero_N: np.ndarray) -> None:
    """Raise UserError if all gradients of the phase's first step are zero; warn if some are."""
    trained = trained_paths(self._labels[phase])
    zero = zero_among(self._paths, zero_N) & set(trained)
    check_any_gradient(phase, trained, zero)
    if zero:
      warnings.warn(
        f"phase {phase}: the gradient of {shown_paths(zero)} is exactly zero in its first step: "
        "the loss does not depend on them, or multiplies them by zeros",
        stacklevel=4,
      )

  def _check_skipped(self, metrics: Metrics) -> None:
    """Raise UserError if too many consecutive steps, up to two steps ago, were skipped."""
    self._latest.append(metrics)
    if len(self._latest) <= _STEPS_IN_FLIGHT:
      return
    earlier = self._latest.popleft()
    skipped = int(earlier["skipped_in_a_row"])
    if skipped >= self._max_skipped_steps:
      phase = self.names[int(earlier["phase"])]
      raise UserError(
        f"phase {phase}: the loss or a gradient was not finite in {skipped} consecutive steps, "
        "which were skipped: lower the learning rate, or check the loss and the batches"
      )


def _check_state(state: object) -> None:
  if not isinstance(state, TrainState) or state.clock is None:
    raise UserError(
      f"the state is a {type(state).__name__} that Alternation.init did not return: give the state "
      "of init(params), or of the latest step"
    )
  check_not_donated(state)


def _open_model(
  params: PyTree, collections: PyTree, seed: int
) -> tuple[Model | None, PyTree, PyTree]:
  """(model, its parameters, its collections); a tree of parameters is returned as it is."""
  if not _is_model(params):
    return None, params, collections
  if collections is not None:
    raise UserError("collections are given with trees of parameters: a model has its own")
  model = as_model(params, "the model of Alternation")
  variables = model.given or model.draw(jax.random.key(seed))
  others = {name: tree for name, tree in variables.items() if name != "params"}
  return model, variables["params"], others


def _is_model(params: PyTree) -> bool:
  """Whether `params` is a model of a library, or makes one, and not a tree of arrays."""
  library = library_of(params)
  if library == "linen":
    name = type(params).__name__
    raise UserError(
      f"init got the Linen module {name}: give its parameters, {name}(...).init(key, x)['params'], "
      "and apply it in the losses"
    )
  if library == "equinox":
    # Arrays only, such as a part of equinox.partition(model, equinox.is_array), are a tree.
    return not all(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(params))
  return library == "nnx" or (callable(params) and jax.tree_util.all_leaves([params]))


def _check_arrays(params: PyTree) -> None:
  for key_path, leaf in jax.tree.leaves_with_path(params):
    if not hasattr(leaf, "dtype") and not isinstance(leaf, int | float | complex):
      raise UserError(
        f"{path_of(key_path)} of the parameters is a {type(leaf).__name__}, not an array: give the "
        "arrays only, such as params, static = equinox.partition(model, equinox.is_array), and "
        "combine both in the losses"
      )


def _check_differentiable(phase: str, trained: PyTree) -> None:
  for key_path, leaf in jax.tree.leaves_with_path(trained):
    if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
      raise UserError(
        f"phase {phase} trains {path_of(key_path)}, which is {jax.typeof(leaf).str_short()} and "
        "has no gradient: leave it out of its regexes"
      )


def _averaged_part(params: PyTree, labels: Labels) -> PyTree:
  """The trained parameters that have a moving average: those that are not integers."""

  def averaged(leaf: PyTree) -> PyTree:
    if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
      return leaf
    return optax.MaskedNode()

  trained, _ = split(params, labels)
  return jax.tree.map(averaged, trained)


def _mesh_of(params: PyTree) -> jax.sharding.Mesh | jax.sharding.AbstractMesh:
  """The mesh of the parameters; if they have none, a mesh of their device."""
  devices = []
  for leaf in jax.tree.leaves(params):
    sharding = getattr(leaf, "sharding", None)
    if isinstance(sharding, NamedSharding):
      return sharding.mesh
    if sharding is not None:
      devices += sharding.device_set
  devices += jax.devices()
  return jax.sharding.Mesh(devices[:1], ("device",))


def _spec(leaf: PyTree) -> jax.P:
  sharding = getattr(leaf, "sharding", None)
  if isinstance(sharding, NamedSharding):
    return sharding.spec
  return jax.P()
