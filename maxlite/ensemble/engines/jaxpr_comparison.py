"""Alignment of several members' programs, equation by equation.

Every member's step is traced to a jaxpr. Jaxprs that differ only in literals (a learning rate, an
epsilon) can run as one program whose literals are arrays with an entry per member. Members declare
nothing: any Linen module, loss and optax optimizer works.
"""

import dataclasses
import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from maxlite.config.errors import UserError

# Primitives with inner jaxprs: the parameters that hold them.
SUBJAXPRS = {
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
# Their other parameters that must be equal.
_COMPARED_PARAMS = {
  "while": ("cond_nconsts", "body_nconsts"),
  "scan": ("num_consts", "num_carry", "reverse", "length"),
  "shard_map": ("mesh", "in_specs", "out_specs"),
}
_NAMED = ("jaxpr", "call_jaxpr")  # inner jaxprs that are a function of the user
_ARRAYS = (np.ndarray, np.generic, jax.Array)
_JAX_FOLDER = str(Path(jax.__file__).parent)


class JaxprMismatchError(UserError):
  """Error for programs that cannot run as one; the message names the first difference."""


@dataclasses.dataclass(frozen=True)
class AlignedEqn:
  """One equation of all programs."""

  first: JaxprEqn  # of the first program
  operands: list[Any]  # of the same; an int is the index of a varying literal
  inner: list["AlignedJaxpr"]  # in the order of SUBJAXPRS

  @property
  def name(self) -> str:
    return self.first.primitive.name

  @property
  def params(self) -> dict[str, Any]:
    return self.first.params

  @property
  def needs_rule(self) -> bool:
    """Whether the first program's equation cannot be bound as it is."""
    inner = any(jaxpr.needs_rules for jaxpr in self.inner)
    return inner or self.places_on_one_device or self.draws_together

  @property
  def draws_together(self) -> bool:
    """Whether `jax.vmap` would draw other random numbers: from the first member's key."""
    if self.name in ("random_bits", "random_split", "random_fold_in"):
      return str(self.first.invars[0].aval.dtype) != "key<fry>"  # threefry
    return self.name == "rng_bit_generator"

  @property
  def places_on_one_device(self) -> bool:
    """Whether it shards over a mesh of one device, which has no effect."""
    if self.name == "shard_map":
      return self.params["mesh"].size == 1
    if self.name in ("sharding_constraint", "reshard"):
      sharding = self.params.get("sharding", self.params.get("dst_sharding"))
      return sharding.mesh.size == 1
    return False


@dataclasses.dataclass(frozen=True)
class AlignedJaxpr:
  """A jaxpr of all programs, outer or inner.

  Varying literals are numbered over the outermost jaxpr, which `align_jaxprs` returns with their
  values; an int in place of an array or operand is such a number.
  """

  first: Jaxpr
  consts: list[Any]
  eqns: list[AlignedEqn]
  results: list[Any]

  @functools.cached_property
  def needs_rules(self) -> bool:
    operands = [*self.consts, *self.results, *(x for eqn in self.eqns for x in eqn.operands)]
    return any(isinstance(x, int) for x in operands) or any(eqn.needs_rule for eqn in self.eqns)


def align_jaxprs(
  programs: Sequence[ClosedJaxpr], names: Sequence[str], input_names: Sequence[str] = ()
) -> tuple[AlignedJaxpr, list[Any]]:
  """The aligned programs, and their varying literals, each an array stacked over programs.

  Args:
    names: of the programs, for messages.
    input_names: of the programs' inputs, for messages.

  Raises:
    JaxprMismatchError: the programs differ in more than literals.
  """
  aligner = _Aligner(names)
  with jax.ensure_compile_time_eval():  # of random keys among the constants
    return aligner.align(programs, input_names), aligner.literals


class _Aligner:
  """A parallel walk over programs that collects the literals in which they differ."""

  def __init__(self, names: Sequence[str]):
    self._names = names
    self._subject: JaxprEqn | str = ""  # what is compared: an operation, or an input by its name
    self.literals: list[Any] = []

  def align(self, programs: Sequence[Any], input_names: Sequence[str] = ()) -> AlignedJaxpr:
    jaxprs = [getattr(program, "jaxpr", program) for program in programs]
    consts = [getattr(program, "consts", ()) for program in programs]
    var_ids: list[dict[Any, int]] = [{} for _ in jaxprs]  # by program, in order of definition
    self._require_same("number of inputs", [len(jaxpr.invars) for jaxpr in jaxprs])
    for n, variables in enumerate(zip(*(jaxpr.invars for jaxpr in jaxprs), strict=True)):
      self._subject = input_names[n] if input_names else self._subject
      self._define(variables, var_ids)
    for variables in zip(*(jaxpr.constvars for jaxpr in jaxprs), strict=False):
      self._define(variables, var_ids)
    eqns = [
      self._align_eqns(eqns, var_ids) for eqns in zip(*(j.eqns for j in jaxprs), strict=False)
    ]
    lengths = [len(jaxpr.eqns) for jaxpr in jaxprs]
    if len(set(lengths)) > 1:
      self._subject = jaxprs[lengths.index(max(lengths))].eqns[min(lengths)]
      self._require_same("number of operations before that", lengths)
    self._require_same("number of constants", list(map(len, consts)))
    values = list(map(self._const, zip(*consts, strict=True)))
    return AlignedJaxpr(jaxprs[0], values, eqns, self._align_atoms("outvars", jaxprs, var_ids))

  def _align_eqns(self, eqns: tuple[JaxprEqn, ...], var_ids: list[dict]) -> AlignedEqn:
    self._subject = eqns[0]
    name = eqns[0].primitive.name
    self._require_same("operation", [eqn.primitive.name for eqn in eqns], eqns)
    operands = self._align_atoms("invars", eqns, var_ids)
    inner = [
      self.align(jaxprs[:1] if all(jaxpr is jaxprs[0] for jaxpr in jaxprs) else jaxprs)
      for key in SUBJAXPRS.get(name, ())
      for jaxprs in zip(*(_as_tuple(eqn.params[key]) for eqn in eqns), strict=True)
    ]
    self._subject = eqns[0]
    own = (key for key in eqns[0].params if key not in ignored_params(name))
    for key in _COMPARED_PARAMS.get(name, ()) if inner else own:
      self._require_same(key, [eqn.params[key] for eqn in eqns])
    self._require_same("number of results", [len(eqn.outvars) for eqn in eqns])
    for variables in zip(*(eqn.outvars for eqn in eqns), strict=True):
      self._define(variables, var_ids)
    return AlignedEqn(eqns[0], operands, inner)

  def _define(self, variables: Sequence[Any], var_ids: list[dict]) -> None:
    avals = [variable.aval for variable in variables]
    self._require_same("type", [aval.dtype for aval in avals])
    self._require_same("number of axes", [aval.ndim for aval in avals])
    self._require_same("shape", [aval.shape for aval in avals])
    for variable, ids in zip(variables, var_ids, strict=True):
      ids[variable] = len(ids)

  def _align_atoms(self, key: str, holders: Sequence[Any], var_ids: list[dict]) -> list[Any]:
    """The atoms under `key`, those of the first program; for a varying literal its index.

    A variable must be defined by the same equation in every program.
    """
    atoms = [getattr(holder, key) for holder in holders]
    self._require_same("number of operands", list(map(len, atoms)))
    return [self._align_atom(group, var_ids) for group in zip(*atoms, strict=True)]

  def _align_atom(self, atoms: Sequence[Any], var_ids: list[dict]) -> Any:
    is_literal = [isinstance(atom, Literal) for atom in atoms]
    self._require_same("kind of operand", is_literal)
    if not is_literal[0]:
      self._require_same("operand", [ids[a] for a, ids in zip(atoms, var_ids, strict=True)])
      return atoms[0]
    self._require_same("type of number", [atom.aval.dtype for atom in atoms])
    values = [np.asarray(atom.val, atom.aval.dtype) for atom in atoms]
    return atoms[0] if _all_equal(values) else self._add_literal(values)

  def _const(self, values: tuple) -> Any:
    return values[0] if _all_equal(values) else self._add_literal(values)

  def _add_literal(self, values: Sequence[Any]) -> int:
    self.literals.append(jnp.stack(values) if _is_key(values[0]) else np.stack(values))
    return len(self.literals) - 1

  def _require_same(self, what: str, values: Sequence[Any], eqns: Sequence[JaxprEqn] = ()) -> None:
    """Raise JaxprMismatchError unless the values are equal; `eqns`: of operations, to name them."""
    if _all_equal(values):
      return
    z = next(z for z, value in enumerate(values) if not _equal(values[0], value))
    subject, module, (a, b) = self._subject, "", (values[0], values[z])
    if isinstance(subject, JaxprEqn):
      path = re.sub(r"\w+\(|\)", "", str(subject.source_info.name_stack))  # of jvp(M)/Dense_0
      subject, module = _called(subject), f" (module {path})" if path else ""
    if eqns:
      subject, called = "", (_called(eqns[0]), _called(eqns[z]))
      a, b = called if called[0] != called[1] else (a, b)
    raise JaxprMismatchError(
      f"{what}{' of ' if subject else ''}{subject}: {_short(a)} in {self._names[0]}, {_short(b)} "
      f"in {self._names[z]}{module}"
    )


def ignored_params(name: str) -> set[str]:
  """The parameters of an operation that depend only on the mesh set where JAX first traced it."""
  return set() if name == "sharding_constraint" else {"sharding", "out_sharding"}


def _as_tuple(value: Any) -> tuple:
  return value if isinstance(value, tuple) else (value,)


def _called(eqn: JaxprEqn) -> str:
  """The operation by the name of the JAX function that the program calls, such as gelu."""
  inner = [eqn.params[key] for key in SUBJAXPRS.get(eqn.primitive.name, ()) if key in _NAMED]
  name = inner[0].jaxpr.debug_info.func_name if inner else eqn.primitive.name
  for frame in getattr(eqn.source_info.traceback, "frames", ()):  # innermost first
    if not frame.file_name.startswith(_JAX_FOLDER):
      break
    function = frame.function_name.rpartition(".")[2]
    if any(hasattr(module, function) for module in (jax.nn, jnp, jax.lax)):
      name = function
  return name


def _all_equal(values: Sequence[Any]) -> bool:
  if _is_array(values[0]):
    return all(_equal(values[0], value) for value in values)
  # As `_equal`, in C: most of the time goes into such comparisons.
  return len(set(map(type, values))) == 1 and values.count(values[0]) == len(values)


def _equal(a: Any, b: Any) -> bool:
  """Whether two parameters, or the bits of two arrays, are equal."""
  if a is b:
    return True
  if not (_is_array(a) and _is_array(b)):
    return type(a) is type(b) and bool(a == b)
  return (a.shape, a.dtype) == (b.shape, b.dtype) and _bits(a) == _bits(b)


def _is_array(value: Any) -> bool:
  # The check of jax.Array is slow, and most values are numbers and sizes.
  return not isinstance(value, int | tuple) and isinstance(value, _ARRAYS)


def _bits(array: Any) -> bytes:
  return np.asarray(jax.random.key_data(array) if _is_key(array) else array).tobytes()


def _is_key(array: Any) -> bool:
  return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def _short(value: Any) -> str:
  text = " ".join(str(value).split())
  return text if len(text) <= 40 else f"{text[:37]}..."
