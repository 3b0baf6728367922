"""Members on the same devices in one compiled step: stacked, padded and fused are its three forms.

Members of one group run together under `jax.vmap`, their states stacked along axis `ensemble` (Z)
and, where sizes differ, padded with zeros. A member alone in its group runs its own function as it
is, so that nothing about it changes but the program it is compiled into.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from maxlite.config.errors import UserError
from maxlite.ensemble.engines.batched_jaxpr import group_alike, on_one_device, run_together
from maxlite.ensemble.engines.step_cost import Load, cost_of, tree_bytes
from maxlite.ensemble.member_program import Program, abstract_states
from maxlite.phases.phase_programs import compile_at_once


class Groups:
  """Programs in one compiled step; the state is one tree per group."""

  def __init__(
    self,
    programs: Sequence[Program],
    batch: Any,
    groups: list[list[int]],
    *,
    sizes: bool = False,
    mesh: Mesh | None = None,
    own_batches: bool = False,
    finish: Callable[[list], Any] = lambda metrics: metrics,
  ):
    """
    Args:
      batch: what one member gets at a step; it need only be described.
      groups: places of programs, group by group.
      sizes: whether members of one group may differ in array sizes.
      mesh: of one axis `ensemble`, over which groups are cut; members keep to one device each.
      own_batches: whether `step` gets a batch per member, stacked.
      finish: makes what `step` returns of the members' metrics, inside the compiled step.

    Raises:
      NotAlikeError: the members of a group cannot run as one.
    """
    self.programs, self.groups = list(programs), groups
    self._sizes, self._mesh, self._own_batches, self._finish = sizes, mesh, own_batches, finish
    self.abstract = abstract_states(programs)
    self._calls = [self._call(g, "step", batch, 0 if own_batches else None) for g in groups]
    self._shardings = shardings = [self._sharding(group) for group in groups]
    self._batch = batch
    self._predicts: dict[str, Callable] = {}
    self.step = jax.jit(
      self._step,
      in_shardings=(shardings, self._batch_sharding()),
      out_shardings=(shardings, None),
      donate_argnums=0,
    )
    self._pack = jax.jit(self._pack_groups, out_shardings=shardings)
    self._unpack = jax.jit(lambda state: self._in_order(state, self.abstract))

  def load(self) -> Load:
    """What a step asks of the devices."""
    state = jax.eval_shape(self._pack_groups, self.abstract)
    batch = self._batch
    if self._own_batches:
      stack = lambda leaf: jax.ShapeDtypeStruct((len(self.programs), *leaf.shape), leaf.dtype)
      batch = jax.tree.map(stack, batch)
    cost = cost_of(jax.make_jaxpr(self._step)(state, batch))
    batch_sharding = self.programs[0].batch_sharding
    num_devices = 1 if batch_sharding is None else batch_sharding.mesh.size
    if self._mesh is not None:
      num_devices = self._mesh.size
    own = cost.on_one_of(num_devices)
    return Load(
      own,
      total=own.times(num_devices),
      num_devices=num_devices,
      num_programs=1,
      operations_compiled=cost.operations,
      state_bytes=tree_bytes(state) / num_devices,
    )

  def pack(self, states: Sequence[Any]) -> list[Any]:
    """The state made of every member's own."""
    if self._mesh is not None:  # they may lie on other devices than its own
      states = jax.device_get(states)
    return self._pack(list(states))

  def unpack(self, state: list[Any]) -> list[Any]:
    """Per member, its state as it would be alone."""
    return self._unpack(state)

  def predict(self, state: list[Any], inputs: Any, method: str = "predict") -> list[Any]:
    """Per member, what its `method` makes of the same `inputs`."""
    if method not in self._predicts:
      self._predicts[method] = jax.jit(functools.partial(self._predict, method))
    return self._predicts[method](state, inputs)

  def _predict(self, method: str, state: list[Any], inputs: Any) -> list[Any]:
    calls = [self._call(group, method, inputs, None) for group in self.groups]
    results = [call(own, inputs) for call, own in zip(calls, state, strict=True)]
    shapes = [
      jax.eval_shape(getattr(program, method), own, inputs)
      for program, own in zip(self.programs, self.abstract, strict=True)
    ]
    return self._in_order(results, shapes)

  def init(self) -> list[Any]:
    """The state before the first step."""
    runs = [
      jax.jit(functools.partial(self._init_group, group), out_shardings=sharding).lower()
      for group, sharding in zip(self.groups, self._shardings, strict=True)
    ]
    return [run() for run in compile_at_once(runs)]

  def _init_group(self, group: list[int]) -> Any:
    """State of one group; members whose inits are alike run together."""
    inits = {id(self.programs[z].init): self._init_of(z) for z in group}
    functions = [inits[id(self.programs[z].init)] for z in group]
    seed_Z = np.array([self.programs[z].seed for z in group], np.uint32)
    if len(group) == 1:
      return functions[0](seed_Z[0], None)
    seeds = [jax.ShapeDtypeStruct((), jnp.uint32)] * len(group)
    names = [self.programs[z].name for z in group]
    sets = group_alike(functions, names, seeds, None)
    parts = [
      run_together([functions[n] for n in own], [names[n] for n in own], seeds[: len(own)], None)(
        jnp.asarray(seed_Z[own]), None
      )
      for own in sets
    ]
    order_Z = np.argsort(np.concatenate(sets))
    return jax.tree.map(lambda *leaves: _join(leaves)[order_Z], *parts)

  def _init_of(self, z: int) -> Callable:
    init = self.programs[z].init
    init = init if self._mesh is None else on_one_device(init, jnp.uint32(0))
    return lambda seed, _: init(seed)

  def _step(self, state: list[Any], batch: Any) -> tuple[list[Any], Any]:
    results = [
      call(own, self._batch_of(group, batch))
      for call, group, own in zip(self._calls, self.groups, state, strict=True)
    ]
    metrics = self._in_order([metrics for _, metrics in results])
    return [new for new, _ in results], self._finish(metrics)

  def _batch_of(self, group: list[int], batch: Any) -> Any:
    if not self._own_batches:
      return batch
    places = group[0] if len(group) == 1 else np.asarray(group)
    return jax.tree.map(lambda leaf: leaf[places], batch)

  def _call(self, group: list[int], name: str, shared: Any, shared_axis: int | None) -> Callable:
    """f(state of the group, shared) for method `name` of its programs."""
    functions = [getattr(self.programs[z], name) for z in group]
    if len(group) == 1:
      return functions[0]
    return run_together(
      functions,
      [self.programs[z].name for z in group],
      [self.abstract[z] for z in group],
      shared,
      sizes=self._sizes,
      shared_axis=shared_axis,
      spmd_axis_name=self._ensemble_axis(group),
      mesh=self._mesh,
    )

  def _ensemble_axis(self, group: list[int]) -> str | None:
    """The mesh axis that members which are themselves cut over a mesh are dealt over, if any."""
    own = self.programs[group[0]].batch_sharding
    degree = 1 if own is None else own.mesh.shape["ensemble"]
    if len(group) % degree:
      raise UserError(
        f"{len(group)} members that are alike do not divide over ici_ensemble_parallelism={degree}"
      )
    return "ensemble" if degree > 1 else None

  def _batch_sharding(self) -> Any:
    own = self.programs[0].batch_sharding
    if self._mesh is not None:
      return NamedSharding(self._mesh, jax.P("ensemble") if self._own_batches else jax.P())
    if own is None or not self._own_batches:
      return own
    return NamedSharding(own.mesh, jax.P(None, *own.spec))

  def _sharding(self, group: list[int]) -> Any:
    if self._mesh is not None:
      return NamedSharding(self._mesh, jax.P("ensemble"))
    own, axis = self.programs[group[0]].shardings, self._ensemble_axis(group)
    if len(group) == 1 or own is None:
      return own
    return jax.tree.map(lambda s: NamedSharding(s.mesh, jax.P(axis, *s.spec)), own)

  def _pack_groups(self, states: list[Any]) -> list[Any]:
    packed = []
    for group in self.groups:
      own = [states[z] for z in group]
      packed.append(own[0] if len(own) == 1 else jax.tree.map(_stack, *own))
    return packed

  def _in_order(self, by_group: list[Any], shapes: Sequence[Any] | None = None) -> list[Any]:
    """Per member, its part of what is stacked by group, cut to the member's own `shapes`."""
    parts: dict[int, Any] = {}
    for group, tree in zip(self.groups, by_group, strict=True):
      for place, z in enumerate(group):
        own = tree if len(group) == 1 else jax.tree.map(lambda leaf, place=place: leaf[place], tree)
        parts[z] = jax.tree.map(_cut, own, shapes[z]) if shapes else own
    return [parts[z] for z in range(len(self.programs))]


def _stack(*leaves: jax.Array) -> jax.Array:
  return _join([leaf[None] for leaf in leaves])


def _join(stacks: Sequence[jax.Array]) -> jax.Array:
  """One after the other along the first axis, padded with zeros to the largest in all others."""
  shape = tuple(map(max, zip(*(stack.shape[1:] for stack in stacks), strict=True)))
  room = [
    [(0, 0), *((0, most - own) for own, most in zip(stack.shape[1:], shape, strict=True))]
    for stack in stacks
  ]
  return jnp.concatenate(
    [
      jnp.pad(stack, pads) if stack.shape[1:] != shape else stack
      for stack, pads in zip(stacks, room, strict=True)
    ]
  )


def _cut(leaf: jax.Array, shape: Any) -> jax.Array:
  return leaf[tuple(map(slice, shape.shape))]
