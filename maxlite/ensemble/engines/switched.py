"""One member per device in one compiled step; each device holds and computes only its own member.

Members of different structure have no array in common that could be sharded. Every member's state
is therefore flattened into one vector per dtype, padded to the longest member's, and the vectors
are sharded along axis `ensemble`. A device selects its member by `axis_index` and `lax.switch`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from maxlite.config.errors import UserError
from maxlite.ensemble.engines.engine_base import (
  EngineRequest,
  EnsembleEngine,
  StackMetrics,
  StepCost,
  require_one_process,
  tree_bytes,
)
from maxlite.ensemble.engines.group_trees import join_metrics
from maxlite.ensemble.member_program import MemberProgram
from maxlite.kernels.xla_cpu import jit_init

Vectors = dict[str, jax.Array]  # by dtype: [length], or stacked over members


class SwitchEngine(EnsembleEngine):
  """Programs in one compiled step; the state is `Vectors`, sharded over the members."""

  def __init__(self, request: EngineRequest):
    """Raise UserError if there are fewer devices than members, or a member has a mesh."""
    require_one_process(request)
    super().__init__(request, request.build())
    if any(program.functions.sharder is not None for program in self.programs):
      raise UserError(
        "members from configs have a mesh of their devices, and here each device runs a part of "
        "one program; use submesh, which also runs one member per device"
      )
    num_members, num_devices = len(self.programs), len(request.devices)
    if num_devices < num_members:
      raise UserError(
        f"it takes a device per member, and there are {num_members} members and {num_devices} "
        "devices; take strategy auto, or fewer members"
      )
    self._mesh = Mesh(np.array(request.devices[:num_members]), ("ensemble",))
    self._states = _VectorLayout(self.abstract)
    sharded = NamedSharding(self._mesh, jax.P("ensemble"))
    replicated = NamedSharding(self._mesh, jax.P())
    self.step = jax.jit(
      self._step,
      in_shardings=(sharded, sharded if request.own_batches else replicated),
      out_shardings=(sharded, replicated),
      donate_argnums=0,
    )
    self.init = jit_init(self._init, out_shardings=sharded)
    self._pack = jax.jit(self._states.flatten_all, out_shardings=sharded)
    self._unpack = jax.jit(self._states.unflatten_all, out_shardings=replicated)
    self.predict = jax.jit(self._predict, static_argnames="method", out_shardings=replicated)

  def pack(self, states: Sequence[Any]) -> Vectors:
    return self._pack(jax.device_get(list(states)))  # which may be on other devices

  def take(self, state: Vectors, z: int) -> Any:
    return self._unpack(state)[z]

  def unpack(self, state: Vectors) -> list[Any]:
    return self._unpack(state)

  def step_cost(self) -> StepCost:
    num_members = len(self.programs)
    separate = self.cost_of_separate_programs([[z] for z in range(num_members)])
    state_bytes = tree_bytes(jax.eval_shape(self._init)) / num_members
    return dataclasses.replace(separate, num_programs=1, state_bytes=state_bytes)

  def _init(self) -> Vectors:
    seed_Z = jnp.stack([program.seed_array for program in self.programs])

    def init_of(program: MemberProgram) -> Callable[[Vectors, jax.Array], Vectors]:
      params = None if program.base_params is None else program.base_params()
      return lambda _, seed: self._states.flatten(program.functions.init(seed, params))

    functions = [init_of(program) for program in self.programs]
    return self._on_devices(functions, {}, seed_Z, own_inputs=True)

  def _step(self, vectors: Vectors, batch: Any) -> tuple[Vectors, StackMetrics]:
    layout = _VectorLayout([shapes[1] for shapes in self.result_shapes("step", self.request.batch)])

    def flatten(result: tuple[Any, dict]) -> tuple[Vectors, Vectors]:
      return self._states.flatten(result[0]), layout.flatten(result[1])

    functions = self._on_vectors("step", flatten)
    own_batches = self.request.own_batches
    vectors, metrics = self._on_devices(functions, vectors, batch, own_inputs=own_batches)
    return vectors, join_metrics(layout.unflatten_all(metrics))

  def _predict(self, vectors: Vectors, inputs: Any, method: str = "predict") -> list[Any]:
    layout = _VectorLayout(self.result_shapes(method, inputs))
    functions = self._on_vectors(method, layout.flatten)
    return layout.unflatten_all(self._on_devices(functions, vectors, inputs, own_inputs=False))

  def _on_vectors(self, method: str, flatten: Callable) -> list[Callable]:
    """Per member, its method as a function of (`Vectors`, inputs) whose result is flattened."""

    def function_of(z: int) -> Callable[[Vectors, Any], Any]:
      call = getattr(self.programs[z].functions, method)
      return lambda own, inputs: flatten(call(self._states.unflatten(own, z), inputs))

    return [function_of(z) for z in range(len(self.programs))]

  def _on_devices(
    self, functions: list[Callable], vectors: Vectors, inputs: Any, *, own_inputs: bool
  ) -> Any:
    """functions[z](vectors of member z, inputs) on device z, stacked over members."""
    own = lambda tree: jax.tree.map(lambda leaf: leaf[0], tree)

    def local(vectors: Vectors, inputs: Any) -> Any:
      member = jax.lax.axis_index("ensemble")
      inputs = own(inputs) if own_inputs else inputs
      result = jax.lax.switch(member, functions, own(vectors), inputs)
      return jax.tree.map(lambda leaf: leaf[None], result)

    run = jax.shard_map(
      local,
      mesh=self._mesh,
      in_specs=(jax.P("ensemble"), jax.P("ensemble") if own_inputs else jax.P()),
      out_specs=jax.P("ensemble"),
      check_vma=False,  # no communication between members; gradients were taken before
    )
    return run(vectors, inputs)


class _VectorLayout:
  """Trees of different structure as vectors of equal length."""

  def __init__(self, trees: Sequence[Any]):
    """The trees may be abstract."""
    self._structures = [jax.tree.structure(tree) for tree in trees]
    self._leaves = [jax.tree.leaves(tree) for tree in trees]
    self._lengths: dict[str, int] = {}
    self._dtypes = {str(leaf.dtype): leaf.dtype for leaves in self._leaves for leaf in leaves}
    for leaves in self._leaves:
      for dtype in {str(leaf.dtype) for leaf in leaves}:
        length = sum(leaf.size for leaf in leaves if str(leaf.dtype) == dtype)
        self._lengths[dtype] = max(length, self._lengths.get(dtype, 0))

  def flatten(self, tree: Any) -> Vectors:
    vectors = {}
    for dtype, length in self._lengths.items():
      parts = [leaf.ravel() for leaf in jax.tree.leaves(tree) if str(leaf.dtype) == dtype]
      padding = jnp.zeros(length - sum(part.size for part in parts), self._dtypes[dtype])
      vectors[dtype] = jnp.concatenate([*parts, padding])
    return vectors

  def unflatten(self, vectors: Vectors, z: int) -> Any:
    """Tree `z` from its vectors."""
    start, leaves = dict.fromkeys(self._lengths, 0), []
    for leaf in self._leaves[z]:
      dtype = str(leaf.dtype)
      own = vectors[dtype][start[dtype] : start[dtype] + leaf.size]
      leaves.append(own.reshape(leaf.shape))
      start[dtype] += leaf.size
    return jax.tree.unflatten(self._structures[z], leaves)

  def flatten_all(self, trees: Sequence[Any]) -> Vectors:
    return jax.tree.map(lambda *vectors: jnp.stack(vectors), *map(self.flatten, trees))

  def unflatten_all(self, vectors: Vectors) -> list[Any]:
    own = [{dtype: v[z] for dtype, v in vectors.items()} for z in range(len(self._structures))]
    return [self.unflatten(vectors, z) for z, vectors in enumerate(own)]
