"""Whether several members' programs are one program but for numbers and sizes.

Every member's step is traced to a jaxpr, and the jaxprs are read side by side. Where only literals
differ (a learning rate, an epsilon), the members can run as one program with these numbers as
arrays; where array sizes differ too, as one padded program. No member has to declare anything, and
any Linen module, loss and optax optimizer will do.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from maxlite.config.errors import UserError

Sizes = tuple[int, ...]  # of one axis, by program
Dims = tuple[Sizes, ...]  # of one array, by axis

# Parameters that hold an inner program; nothing else of these operations has to be compared.
BODIES = {
  "jit": ("jaxpr",),
  "closed_call": ("call_jaxpr",),
  "custom_jvp_call": ("call_jaxpr",),
  "custom_vjp_call": ("call_jaxpr",),
  "custom_vmap_call": ("call",),
  "remat2": ("jaxpr",),
  "checkpoint": ("jaxpr",),
  "cond": ("branches",),
  "while": ("cond_jaxpr", "body_jaxpr"),
  "scan": ("jaxpr",),
  "shard_map": ("jaxpr",),
}
# Of operations with inner programs, parameters that matter beside them.
FACTS = {
  "while": ("cond_nconsts", "body_nconsts"),
  "scan": ("num_consts", "num_carry", "reverse"),
  "shard_map": ("mesh", "in_specs", "out_specs"),
}
# Parameters that are sizes or follow from them.
SIZES = {
  "broadcast_in_dim": ("shape",),
  "dynamic_slice": ("slice_sizes",),
  "gather": ("slice_sizes",),
  "iota": ("shape",),
  "pad": ("padding_config",),
  "random_split": ("shape",),
  "reshape": ("new_sizes",),
  "scan": ("length",),
  "slice": ("start_indices", "limit_indices"),
  "split": ("sizes",),
}


class NotAlikeError(UserError):
  """Why programs cannot run as one; the message names what differs first."""


@dataclasses.dataclass(frozen=True)
class Line:
  """One operation, as each program has it."""

  eqns: tuple[JaxprEqn, ...]
  numbers: dict[int, int]  # operand -> place in Alike.numbers, where literals differ
  bodies: dict[str, tuple["Body", ...]]  # parameter -> its inner programs, compared

  @property
  def name(self) -> str:
    return self.eqns[0].primitive.name

  @property
  def params(self) -> dict[str, Any]:
    return self.eqns[0].params

  @property
  def in_dims(self) -> list[Dims]:
    return [_dims(atoms) for atoms in zip(*(eqn.invars for eqn in self.eqns), strict=True)]

  @property
  def out_dims(self) -> list[Dims]:
    return [_dims(atoms) for atoms in zip(*(eqn.outvars for eqn in self.eqns), strict=True)]

  @property
  def is_ragged(self) -> bool:
    """Whether a size differs; a scan may differ in nothing but its length."""
    ragged = any(is_ragged(dims) for dims in (*self.in_dims, *self.out_dims))
    return ragged or len({eqn.params.get("length") for eqn in self.eqns}) > 1

  @property
  def is_open(self) -> bool:
    """Whether the operation cannot be bound as the first program has it."""
    inner = any(body.is_open for bodies in self.bodies.values() for body in bodies)
    return self.is_ragged or inner or self.places_on_one_device

  @property
  def places_on_one_device(self) -> bool:
    """Whether it says where an array lies on a mesh of one device, and so says nothing."""
    if self.name == "shard_map":
      return self.params["mesh"].size == 1
    if self.name in ("sharding_constraint", "reshard"):
      sharding = self.params.get("sharding", self.params.get("dst_sharding"))
      return sharding.mesh.size == 1
    return False


@dataclasses.dataclass(frozen=True)
class Body:
  """A program or an inner one, as each member has it."""

  jaxprs: tuple[Jaxpr, ...]
  consts: list[Any]  # an array that all share, or an int: place in Alike.numbers
  lines: list[Line]
  results: dict[int, int]  # result -> place in Alike.numbers, where literal results differ
  has_numbers: bool

  @property
  def is_open(self) -> bool:
    return self.has_numbers or any(line.is_open for line in self.lines)


@dataclasses.dataclass(frozen=True)
class Alike:
  """Programs that are one but for `numbers` (stacked over programs) and sizes."""

  body: Body
  numbers: list[np.ndarray]


def compare(programs: Sequence[ClosedJaxpr], names: Sequence[str], *, sizes: bool) -> Alike:
  """The programs side by side; `names` are for messages, `sizes` allows array sizes to differ.

  Raises:
    NotAlikeError: they differ in more than that.
  """
  reader = _Reader(names, sizes)
  return Alike(reader.body(programs), reader.numbers)


def is_ragged(dims: Dims) -> bool:
  return any(len(set(sizes)) > 1 for sizes in dims)


def padded(dims: Dims) -> tuple[int, ...]:
  """The shape that holds every program's array."""
  return tuple(max(sizes) for sizes in dims)


def _dims(atoms: Sequence[Any]) -> Dims:
  return tuple(zip(*(atom.aval.shape for atom in atoms), strict=True))


class _Reader:
  """Reads programs side by side and collects the numbers they differ in."""

  def __init__(self, names: Sequence[str], sizes: bool):
    self._names, self._sizes = names, sizes
    self.numbers: list[np.ndarray] = []

  def body(self, programs: Sequence[Any]) -> Body:
    jaxprs = tuple(p.jaxpr if isinstance(p, ClosedJaxpr) else p for p in programs)
    consts = [p.consts if isinstance(p, ClosedJaxpr) else [] for p in programs]
    first = len(self.numbers)
    if self._sizes:
      jaxprs = tuple(map(_without_barriers, jaxprs))
    self._same("operations", [len(jaxpr.eqns) for jaxpr in jaxprs])
    self._same("inputs", [len(jaxpr.invars) for jaxpr in jaxprs])
    self._same("constants", [len(c) for c in consts])
    places: list[dict[Any, int]] = [{} for _ in jaxprs]
    for variables in zip(*((*j.constvars, *j.invars) for j in jaxprs), strict=True):
      self._define(variables, places)
    values = [self._const(group) for group in zip(*consts, strict=True)]
    lines = [self._line(eqns, places) for eqns in zip(*(j.eqns for j in jaxprs), strict=True)]
    results = self._atoms(list(zip(*(j.outvars for j in jaxprs), strict=True)), places)
    return Body(jaxprs, values, lines, results, len(self.numbers) > first)

  def _line(self, eqns: tuple[JaxprEqn, ...], places: list[dict]) -> Line:
    self._same("operation", [eqn.primitive.name for eqn in eqns])
    name = eqns[0].primitive.name
    self._same(f"operands of {name}", [len(eqn.invars) for eqn in eqns])
    self._same(f"results of {name}", [len(eqn.outvars) for eqn in eqns])
    numbers = self._atoms(list(zip(*(eqn.invars for eqn in eqns), strict=True)), places)
    bodies = {key: self._bodies(eqns, key) for key in BODIES.get(name, ())}
    facts = FACTS.get(name, ()) if bodies else eqns[0].params
    for key in facts:
      if not (self._sizes and key in SIZES.get(name, ())):
        self._same(f"{key} of {name}", [eqn.params[key] for eqn in eqns])
    if not self._sizes and name == "scan":
      self._same("length of scan", [eqn.params["length"] for eqn in eqns])
    for variables in zip(*(eqn.outvars for eqn in eqns), strict=True):
      self._define(variables, places)
    return Line(eqns, numbers, bodies)

  def _bodies(self, eqns: tuple[JaxprEqn, ...], key: str) -> tuple[Body, ...]:
    inner = [eqn.params[key] for eqn in eqns]
    inner = [value if isinstance(value, tuple) else (value,) for value in inner]
    self._same(f"branches of {eqns[0].primitive.name}", [len(value) for value in inner])
    return tuple(self.body(group) for group in zip(*inner, strict=True))

  def _define(self, variables: Sequence[Any], places: list[dict]) -> None:
    avals = [variable.aval for variable in variables]
    self._same("type", [str(aval.dtype) for aval in avals])
    self._same("number of axes", [aval.ndim for aval in avals])
    if not self._sizes:
      self._same("shape", [aval.shape for aval in avals])
    for variable, known in zip(variables, places, strict=True):
      known[variable] = len(known)

  def _atoms(self, groups: list[tuple], places: list[dict]) -> dict[int, int]:
    """Where literals differ; a variable must come of the same operation in every program."""
    numbers = {}
    for position, atoms in enumerate(groups):
      literal = [isinstance(atom, Literal) for atom in atoms]
      self._same("kind of operand", literal)
      if not literal[0]:
        self._same("operand", [known[a] for a, known in zip(atoms, places, strict=True)])
      elif any(not _equal(atoms[0].val, atom.val) for atom in atoms):
        self._same("type of a number", [str(atom.aval.dtype) for atom in atoms])
        numbers[position] = self._number([np.asarray(a.val, a.aval.dtype) for a in atoms])
    return numbers

  def _const(self, values: tuple) -> Any:
    if all(value is values[0] or _equal(value, values[0]) for value in values):
      return values[0]
    arrays = [np.asarray(value) for value in values]
    shape = padded(tuple(zip(*(array.shape for array in arrays), strict=True)))
    if any(array.shape != shape for array in arrays):
      room = [
        tuple(zip((0,) * len(shape), np.subtract(shape, a.shape), strict=True)) for a in arrays
      ]
      arrays = [np.pad(array, pads) for array, pads in zip(arrays, room, strict=True)]
    return self._number(arrays)

  def _number(self, values: list[np.ndarray]) -> int:
    self.numbers.append(np.stack(values))
    return len(self.numbers) - 1

  def _same(self, what: str, values: Sequence[Any]) -> None:
    for name, value in zip(self._names, values, strict=True):
      if not _equal(values[0], value):
        raise NotAlikeError(
          f"{what}: {_short(values[0])} in {self._names[0]}, {_short(value)} in {name}"
        )


def _without_barriers(jaxpr: Jaxpr) -> Jaxpr:
  """Where they stand may depend on sizes; they change no value."""
  source: dict[Var, Any] = {}
  follow = lambda atoms: [source.get(a, a) if isinstance(a, Var) else a for a in atoms]
  eqns = []
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == "optimization_barrier":
      source.update(zip(eqn.outvars, follow(eqn.invars), strict=True))
    else:
      eqns.append(eqn.replace(invars=follow(eqn.invars)))
  return jaxpr.replace(eqns=eqns, outvars=follow(jaxpr.outvars))


def _equal(a: Any, b: Any) -> bool:
  if isinstance(a, np.ndarray | jax.Array) or isinstance(b, np.ndarray | jax.Array):
    return np.shape(a) == np.shape(b) and bool(np.all(np.asarray(a) == np.asarray(b)))
  return a is b or a == b


def _short(value: Any) -> str:
  text = " ".join(str(value).split())
  return text if len(text) <= 40 else f"{text[:37]}..."


def trace(function: Callable, *args: Any) -> tuple[ClosedJaxpr, Any]:
  """(jaxpr, shapes of the result) of `function`, whose arguments need only be described."""
  closed, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
  return closed, shapes
