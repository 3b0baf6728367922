"""Checks of a step that need one variant only: what no gradient reaches, what matches nothing."""

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from maxlite.auditing.compare import NOISE, TOLERANCE, reported_norm, true_norm
from maxlite.auditing.measure import Measured, tiny_batch
from maxlite.auditing.optimizer_checks import CHECKED
from maxlite.config.schema import ModelConfig
from maxlite.models.decoder_layer import LAYER_SCALE
from maxlite.models.remat import MATMUL_OUTPUTS
from maxlite.optim.labels import NO_DECAY, frozen_paths, paths_in, trained_paths
from maxlite.sharding.logical_axis_rules import DEFAULT_RULES
from maxlite.training.program import Program, build_objective_step
from maxlite.training.routed_bias import BIAS
from maxlite.training.spec import StepSpec

# Parameters that a step changes without a gradient, or not at all.
WITHOUT_GRADIENT = f"{BIAS}|/{LAYER_SCALE}$"
_NOT_DIFFERENTIABLE = {"stop_gradient", "round", "floor", "ceil", "sign"}
_RANDOM = {"random_bits", "threefry2x32", "random_gamma"}


def draws_random_numbers(reference: Measured) -> bool:
  """Whether the results of the step depend on random numbers, as with router_jitter.

  The key of each step is always derived, so only the drawing of bits counts.
  """
  return any(equations(jaxpr, _RANDOM) for jaxpr in reference.steps.jaxprs.values())


def mistakes(spec: StepSpec, reference: Measured, unreached: Collection[str]) -> list[str]:
  """What is wrong in the reference itself, a line each."""
  return [
    *_without_gradient(reference, unreached),
    *_wrong_norms(reference),
    *_unmatched_names(spec, reference),
    *_repeated_keys(reference),
    *misplaced_states(reference.steps.program),
  ]


def remarks(spec: StepSpec, reference: Measured) -> list[str]:
  """What the user should know, a line each: it may be meant."""
  program = reference.steps.program
  lines = []

  kept = [each for each in program.parameters if re.search(NO_DECAY, each.path)]
  decays = any(each.optimizer.adam_weight_decay for each in spec.objectives)
  if decays:
    ends = sorted({each.path.rsplit("/", 1)[-1] for each in kept})
    lines.append(
      f"weight decay: {len(program.parameters) - len(kept)} of {len(program.parameters)} "
      f"parameters; not on those named {', '.join(ends) or '(none)'}"
    )
  for name in sorted({each.optimizer.opt_type for each in spec.objectives} - {*CHECKED}):
    lines.append(
      f"opt_type={name}: its formula is not checked; updates are compared between the variants"
    )
  lines += _unmatched_rules(spec, reference)
  lines += _unmatched_policy(spec.model, reference)
  places = _not_differentiable(reference)
  if places:
    lines.append(f"no gradient flows through {', '.join(places)}")
  labels = [each.labels for each in program.objectives]
  frozen = frozen_paths(*labels)
  if frozen:
    lines.append(f"no phase trains {len(frozen)} parameters: {_first(frozen)}")
  return lines


def _unmatched_rules(spec: StepSpec, reference: Measured) -> Iterator[str]:
  """Parameters that no rule shards, and rules for axes that nothing has."""
  rules = DEFAULT_RULES | dict(spec.mesh.logical_axis_rules)
  whole = []
  for each in reference.steps.program.parameters:
    axes = [name for name in each.names if name and name != "layers"]
    if len(axes) > 1 and not any(rules[name] for name in axes):
      whole.append(each.path)
  if whole:
    yield f"no rule shards {', '.join(whole)}: every device has all of it"
  for name, mesh_axes in spec.mesh.logical_axis_rules:
    is_of_replicas = "ensemble" in mesh_axes  # which are audited without
    if name not in reference.steps.used_axes and not is_of_replicas:
      yield f"logical_axis_rules: no parameter or activation of this model has axis {name}"


def _unmatched_policy(model: ModelConfig, reference: Measured) -> Iterator[str]:
  """Names that remat_policy saves and no activation has, though layers of this family should."""
  if model.remat_policy not in ("minimal", "offload"):
    return
  missing = set(MATMUL_OUTPUTS) - _names_given(reference)
  if model.family.is_moe:
    missing -= {"mlpwo"}  # the backward pass of experts does not read their output
  if not model.family.reads("mla"):
    missing -= {"query_latent", "kv_latent"}
  elif not model.mla.q_lora_rank:
    missing -= {"query_latent"}
  if missing:
    names = ", ".join(sorted(missing))
    yield f"remat_policy={model.remat_policy}: no activation of this model has the names {names}"


def without_gradient(reference: Measured) -> list[str]:
  """Trained parameters whose gradient is zero in every objective that trains them."""
  reached: set[str] = set()
  rounding: set[str] = set()
  trained: set[str] = set()
  for objective in reference.steps.program.objectives:
    gradients = reference.results[objective.name].gradients
    largest = max((np.abs(each).max(initial=0) for each in gradients.values()), default=0)
    names = set(gradients)
    if objective.labels is not None:
      names &= set(trained_paths(objective.labels))
    trained |= {name for name in names if not re.search(WITHOUT_GRADIENT, name)}
    for name in names:
      size = np.abs(gradients[name]).max(initial=0)
      if size > NOISE * largest:
        reached.add(name)
      elif size > 0:
        rounding.add(name)
  # Rounding: zero by a symmetry, such as a bias of all keys.
  return sorted(trained - reached - rounding)


def _without_gradient(reference: Measured, unreached: Collection[str]) -> Iterator[str]:
  if not unreached:
    return
  places = _not_differentiable(reference)
  where = f" ({', '.join(places)})" if places else ""
  for name in unreached:
    yield (
      f"no gradient reaches {name}, which is trained: is it used, or behind a stop_gradient"
      f"{where}? To freeze it on purpose, write phases that do not train it"
    )


def _not_differentiable(reference: Measured) -> list[str]:
  """Operations of plug-ins through which no gradient flows, with their lines."""
  places = []
  for jaxpr in reference.steps.jaxprs.values():
    for equation in equations(jaxpr, _NOT_DIFFERENTIABLE):
      place = source_line(equation)
      if place and not place.startswith("maxlite/"):
        places.append(f"{equation.primitive.name} at {place}")
  return list(dict.fromkeys(places))


def _repeated_keys(reference: Measured) -> Iterator[str]:
  """Random keys from which numbers are drawn twice."""
  steps = reference.steps
  if not draws_random_numbers(reference):
    return
  for name, objective in steps.objectives.items():
    step = build_objective_step(steps.program, objective)
    with jax.enable_x64(True), jax.debug_key_reuse(True):
      batch = jax.device_put(tiny_batch(objective.spec.loss), steps.program.batch_sharding)
      inputs = steps.program.with_extra_inputs(batch)
      try:
        jax.jit(step).trace(steps.program.abstract_state, inputs)
      except jax.errors.KeyReuseError as error:
        yield f"{name}: numbers are drawn twice from one random key: {str(error).splitlines()[0]}"


def misplaced_states(program: Program) -> Iterator[str]:
  """Optimizer states and averages of a parameter's shape that are not sharded like it.

  Also the states of parameters that their objective does not train.
  """
  params = dict(
    zip(
      paths_in(program.abstract_state.params),
      jax.tree.leaves(program.abstract_state.params),
      strict=True,
    )
  )
  others = {"opt_state": program.abstract_state.opt_state, "ema": program.abstract_state.ema}
  frozen = frozen_paths(*[each.labels for each in program.objectives])
  for path, leaf in zip(paths_in(others), jax.tree.leaves(others), strict=True):
    if "/gradients/" in path:
      continue  # of the audit
    parts = path.split("/")
    suffixes = ["/".join(parts[start:]) for start in range(1, len(parts))]
    own = next((each for each in suffixes if each in params), None)
    if own is None or leaf.shape != params[own].shape:
      continue
    if own in frozen:
      yield f"the state {path} is of a parameter that no phase trains"
    on_device = NamedSharding(leaf.sharding.mesh, leaf.sharding.spec)  # it may be on the host
    if not on_device.is_equivalent_to(params[own].sharding, leaf.ndim):
      yield (
        f"the state {path} is sharded as {leaf.sharding.spec}, but its parameter as "
        f"{params[own].sharding.spec}"
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
  given = _names_given(reference)
  for name in spec.model.remat_saved_names:
    if name not in given:
      yield (
        f"remat_saved_names: no activation of this model has the name {name}; write some of "
        f"{', '.join(sorted(given))}"
      )


def _names_given(reference: Measured) -> set[str]:
  """The names of activations in the model, which remat may save."""
  given: set[str] = set()
  for jaxpr in reference.steps.jaxprs.values():
    given |= {equation.params["name"] for equation in equations(jaxpr, {"name"})}
  return given


def equations(jaxpr: Any, names: set[str]) -> list[Any]:
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


def source_line(equation: Any) -> str:
  """The line of this package or of a plug-in that made an equation, as file:line; may be empty."""
  traceback = equation.source_info.traceback
  frames = traceback.frames if traceback is not None else []
  package = str(Path(__file__).parents[1])
  for frame in frames:
    file = frame.file_name
    if "/jax/" in file or "/flax/" in file or "/optax/" in file or file.startswith("<"):
      continue
    return f"{file.replace(package, 'maxlite')}:{frame.line_num}"
  return ""


def _is_jaxpr(value: object) -> bool:
  return hasattr(value, "eqns") or hasattr(value, "jaxpr")


def _first(paths: list[str]) -> str:
  shown = ", ".join(paths[:3])
  return shown if len(paths) <= 3 else f"{shown}, ..."
