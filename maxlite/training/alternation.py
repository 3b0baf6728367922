"""Alternating training from Python: phases that train one part of any model, the rest frozen.

    alternation = Alternation([Phase("fit", train=["a/.*"], loss=fit_loss, ...), Phase(...)])
    state = alternation.init(params)
    state, metrics = alternation.step(state, batch)

A leaf that a phase does not train gets no gradient, no decay, no share in the clipping norm and no
EMA, and comes out of the phase with the bits it went in with.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import NamedSharding

from maxlite.config.errors import UserError
from maxlite.data.batch import interleave
from maxlite.optim.partition import path_of, state_names
from maxlite.phases.phase_optimizers import (
  PhaseOptimizers,
  PhaseStates,
  merge,
  partition_params,
  paths_in,
)
from maxlite.phases.phase_programs import STRATEGIES, PhasePrograms
from maxlite.phases.phase_schedule import PhaseClock, PhaseSchedule, Plateau, Threshold

__all__ = ["Alternation", "AlternationState", "Phase", "Plateau", "Threshold"]


@dataclasses.dataclass(frozen=True)
class Phase:
  """What is trained on which loss, how and for how long: `steps`, or `until` a condition.

  `loss(params, batch)` gets the whole tree and returns a scalar, or (scalar, {name: scalar}). If it
  takes `key=`, it gets a random key, a new one in every step. If it takes `collections=`, it gets
  the state's collections (such as batch statistics) and returns (scalar, {name: scalar},
  collections). With `accumulate`, the batch goes through in so many parts, and the loss is the mean
  of theirs. The optimizer, with its schedule, counts this phase's steps only.
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
    if self.accumulate < 1:
      raise UserError(f"phase {self.name} has accumulate={self.accumulate}; give at least 1")


@struct.dataclass
class AlternationState:
  """All that training changes; a run goes on from it bit for bit."""

  params: Any
  collections: Any  # trees of other variables, by collection; frozen with their modules
  optimizers: PhaseStates
  ema: Any  # of the leaves that some phase trains; None without ema_decay
  clock: PhaseClock
  rng: jax.Array  # raw key; step n draws from fold_in(rng, n)


class Alternation:
  """Phases that take turns on one tree of parameters.

  Every step donates the state it is given. It runs wherever the parameters lie, on a mesh too.
  """

  def __init__(
    self,
    phases: Sequence[Phase],
    *,
    warmup: Mapping[str, int] | None = None,
    strategy: str = "auto",
    optimizer_state: str = "own",
    ema_decay: float | None = None,
  ):
    """
    Args:
      warmup: by phase, steps that it takes alone before all take turns.
      strategy: `separate`, a program per phase; `switch`, one for all; or `auto`.
      optimizer_state: `own`, or `shared` by the phases that train the same leaf.
      ema_decay: keeps a moving average of the parameters, one step of it per step of their phase.

    Raises:
      UserError: no phases, a name twice, or a length, name or choice that cannot be.
    """
    names = [phase.name for phase in phases]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
      raise UserError(f"two phases are called {min(twice)}; give each a name of its own")
    if strategy not in STRATEGIES:
      raise UserError(f"no strategy {strategy!r}; choose one of {', '.join(STRATEGIES)}")
    if optimizer_state not in ("own", "shared"):
      raise UserError(f"no optimizer_state {optimizer_state!r}; choose own or shared")
    if ema_decay is not None and not 0 <= ema_decay < 1:
      raise UserError(f"ema_decay={ema_decay} is not from 0 to below 1; 0.999 is usual")
    self.phases, self.names = list(phases), names
    lengths = {phase.name: phase.until or phase.steps for phase in phases}
    self._schedule = PhaseSchedule(lengths, warmup)
    self._strategy, self._share = strategy, optimizer_state == "shared"
    self._ema_decay = ema_decay
    self._programs: PhasePrograms | None = None

  @property
  def reason(self) -> str:
    """The strategy in use and why; empty before anything is compiled."""
    return f"{self._programs.strategy}: {self._programs.reason}" if self._programs else ""

  @property
  def num_compiled(self) -> int:
    """Programs compiled so far."""
    return self._programs.num_compiled if self._programs else 0

  @property
  def programs(self) -> dict[str, jax.stages.Compiled]:
    """The compiled programs: by phase, or one called `switch`."""
    return dict(self._programs.compiled) if self._programs else {}

  def timeline(self, num_steps: int) -> list[tuple[int, int, str]]:
    """(first step, last step, phase) of each turn in `num_steps` steps, counted from 1.

    Raises:
      UserError: a phase ends by a condition.
    """
    return self._schedule.timeline(num_steps)

  def untrained(self, params: Any) -> list[str]:
    """Paths of the parameters that no phase trains."""
    trained = {path for part in self._parts(params).values() for path in paths_in(part)}
    return [path for path in paths_in(params) if path not in trained]

  def init(self, params: Any, collections: Any = None, seed: int = 0) -> AlternationState:
    """The state before the first step, of copies of `params`.

    Raises:
      UserError: a regex matches no parameter, or optimizers that share state differ in kind.
    """
    shapes = self.abstract_state(params, collections)
    init = jax.jit(self._init, out_shardings=jax.tree.map(lambda leaf: leaf.sharding, shapes))
    return init(params, collections, jnp.uint32(seed))

  def abstract_state(self, params: Any, collections: Any = None) -> AlternationState:
    """Shapes, types and shardings of the state: what restoring takes.

    The state lies on the mesh that `params` lie on, an optimizer's slots as their parameters.
    """
    shapes = jax.eval_shape(self._init, params, collections, jnp.uint32(0))
    specs = state_names(shapes, params, jax.tree.map(_spec, params))
    specs = specs.replace(collections=jax.tree.map(_spec, collections))
    mesh = _mesh_of(params)
    return jax.tree.map(
      lambda leaf, spec: jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)
      ),
      shapes,
      specs,
    )

  def compile(self, state: Any, batch: Any, own_batches: Mapping[str, Any] | None = None) -> None:
    """Compiles all phases for a state and batches of such shapes; else the first step does.

    `own_batches` has, by phase, a batch where it is not shaped like `batch`.
    """
    batches = dict.fromkeys(self.names, batch) | dict(own_batches or {})
    optimizers = self._optimizers(state.params)
    steps = {
      phase.name: functools.partial(self._step, index, optimizers)
      for index, phase in enumerate(self.phases)
    }
    self._programs = PhasePrograms(steps, self._schedule, self._strategy, state, batches)

  def step(self, state: AlternationState, batch: Any) -> tuple[AlternationState, dict]:
    """(state, metrics) after a step of the phase that is due.

    The metrics are `loss`, what the loss reports, and `phase`, an index into `names`.
    """
    if self._programs is None:
      self.compile(state, batch)
    return self._programs.step(state, batch)

  def next_phase(self, state: AlternationState) -> str:
    """Name of the phase whose step is due."""
    if self._programs is None:
      return self.names[int(self._schedule.phase(state.clock))]
    return self._programs.phase(state)

  def ema_params(self, state: AlternationState) -> Any:
    """The parameters' moving averages; those that no phase trains are as they are."""
    if self._ema_decay is None:
      raise UserError("there is no moving average: give Alternation an ema_decay")
    return merge(state.ema, state.params)

  def _parts(self, params: Any) -> dict[str, Any]:
    """By phase, its part of `params`."""
    parts = {}
    for phase in self.phases:
      try:
        parts[phase.name] = partition_params(params, phase.train)[0]
      except ValueError as error:
        raise UserError(f"phase {phase.name}: {error}") from None
    return parts

  def _optimizers(self, params: Any) -> PhaseOptimizers:
    optimizers = {phase.name: phase.optimizer for phase in self.phases}
    return PhaseOptimizers(optimizers, self._parts(params), share=self._share)

  def _init(self, params: Any, collections: Any, seed: jax.Array) -> AlternationState:
    parts = self._parts(params)
    trained = merge(*parts.values())
    return AlternationState(
      params=jax.tree.map(jnp.copy, params),  # the caller's own are not to be donated
      collections=jax.tree.map(jnp.copy, collections),
      optimizers=self._optimizers(params).init(parts),
      ema=None if self._ema_decay is None else jax.tree.map(jnp.copy, trained),
      clock=self._schedule.start(),
      rng=jax.random.key_data(jax.random.key(seed)),
    )

  def _step(
    self, index: int, optimizers: PhaseOptimizers, state: AlternationState, batch: Any
  ) -> tuple[AlternationState, dict]:
    phase = self.phases[index]
    trained, frozen = partition_params(state.params, phase.train)
    key = jax.random.fold_in(jax.random.wrap_key_data(state.rng), state.clock.step)
    gradients, metrics, collections = _gradients(
      phase, trained, frozen, state.collections, batch, key
    )
    trained, opt_states = optimizers.update(phase.name, gradients, state.optimizers, trained)
    metrics["phase"] = jnp.array(index, jnp.int32)
    moved = state.replace(
      params=merge(trained, frozen),
      collections=_move_with_modules(state.collections, collections, trained, frozen),
      optimizers=opt_states,
      ema=self._average(state.ema, trained),
      clock=self._schedule.advance(state.clock, index, metrics),
    )
    return moved, metrics

  def _average(self, ema: Any, trained: Any) -> Any:
    if self._ema_decay is None:
      return None
    decay = self._ema_decay
    move = lambda old, new: old if new is None else decay * old + (1 - decay) * new
    return jax.tree.map(move, ema, trained, is_leaf=lambda leaf: leaf is None)


def _gradients(
  phase: Phase, trained: Any, frozen: Any, collections: Any, batch: Any, key: jax.Array
) -> tuple[Any, dict, Any]:
  """(gradients of the trained leaves alone, metrics, collections)."""

  def loss(trained: Any, collections: Any, batch: Any, key: jax.Array) -> tuple[jax.Array, tuple]:
    result = _call(phase, merge(trained, frozen), batch, key, collections)
    return result[0], ({"loss": result[0], **result[1]}, result[2])

  gradients_of = jax.grad(loss, has_aux=True)
  if phase.accumulate == 1:
    gradients, (metrics, collections) = gradients_of(trained, collections, batch, key)
    return gradients, metrics, collections
  micro = jax.tree.map(functools.partial(_in_parts, phase), batch)
  inputs = (micro, jax.random.split(key, phase.accumulate))

  def accumulate(carry: tuple, inputs: tuple) -> tuple[tuple, None]:
    sums, collections = carry
    gradients, (metrics, collections) = gradients_of(trained, collections, *inputs)
    return (jax.tree.map(jnp.add, sums, (gradients, metrics)), collections), None

  first = jax.tree.map(lambda x: x[0], inputs)
  gradients, (metrics, _) = jax.eval_shape(gradients_of, trained, collections, *first)
  zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), (gradients, metrics))
  (sums, collections), _ = jax.lax.scan(accumulate, (zeros, collections), inputs)
  return *jax.tree.map(lambda x: x / phase.accumulate, sums), collections


def _in_parts(phase: Phase, x: Any) -> jax.Array:
  if not jnp.ndim(x) or jnp.shape(x)[0] % phase.accumulate:
    raise UserError(
      f"phase {phase.name}: a batch of shape {jnp.shape(x)} does not divide into "
      f"accumulate={phase.accumulate} parts along its first axis"
    )
  return interleave(x, phase.accumulate)


def _call(phase: Phase, params: Any, batch: Any, key: jax.Array, collections: Any) -> tuple:
  """(scalar, metrics, collections) of the phase's loss.

  Raises:
    UserError: the loss returns something else.
  """
  takes = inspect.signature(phase.loss).parameters
  given = {"key": key, "collections": collections}
  result = phase.loss(params, batch, **{name: x for name, x in given.items() if name in takes})
  parts = result if isinstance(result, tuple) else (result,)
  form = "scalar, {name: scalar}, collections" if "collections" in takes else "scalar"
  if ("collections" in takes and len(parts) != 3) or len(parts) > 3:
    raise UserError(f"the loss of phase {phase.name} returns {len(parts)} values, not ({form})")
  value, metrics, collections = (*parts, *({}, collections)[len(parts) - 1 :])
  for name, x in {"loss": value, **metrics}.items():
    if jnp.shape(x) or not jnp.issubdtype(jnp.result_type(x), jnp.floating):
      raise UserError(
        f"{name!r} of phase {phase.name} is {jax.typeof(x).str_short()}; a loss returns a floating "
        "scalar, or (scalar, {name: scalar})"
      )
  return value, metrics, collections


def _move_with_modules(before: Any, after: Any, trained: Any, frozen: Any) -> Any:
  """Collections after a step: as they were, but for the modules of which something is trained.

  A module without parameters goes with the nearest one around it that has some.
  """
  moving, standing = ([f"{path}/" for path in paths_in(part)] for part in (trained, frozen))

  def leaf(key_path: tuple, old: Any, new: Any) -> Any:
    module = path_of(key_path[1:-1]).split("/")  # without the collection and the variable
    around = (f"{'/'.join(module[:depth])}/" for depth in range(len(module), 0, -1))
    below = lambda paths, module: any(path.startswith(module) for path in paths)
    nearest = next((m for m in around if below(moving + standing, m)), "")
    return new if below(moving, nearest) else old

  return jax.tree_util.tree_map_with_path(leaf, before, after)


def _mesh_of(params: Any) -> jax.sharding.Mesh:
  """The mesh that the parameters lie on; for those that lie on none, one of their device."""
  shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(params)]
  for sharding in shardings:
    if isinstance(sharding, NamedSharding):
      return sharding.mesh
  device = next((next(iter(s.device_set)) for s in shardings if s is not None), jax.devices()[0])
  return jax.sharding.Mesh([device], ("device",))


def _spec(leaf: Any) -> jax.P:
  sharding = getattr(leaf, "sharding", None)
  return sharding.spec if isinstance(sharding, NamedSharding) else jax.P()
