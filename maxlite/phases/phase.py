"""A phase of the Python API: what it trains, on which loss, and for how long."""

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import SupportsIndex

import optax

from maxlite.errors import UserError
from maxlite.phases.phase_schedule import Plateau, Threshold
from maxlite.sharding.pytree import PyTree
from maxlite.step.api_checks import as_optimizer


@dataclasses.dataclass(frozen=True)
class Phase:
  """What a phase trains, and for how long: `steps`, or `until` a condition.

  `loss(params, batch)` gets all parameters and returns a scalar, or (scalar, {name: scalar}). If it
  has an argument `key`, it gets a random key, a new one in every step. If it has an argument
  `collections`, it gets the state's collections (such as batch statistics) and returns (scalar,
  {name: scalar}, collections). The optimizer, with its schedule, counts only the updates of its
  phase.

  A phase without a gradient has `update(params, batch)` instead of `loss` and `optimizer`. It gets
  the same arguments as a loss and returns the new parameters, or (parameters, {name: scalar}), or,
  with `collections`, all three; only the parameters that the phase trains are taken.

  A phase without `steps` and `until` runs only as an initial phase of `Alternation`.
  """

  name: str
  train: Sequence[str]  # regexes, each of whole parameter paths
  loss: Callable[..., PyTree] | None = None
  optimizer: optax.GradientTransformation | None = None
  steps: int | None = None
  until: Plateau | Threshold | None = None
  accumulate: int = 1  # micro-batches per batch, whose losses are averaged
  update: Callable[..., PyTree] | None = None
  repeat_batch: int = 1  # updates on each batch
  share_optimizer_state: str | None = None  # the phase whose optimizer state this one updates

  def __post_init__(self) -> None:
    place = f"phase {self.name}"
    _check_train(self.train, place)
    _check_length(self, place)
    for field in ("accumulate", "repeat_batch"):
      value = getattr(self, field)
      if not isinstance(value, SupportsIndex) or int(value) < 1:
        raise UserError(f"{place} has {field}={value}; give an integer, at least 1")
    if self.update is None:
      _check_function(self.loss, "loss", place)
      object.__setattr__(self, "optimizer", as_optimizer(self.optimizer, place))
      return
    _check_function(self.update, "update", place)
    for field in ("loss", "optimizer", "share_optimizer_state"):
      if getattr(self, field) is not None:
        raise UserError(f"{place} has update= and {field}=: an update takes no gradient, omit one")
    if self.accumulate != 1:
      raise UserError(f"{place} has update= and accumulate={self.accumulate}: leave it out")


def check_phases(phases: object) -> None:
  """Raise UserError if `phases` is not a sequence of Phase with different names."""
  if isinstance(phases, Phase) or not isinstance(phases, Sequence):
    raise UserError(f"phases is a {type(phases).__name__}; give a list of Phase")
  for n, phase in enumerate(phases):
    if not isinstance(phase, Phase):
      raise UserError(
        f"phases[{n}] is a {type(phase).__name__}, not a Phase; write "
        "Phase(name, train, loss, optimizer, steps=...)"
      )
  names = [phase.name for phase in phases]
  duplicates = {name for name in names if names.count(name) > 1}
  if duplicates:
    raise UserError(f"two phases are called {min(duplicates)}; give each its own name")


def _check_train(train: object, place: str) -> None:
  regexes: list[object] = []
  if isinstance(train, Sequence) and not isinstance(train, str):
    regexes.extend(train)
  if not regexes or not all(isinstance(regex, str) for regex in regexes):
    raise UserError(f"{place} trains {train!r}; give a list of path regexes")


def _check_length(phase: Phase, place: str) -> None:
  if phase.steps is not None and phase.until is not None:
    raise UserError(f"{place} needs steps= or until=, one of the two")
  if not isinstance(phase.until, Plateau | Threshold | None):
    raise UserError(
      f"{place} has until={phase.until!r}, a {type(phase.until).__name__}; give "
      "Plateau(metric, patience, max_steps) or Threshold(metric, max_steps, below=...)"
    )
  if not isinstance(phase.steps, int | None):
    raise UserError(f"{place} has steps={phase.steps}; give an integer")


def _check_function(function: object, field: str, place: str) -> None:
  """Raise UserError if `function` cannot be called with (params, batch)."""
  if not callable(function):
    raise UserError(f"{place} has {field}={function!r}; give a function {field}(params, batch)")
  try:
    arguments = inspect.signature(function).parameters.values()
  except ValueError:  # a builtin without a signature
    return
  kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
  names = [each.name for each in arguments if each.kind in kinds]
  if any(each.kind == inspect.Parameter.VAR_POSITIONAL for each in arguments):
    return
  if len(names) < 2 or names[0] == "batch" or names[1] == "params":
    raise UserError(
      f"the {field} of {place} has the arguments ({', '.join(names)}); it is called as "
      f"{field}(params, batch)"
    )
