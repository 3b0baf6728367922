"""Checks of a step that need one variant only: what no gradient reaches, what matches nothing."""

import re
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from maxlite.auditing.compare import NOISE, TOLERANCE, reported_norm, true_norm
from maxlite.auditing.measure import Measured
from maxlite.optim.labels import NO_DECAY, frozen_paths, trained_paths
from maxlite.sharding.logical_axis_rules import DEFAULT_RULES
from maxlite.training.routed_bias import BIAS
from maxlite.training.spec import StepSpec

_RANDOM = {"random_bits", "threefry2x32", "random_gamma"}


def draws_random_numbers(reference: Measured) -> bool:
  """Whether the results of the step depend on random numbers, as with router_jitter.

  The key of each step is always derived, so only the drawing of bits counts.
  """
  return any(_equations(jaxpr, _RANDOM) for jaxpr in reference.jaxprs.values())


def mistakes(spec: StepSpec, reference: Measured) -> list[str]:
  """What is wrong in the reference itself, a line each."""
  return [
    *_without_gradient(reference),
    *_wrong_norms(reference),
    *_unmatched_names(spec, reference),
  ]


def remarks(spec: StepSpec, reference: Measured) -> list[str]:
  """What the user should know, a line each: it may be meant."""
  program = reference.program
  names = dict.fromkeys(name for each in program.parameters for name in each.names if name)
  lines = []

  kept = [each for each in program.parameters if re.search(NO_DECAY, each.path)]
  decays = any(each.optimizer.adam_weight_decay for each in spec.objectives)
  if decays:
    ends = sorted({each.path.rsplit("/", 1)[-1] for each in kept})
    lines.append(
      f"weight decay: {len(program.parameters) - len(kept)} of {len(program.parameters)} "
      f"parameters; not on those named {', '.join(ends) or '(none)'}"
    )
  rules = DEFAULT_RULES | dict(spec.mesh.logical_axis_rules)
  whole = []
  for each in program.parameters:
    axes = [name for name in each.names if name and name != "layers"]
    if len(axes) > 1 and not any(rules[name] for name in axes):
      whole.append(each.path)
  if whole:
    lines.append(f"no rule shards {', '.join(whole)}: every device has all of it")
  for name, _ in spec.mesh.logical_axis_rules:
    if not name.startswith("activation") and name not in names:
      lines.append(f"logical_axis_rules: no parameter has the axis {name}")
  labels = [each.labels for each in program.objectives]
  frozen = frozen_paths(*labels)
  if frozen:
    lines.append(f"no phase trains {len(frozen)} parameters: {_first(frozen)}")
  return lines


def _without_gradient(reference: Measured) -> Iterator[str]:
  """Trained parameters whose gradient is zero in every objective that trains them."""
  reached: set[str] = set()
  rounding: set[str] = set()
  trained: set[str] = set()
  for objective in reference.program.objectives:
    gradients = reference.results[objective.name].gradients
    largest = max((np.abs(each).max(initial=0) for each in gradients.values()), default=0)
    names = set(gradients)
    if objective.labels is not None:
      names &= set(trained_paths(objective.labels))
    trained |= {name for name in names if not re.search(BIAS, name)}
    for name in names:
      size = np.abs(gradients[name]).max(initial=0)
      if size > NOISE * largest:
        reached.add(name)
      elif size > 0:
        rounding.add(name)
  for name in sorted(trained - reached):
    if name in rounding:
      continue  # zero by a symmetry, such as a bias of all keys
    yield (
      f"no gradient reaches {name}, which is trained: is it used, or behind a stop_gradient? To "
      "freeze it on purpose, write phases that do not train it"
    )


def _wrong_norms(reference: Measured) -> Iterator[str]:
  """Objectives whose reported norm is not that of their gradients, on one device."""
  for name, results in reference.results.items():
    reported, norm = reported_norm(results), true_norm(results)
    if not np.isclose(reported, norm, rtol=TOLERANCE, atol=0):
      yield f"grad_norm of {name} is {reported:.10g}, but the gradients have the norm {norm:.10g}"


def _unmatched_names(spec: StepSpec, reference: Measured) -> Iterator[str]:
  """Names of activations to save that no layer gives."""
  if spec.model.remat_policy != "custom":
    return
  given: set[str] = set()
  for jaxpr in reference.jaxprs.values():
    given |= {equation.params["name"] for equation in _equations(jaxpr, {"name"})}
  for name in spec.model.remat_saved_names:
    if name not in given:
      yield (
        f"remat_saved_names: no activation of this model has the name {name}; write some of "
        f"{', '.join(sorted(given))}"
      )


def _equations(jaxpr: Any, names: set[str]) -> list[Any]:
  """The equations of these primitives, also inside other functions."""
  found = []
  waiting = [jaxpr]
  seen: set[int] = set()
  while waiting:
    each = waiting.pop()
    each = getattr(each, "jaxpr", each)  # of a ClosedJaxpr
    if id(each) in seen or not hasattr(each, "eqns"):
      continue
    seen.add(id(each))
    for equation in each.eqns:
      if equation.primitive.name in names:
        found.append(equation)
      for value in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
        if _is_jaxpr(value):
          waiting.append(value)
  return found


def _is_jaxpr(value: object) -> bool:
  return hasattr(value, "eqns") or hasattr(value, "jaxpr")


def _first(paths: list[str]) -> str:
  shown = ", ".join(paths[:3])
  return shown if len(paths) <= 3 else f"{shown}, ..."
