"""The scores of members that are combined: by their predictions, and by their parameters."""

import math
from collections.abc import Callable

import jax
import numpy as np
from rich.console import Console

from maxlite.data.batch import Batch
from maxlite.ensemble.members.program import MemberFunctions
from maxlite.ensemble.members.run import MemberRun
from maxlite.ensemble.report.ensemble_metrics import score_combinations
from maxlite.ensemble.report.soups import score_soups
from maxlite.ensemble.run.ensemble_trainer import EnsembleTrainer
from maxlite.metrics.waits import report_wait
from maxlite.sharding.pytree import PyTree
from maxlite.storage.json_values import JsonObject


def score_members(
  trainer: EnsembleTrainer,
  functions_of: Callable[[MemberRun], MemberFunctions],
  num_bytes_V: np.ndarray,
  console: Console,
) -> dict[str, JsonObject]:
  """The scores of all combinations of the trainer's members, and of their soups, by name.

  Args:
    trainer: that of the members, whose states it takes and gives back.
    functions_of: builds the functions of a member, on its own devices.
    num_bytes_V: bytes of text of every token of the vocabulary.
    console: prints what takes long, and which members have no soup.
  """
  state = trainer.pack()

  def predict(batch: Batch) -> list[jax.Array]:
    return trainer.predict(state, batch)

  with report_wait("scoring combined predictions", console.print):
    scores = score_combinations(predict, trainer.eval_batches, num_bytes_V)
  trainer.unpack(state)
  scores.update(_score_soups(trainer, functions_of, num_bytes_V, console))
  return scores


def _score_soups(
  trainer: EnsembleTrainer,
  functions_of: Callable[[MemberRun], MemberFunctions],
  num_bytes_V: np.ndarray,
  console: Console,
) -> dict[str, JsonObject]:
  """Score the soups of all members that have the shapes of the one with the lowest loss."""
  if jax.process_count() > 1:
    console.print("soups are not scored: an ensemble on several hosts has no host with all")
    return {}
  best = min(trainer.runs, key=_final_loss)
  shapes = _parameter_shapes(best)
  alike = []
  others = []
  for run in trainer.runs:
    if _parameter_shapes(run) == shapes:
      alike.append(run)
    else:
      others.append(run.name)
  if len(alike) < 2:
    return {}
  if others:
    console.print(f"soups leave out {', '.join(others)}: other shapes than {best.name}")
  params = {run.name: jax.device_get(run.state.params) for run in alike}
  functions = functions_of(best)
  with report_wait("scoring soups", console.print):
    return score_soups(functions, params, trainer.eval_batches, num_bytes_V)


def _final_loss(member: MemberRun) -> float:
  """The held-out loss at the member's step; infinity if there is none."""
  return member.eval_losses.get(member.step, math.inf)


def _parameter_shapes(member: MemberRun) -> PyTree:
  """The tree of the parameters with the shape and dtype of every one."""
  return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), member.state.params)
