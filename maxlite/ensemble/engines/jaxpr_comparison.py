"""Alignment of several members' programs, equation by equation.

Every member's step is traced to a jaxpr. Jaxprs that differ only in literals (a learning rate, an
epsilon) can run as one program whose literals are arrays with an entry per member. Jaxprs that also
differ in array sizes can run as one padded program. Members declare nothing: any Linen module, loss
and optax optimizer works.
"""

import dataclasses
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from maxlite.config.errors import UserError

Sizes = tuple[int, ...]  # one axis: its size in each program
Dims = tuple[Sizes, ...]  # one array: `Sizes` of each axis

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
  "scan": ("num_consts", "num_carry", "reverse"),
  "shard_map": ("mesh", "in_specs", "out_specs"),
}
# Parameters that are array sizes or follow from them.
_SIZE_PARAMS = {
  "broadcast_in_dim": ("shape",),
  "gather": ("slice_sizes",),
  "pad": ("padding_config",),
  "random_split": ("shape",),
  "reshape": ("new_sizes",),
  "scan": ("length",),
  "slice": ("start_indices", "limit_indices"),
  "split": ("sizes",),
}
_NAMED = ("jaxpr", "call_jaxpr")  # inner jaxprs that are a function of the user
_JAX_FOLDER = str(Path(jax.__file__).parent)


class JaxprMismatchError(UserError):
  """Error for programs that cannot run as one; the message names the first difference."""


@dataclasses.dataclass(frozen=True)
class AlignedEqn:
  """One equation, with its form in each program."""

  eqns: tuple[JaxprEqn, ...]
  literals: dict[int, int]  # operand -> index of its varying literal
  subjaxprs: dict[str, tuple["AlignedJaxpr", ...]]  # by parameter

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

  def param_dims(self, key: str) -> tuple[tuple, ...]:
    """A parameter with an entry per axis: by axis, its value in each program."""
    return tuple(zip(*(eqn.params[key] for eqn in self.eqns), strict=True))

  @property
  def is_ragged(self) -> bool:
    """Whether an array size, or a parameter that follows from sizes, differs between programs."""
    values = [[eqn.params[key] for eqn in self.eqns] for key in _SIZE_PARAMS.get(self.name, ())]
    return any(map(is_ragged, (*self.in_dims, *self.out_dims))) or any(map(differ, values))

  @property
  def needs_rule(self) -> bool:
    """Whether the first program's equation cannot be bound as it is."""
    inner = any(jaxpr.needs_rules for jaxprs in self.subjaxprs.values() for jaxpr in jaxprs)
    return self.is_ragged or inner or self.places_on_one_device or self.draws_together

  @property
  def draws_together(self) -> bool:
    """Whether `jax.vmap` would draw other random numbers: from the first member's key."""
    if self.name in ("random_bits", "random_split", "random_fold_in"):
      return str(self.eqns[0].invars[0].aval.dtype) != "key<fry>"  # threefry
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
  """A jaxpr, outer or inner, with its form in each program.

  Varying literals are numbered over the outermost jaxpr, which `align_jaxprs` returns with their
  values.
  """

  jaxprs: tuple[Jaxpr, ...]
  consts: list[Any]  # an array that all programs share, or the index (int) of a varying literal
  eqns: list[AlignedEqn]
  literal_results: dict[int, int]  # result -> index of its varying literal
  has_literals: bool

  @property
  def out_dims(self) -> list[Dims]:
    return [_dims(atoms) for atoms in zip(*(j.outvars for j in self.jaxprs), strict=True)]

  @property
  def needs_rules(self) -> bool:
    return self.has_literals or any(eqn.needs_rule for eqn in self.eqns)


def align_jaxprs(
  programs: Sequence[ClosedJaxpr],
  names: Sequence[str],
  *,
  sizes: bool,
  input_names: Sequence[str] = (),
) -> tuple[AlignedJaxpr, list[Any]]:
  """The aligned programs, and their varying literals, each an array stacked over programs.

  Args:
    names: of the programs, for messages.
    sizes: whether array sizes may differ.
    input_names: of the programs' inputs, for messages.

  Raises:
    JaxprMismatchError: the programs differ in anything else.
  """
  aligner = _Aligner(names, sizes)
  with jax.ensure_compile_time_eval():  # of random keys among the constants
    return aligner.align(programs, input_names), aligner.literals


def differ(sizes: Sequence[Any]) -> bool:
  return len(set(sizes)) > 1


def is_ragged(dims: Dims) -> bool:
  return any(map(differ, dims))


def padded_shape(dims: Dims) -> tuple[int, ...]:
  """The smallest shape that holds every program's array."""
  return tuple(map(max, dims))


def _dims(atoms: Iterable[Any]) -> Dims:
  return tuple(zip(*(atom.aval.shape for atom in atoms), strict=True))


class _Aligner:
  """A parallel walk over programs that collects the literals in which they differ."""

  def __init__(self, names: Sequence[str], sizes: bool):
    self._names, self._sizes = names, sizes
    self._subject: JaxprEqn | str = ""  # what is compared: an operation, or an input by its name
    self.literals: list[Any] = []

  def align(self, programs: Sequence[Any], input_names: Sequence[str] = ()) -> AlignedJaxpr:
    jaxprs = tuple(p.jaxpr if isinstance(p, ClosedJaxpr) else p for p in programs)
    consts = [p.consts if isinstance(p, ClosedJaxpr) else [] for p in programs]
    num_literals = len(self.literals)
    if self._sizes:
      jaxprs = tuple(map(_without_barriers, jaxprs))
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
    if differ(lengths):
      self._subject = jaxprs[lengths.index(max(lengths))].eqns[min(lengths)]
      self._require_same("number of operations before that", lengths)
    self._require_same("number of constants", [len(c) for c in consts])
    values = [self._const(group) for group in zip(*consts, strict=True)]
    results = self._align_atoms([j.outvars for j in jaxprs], var_ids)
    return AlignedJaxpr(jaxprs, values, eqns, results, len(self.literals) > num_literals)

  def _align_eqns(self, eqns: tuple[JaxprEqn, ...], var_ids: list[dict]) -> AlignedEqn:
    self._subject = eqns[0]
    self._require_same_operation(eqns)
    name = eqns[0].primitive.name
    self._require_same("number of operands", [len(eqn.invars) for eqn in eqns])
    self._require_same("number of results", [len(eqn.outvars) for eqn in eqns])
    literals = self._align_atoms([eqn.invars for eqn in eqns], var_ids)
    subjaxprs = {key: self._align_subjaxprs(eqns, key) for key in SUBJAXPRS.get(name, ())}
    self._subject = eqns[0]
    params = [*_COMPARED_PARAMS.get(name, ())] if subjaxprs else [*eqns[0].params]
    params += ["length"] if name == "scan" else []
    for key in params:
      if not (self._sizes and key in _SIZE_PARAMS.get(name, ())):
        self._require_same(key, [eqn.params[key] for eqn in eqns])
    for variables in zip(*(eqn.outvars for eqn in eqns), strict=True):
      self._define(variables, var_ids)
    return AlignedEqn(eqns, literals, subjaxprs)

  def _require_same_operation(self, eqns: Sequence[JaxprEqn]) -> None:
    for name, eqn in zip(self._names, eqns, strict=True):
      if eqn.primitive != eqns[0].primitive:
        called = [_called(eqns[0]), _called(eqn)]
        if not differ(called):
          called = [eqns[0].primitive.name, eqn.primitive.name]
        raise JaxprMismatchError(
          f"operation: {called[0]} in {self._names[0]}, {called[1]} in {name}{_module(eqns[0])}"
        )

  def _align_subjaxprs(self, eqns: tuple[JaxprEqn, ...], key: str) -> tuple[AlignedJaxpr, ...]:
    inner = [eqn.params[key] for eqn in eqns]
    inner = [value if isinstance(value, tuple) else (value,) for value in inner]
    self._require_same(f"branches of {eqns[0].primitive.name}", [len(value) for value in inner])
    return tuple(self.align(group) for group in zip(*inner, strict=True))

  def _define(self, variables: Sequence[Any], var_ids: list[dict]) -> None:
    avals = [variable.aval for variable in variables]
    self._require_same("type", [str(aval.dtype) for aval in avals])
    self._require_same("number of axes", [aval.ndim for aval in avals])
    if not self._sizes:
      self._require_same("shape", [aval.shape for aval in avals])
    for variable, ids in zip(variables, var_ids, strict=True):
      ids[variable] = len(ids)

  def _align_atoms(self, atoms: Sequence[Sequence], var_ids: list[dict]) -> dict[int, int]:
    """{position: index of the varying literal}; `atoms` are by program.

    A variable must be defined by the same equation in every program.
    """
    literals = {}
    for position, group in enumerate(zip(*atoms, strict=True)):
      is_literal = [isinstance(atom, Literal) for atom in group]
      self._require_same("kind of operand", is_literal)
      if not is_literal[0]:
        self._require_same("operand", [ids[a] for a, ids in zip(group, var_ids, strict=True)])
        continue
      self._require_same("type of number", [str(atom.aval.dtype) for atom in group])
      values = [np.asarray(atom.val, atom.aval.dtype) for atom in group]
      if any(not _equal(values[0], value) for value in values):
        literals[position] = self._add_literal(values)
    return literals

  def _const(self, values: tuple) -> Any:
    if all(_equal(values[0], value) for value in values):
      return values[0]
    if _is_key(values[0]):
      self._require_same("shape of random keys", [value.shape for value in values])
      return self._add_literal(values)
    arrays = [np.asarray(value) for value in values]
    shape = np.max([array.shape for array in arrays], axis=0, initial=0)
    room = lambda a: [(0, most - n) for n, most in zip(a.shape, shape, strict=True)]
    return self._add_literal([np.pad(a, room(a)) if a.ndim else a for a in arrays])

  def _add_literal(self, values: Sequence[Any]) -> int:
    self.literals.append(jnp.stack(values) if _is_key(values[0]) else np.stack(values))
    return len(self.literals) - 1

  def _require_same(self, what: str, values: Sequence[Any]) -> None:
    for name, value in zip(self._names, values, strict=True):
      if not _equal(values[0], value):
        subject, module = self._subject, ""
        if isinstance(subject, JaxprEqn):
          subject, module = _called(subject), _module(subject)
        of = f" of {subject}" if subject else ""
        raise JaxprMismatchError(
          f"{what}{of}: {_short(values[0])} in {self._names[0]}, {_short(value)} in {name}{module}"
        )


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


def _module(eqn: JaxprEqn) -> str:
  """The Flax module that calls the operation, for messages: its path of jvp(M)/Dense_0."""
  path = re.sub(r"\w+\(|\)", "", str(eqn.source_info.name_stack))
  return f" (module {path})" if path else ""


def _without_barriers(jaxpr: Jaxpr) -> Jaxpr:
  """Remove optimization barriers: they change no value, and their place may depend on sizes."""
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
  """Whether two parameters, or the bits of two arrays, are equal."""
  if a is b:
    return True
  if not all(isinstance(value, np.ndarray | np.generic | jax.Array) for value in (a, b)):
    return type(a) is type(b) and bool(a == b)
  return (a.shape, a.dtype) == (b.shape, b.dtype) and _bits(a) == _bits(b)


def _bits(array: Any) -> bytes:
  return np.asarray(jax.random.key_data(array) if _is_key(array) else array).tobytes()


def _is_key(array: Any) -> bool:
  return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def _short(value: Any) -> str:
  text = " ".join(str(value).split())
  return text if len(text) <= 40 else f"{text[:37]}..."
