"""Alternating training from Python: phases that train one part of any model, the rest frozen.

    alternation = Alternation([Phase("fit", train=["a/.*"], loss=fit_loss, ...), Phase(...)])
    state = alternation.init(params)
    state, metrics = alternation.step(state, batch)

A frozen leaf gets no gradient, weight decay, share of the clipping norm or EMA update: it keeps its
bits.
"""

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from maxlite.config.errors import UserError
from maxlite.config.schema import PHASE_STRATEGIES
from maxlite.optim.labels import Partition, path_of, paths_in, state_names
from maxlite.phases.phase_programs import PhaseOptStates, PhasePrograms, build_phase_step
from maxlite.phases.phase_schedule import PhaseSchedule, Plateau, Threshold
from maxlite.step.api_checks import check_not_donated, check_scalars, check_unreserved
from maxlite.step.train_state import TrainState, averaged_params, init_state
from maxlite.step.train_step import LossFunction, Step, build_gradients, build_train_step


@dataclasses.dataclass(frozen=True)
class Phase:
  """What a phase trains, on which loss, and for how long: `steps`, or `until` a condition.

  `loss(params, batch)` gets all parameters and returns a scalar, or (scalar, {name: scalar}). If it
  has an argument `key`, it gets a random key, a new one in every step. If it has an argument
  `collections`, it gets the state's collections (such as batch statistics) and returns (scalar,
  {name: scalar}, collections). `accumulate` divides the batch into that many micro-batches, whose
  losses are averaged. The optimizer, with its schedule, counts only the steps of its phase.
  """

  name: str
  train: Sequence[str]  # regexes, each of whole parameter paths
  loss: Callable[..., Any]
  optimizer: optax.GradientTransformation
  steps: int | None = None
  until: Plateau | Threshold | None = None
  accumulate: int = 1

  def __post_init__(self):
    if (self.steps is None) == (self.until is None):
      raise UserError(f"phase {self.name} needs steps= or until=, one of the two")
    if isinstance(self.train, str) or not self.train:
      raise UserError(f"phase {self.name} trains {self.train!r}; give a list of path regexes")
    if not hasattr(self.optimizer, "update"):
      name = getattr(self.optimizer, "__name__", type(self.optimizer).__name__)
      raise UserError(f"phase {self.name} has optimizer={name}; give an optimizer, as {name}(...)")
    if not isinstance(self.steps, int | None):
      raise UserError(f"phase {self.name} has steps={self.steps}; give an integer")
    if not isinstance(self.accumulate, SupportsIndex) or int(self.accumulate) < 1:
      raise UserError(
        f"phase {self.name} has accumulate={self.accumulate}; give an integer, at least 1"
      )


class Alternation:
  """Phases that train one tree of parameters alternately.

  The state is a `TrainState`; every step donates it. It has the sharding of the parameters, also on
  a mesh.
  """

  def __init__(
    self,
    phases: Sequence[Phase],
    *,
    initial_phases: Mapping[str, int] | None = None,
    strategy: str = "auto",
    ema_decay: float | None = None,
  ):
    """
    Args:
      initial_phases: by phase, steps that it takes alone before the cycle begins.
      strategy: `separate`, a program per phase; `switch`, one for all; or `auto`.
      ema_decay: keeps a moving average of the parameters, updated in steps that train them.

    Raises:
      UserError: no phases, a duplicate name, or an invalid length, name or choice.
    """
    names = [phase.name for phase in phases]
    duplicates = {name for name in names if names.count(name) > 1}
    if duplicates:
      raise UserError(f"two phases are called {min(duplicates)}; give each its own name")
    if strategy not in PHASE_STRATEGIES:
      raise UserError(f"no strategy {strategy!r}; choose one of {', '.join(PHASE_STRATEGIES)}")
    if ema_decay is not None and not 0 <= ema_decay < 1:
      raise UserError(f"ema_decay={ema_decay} is not from 0 to below 1; 0.999 is usual")
    self.phases, self.names = list(phases), names
    lengths = {phase.name: phase.until or phase.steps for phase in phases}
    self._schedule = PhaseSchedule(lengths, initial_phases)
    self._strategy = strategy
    self._ema_decay = ema_decay
    self._programs: PhasePrograms | None = None

  @property
  def reason(self) -> str:
    """The strategy in use and its reason; empty before anything is compiled."""
    return f"{self._programs.strategy}: {self._programs.reason}" if self._programs else ""

  @property
  def num_compiled(self) -> int:
    """Number of programs compiled so far."""
    return len(self.programs)

  @property
  def programs(self) -> dict[str, jax.stages.Compiled]:
    """The compiled programs: by phase, or one called `switch`."""
    return dict(self._programs.compiled) if self._programs else {}

  def timeline(self, num_steps: int) -> list[tuple[int, int, str]]:
    """(first step, last step, phase) of each span in `num_steps` steps, counted from 1.

    Raises:
      UserError: a phase ends on a condition.
    """
    return self._schedule.timeline(num_steps)

  def untrained(self, params: Any) -> list[str]:
    """Paths of the parameters that no phase trains."""
    return paths_in(Partition.union(self._partitions(params).values()).split(params)[1])

  def init(self, params: Any, collections: Any = None, seed: int = 0) -> TrainState:
    """Initialize the state from copies of `params`.

    Raises:
      UserError: a regex is invalid or matches no parameter.
    """
    shapes = self.abstract_state(params, collections)
    init = jax.jit(self._init, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, shapes))
    return init(params, collections, jnp.uint32(seed))

  def abstract_state(self, params: Any, collections: Any = None) -> TrainState:
    """Shapes, types and shardings of the state, for restoring a checkpoint.

    The state is on the mesh of `params`; an optimizer's slots are sharded like their parameters.
    """
    shapes = jax.eval_shape(self._init, params, collections, jnp.uint32(0))
    specs = state_names(shapes, params, jax.tree.map(_spec, params))
    specs = specs.replace(collections=jax.tree.map(_spec, collections))
    mesh = _mesh_of(params)
    place = lambda leaf, spec: leaf.update(sharding=NamedSharding(mesh, spec))
    return jax.tree.map(place, shapes, specs)

  def compile(self, state: Any, batch: Any, own_batches: Mapping[str, Any] | None = None) -> None:
    """Compile all phases for a state and batches of these shapes; by default the first step does.

    `own_batches` has, by phase, batches that are not shaped like `batch`.
    """
    batches = dict.fromkeys(self.names, batch) | dict(own_batches or {})
    partitions = self._partitions(state.params)
    steps = {name: self._build_step(n, partitions[name]) for n, name in enumerate(self.names)}
    self._programs = PhasePrograms(steps, self._schedule, self._strategy, state, batches)

  def step(self, state: TrainState, batch: Any) -> tuple[TrainState, dict]:
    """Take a step of the phase that is due: (state, metrics).

    The metrics are `loss`, those of the phase's loss, and `phase`, an index into `names`.

    Raises:
      UserError: `state` was given to an earlier step, or differs in shape from the compiled one.
    """
    check_not_donated(state)
    if self._programs is None:
      self.compile(state, batch)
    return self._programs.step(state, batch)

  def next_phase(self, state: TrainState) -> str:
    """Name of the phase whose step is due."""
    check_not_donated(state)
    if self._programs is None:
      return self.names[int(self._schedule.phase(state.clock))]
    return self._programs.phase(state)

  def ema_params(self, state: TrainState) -> Any:
    """The parameters' moving averages; parameters that no phase trains are unchanged."""
    if self._ema_decay is None:
      raise UserError("there is no moving average: give Alternation an ema_decay")
    check_not_donated(state)
    return averaged_params(state)

  def _partitions(self, params: Any) -> dict[str, Partition]:
    partitions = Partition.by_phase(params, {phase.name: phase.train for phase in self.phases})
    for name, partition in partitions.items():
      for path, leaf in jax.tree.leaves_with_path(partition.split(params)[0]):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
          raise UserError(
            f"phase {name} trains {path_of(path)}, which is {jax.typeof(leaf).str_short()} and has "
            "no gradient: leave it out of its regexes"
          )
    return partitions

  def _init(self, params: Any, collections: Any, seed: jax.Array) -> TrainState:
    partitions = self._partitions(params)
    init = lambda phase: phase.optimizer.init(partitions[phase.name].split(params)[0])
    opt_states = {phase.name: init(phase) for phase in self.phases}
    trained, _ = Partition.union(partitions.values()).split(params)
    return init_state(
      jax.tree.map(jnp.copy, params),  # the caller's own must not be donated
      PhaseOptStates(opt_states),
      jax.random.key_data(jax.random.key(seed)),
      self._schedule.start(),
      averaged=None if self._ema_decay is None else trained,
      collections=jax.tree.map(jnp.copy, collections),
    )

  def _build_step(self, index: int, partition: Partition) -> Step:
    phase = self.phases[index]
    step = build_train_step(
      build_gradients(_PhaseLoss(phase), phase.accumulate),
      phase.optimizer,
      partition=partition,
      ema_decay=self._ema_decay or 0.0,
      skip=None,
    )

    def step_and_freeze(state: TrainState, batch: Any) -> tuple[TrainState, dict]:
      _check_divides(phase, batch)
      before = state.collections
      state, metrics = step(state, batch)
      collections = _freeze_collections(before, state.collections, state.params, partition)
      return state.replace(collections=collections), metrics

    return build_phase_step(step_and_freeze, index, self._schedule)


@dataclasses.dataclass(frozen=True)
class _PhaseLoss(LossFunction):
  """The mean of a phase's loss over its micro-batches."""

  phase: Phase

  def forward(
    self, params: Any, collections: Any, batch: Any, key: jax.Array
  ) -> tuple[tuple[jax.Array, dict], Any]:
    loss, metrics, collections = _call(self.phase, params, batch, key, collections)
    return (loss, jax.lax.stop_gradient({"loss": loss, **metrics})), collections

  def combine(self, sums: tuple[jax.Array, dict]) -> tuple[jax.Array, dict]:
    return jax.tree.map(lambda x: x / self.phase.accumulate, sums)


def _check_divides(phase: Phase, batch: Any) -> None:
  for x in jax.tree.leaves(batch) if phase.accumulate > 1 else ():
    if not jnp.ndim(x) or jnp.shape(x)[0] % phase.accumulate:
      raise UserError(
        f"phase {phase.name}: a batch of shape {jnp.shape(x)} does not divide into "
        f"accumulate={phase.accumulate} parts along its first axis"
      )


def _call(phase: Phase, params: Any, batch: Any, key: jax.Array, collections: Any) -> tuple:
  """Call the phase's loss: (scalar, metrics, collections).

  Raises:
    UserError: the loss returns something else.
  """
  takes = inspect.signature(phase.loss).parameters
  if "collections" in takes and collections is None:
    raise UserError(
      f"the loss of phase {phase.name} takes collections, and the state has none: give them to "
      "init(params, collections)"
    )
  given = {"key": key, "collections": collections}
  result = phase.loss(params, batch, **{name: x for name, x in given.items() if name in takes})
  parts = result if isinstance(result, tuple) else (result,)
  form = "scalar, {name: scalar}, collections" if "collections" in takes else "scalar"
  if ("collections" in takes and len(parts) != 3) or len(parts) > 3:
    raise UserError(f"the loss of phase {phase.name} returns {len(parts)} values, not ({form})")
  value, metrics, collections = (*parts, *({}, collections)[len(parts) - 1 :])
  check_scalars({"loss": value, **metrics}, f"phase {phase.name}")
  check_unreserved(metrics, ("phase",), f"phase {phase.name}")
  if changed := set(paths_in(collections)) ^ set(paths_in(given["collections"])):
    raise UserError(
      f"the loss of phase {phase.name} must return the collections that it gets; they differ in "
      f"{', '.join(sorted(changed)[:3])}"
    )
  return value, metrics, collections


def _freeze_collections(before: Any, after: Any, params: Any, partition: Partition) -> Any:
  """The collections after a step, unchanged for modules of which no parameter is trained.

  A module without parameters follows the nearest enclosing module that has some.
  """
  module_paths = lambda tree: [f"{path}/".removeprefix("params/") for path in paths_in(tree)]
  trained, frozen = map(module_paths, partition.split(params))

  def leaf(key_path: tuple, old: Any, new: Any) -> Any:
    keys = path_of(key_path[:-1]).split("/")
    # Without the collection: the first key in Flax; below their module if models are in a dict.
    modules = [keys[:n] + keys[n + 1 :] for n in range(len(keys))] + [keys]
    depths = range(len(keys), 0, -1)
    around = (f"{'/'.join(module[:depth])}/" for depth in depths for module in modules)
    below = lambda paths, module: any(path.startswith(module) for path in paths)
    nearest = next((m for m in around if below(trained + frozen, m)), "")
    return new if below(trained, nearest) else old

  return jax.tree_util.tree_map_with_path(leaf, before, after)


def _mesh_of(params: Any) -> jax.sharding.Mesh:
  """The mesh of the parameters; if they have none, a mesh of their device."""
  shardings = [s for leaf in jax.tree.leaves(params) if (s := getattr(leaf, "sharding", None))]
  meshes = [each.mesh for each in shardings if isinstance(each, NamedSharding)]
  devices = [*itertools.chain(*(each.device_set for each in shardings)), jax.devices()[0]]
  return meshes[0] if meshes else jax.sharding.Mesh(devices[:1], ("device",))


def _spec(leaf: Any) -> jax.P:
  sharding = getattr(leaf, "sharding", None)
  return sharding.spec if isinstance(sharding, NamedSharding) else jax.P()
