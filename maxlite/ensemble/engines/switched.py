"""One member per device in one compiled step, each device holding and computing its own only.

Members of different structure have no array in common that could be cut over devices. So every
member's state is laid into one vector per number format, as long as the longest member's, and the
vectors are cut along axis `ensemble`. A device finds its member by `axis_index` and `lax.switch`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from maxlite.config.errors import UserError
from maxlite.ensemble.engines.batched_jaxpr import on_one_device
from maxlite.ensemble.engines.jaxpr_comparison import trace
from maxlite.ensemble.engines.step_cost import Cost, Load, cost_of, dearest, tree_bytes
from maxlite.ensemble.member_program import Program, abstract_states

Vectors = dict[str, jax.Array]  # [Z, L] by number format


class Switched:
  """Programs in one compiled step; the state is `Vectors`, a row on each device."""

  def __init__(
    self,
    programs: Sequence[Program],
    batch: Any,
    *,
    devices: Sequence[jax.Device],
    own_batches: bool = False,
    finish: Callable[[list], Any] = lambda metrics: metrics,
  ):
    """Arguments as of `Groups`.

    Raises:
      UserError: there are fewer devices than members.
    """
    if len(devices) < len(programs):
      raise UserError(
        f"it takes a device per member, and there are {len(programs)} members and {len(devices)} "
        "devices; take strategy auto, or fewer members"
      )
    self.programs, self.abstract = list(programs), abstract_states(programs)
    self._mesh = Mesh(np.array(devices[: len(programs)]), ("ensemble",))
    self._states, self._finish = _Layout(self.abstract), finish
    shapes = [
      jax.eval_shape(program.step, state, batch)[1]
      for program, state in zip(self.programs, self.abstract, strict=True)
    ]
    self._metrics, self._own_batches, self._batch = _Layout(shapes), own_batches, batch
    own, whole = NamedSharding(self._mesh, jax.P("ensemble")), NamedSharding(self._mesh, jax.P())
    self.step = jax.jit(
      self._step,
      in_shardings=(own, own if own_batches else whole),
      out_shardings=(own, whole),
      donate_argnums=0,
    )
    self.init = jax.jit(self._init, out_shardings=own)
    self._pack = jax.jit(self._states.lay, out_shardings=own)
    self.unpack = jax.jit(self._states.take_apart, out_shardings=whole)
    self.predict = jax.jit(self._predict, static_argnames="method", out_shardings=whole)

  def pack(self, states: Sequence[Any]) -> Vectors:
    """The state made of every member's own, wherever they lie."""
    return self._pack(jax.device_get(list(states)))

  def load(self) -> Load:
    """What a step asks of the devices: of the busiest, as of the largest member."""
    costs = [
      cost_of(trace(program.step, state, self._batch)[0])
      for program, state in zip(self.programs, self.abstract, strict=True)
    ]
    total = sum(costs, Cost())
    row_bytes = tree_bytes(jax.eval_shape(self._init)) / len(costs)
    return Load(dearest(costs), total, len(costs), 1, total.operations, row_bytes)

  def _init(self) -> Vectors:
    seed_Z = jnp.asarray([program.seed for program in self.programs], jnp.uint32)
    inits = [on_one_device(program.init, seed_Z[0]) for program in self.programs]
    functions = [lambda _, seed, init=init: self._states.row(init(seed)) for init in inits]
    return self._on_devices(functions, {}, seed_Z, own=True)

  def _step(self, vectors: Vectors, batch: Any) -> tuple[Vectors, Any]:
    """(new states, metrics)."""

    def write(results: tuple[Any, Any]) -> tuple[Vectors, Vectors]:
      return self._states.row(results[0]), self._metrics.row(results[1])

    functions = self._of_states("step", self._batch, write)
    vectors, metrics = self._on_devices(functions, vectors, batch, own=self._own_batches)
    return vectors, self._finish(self._metrics.take_apart(metrics))

  def _predict(self, vectors: Vectors, inputs: Any, method: str = "predict") -> list[Any]:
    """Per member, what its `method` makes of the same `inputs`."""
    results = [
      jax.eval_shape(getattr(program, method), state, inputs)
      for program, state in zip(self.programs, self.abstract, strict=True)
    ]
    layout = _Layout(results)
    functions = self._of_states(method, inputs, layout.row)
    return layout.take_apart(self._on_devices(functions, vectors, inputs, own=False))

  def _of_states(self, name: str, shared: Any, write: Callable) -> list[Callable]:
    """Per member, its method `name` from a row of `Vectors` to what `write` makes of the result."""
    methods = [
      on_one_device(getattr(program, name), state, shared)
      for program, state in zip(self.programs, self.abstract, strict=True)
    ]
    return [
      lambda row, shared, z=z, method=method: write(method(self._states.read(row, z), shared))
      for z, method in enumerate(methods)
    ]

  def _on_devices(
    self, functions: list[Callable], vectors: Vectors, shared: Any, *, own: bool
  ) -> Any:
    """functions[z](row z, shared) on device z, stacked; `own`: each gets a row of `shared`."""

    def local(vectors: Vectors, shared: Any) -> Any:
      first = lambda tree: jax.tree.map(lambda leaf: leaf[0], tree)
      place = jax.lax.axis_index("ensemble")
      result = jax.lax.switch(place, functions, first(vectors), first(shared) if own else shared)
      return jax.tree.map(lambda leaf: leaf[None], result)

    run = jax.shard_map(
      local,
      mesh=self._mesh,
      in_specs=(jax.P("ensemble"), jax.P("ensemble") if own else jax.P()),
      out_specs=jax.P("ensemble"),
      check_vma=False,  # members exchange nothing; their gradients were taken before
    )
    return run(vectors, shared)


class _Layout:
  """Trees of different structure as rows of one length."""

  def __init__(self, trees: Sequence[Any]):
    """The trees need only be described."""
    self._trees = [jax.tree.structure(tree) for tree in trees]
    self._leaves = [jax.tree.leaves(tree) for tree in trees]
    self._lengths: dict[str, int] = {}
    for leaves in self._leaves:
      for name in {str(leaf.dtype) for leaf in leaves}:
        length = sum(leaf.size for leaf in leaves if str(leaf.dtype) == name)
        self._lengths[name] = max(length, self._lengths.get(name, 0))

  def row(self, tree: Any) -> Vectors:
    """One tree as a row."""
    row = {}
    for name, length in self._lengths.items():
      parts = [leaf.ravel() for leaf in jax.tree.leaves(tree) if str(leaf.dtype) == name]
      filling = jnp.zeros(length - sum(part.size for part in parts), name)
      row[name] = jnp.concatenate([*parts, filling])
    return row

  def read(self, row: Vectors, z: int) -> Any:
    """Tree z from its row."""
    start, leaves = dict.fromkeys(self._lengths, 0), []
    for leaf in self._leaves[z]:
      name = str(leaf.dtype)
      leaves.append(row[name][start[name] : start[name] + leaf.size].reshape(leaf.shape))
      start[name] += leaf.size
    return jax.tree.unflatten(self._trees[z], leaves)

  def lay(self, trees: Sequence[Any]) -> Vectors:
    """All trees, stacked."""
    return jax.tree.map(lambda *rows: jnp.stack(rows), *map(self.row, trees))

  def take_apart(self, vectors: Vectors) -> list[Any]:
    """All trees from stacked rows."""
    rows = [{name: v[z] for name, v in vectors.items()} for z in range(len(self._trees))]
    return [self.read(row, z) for z, row in enumerate(rows)]
