"""What ensemble.py measures: a program that takes steps of all members."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from maxlite.sharding.pytree import PyTree

State = tuple[PyTree, PyTree]  # parameters and the state of their optimizer
Step = Callable[[Any, Any], tuple[Any, Any]]  # (state, batch) -> (state, metrics)


class Candidate(NamedTuple):
  """One way to train all members.

  Attributes:
    run: takes `num_steps` steps and waits for the results.
    useful_share: the share of the FLOPs that are not spent on padding.
    strategy: the strategy that `auto` chose; empty for others.
    reports: what else ensemble.py may request, by name; the results are JSON.
  """

  run: Callable[[], Any]
  num_steps: int
  useful_share: float = 1.0
  strategy: str = ""
  reports: Mapping[str, Callable[[], Any]] = {}


class RepeatedStep:
  """A step with its state; the first step is taken at once, and `run` takes `num_steps` more.

  Attributes:
    state: the state after the latest step.
    early_metrics: the metrics of the last step of the first run; None before it.
  """

  def __init__(self, step: Step, state: Any, data: Any, num_steps: int):
    self._step = step
    self._data = data
    self._num_steps = num_steps
    self.early_metrics = None
    self.state, _ = jax.block_until_ready(step(state, data))

  def run(self) -> None:
    for _ in range(self._num_steps):
      self.state, metrics = self._step(self.state, self._data)
    jax.block_until_ready((self.state, metrics))
    if self.early_metrics is None:
      self.early_metrics = metrics
