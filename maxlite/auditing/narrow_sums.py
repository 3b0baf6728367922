"""Sums in 16-bit types: found in the traced step of the config's own types, which is not run.

A sum of bfloat16 values in bfloat16 no longer grows after 256 equal terms.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from maxlite.auditing.measure import Steps
from maxlite.auditing.static_checks import equations, source_line
from maxlite.auditing.variants import Variant
from maxlite.config.schema import ModelConfig
from maxlite.training.program import build_objective_step
from maxlite.training.spec import StepSpec

# Products are not among them: their units add up in float32 and round the result.
_SUMS = {
  "reduce_sum",
  "cumsum",
  "scatter-add",
  "psum",
  "psum_invariant",
  "reduce_scatter",
  "reduce_window_sum",
}
_MAX_PLACES = 4  # that a line names


def narrow_sums(spec: StepSpec, own: ModelConfig) -> tuple[list[str], list[str]]:
  """(mistakes, remarks) on sums in 16-bit types.

  Args:
    spec: the tiny step.
    own: the config's model, with its types.
  """
  types = {own.dtype, own.weight_dtype}
  if not any(_is_narrow(jnp.dtype(name)) for name in types):
    return [], []
  model = dataclasses.replace(spec.model, dtype=own.dtype, weight_dtype=own.weight_dtype)
  narrow = dataclasses.replace(spec, model=model)
  steps = Steps(Variant(accumulation=2).spec_of(narrow), 1)
  program = steps.program
  shapes = {leaf.shape for leaf in jax.tree.leaves(program.abstract_state.params)}
  mistakes: dict[str, None] = {}
  places: dict[str, None] = {}
  for objective in program.objectives:
    step = build_objective_step(program, objective)
    inputs = program.abstract_inputs(objective)
    jaxpr = jax.jit(step).trace(program.abstract_state, inputs).jaxpr
    for equation in equations(jaxpr, _SUMS):
      out = equation.outvars[0].aval
      has_terms = equation.primitive.name != "reduce_sum" or equation.invars[0].aval.size > out.size
      if _is_narrow(out.dtype) and has_terms:
        place = source_line(equation) or "backward pass"
        places[f"{equation.primitive.name} of {out.dtype.name}{list(out.shape)} ({place})"] = None
    for scan in equations(jaxpr, {"scan"}):
      for leaf in _accumulated(scan):
        if leaf.aval.shape in shapes:
          mistakes[
            f"{objective.name}: gradients of shape {leaf.aval.shape} are accumulated in "
            f"{leaf.aval.dtype.name} over micro-batches"
          ] = None
  remarks = []
  if places:
    named = list(places)
    more = f" and {len(named) - _MAX_PLACES} more" if len(named) > _MAX_PLACES else ""
    remarks.append(f"sums in 16-bit types: {', '.join(named[:_MAX_PLACES])}{more}")
  return list(mistakes), remarks


def _is_narrow(dtype: Any) -> bool:
  return jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize <= 2


def _accumulated(scan: Any) -> Iterator[Any]:
  """The 16-bit carries of a scan to which its body adds."""
  body = scan.params["jaxpr"].jaxpr
  # The body sees slices of what is scanned, and the carry as it is.
  whole = set()
  for outer, inner in zip(scan.invars, body.invars, strict=True):
    if outer.aval.shape == inner.aval.shape:
      whole.add(inner)
  for equation in body.eqns:
    if equation.primitive.name != "add" or not _is_narrow(equation.outvars[0].aval.dtype):
      continue
    if equation.outvars[0] in body.outvars:
      for operand in equation.invars:
        if not isinstance(operand, Literal) and operand in whole:
          yield operand
