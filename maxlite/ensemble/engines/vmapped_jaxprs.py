"""Programs that differ in literals, as one program under `jax.vmap`.

Every member's program is traced to a jaxpr. Jaxprs that differ only in literals (a learning rate,
an epsilon) run as one, whose literals are arrays with an entry per member. Members declare nothing:
any Linen module, loss and optax optimizer works.
"""

import functools
import itertools
import re
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal
from jax.sharding import Mesh

from maxlite.ensemble.engines.engine_base import JaxprMismatchError
from maxlite.ensemble.engines.step_cost import inner_jaxprs, open_jaxpr
from maxlite.ensemble.member_program import trace

# Parameters of primitives with inner jaxprs that must be equal.
_COMPARED_PARAMS = {
  "cond": ("branches_platforms",),
  "while": ("cond_nconsts", "body_nconsts"),
  "scan": ("num_consts", "num_carry", "reverse", "length"),
  "shard_map": ("mesh", "in_specs", "out_specs"),
}
_JAX_FOLDER = str(Path(jax.__file__).parent)
_REDUCTIONS = ("pmax", "pmin", "psum", "psum_invariant", "reduce_scatter")
_COLLECTIVES = ("all_gather", "all_to_all", "axis_index", "pcast", "pvary", *_REDUCTIONS)


def vmap_programs(
  functions: Sequence[Callable],
  names: Sequence[str],
  args_Z: Sequence[tuple],
  *,
  in_axes: tuple[int | None, ...],
  spmd_axis_name: str | None = None,
  mesh: Mesh | None = None,
) -> Callable:
  """run(*args): what function z returns for member z, stacked over members.

  Args:
    names: of the members, for messages.
    args_Z: per member, the arguments of its function; may be abstract (`jax.ShapeDtypeStruct`).
    in_axes: per argument of `run`, 0 if it is stacked over members, None if they share it.
    spmd_axis_name: mesh axis over which members that themselves use several devices are sharded.
    mesh: of one axis, over which members are sharded, each on one device.

  Raises:
    JaxprMismatchError: the functions differ in more than literals.
  """
  programs = list(map(_program, functions, args_Z, names))
  first = programs[0]
  for program in programs:
    if program.rows != first.rows:
      raise JaxprMismatchError(_first_difference(first, program))
  with jax.ensure_compile_time_eval():  # of random keys
    literals = list(map(_stack, *(program.signature.literals for program in programs)))

  def one(own: list[jax.Array | None], *args: Any) -> Any:
    values = [a if b is None else b for a, b in zip(first.signature.literals, own, strict=True)]
    return first.call(values, args, _Context(mesh is not None, spmd_axis_name))

  run = jax.vmap(one, in_axes=(0, *in_axes), spmd_axis_name=spmd_axis_name)
  if mesh is not None:
    members = jax.P(mesh.axis_names[0])
    run = jax.shard_map(
      run,
      mesh=mesh,
      in_specs=(members, *(jax.P() if axis is None else members for axis in in_axes)),
      out_specs=members,
      check_vma=False,  # no communication between members; gradients were taken before
    )
  return functools.partial(run, literals)


def group_by_jaxpr(functions: Sequence[Callable], args_Z: Sequence[tuple]) -> list[list[int]]:
  """Indices of the functions that differ in literals only, by group; arguments as above."""
  programs = list(map(_program, functions, args_Z))
  groups: dict[int, list[int]] = {}  # by their first function
  for z, program in enumerate(programs):
    first = next((first for first in groups if programs[first].rows == program.rows), z)
    groups.setdefault(first, []).append(z)
  return list(groups.values())


def without_one_device_mesh(function: Callable, *args: Any) -> Callable:
  """`function` without its mesh of one device, for use inside another; `args` may be abstract."""
  program = _program(function, args)
  return lambda *args: program.call(program.signature.literals, args, _Context(one_device=True))


class _Signature(NamedTuple):
  """A jaxpr apart from its literals: jaxprs with equal rows differ in literals only."""

  rows: list[dict[str, Any]]  # of constants and equations, inner ones after their equation
  subjects: list[JaxprEqn | str]  # what they describe
  literals: list[Any]  # and constants, those of inner jaxprs at their equation
  kinds: set[str]  # of its equations, from `_kind`


_signatures: weakref.WeakKeyDictionary[Any, _Signature] = weakref.WeakKeyDictionary()  # by jaxpr


class _Program(NamedTuple):
  """One member's program; its first rows describe its arguments and results."""

  name: str
  args: tuple
  traced: jax.stages.Traced
  signature: _Signature
  rows: list[dict[str, Any]]

  @property
  def leaves(self) -> list[str]:
    """Their paths in the arguments, then in the results."""
    return [
      jax.tree_util.keystr(path, simple=True, separator="/") or "an array"
      for tree in (*self.args, self.traced.out_info)
      for path, _ in jax.tree_util.tree_leaves_with_path(tree)
    ]

  def call(self, literals: Sequence[Any], args: tuple, context: "_Context") -> Any:
    """The result with these values of the literals."""
    results = _evaluate(context, self.traced.jaxpr, literals, jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(self.traced.out_info), results)


def _program(function: Callable, args: tuple, name: str = "") -> _Program:
  traced = trace(function, *args)
  trees = {"trees": (jax.tree.structure(args), jax.tree.structure(traced.out_info))}
  inputs, signature = _types(traced.jaxpr.jaxpr.invars), _sign(traced.jaxpr)
  return _Program(name, args, traced, signature, [trees, *inputs, *signature.rows])


def _sign(program: Any) -> _Signature:
  """The signature of a jaxpr, open or closed."""
  if program in _signatures:
    return _signatures[program]
  jaxpr, consts = open_jaxpr(program)
  count = itertools.count()
  ids = dict(zip((*jaxpr.constvars, *jaxpr.invars), count, strict=False))
  rows, literals, kinds = _types(jaxpr.constvars), list(consts), set()
  subjects: list[JaxprEqn | str] = ["a constant"] * len(rows)

  def describe(atom: Any) -> int | str:
    if not isinstance(atom, Literal):
      return ids[atom]
    aval: Any = atom.aval
    literals.append(np.asarray(atom.val, aval.dtype))
    return f"{aval.dtype}{[*aval.shape]}"

  for eqn in jaxpr.eqns:
    row = {"operation": eqn.primitive.name, "operands": list(map(describe, eqn.invars))}
    rows.append(row | _compared_params(eqn))
    subjects.append(eqn)
    kinds.add(_kind(eqn))
    for inner in map(_sign, inner_jaxprs(eqn)):
      rows += inner.rows
      subjects += inner.subjects
      literals += inner.literals
      kinds |= inner.kinds
    ids.update(zip(eqn.outvars, count, strict=False))
  rows.append({"operation": "return", "operands": list(map(describe, jaxpr.outvars))})
  subjects.append("return")
  return _signatures.setdefault(program, _Signature(rows, subjects, literals, kinds))


def _types(variables: Sequence[Any]) -> list[dict[str, Any]]:
  return [{"type": v.aval.dtype, "shape": v.aval.shape} for v in variables]


def _compared_params(eqn: JaxprEqn) -> dict[str, Any]:
  """The parameters that must be equal, apart from inner jaxprs, whose rows are compared."""
  name, params = eqn.primitive.name, eqn.params
  if inner := inner_jaxprs(eqn):
    own = {key: params.get(key) for key in _COMPARED_PARAMS.get(name, ())}
    return own | {"number of branches": len(inner)}
  own = {key: value for key, value in params.items() if key not in _ignored_params(name)}
  # An array by its bits. Values of different types may be equal: 1 == 1.0 == True.
  arrays = {key: (x.dtype, x.shape, x.tobytes()) for key, x in own.items() if hasattr(x, "tobytes")}
  return own | arrays | {"types of parameters": [*map(type, own.values())]}


def _ignored_params(name: str) -> tuple[str, ...]:
  """The parameters of an operation that depend only on the mesh set where JAX first traced it."""
  return () if name == "sharding_constraint" else ("sharding", "out_sharding")


def _stack(*values: Any) -> Any:
  """A literal of every member, stacked; None if all have the same bits."""
  if len(set(map(_bits, {id(value): value for value in values}.values()))) == 1:
    return None
  # A JAX array: a custom_jvp or custom_vjp under jit takes no stacked NumPy array.
  return jnp.stack(values) if _is_key(values[0]) else jnp.asarray(np.stack(values))


def _bits(array: Any) -> bytes:
  return np.asarray(jax.random.key_data(array) if _is_key(array) else array).tobytes()


def _is_key(array: Any) -> bool:
  return not isinstance(array, np.ndarray) and jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def _first_difference(a: _Program, b: _Program) -> str:
  """The first difference between two programs, in terms of the user's functions."""
  leaves = a.leaves, b.leaves
  if a.rows[0] != b.rows[0]:
    missing = lambda own, other: [path for path in own if path not in other][:1]
    only = [f"{path} is only in {a.name}" for path in missing(*leaves)]
    only += [f"{path} is only in {b.name}" for path in missing(*leaves[::-1])]
    equal = f"arguments or results of {a.name} and {b.name} have equal leaves in different trees"
    return ", ".join(only) or equal
  inputs = ["", *leaves[0][: len(a.traced.jaxpr.jaxpr.invars)]]
  subjects = ([*inputs, *own.signature.subjects] for own in (a, b))
  rows = zip(a.rows, b.rows, *subjects, strict=False)
  row, other, *subject = next(each for each in rows if each[0] != each[1])
  key = next(key for key in (*row, *other) if row.get(key) != other.get(key))
  values, of, module = (row.get(key), other.get(key)), f" of {_called(subject[0])}", ""
  if isinstance(subject[0], JaxprEqn):
    path = re.sub(r"\w+\(|\)", "", str(subject[0].source_info.name_stack))  # of jvp(M)/Dense_0
    module = f" (module {path})" if path else ""
  if key == "operation":
    called, of = (_called(subject[0]), _called(subject[1])), ""
    values = called if called[0] != called[1] else values
  texts = (" ".join(str(value).split()) for value in values)
  shown = [text if len(text) <= 40 else f"{text[:37]}..." for text in texts]
  return f"{key}{of}: {shown[0]} in {a.name}, {shown[1]} in {b.name}{module}"


def _called(subject: JaxprEqn | str) -> str:
  """The operation by the name of the JAX function that the program calls, such as gelu."""
  if isinstance(subject, str):
    return subject
  inner = inner_jaxprs(subject)
  name = open_jaxpr(inner[0])[0].debug_info.func_name if len(inner) == 1 else subject.primitive.name
  for frame in getattr(subject.source_info.traceback, "frames", ()):  # innermost first
    if not frame.file_name.startswith(_JAX_FOLDER):
      break
    function = frame.function_name.rpartition(".")[2]
    if any(hasattr(module, function) for module in (jax.nn, jnp, jax.lax)):
      name = function
  return name


def _kind(eqn: Any) -> str:
  """What JAX's batching rule, or the mesh of the members, does not permit; empty for the others.

  `draw`: under `jax.vmap`, it would draw the random numbers of all members from the first one's
  key. `one device`: it shards over a mesh of one device, which has no effect. `collective`: inside
  such a shard_map, it has no effect either.
  """
  name = eqn.primitive.name
  if name in _COLLECTIVES:
    return "collective"
  if name in ("random_bits", "random_fold_in", "random_split", "rng_bit_generator"):
    return "" if str(eqn.invars[0].aval.dtype) == "key<fry>" else "draw"  # threefry
  if name == "shard_map":
    return "one device" if eqn.params["mesh"].size == 1 else "shard_map"
  if name in ("sharding_constraint", "reshard"):
    key = "dst_sharding" if name == "reshard" else "sharding"
    return "one device" if eqn.params[key].mesh.size == 1 else ""
  return ""


class _Context(NamedTuple):
  """What replaces the mesh of the programs; inner jaxprs, which depend on it, are evaluated too."""

  one_device: bool = False  # the mesh of one device is removed
  spmd_axis: str | None = None  # mesh axis over which members of several devices are sharded
  manual_axis: str | None = None  # the same inside a shard_map

  def pvary(self, array: Any) -> Any:
    """Mark `array` as varying over the members' mesh axis, inside a shard_map."""
    axis = self.manual_axis
    if axis is None or axis in jax.typeof(array).manual_axis_type.varying:
      return array
    return jax.lax.pcast(array, axis, to="varying")


def _evaluate(context: _Context, program: Any, literals: Sequence, args: Sequence) -> list[Any]:
  """The results of a jaxpr with these literals, in the order of its signature."""
  jaxpr, consts = open_jaxpr(program)
  rest = iter(literals)
  inputs = [*map(context.pvary, itertools.islice(rest, len(consts))), *args]
  values = dict(zip((*jaxpr.constvars, *jaxpr.invars), inputs, strict=True))
  read = lambda atom: context.pvary(next(rest)) if isinstance(atom, Literal) else values[atom]
  for eqn in jaxpr.eqns:
    operands = list(map(read, eqn.invars))
    own = [[*itertools.islice(rest, len(_sign(inner).literals))] for inner in inner_jaxprs(eqn)]
    values.update(zip(eqn.outvars, _apply(context, eqn, own, operands), strict=True))
  return list(map(read, jaxpr.outvars))


def _apply(context: _Context, eqn: Any, literals: list[list], args: list) -> Sequence[Any]:
  """The results of an equation; `literals` are those of its inner jaxprs."""
  name, kind, inner = eqn.primitive.name, _kind(eqn), inner_jaxprs(eqn)
  if (kind == "collective" and context.one_device) or (kind == "one device" and not inner):
    args = args or [jnp.zeros((), jnp.int32)]  # of axis_index
    return [jnp.reshape(x, v.aval.shape) for x, v in zip(args, eqn.outvars, strict=True)]
  varies = any(isinstance(literal, jax.core.Tracer) for own in literals for literal in own)
  kinds = set().union(*(_sign(each).kinds for each in inner))
  needs_rule = varies or bool((kinds | {kind}) & {"draw", "one device"})
  bind = functools.partial(_bind, eqn)
  if kind == "draw":
    bind = jax.custom_batching.sequential_vmap(bind)
  elif kind == "shard_map" and (varies or "draw" in kinds):
    raise JaxprMismatchError(
      "programs differ, or draw numbers by another generator than threefry, inside a shard_map "
      f"over {eqn.params['mesh'].size} devices"
    )
  elif kind == "shard_map" and context.spmd_axis:
    return _shard_map_of_members(context.spmd_axis, eqn, literals[0], args)
  if kind == "shard_map" or not inner or not (needs_rule or any(context)):
    return list(map(context.pvary, bind(*args)))
  context = context._replace(one_device=context.one_device or kind == "one device")
  calls = zip(inner, literals, strict=True)
  bodies = [functools.partial(_evaluate, context, *call) for call in calls]
  if name == "custom_vmap_call" and not needs_rule:
    return jax.custom_batching.sequential_vmap(bodies[0])(args)
  return _RULES.get(name, lambda _, bodies, args: bodies[0](args))(eqn.params, bodies, args)


def _bind(eqn: JaxprEqn, *operands: Any) -> list[Any]:
  """The results of the equation on other operands."""
  primitive, params = eqn.primitive, eqn.primitive.get_bind_params(eqn.params)
  params |= {key: None for key in _ignored_params(primitive.name) if key in params}
  results = primitive.bind(*operands, **params)
  return list(results) if primitive.multiple_results else [results]


def _shard_map_of_members(axis: str, eqn: Any, literals: list, args: list[Any]) -> Sequence[Any]:
  """A shard_map whose members are also sharded over another mesh axis.

  In JAX's own rule only batched arrays vary over that axis, and a primitive rejects the others.
  """
  inside, (jaxpr,) = _Context(manual_axis=axis), inner_jaxprs(eqn)
  run = jax.custom_batching.custom_vmap(functools.partial(_bind, eqn))

  @run.def_vmap
  def run_members(axis_size: int, in_batched: list[bool], *args: jax.Array) -> tuple:
    specs = zip(eqn.params["in_specs"], in_batched, strict=True)
    one = lambda *args: _evaluate(inside, jaxpr, literals, list(map(inside.pvary, args)))
    results = jax.shard_map(
      jax.vmap(one, in_axes=[0 if batched else None for batched in in_batched], out_axes=0),
      mesh=eqn.params["mesh"],
      in_specs=tuple(jax.P(axis, *spec) if batched else spec for spec, batched in specs),
      out_specs=[jax.P(axis, *spec) for spec in eqn.params["out_specs"]],
    )(*args)
    return results, [True] * len(results)

  return run(*args)


def _remat(params: Any, bodies: Sequence[Callable], args: Sequence[Any]) -> Any:
  """The barriers keep XLA from reusing the values that are to be recomputed."""
  if params["differentiated"] and params["prevent_cse"]:
    args = list(map(jax.lax.optimization_barrier, args))  # one of all would unify their mesh axes
  return bodies[0](args)


def _cond(params: Any, bodies: Sequence[Callable], args: Sequence[Any]) -> Any:
  """Of a choice by platform, the branches of other platforms are not compiled."""
  if not (platforms := params.get("branches_platforms")):
    return jax.lax.switch(args[0], bodies, args[1:])
  names = (own or ["default"] for own in platforms)
  chosen = {name: body for own, body in zip(names, bodies, strict=True) for name in own}
  return jax.lax.platform_dependent(args[1:], **chosen)


def _while(params: Any, bodies: Sequence[Callable], args: Sequence[Any]) -> Any:
  num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
  cond_consts, body_consts = args[:num_cond], args[num_cond:][:num_body]
  (cond, body), start = bodies, list(args[num_cond + num_body :])
  return jax.lax.while_loop(
    lambda carry: cond([*cond_consts, *carry])[0], lambda carry: body([*body_consts, *carry]), start
  )


def _scan(params: Any, bodies: Sequence[Callable], args: Sequence[Any]) -> Any:
  num_consts, num_carry = params["num_consts"], params["num_carry"]
  consts, init, xs = args[:num_consts], args[num_consts:][:num_carry], args[num_consts:][num_carry:]

  def iterate(carry: Any, slices: Any) -> tuple[list, list]:
    results = bodies[0]([*consts, *carry, *slices])
    return results[:num_carry], results[num_carry:]

  last, ys = jax.lax.scan(iterate, init, xs, params["length"], params["reverse"], params["unroll"])
  return [*last, *ys]


_RULES = {"checkpoint": _remat, "cond": _cond, "remat2": _remat, "scan": _scan, "while": _while}
