"""Programs that are alike, run as one: a program with the members' numbers and sizes as arrays."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from jax.sharding import Mesh

from maxlite.ensemble.engines.jaxpr_comparison import (
  BODIES,
  Body,
  Line,
  NotAlikeError,
  compare,
  trace,
)
from maxlite.ensemble.engines.padding_rules import RULES, Member, Value, bind, zero_padding

# On a mesh of one device these hand on what they are given.
_PLACING = (
  "all_gather",
  "pcast",
  "pmax",
  "pmin",
  "psum",
  "psum_invariant",
  "pvary",
  "reduce_scatter",
  "reshard",
  "sharding_constraint",
)


def run_together(
  functions: Sequence[Callable],
  names: Sequence[str],
  stacked: Sequence[Any],
  shared: Sequence[Any],
  *,
  sizes: bool = False,
  shared_axis: int | None = None,
  spmd_axis_name: str | None = None,
  mesh: Mesh | None = None,
) -> Callable:
  """run(stacked, shared): what function z returns for (stacked z, shared), stacked over members.

  Results come padded with zeros to the largest member's shape. Equal functions are traced once.

  Args:
    stacked: per member, the tree of its own arguments, which need only be described.
    shared: the arguments that all members get alike, as one member gets them.
    sizes: whether members may differ in array sizes.
    shared_axis: 0 where every member gets its own of `shared` after all, stacked.
    spmd_axis_name: mesh axis that members are cut over, each of them cut over others.
    mesh: of one axis, over which members are cut, each of them on one device.

  Raises:
    NotAlikeError: the functions differ in more than numbers (and sizes).
  """
  distinct = {id(function): z for z, function in reversed(list(enumerate(functions)))}
  firsts = sorted(distinct.values())
  which_Z = np.array([firsts.index(distinct[id(function)]) for function in functions], np.int32)
  traced = [trace(functions[z], stacked[z], shared) for z in firsts]
  alike = compare([closed for closed, _ in traced], [names[z] for z in firsts], sizes=sizes)
  result_tree = jax.tree.structure(traced[0][1])
  trees = [jax.tree.structure(shapes) for _, shapes in traced]
  if any(tree != result_tree for tree in trees):
    raise NotAlikeError("the results have different structures")
  num_stacked = len(jax.tree.leaves(stacked[0]))
  out_dims = [
    tuple(zip(*(leaf.shape for leaf in leaves), strict=True))
    for leaves in zip(*(jax.tree.leaves(shapes) for _, shapes in traced), strict=True)
  ]

  def one(number, own, common):
    which, *numbers = number
    member = Member(which, numbers, spmd_axis_name)
    given = [Value(leaf) for leaf in (*own, *common)]
    results = evaluate(alike.body, member, given, placed=mesh is not None)
    return [
      zero_padding(member, result, dims) for result, dims in zip(results, out_dims, strict=True)
    ]

  def run(stacked_args: Any, shared_args: Any) -> Any:
    own, common = jax.tree.leaves(stacked_args), jax.tree.leaves(shared_args)
    assert len(own) == num_stacked
    numbers = [which_Z, *(number[which_Z] for number in alike.numbers)]
    along = jax.vmap(one, in_axes=(0, 0, shared_axis), spmd_axis_name=spmd_axis_name)
    if mesh is not None:
      (axis,) = mesh.axis_names
      along = jax.shard_map(
        along,
        mesh=mesh,
        in_specs=(jax.P(axis), jax.P(axis), jax.P() if shared_axis is None else jax.P(axis)),
        out_specs=jax.P(axis),
        check_vma=False,  # members exchange nothing; their gradients were taken before
      )
    return jax.tree.unflatten(result_tree, along(list(map(jnp.asarray, numbers)), own, common))

  return run


def group_alike(
  functions: Sequence[Callable], names: Sequence[str], stacked: Sequence[Any], shared: Any
) -> list[list[int]]:
  """Places of the functions that differ in numbers only, group by group; arguments as above."""
  leaders: list[tuple[int, Any, Any]] = []
  groups: dict[int, list[int]] = {}
  known: dict[int, int] = {}
  for z, function in enumerate(functions):
    if id(function) not in known:
      closed, shapes = trace(function, stacked[z], shared)
      tree = jax.tree.structure(shapes)
      known[id(function)] = z
      for leader, other, other_tree in leaders:
        if tree == other_tree and _differ_in_numbers([other, closed], [names[leader], names[z]]):
          known[id(function)] = leader
          break
      else:
        leaders.append((z, closed, tree))
    groups.setdefault(known[id(function)], []).append(z)
  return list(groups.values())


def _differ_in_numbers(programs: Sequence[Any], names: Sequence[str]) -> bool:
  try:
    compare(programs, names, sizes=False)
  except NotAlikeError:
    return False
  return True


def on_one_device(function: Callable, *args: Any) -> Callable:
  """`function` without its placements on a mesh of one device, to run anywhere on any mesh.

  `args` are examples, which need only be described.
  """
  closed, shapes = trace(function, *args)
  body = compare([closed], ["it"], sizes=False).body

  def run(*args: Any) -> Any:
    member = Member(jnp.zeros((), jnp.int32), [])
    values = evaluate(body, member, [Value(leaf) for leaf in jax.tree.leaves(args)], placed=True)
    return jax.tree.unflatten(jax.tree.structure(shapes), [value.array for value in values])

  return run


def evaluate(body: Body, member: Member, args: list[Value], placed: bool = False) -> list[Value]:
  """The results of `body` for one member, whose arrays are padded.

  `placed` says that a mesh of one device, which the program was made for, is taken away.
  """
  jaxpr = body.jaxprs[0]
  consts = [member.numbers[c] if isinstance(c, int) else member.vary(c) for c in body.consts]
  consts = list(map(Value, consts))
  known = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

  def read(atom: Any, place: int | None) -> Value:
    if place is not None:
      return Value(member.numbers[place])
    if isinstance(atom, Literal):
      return Value(member.vary(jnp.asarray(atom.val, atom.aval.dtype)))
    return known[atom]

  for line in body.lines:
    eqn = line.eqns[0]
    values = [read(atom, line.numbers.get(i)) for i, atom in enumerate(eqn.invars)]
    results = _apply(line, member, values, placed)
    known.update(zip(eqn.outvars, results, strict=True))
  return [read(atom, body.results.get(i)) for i, atom in enumerate(jaxpr.outvars)]


def _apply(line: Line, member: Member, values: list[Value], placed: bool) -> list[Value]:
  if line.name == "shard_map" and member.spmd_axis_name and not line.is_open:
    return _spread(line, member, values)
  everywhere = placed or member.spmd_axis_name or member.inside_axis
  opened = line.is_open or (everywhere and line.name in BODIES)
  if line.name in _PLACING and (placed or opened):
    return values
  if placed and line.name == "axis_index":
    return [Value(jnp.zeros((), jnp.int32))]
  if opened and line.name in _HIGHER:
    return _HIGHER[line.name](line, member, values, placed)
  if opened and line.name not in RULES:
    raise NotAlikeError(f"sizes differ in {line.name}, which has no rule for padding")
  if opened:
    return RULES[line.name](line, member, values)
  return [Value(member.vary(array)) for array in bind(line, values)]


def _inline(line: Line, member: Member, values: list[Value], placed: bool) -> list[Value]:
  ((body,),) = line.bodies.values()
  placed = placed or line.name == "shard_map"
  if line.name == "shard_map" and not line.places_on_one_device:
    raise NotAlikeError(
      f"programs differ inside a shard_map over {line.params['mesh'].size} devices"
    )
  return evaluate(body, member, values, placed)


def _in_turn(line: Line, member: Member, values: list[Value], placed: bool) -> list[Value]:
  """What has a vmap rule of its own, because JAX's would be slow: one member after the other."""
  (body,) = line.bodies["call"]
  if line.is_ragged or body.has_numbers:
    return evaluate(body, member, values, placed)

  @jax.custom_batching.sequential_vmap
  def run(*arrays: jax.Array) -> list[jax.Array]:
    return [v.array for v in evaluate(body, member, list(map(Value, arrays)), placed)]

  return [Value(array) for array in run(*(value.array for value in values))]


def _spread(line: Line, member: Member, values: list[Value]) -> list[Value]:
  """A shard_map of members that are cut over one more mesh axis beside it.

  JAX's own rule has only what is batched vary over that axis, and then finds operands of one
  operation that vary over different axes. Here everything inside does.
  """
  axis, (body,) = member.spmd_axis_name, line.bodies["jaxpr"]
  inside = Member(member.which, member.numbers, inside_axis=axis)

  @jax.custom_batching.custom_vmap
  def run(*arrays: jax.Array) -> list[jax.Array]:
    return bind(line, list(map(Value, arrays)))

  def one(*arrays: jax.Array) -> list[jax.Array]:
    given = [Value(inside.vary(array)) for array in arrays]
    return [value.array for value in evaluate(body, inside, given)]

  @run.def_vmap
  def run_members(axis_size: int, in_batched: list[bool], *arrays: jax.Array) -> tuple:
    del axis_size
    of = lambda spec, batched: jax.P(axis, *spec) if batched else spec
    results = jax.shard_map(
      jax.vmap(one, in_axes=[0 if batched else None for batched in in_batched], out_axes=0),
      mesh=line.params["mesh"],
      in_specs=tuple(map(of, line.params["in_specs"], in_batched)),
      out_specs=[jax.P(axis, *spec) for spec in line.params["out_specs"]],
    )(*arrays)
    return results, [True] * len(results)

  return [Value(array) for array in run(*(value.array for value in values))]


def _remat(line: Line, member: Member, values: list[Value], placed: bool) -> list[Value]:
  (body,) = line.bodies["jaxpr"]
  clean: list[bool] = []

  def run(*arrays: jax.Array) -> list[jax.Array]:
    given = [Value(a, v.clean) for a, v in zip(arrays, values, strict=True)]
    results = evaluate(body, member, given, placed)
    clean[:] = [result.clean for result in results]
    return [result.array for result in results]

  kept = jax.checkpoint(run, prevent_cse=line.params["prevent_cse"], policy=line.params["policy"])
  return [Value(a, c) for a, c in zip(kept(*(v.array for v in values)), clean, strict=True)]


def _cond(line: Line, member: Member, values: list[Value], placed: bool) -> list[Value]:
  index, *operands = values
  clean: list[list[bool]] = []

  def branch(body: Body) -> Callable:
    def run(*arrays: jax.Array) -> list[jax.Array]:
      given = [Value(a, v.clean) for a, v in zip(arrays, operands, strict=True)]
      results = evaluate(body, member, given, placed)
      clean.append([result.clean for result in results])
      return [result.array for result in results]

    return run

  choices = [branch(body) for body in line.bodies["branches"]]
  results = jax.lax.switch(index.array, choices, *(value.array for value in operands))
  return [Value(a, all(c)) for a, c in zip(results, zip(*clean, strict=True), strict=True)]


def _while(line: Line, member: Member, values: list[Value], placed: bool) -> list[Value]:
  num_cond, num_body = line.params["cond_nconsts"], line.params["body_nconsts"]
  cond_consts, body_consts = values[:num_cond], values[num_cond : num_cond + num_body]
  start = values[num_cond + num_body :]
  (cond,), (body,) = line.bodies["cond_jaxpr"], line.bodies["body_jaxpr"]
  dims = line.out_dims

  def go_on(carry: list[jax.Array]) -> jax.Array:
    return evaluate(cond, member, [*cond_consts, *map(Value, carry)], placed)[0].array

  def turn(carry: list[jax.Array]) -> list[jax.Array]:
    results = evaluate(body, member, [*body_consts, *map(Value, carry)], placed)
    return [zero_padding(member, r, d) for r, d in zip(results, dims, strict=True)]

  first = [zero_padding(member, value, d) for value, d in zip(start, dims, strict=True)]
  return [Value(array) for array in jax.lax.while_loop(go_on, turn, first)]


def _scan(line: Line, member: Member, values: list[Value], placed: bool) -> list[Value]:
  """A shorter member's carry stands still past its last turn; what it stacks there is padding."""
  params, (body,) = line.params, line.bodies["jaxpr"]
  num_consts, num_carry = params["num_consts"], params["num_carry"]
  consts, start = values[:num_consts], values[num_consts : num_consts + num_carry]
  stacked = values[num_consts + num_carry :]
  lengths = tuple(eqn.params["length"] for eqn in line.eqns)
  dims, same_length = line.out_dims, len(set(lengths)) == 1
  clean: list[bool] = []

  def turn(carry: list[jax.Array], inputs: tuple) -> tuple[list[jax.Array], list[jax.Array]]:
    step, slices = inputs
    given = [Value(a, v.clean) for a, v in zip(slices, stacked, strict=True)]
    results = evaluate(body, member, [*consts, *map(Value, carry), *given], placed)
    after = [zero_padding(member, r, d) for r, d in zip(results, dims[:num_carry], strict=False)]
    if not same_length:
      alive = step < member.size(lengths)
      after = [jnp.where(alive, new, old) for new, old in zip(after, carry, strict=True)]
    clean[:] = [same_length and result.clean for result in results[num_carry:]]
    return after, [result.array for result in results[num_carry:]]

  first = [zero_padding(member, value, d) for value, d in zip(start, dims, strict=False)]
  steps = jnp.arange(max(lengths))
  last, slices = jax.lax.scan(
    turn,
    first,
    (steps, [value.array for value in stacked]),
    length=max(lengths),
    reverse=params["reverse"],
    unroll=min(params["unroll"], max(*lengths, 1)),
  )
  return [*map(Value, last), *(Value(a, c) for a, c in zip(slices, clean, strict=True))]


_HIGHER = {
  "jit": _inline,
  "closed_call": _inline,
  "custom_jvp_call": _inline,
  "custom_vjp_call": _inline,
  "custom_vmap_call": _in_turn,
  "shard_map": _inline,
  "remat2": _remat,
  "checkpoint": _remat,
  "cond": _cond,
  "while": _while,
  "scan": _scan,
}
assert set(_HIGHER) == set(BODIES)
