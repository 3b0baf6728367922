"""Programs that differ in literals, and optionally in sizes, evaluated as one under `jax.vmap`."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

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
  differ,
)
from maxlite.ensemble.engines.padding_rules import (
  RULES,
  Args,
  MemberContext,
  PaddedArray,
  bind,
  zero_padding,
)

Traced = tuple[ClosedJaxpr, jax.tree_util.PyTreeDef]  # a function, and the structure of its result

# On a mesh of one device, these return their operands.
# fmt: off
_NO_OPS_ON_ONE_DEVICE = frozenset([
  "all_gather", "pcast", "pmax", "pmin", "psum", "psum_invariant", "pvary", "reduce_scatter",
  "reshard", "sharding_constraint",
])
# fmt: on


def vmap_programs(
  functions: Sequence[Callable],
  names: Sequence[str],
  member_args: Sequence[Any],
  shared_args: Any,
  *,
  sizes: bool = False,
  shared_axis: int | None = None,
  spmd_axis_name: str | None = None,
  mesh: Mesh | None = None,
) -> Callable:
  """run(member_args, shared_args): what function z returns for member z, stacked over members.

  `run` takes the members' arguments stacked and pads results with zeros to the largest member's
  shape. Arguments given here may be abstract (`jax.ShapeDtypeStruct`). Equal function objects are
  traced once.

  Args:
    member_args: per member, the tree of its first argument.
    shared_args: the second argument of one member.
    sizes: whether members may differ in array sizes.
    shared_axis: 0 if `run` takes a second argument per member, stacked.
    spmd_axis_name: mesh axis over which members that themselves use several devices are sharded.
    mesh: of one axis, over which members are sharded, each on one device.

  Raises:
    JaxprMismatchError: the functions differ in more than literals (and sizes).
  """
  first_of = {id(function): z for z, function in reversed(list(enumerate(functions)))}
  firsts = sorted(first_of.values())
  program_Z = np.array([firsts.index(first_of[id(function)]) for function in functions], np.int32)
  traced = [_trace(functions[z], member_args[z], shared_args) for z in firsts]
  jaxpr, literals = _align(traced, [names[z] for z in firsts], sizes=sizes)
  _, result_tree = traced[0]

  def one(own_literals: list, own: list, shared: list) -> list[jax.Array]:
    index, *values = own_literals
    member = MemberContext(index, values, spmd_axis_name)
    args = [PaddedArray(leaf) for leaf in (*own, *shared)]
    return zero_padding(member, evaluate(jaxpr, member, args, mesh is not None), jaxpr.out_dims)

  def run(member_args: Any, shared_args: Any) -> Any:
    by_member = [jnp.asarray(values) for values in (program_Z, *(x[program_Z] for x in literals))]
    batched = jax.vmap(one, in_axes=(0, 0, shared_axis), spmd_axis_name=spmd_axis_name)
    if mesh is not None:
      batched = _shard_members(batched, mesh, shared=shared_axis is None)
    results = batched(by_member, jax.tree.leaves(member_args), jax.tree.leaves(shared_args))
    return jax.tree.unflatten(result_tree, results)

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
  leaders: list[tuple[int, Traced]] = []
  groups: dict[int, list[int]] = {}
  leader_of: dict[int, int] = {}
  for z, function in enumerate(functions):
    if id(function) not in leader_of:
      traced = _trace(function, member_args[z], shared_args)
      leader_of[id(function)] = z
      for leader, other in leaders:
        with contextlib.suppress(JaxprMismatchError):
          _align([other, traced], [names[leader], names[z]], sizes=False)
          leader_of[id(function)] = leader
          break
      else:
        leaders.append((z, traced))
    groups.setdefault(leader_of[id(function)], []).append(z)
  return list(groups.values())


def without_one_device_mesh(function: Callable, *args: Any) -> Callable:
  """`function` without its sharding over a mesh of one device; it can run inside any other mesh.

  `args` are example arguments, which may be abstract.
  """
  traced = _trace(function, *args)
  jaxpr, _ = _align([traced], [""], sizes=False)

  def run(*args: Any) -> Any:
    member = MemberContext(jnp.zeros((), jnp.int32), [])
    values = list(map(PaddedArray, jax.tree.leaves(args)))
    results = evaluate(jaxpr, member, values, one_device=True)
    return jax.tree.unflatten(traced[1], [value.array for value in results])

  return run


def _trace(function: Callable, *args: Any) -> Traced:
  jaxpr, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
  return jaxpr, jax.tree.structure(shapes)


def _align(
  traced: Sequence[Traced], names: Sequence[str], *, sizes: bool
) -> tuple[AlignedJaxpr, list[np.ndarray]]:
  aligned = align_jaxprs([jaxpr for jaxpr, _ in traced], names, sizes=sizes)
  if differ([tree for _, tree in traced]):
    raise JaxprMismatchError("the results have different structures")
  return aligned


def evaluate(
  jaxpr: AlignedJaxpr, member: MemberContext, args: Args, one_device: bool = False
) -> Args:
  """The results of `jaxpr` for one member.

  `one_device`: the programs were traced on a mesh of one device, which is removed.
  """
  first = jaxpr.jaxprs[0]
  consts = [member.literals[c] if isinstance(c, int) else member.pvary(c) for c in jaxpr.consts]
  consts = list(map(PaddedArray, consts))
  values = dict(zip((*first.constvars, *first.invars), (*consts, *args), strict=True))

  def read(atom: Any, literal: int | None) -> PaddedArray:
    if literal is not None:
      return PaddedArray(member.literals[literal])
    if isinstance(atom, Literal):
      return PaddedArray(member.pvary(jnp.asarray(atom.val, atom.aval.dtype)))
    return values[atom]

  for aligned in jaxpr.eqns:
    eqn = aligned.eqns[0]
    operands = [read(atom, aligned.literals.get(i)) for i, atom in enumerate(eqn.invars)]
    results = _apply(aligned, member, operands, one_device)
    values.update(zip(eqn.outvars, results, strict=True))
  return [read(atom, jaxpr.literal_results.get(i)) for i, atom in enumerate(first.outvars)]


def _apply(eqn: AlignedEqn, member: MemberContext, args: Args, one_device: bool) -> Args:
  if eqn.name == "shard_map" and member.spmd_axis_name and not eqn.needs_rule:
    return _shard_map_of_members(eqn, member, args)
  descend = one_device or member.spmd_axis_name or member.manual_axis_name
  needs_rule = eqn.needs_rule or (descend and eqn.name in SUBJAXPRS)
  if eqn.name in _NO_OPS_ON_ONE_DEVICE and (one_device or needs_rule):
    return args
  if one_device and eqn.name == "axis_index":
    return [PaddedArray(jnp.zeros((), jnp.int32))]
  if needs_rule and eqn.name in _HIGHER_ORDER_RULES:
    return _HIGHER_ORDER_RULES[eqn.name](eqn, member, args, one_device)
  if needs_rule and eqn.name not in RULES:
    raise JaxprMismatchError(f"sizes differ in {eqn.name}, which has no rule for padding")
  if needs_rule:
    return RULES[eqn.name](eqn, member, args)
  return [PaddedArray(member.pvary(result.array)) for result in bind(eqn, args)]


def _inline(eqn: AlignedEqn, member: MemberContext, args: Args, one_device: bool) -> Args:
  ((jaxpr,),) = eqn.subjaxprs.values()
  if eqn.name == "shard_map" and not eqn.places_on_one_device:
    raise JaxprMismatchError(
      f"programs differ inside a shard_map over {eqn.params['mesh'].size} devices"
    )
  return evaluate(jaxpr, member, args, one_device or eqn.name == "shard_map")


class _OnArrays:
  """`evaluate` of an inner jaxpr as a function of arrays, for JAX's control flow.

  After it was traced, `zero_padded` has by call the flags of its results.
  """

  def __init__(self, jaxpr: AlignedJaxpr, member: MemberContext, args: Args, one_device: bool):
    """`args`: only their flags are used."""
    self._flags = [arg.zero_padded for arg in args]
    self._evaluate = lambda values: evaluate(jaxpr, member, values, one_device)
    self.zero_padded: list[bool] = []

  def __call__(self, *arrays: jax.Array) -> list[jax.Array]:
    results = self._evaluate(list(map(PaddedArray, arrays, self._flags)))
    self.zero_padded = [result.zero_padded for result in results]
    return [result.array for result in results]


def _custom_vmap(eqn: AlignedEqn, member: MemberContext, args: Args, one_device: bool) -> Args:
  """Functions with a vmap rule: one member after the other, since JAX's rule would be slow."""
  (jaxpr,) = eqn.subjaxprs["call"]
  if eqn.is_ragged or jaxpr.has_literals:
    return evaluate(jaxpr, member, args, one_device)
  arrays = [arg.array for arg in args]
  function = _OnArrays(jaxpr, member, list(map(PaddedArray, arrays)), one_device)
  run = jax.custom_batching.sequential_vmap(function)
  return list(map(PaddedArray, run(*arrays)))


def _shard_map_of_members(eqn: AlignedEqn, member: MemberContext, args: Args) -> Args:
  """A shard_map whose members are also sharded over another mesh axis.

  In JAX's own rule only batched arrays vary over that axis, so that operands of one primitive vary
  over different axes. Here, everything inside varies over it.
  """
  axis, (jaxpr,) = member.spmd_axis_name, eqn.subjaxprs["jaxpr"]
  inside = MemberContext(member.program_index, member.literals, manual_axis_name=axis)

  @jax.custom_batching.custom_vmap
  def run(*arrays: jax.Array) -> list[jax.Array]:
    return [result.array for result in bind(eqn, list(map(PaddedArray, arrays)))]

  def one(*arrays: jax.Array) -> list[jax.Array]:
    results = evaluate(jaxpr, inside, [PaddedArray(inside.pvary(array)) for array in arrays])
    return [result.array for result in results]

  @run.def_vmap
  def run_members(axis_size: int, in_batched: list[bool], *arrays: jax.Array) -> tuple:
    specs = zip(eqn.params["in_specs"], in_batched, strict=True)
    results = jax.shard_map(
      jax.vmap(one, in_axes=[0 if batched else None for batched in in_batched], out_axes=0),
      mesh=eqn.params["mesh"],
      in_specs=tuple(jax.P(axis, *spec) if batched else spec for spec, batched in specs),
      out_specs=[jax.P(axis, *spec) for spec in eqn.params["out_specs"]],
    )(*arrays)
    return results, [True] * len(results)

  return list(map(PaddedArray, run(*(arg.array for arg in args))))


def _remat(eqn: AlignedEqn, member: MemberContext, args: Args, one_device: bool) -> Args:
  (jaxpr,) = eqn.subjaxprs["jaxpr"]
  function = _OnArrays(jaxpr, member, args, one_device)
  options = {key: eqn.params[key] for key in ("prevent_cse", "policy")}
  remat = jax.checkpoint(function, **options)
  results = remat(*(arg.array for arg in args))
  return list(map(PaddedArray, results, function.zero_padded))


def _cond(eqn: AlignedEqn, member: MemberContext, args: Args, one_device: bool) -> Args:
  index, *operands = args
  branches = [_OnArrays(b, member, operands, one_device) for b in eqn.subjaxprs["branches"]]
  results = jax.lax.switch(index.array, branches, *(arg.array for arg in operands))
  flags = zip(*(branch.zero_padded for branch in branches), strict=True)
  return list(map(PaddedArray, results, map(all, flags)))


def _while(eqn: AlignedEqn, member: MemberContext, args: Args, one_device: bool) -> Args:
  num_cond, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
  cond_consts, body_consts = args[:num_cond], args[num_cond : num_cond + num_body]
  (cond,), (body,) = eqn.subjaxprs["cond_jaxpr"], eqn.subjaxprs["body_jaxpr"]

  def condition(carry: list[jax.Array]) -> jax.Array:
    return evaluate(cond, member, [*cond_consts, *map(PaddedArray, carry)], one_device)[0].array

  def step(carry: list[jax.Array]) -> list[jax.Array]:
    results = evaluate(body, member, [*body_consts, *map(PaddedArray, carry)], one_device)
    return zero_padding(member, results, eqn.out_dims)

  init = zero_padding(member, args[num_cond + num_body :], eqn.out_dims)
  return list(map(PaddedArray, jax.lax.while_loop(condition, step, init)))


def _scan(eqn: AlignedEqn, member: MemberContext, args: Args, one_device: bool) -> Args:
  """A shorter member keeps its carry after its last iteration; what it stacks then is padding."""
  params, (body,) = eqn.params, eqn.subjaxprs["jaxpr"]
  num_consts, num_carry = params["num_consts"], params["num_carry"]
  consts, xs = args[:num_consts], args[num_consts + num_carry :]
  lengths = tuple(eqn.params["length"] for eqn in eqn.eqns)
  carry_dims, same_length = eqn.out_dims[:num_carry], not differ(lengths)
  zero_padded: list[bool] = []

  def iterate(carry: list[jax.Array], inputs: tuple) -> tuple[list[jax.Array], list[jax.Array]]:
    index, slices = inputs
    own = [PaddedArray(a, x.zero_padded) for a, x in zip(slices, xs, strict=True)]
    results = evaluate(body, member, [*consts, *map(PaddedArray, carry), *own], one_device)
    new = zero_padding(member, results[:num_carry], carry_dims)
    if not same_length:
      running = index < member.size(lengths)
      new = [jnp.where(running, after, before) for after, before in zip(new, carry, strict=True)]
    zero_padded[:] = [same_length and result.zero_padded for result in results[num_carry:]]
    return new, [result.array for result in results[num_carry:]]

  last, ys = jax.lax.scan(
    iterate,
    zero_padding(member, args[num_consts : num_consts + num_carry], carry_dims),
    (jnp.arange(max(lengths)), [x.array for x in xs]),
    length=max(lengths),
    reverse=params["reverse"],
    unroll=min(params["unroll"], max(*lengths, 1)),
  )
  return [*map(PaddedArray, last), *map(PaddedArray, ys, zero_padded)]


_HIGHER_ORDER_RULES = {
  "jit": _inline,
  "closed_call": _inline,
  "custom_jvp_call": _inline,
  "custom_vjp_call": _inline,
  "custom_vmap_call": _custom_vmap,
  "shard_map": _inline,
  "remat2": _remat,
  "checkpoint": _remat,
  "cond": _cond,
  "while": _while,
  "scan": _scan,
}
assert set(_HIGHER_ORDER_RULES) == set(SUBJAXPRS)
