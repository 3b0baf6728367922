"""One member per device in one compiled step; each device holds and computes only its own member.

Members of different structure have no array in common that could be sharded. Every member's state
is therefore flattened into one vector per dtype, padded to the longest member's, and the vectors
are sharded along axis `ensemble`. A device selects its member by `axis_index` and `lax.switch`.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from maxlite.ensemble.engines.engine_base import (
  EngineRequest,
  EnsembleEngine,
  StackMetrics,
  StepCost,
  require_one_process,
  tree_bytes,
)
from maxlite.ensemble.engines.group_trees import join_metrics, stack_rows, take_row
from maxlite.ensemble.members.program import MemberProgram
from maxlite.errors import UserError
from maxlite.kernels.xla_cpu import jit_init
from maxlite.sharding.pytree import PyTree

# By dtype, a vector [length], or the vectors of all members [Z, length].
Vectors = dict[str, jax.Array]
# (`Vectors` of a member, inputs) -> `Vectors` or trees of them
MemberFunction = Callable[[Vectors, PyTree], PyTree]


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
    num_members = len(self.programs)
    num_devices = len(request.devices)
    if num_devices < num_members:
      raise UserError(
        f"it takes a device per member, and there are {num_members} members and {num_devices} "
        "devices; take strategy auto, or fewer members"
      )
    self._mesh = Mesh(np.array(request.devices[:num_members]), ("ensemble",))
    self._states = _VectorLayout(self.abstract)
    sharded = NamedSharding(self._mesh, jax.P("ensemble"))
    replicated = NamedSharding(self._mesh, jax.P())
    batch_sharding = sharded if request.own_batches else replicated
    self.jitted_step = jax.jit(
      self._step,
      in_shardings=(sharded, batch_sharding),
      out_shardings=(sharded, replicated),
      donate_argnums=0,
    )
    self._jitted_init = jit_init(self._init, out_shardings=sharded)
    self._jitted_predict = jax.jit(
      self._predict, static_argnames="method", out_shardings=replicated
    )
    self._pack = jax.jit(self._states.flatten_all, out_shardings=sharded)
    self._unpack = jax.jit(self._states.unflatten_all, out_shardings=replicated)

  def init(self) -> Vectors:
    return self._jitted_init()

  def step(self, state: Vectors, batch: PyTree) -> tuple[Vectors, StackMetrics]:
    return self.jitted_step(state, batch)

  def predict(self, state: Vectors, inputs: PyTree, method: str = "predict") -> list[PyTree]:
    return self._jitted_predict(state, inputs, method=method)

  def pack(self, states: Sequence[PyTree]) -> Vectors:
    on_host = jax.device_get(list(states))  # the states may be on other devices
    return self._pack(on_host)

  def take(self, state: Vectors, z: int) -> PyTree:
    return self._unpack(state)[z]

  def unpack(self, state: Vectors) -> list[PyTree]:
    return self._unpack(state)

  def step_cost(self) -> StepCost:
    num_members = len(self.programs)
    separate = self.cost_of_separate_programs([[z] for z in range(num_members)])
    bytes_of_all = tree_bytes(jax.eval_shape(self._init))
    return dataclasses.replace(
      separate,
      num_programs=1,
      state_bytes=bytes_of_all / num_members,
    )

  def _init(self) -> Vectors:
    seed_Z = jnp.stack([program.seed_array for program in self.programs])
    functions = [self._init_function(program) for program in self.programs]
    return self._on_devices(functions, {}, seed_Z, own_inputs=True)

  def _init_function(self, program: MemberProgram) -> MemberFunction:
    """The member's state before the first step, flattened, as a function of ({}, seed)."""
    params = program.read_base_params()

    def init(_no_vectors: Vectors, seed: jax.Array) -> Vectors:
      state = program.functions.init(seed, params)
      return self._states.flatten(state)

    return init

  def _step(self, vectors: Vectors, batch: PyTree) -> tuple[Vectors, StackMetrics]:
    results = self.result_shapes("step", self.request.batch)
    layout = _VectorLayout([metrics for _, metrics in results])

    def flatten(result: tuple[PyTree, dict[str, jax.Array]]) -> tuple[Vectors, Vectors]:
      state, metrics = result
      return self._states.flatten(state), layout.flatten(metrics)

    functions = self._on_vectors("step", flatten)
    vectors, metrics = self._on_devices(
      functions,
      vectors,
      batch,
      own_inputs=self.request.own_batches,
    )
    return vectors, join_metrics(layout.unflatten_all(metrics))

  def _predict(self, vectors: Vectors, inputs: PyTree, method: str) -> list[PyTree]:
    layout = _VectorLayout(self.result_shapes(method, inputs))
    functions = self._on_vectors(method, layout.flatten)
    results = self._on_devices(functions, vectors, inputs, own_inputs=False)
    return layout.unflatten_all(results)

  def _on_vectors(self, method: str, flatten: Callable[[PyTree], PyTree]) -> list[MemberFunction]:
    """Per member, its method as a function of (`Vectors`, inputs) whose result is flattened."""

    def function_of(z: int) -> MemberFunction:
      call = getattr(self.programs[z].functions, method)

      def on_vectors(vectors: Vectors, inputs: PyTree) -> PyTree:
        state = self._states.unflatten(vectors, z)
        return flatten(call(state, inputs))

      return on_vectors

    return [function_of(z) for z in range(len(self.programs))]

  def _on_devices(
    self,
    functions: Sequence[MemberFunction],
    vectors: Vectors,
    inputs: PyTree,
    *,
    own_inputs: bool,
  ) -> PyTree:
    """functions[z](vectors of member z, inputs) on device z, stacked over members.

    Args:
      own_inputs: whether `inputs` have an entry per member along their first axis.
    """

    def local(vectors: Vectors, inputs: PyTree) -> PyTree:
      own_vectors = take_row(vectors, 0)
      if own_inputs:
        inputs = take_row(inputs, 0)
      member = jax.lax.axis_index("ensemble")
      result = jax.lax.switch(member, functions, own_vectors, inputs)
      return jax.tree.map(lambda leaf: leaf[None], result)

    per_member = jax.P("ensemble")
    run = jax.shard_map(
      local,
      mesh=self._mesh,
      in_specs=(per_member, per_member if own_inputs else jax.P()),
      out_specs=per_member,
      check_vma=False,  # no communication between members; gradients were taken before
    )
    return run(vectors, inputs)


class _VectorLayout:
  """Trees of different structure as vectors of equal length."""

  def __init__(self, trees: Sequence[PyTree]):
    """The trees may be abstract."""
    self._structures = [jax.tree.structure(tree) for tree in trees]
    self._leaves = [jax.tree.leaves(tree) for tree in trees]
    self._lengths: dict[str, int] = {}  # by dtype, of the longest tree's vector
    self._dtypes: dict[str, np.dtype] = {}
    for leaves in self._leaves:
      sizes: dict[str, int] = {}
      for leaf in leaves:
        name = str(leaf.dtype)
        self._dtypes[name] = leaf.dtype
        sizes[name] = sizes.get(name, 0) + leaf.size
      for name, size in sizes.items():
        self._lengths[name] = max(size, self._lengths.get(name, 0))

  def flatten(self, tree: PyTree) -> Vectors:
    """The leaves of one of the trees as one vector per dtype, padded with zeros."""
    leaves = jax.tree.leaves(tree)
    vectors = {}
    for name, length in self._lengths.items():
      parts = [leaf.ravel() for leaf in leaves if str(leaf.dtype) == name]
      num_used = sum(part.size for part in parts)
      parts.append(jnp.zeros(length - num_used, self._dtypes[name]))
      vectors[name] = jnp.concatenate(parts)
    return vectors

  def unflatten(self, vectors: Vectors, z: int) -> PyTree:
    """Tree `z` from its vectors."""
    start = dict.fromkeys(self._lengths, 0)
    leaves = []
    for leaf in self._leaves[z]:
      name = str(leaf.dtype)
      end = start[name] + leaf.size
      values = vectors[name][start[name] : end]
      leaves.append(values.reshape(leaf.shape))
      start[name] = end
    return jax.tree.unflatten(self._structures[z], leaves)

  def flatten_all(self, trees: Sequence[PyTree]) -> Vectors:
    """All trees, whose vectors are stacked."""
    return stack_rows([self.flatten(tree) for tree in trees])

  def unflatten_all(self, vectors: Vectors) -> list[PyTree]:
    """All trees from their stacked vectors."""
    trees = []
    for z in range(len(self._structures)):
      trees.append(self.unflatten(take_row(vectors, z), z))
    return trees
