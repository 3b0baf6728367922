"""Programs that differ in literals, evaluated as one under `jax.vmap`."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal
from jax.sharding import Mesh

from maxlite.ensemble.engines.jaxpr_comparison import (
  SUBJAXPRS,
  AlignedEqn,
  AlignedJaxpr,
  JaxprMismatchError,
  align_jaxprs,
  ignored_params,
)


class TracedFunction(NamedTuple):
  jaxpr: ClosedJaxpr
  leaves: list[str]  # their paths in the arguments, then in the results
  result_tree: jax.tree_util.PyTreeDef


# On a mesh of one device, these return their operands.
# fmt: off
_NO_OPS_ON_ONE_DEVICE = frozenset([
  "all_gather", "pcast", "pmax", "pmin", "psum", "psum_invariant", "pvary", "reduce_scatter",
  "reshard", "sharding_constraint",
])
# fmt: on


@dataclasses.dataclass(frozen=True)
class MemberContext:
  """One member in the evaluation under vmap."""

  literals: Sequence[jax.Array] = ()  # its values of the varying literals
  spmd_axis_name: str | None = None  # mesh axis over which members of several devices are sharded
  manual_axis_name: str | None = None  # the same inside a shard_map
  one_device: bool = False  # the programs were traced on a mesh of one device, which is removed

  def pvary(self, array: Any) -> Any:
    """Mark `array` as varying over the members' mesh axis, inside a shard_map."""
    axis = self.manual_axis_name
    if axis is None or axis in jax.typeof(array).manual_axis_type.varying:
      return array
    return jax.lax.pcast(array, axis, to="varying")


def vmap_programs(
  functions: Sequence[Callable],
  names: Sequence[str],
  member_args: Sequence[Any],
  shared_args: Any,
  *,
  shared_axis: int | None = None,
  spmd_axis_name: str | None = None,
  mesh: Mesh | None = None,
) -> Callable:
  """run(member_args, shared_args): what function z returns for member z, stacked over members.

  `run` takes the members' arguments stacked. Arguments given here may be abstract
  (`jax.ShapeDtypeStruct`). Equal function objects are traced once.

  Args:
    member_args: per member, the tree of its first argument.
    shared_args: the second argument of one member.
    shared_axis: 0 if `run` takes a second argument per member, stacked.
    spmd_axis_name: mesh axis over which members that themselves use several devices are sharded.
    mesh: of one axis, over which members are sharded, each on one device.

  Raises:
    JaxprMismatchError: the functions differ in more than literals.
  """
  first_Z = _first_occurrences(functions)
  firsts = sorted(set(first_Z))
  program_Z = np.searchsorted(firsts, first_Z).astype(np.int32)
  traced = [_trace(functions[z], member_args[z], shared_args) for z in firsts]
  jaxpr, literals = _align(traced, [names[z] for z in firsts])

  def one(own_literals: list, own: list, shared: list) -> list[jax.Array]:
    member = MemberContext(own_literals, spmd_axis_name, one_device=mesh is not None)
    return evaluate(jaxpr, member, [*own, *shared])

  def run(member_args: Any, shared_args: Any) -> Any:
    by_member = [jnp.asarray(values[program_Z]) for values in literals]
    batched = jax.vmap(one, in_axes=(0, 0, shared_axis), spmd_axis_name=spmd_axis_name)
    if mesh is not None:
      batched = _shard_members(batched, mesh, shared=shared_axis is None)
    results = batched(by_member, jax.tree.leaves(member_args), jax.tree.leaves(shared_args))
    return jax.tree.unflatten(traced[0].result_tree, results)

  return run


def _shard_members(batched: Callable, mesh: Mesh, *, shared: bool) -> Callable:
  members = jax.P(mesh.axis_names[0])
  return jax.shard_map(
    batched,
    mesh=mesh,
    in_specs=(members, members, jax.P() if shared else members),
    out_specs=members,
    check_vma=False,  # no communication between members; gradients were taken before
  )


def group_by_jaxpr(
  functions: Sequence[Callable], names: Sequence[str], member_args: Sequence[Any], shared_args: Any
) -> list[list[int]]:
  """Indices of the functions that differ in literals only, by group; arguments as above."""
  first_Z = _first_occurrences(functions)
  traced = {z: _trace(functions[z], member_args[z], shared_args) for z in sorted(set(first_Z))}
  groups: dict[int, list[int]] = {}  # by their first function

  def are_alike(indices: Sequence[int]) -> bool:
    with contextlib.suppress(JaxprMismatchError):
      _align([traced[z] for z in indices], [names[z] for z in indices])
      return True
    return False

  if are_alike(list(traced)):
    return [list(range(len(functions)))]
  is_alike = functools.cache(lambda *pair: are_alike(pair))
  for z, first in enumerate(first_Z):
    leader = next((leader for leader in groups if is_alike(leader, first)), z)
    groups.setdefault(leader, []).append(z)
  return list(groups.values())


def _first_occurrences(functions: Sequence[Callable]) -> list[int]:
  first_of: dict[int, int] = {}
  return [first_of.setdefault(id(function), z) for z, function in enumerate(functions)]


def without_one_device_mesh(function: Callable, *args: Any) -> Callable:
  """`function` without its sharding over a mesh of one device; it can run inside any other mesh.

  `args` are example arguments, which may be abstract.
  """
  traced = _trace(function, *args)
  jaxpr, _ = _align([traced], [""])

  def run(*args: Any) -> Any:
    member = MemberContext(one_device=True)
    return jax.tree.unflatten(traced.result_tree, evaluate(jaxpr, member, jax.tree.leaves(args)))

  return run


def _trace(function: Callable, *args: Any) -> TracedFunction:
  jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
  leaves = [
    jax.tree_util.keystr(path, simple=True, separator="/")
    for tree in (*args, shapes)
    for path, _ in jax.tree_util.tree_leaves_with_path(tree)
  ]
  return TracedFunction(jaxpr, leaves, jax.tree.structure(shapes))


def _align(
  traced: Sequence[TracedFunction], names: Sequence[str]
) -> tuple[AlignedJaxpr, list[Any]]:
  first = traced[0]
  for name, other in zip(names, traced, strict=True):
    only = [f"{path} is only in {names[0]}" for path in first.leaves if path not in other.leaves]
    more = [f"{path} is only in {name}" for path in other.leaves if path not in first.leaves]
    if only or more:
      raise JaxprMismatchError(", ".join([*only[:1], *more[:1]]))
    if other.result_tree != first.result_tree:
      raise JaxprMismatchError(
        f"the results of {names[0]} and {name} have equal leaves in different containers"
      )
  return align_jaxprs([own.jaxpr for own in traced], names, first.leaves)


def evaluate(
  jaxpr: AlignedJaxpr, member: MemberContext, args: Sequence[jax.Array]
) -> list[jax.Array]:
  """The results of `jaxpr` for one member."""
  consts = [member.literals[c] if isinstance(c, int) else member.pvary(c) for c in jaxpr.consts]
  values = dict(zip((*jaxpr.first.constvars, *jaxpr.first.invars), (*consts, *args), strict=True))

  def read(atom: Any) -> jax.Array:
    if isinstance(atom, int):
      return member.literals[atom]
    if isinstance(atom, Literal):
      return member.pvary(jnp.asarray(atom.val, atom.aval.dtype))
    return values[atom]

  for eqn in jaxpr.eqns:
    results = _apply(eqn, member, list(map(read, eqn.operands)))
    values.update(zip(eqn.first.outvars, results, strict=True))
  return list(map(read, jaxpr.results))


def _apply(eqn: AlignedEqn, member: MemberContext, args: Sequence[jax.Array]) -> Sequence:
  if eqn.name == "shard_map" and member.spmd_axis_name and not eqn.needs_rule:
    return _shard_map_of_members(eqn, member, args)
  if eqn.name in _NO_OPS_ON_ONE_DEVICE and (member.one_device or eqn.needs_rule):
    return args
  if member.one_device and eqn.name == "axis_index":
    return [jnp.zeros((), jnp.int32)]
  descend = member.one_device or member.spmd_axis_name or member.manual_axis_name
  if eqn.name in _HIGHER_ORDER_RULES and (eqn.needs_rule or descend):
    return _HIGHER_ORDER_RULES[eqn.name](eqn, member, args)
  run = lambda *args: bind(eqn, args)
  if eqn.draws_together:
    run = jax.custom_batching.sequential_vmap(run)
  return [member.pvary(result) for result in run(*args)]


def bind(eqn: AlignedEqn, operands: Sequence[jax.Array]) -> list[jax.Array]:
  """The results of the first program's equation."""
  primitive = eqn.first.primitive
  params = primitive.get_bind_params(eqn.params)
  params |= {key: None for key in ignored_params(eqn.name) if key in params}
  results = primitive.bind(*operands, **params)
  return list(results) if primitive.multiple_results else [results]


def _inline(eqn: AlignedEqn, member: MemberContext, args: Sequence[jax.Array]) -> Sequence:
  (jaxpr,) = eqn.inner
  if eqn.name != "shard_map":
    return evaluate(jaxpr, member, args)
  if not eqn.places_on_one_device:
    raise JaxprMismatchError(
      f"programs differ, or draw numbers by another generator than threefry, inside a shard_map "
      f"over {eqn.params['mesh'].size} devices"
    )
  return evaluate(jaxpr, dataclasses.replace(member, one_device=True), args)


def _remat(eqn: AlignedEqn, member: MemberContext, args: Sequence[jax.Array]) -> Sequence:
  """The barriers keep XLA from reusing the values that are to be recomputed."""
  if eqn.params["differentiated"] and eqn.params["prevent_cse"]:
    args = list(map(jax.lax.optimization_barrier, args))  # one of all would unify their mesh axes
  return _inline(eqn, member, args)


def _custom_vmap(eqn: AlignedEqn, member: MemberContext, args: Sequence[jax.Array]) -> Sequence:
  """Functions with a vmap rule: one member after the other, since JAX's rule would be slow."""
  (jaxpr,) = eqn.inner
  if eqn.needs_rule:
    return evaluate(jaxpr, member, args)
  return jax.custom_batching.sequential_vmap(lambda *args: evaluate(jaxpr, member, args))(*args)


def _shard_map_of_members(
  eqn: AlignedEqn, member: MemberContext, args: Sequence[jax.Array]
) -> Sequence:
  """A shard_map whose members are also sharded over another mesh axis.

  In JAX's own rule only batched arrays vary over that axis, so that operands of one primitive vary
  over different axes. Here, everything inside varies over it.
  """
  axis, (jaxpr,) = member.spmd_axis_name, eqn.inner
  inside = MemberContext(member.literals, manual_axis_name=axis)

  @jax.custom_batching.custom_vmap
  def run(*args: jax.Array) -> list[jax.Array]:
    return bind(eqn, args)

  @run.def_vmap
  def run_members(axis_size: int, in_batched: list[bool], *args: jax.Array) -> tuple:
    specs = zip(eqn.params["in_specs"], in_batched, strict=True)
    one = lambda *args: evaluate(jaxpr, inside, list(map(inside.pvary, args)))
    results = jax.shard_map(
      jax.vmap(one, in_axes=[0 if batched else None for batched in in_batched], out_axes=0),
      mesh=eqn.params["mesh"],
      in_specs=tuple(jax.P(axis, *spec) if batched else spec for spec, batched in specs),
      out_specs=[jax.P(axis, *spec) for spec in eqn.params["out_specs"]],
    )(*args)
    return results, [True] * len(results)

  return run(*args)


def _cond(eqn: AlignedEqn, member: MemberContext, args: Sequence[jax.Array]) -> Sequence:
  branches = [
    lambda *operands, branch=branch: evaluate(branch, member, operands) for branch in eqn.inner
  ]
  return jax.lax.switch(args[0], branches, *args[1:])


def _while(eqn: AlignedEqn, member: MemberContext, args: Sequence[jax.Array]) -> Sequence:
  num_cond, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
  cond_consts, body_consts = args[:num_cond], args[num_cond : num_cond + num_body]
  cond, body = eqn.inner
  return jax.lax.while_loop(
    lambda carry: evaluate(cond, member, [*cond_consts, *carry])[0],
    lambda carry: evaluate(body, member, [*body_consts, *carry]),
    list(args[num_cond + num_body :]),
  )


def _scan(eqn: AlignedEqn, member: MemberContext, args: Sequence[jax.Array]) -> Sequence:
  params, (body,) = eqn.params, eqn.inner
  num_consts, num_carry = params["num_consts"], params["num_carry"]
  consts, init, xs = args[:num_consts], args[num_consts:][:num_carry], args[num_consts:][num_carry:]

  def iterate(carry: Sequence[jax.Array], slices: Sequence[jax.Array]) -> tuple[list, list]:
    results = evaluate(body, member, [*consts, *carry, *slices])
    return results[:num_carry], results[num_carry:]

  options = {key: params[key] for key in ("length", "reverse", "unroll")}
  last, ys = jax.lax.scan(iterate, list(init), list(xs), **options)
  return [*last, *ys]


_HIGHER_ORDER_RULES = dict.fromkeys(SUBJAXPRS, _inline) | {
  "checkpoint": _remat,
  "cond": _cond,
  "custom_vmap_call": _custom_vmap,
  "remat2": _remat,
  "scan": _scan,
  "while": _while,
}
