"""Population-based training (PBT): the worst members continue from copies of the best.

Source: Jaderberg et al., Population Based Training of Neural Networks (2017), with truncation
selection.
"""

import itertools
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from rich.console import Console

from maxlite.config import Config
from maxlite.config.tuning import perturbations_of
from maxlite.distributed.object_collectives import all_gather_object
from maxlite.ensemble.engines.stacked import StackedEngine
from maxlite.ensemble.run.member_run import MemberRun
from maxlite.metrics.writers import JsonlWriter, Writers
from maxlite.optim.build import hyperparameters, with_hyperparameters

LINEAGE = "lineage.jsonl"  # in the folder of the ensemble: a row per copy


class Population:
  """The exchanges between stacked members.

  An exchange is a function of the members' states, their held-out losses, the seed and the step. It
  takes place before the step after it, so that a checkpoint has what it starts from. Of multiple
  processes, process 0 reads the losses for all and writes the log.
  """

  def __init__(
    self,
    cfg: Config,
    runs: Sequence[MemberRun],
    engine: StackedEngine,
    directory: Path,
    console: Console,
  ):
    """Open the log in `directory`, and drop its rows from the current step on."""
    self._period, self._fraction = cfg.ensemble.pbt_period, cfg.ensemble.pbt_fraction
    self._seed, self._perturbations = cfg.run.init_weights_seed, perturbations_of(cfg.optimizer)
    self._runs, self._console = runs, console
    is_writer = jax.process_index() == 0
    rows = [JsonlWriter(directory / LINEAGE, runs[0].step - 1)] if is_writer else []
    self._lineage = Writers(rows)
    self._copy = jax.jit(copy_members, out_shardings=engine.shardings, donate_argnums=0)

  def next_step(self, step: int) -> int:
    """The step of the first exchange after `step`."""
    return step + self._period - step % self._period

  def exchange(self, state: list[Any], step: int) -> list[Any]:
    """The state after the exchange at `step`, if one is due; donates `state`.

    Every member that is replaced takes the whole state of its donor.
    """
    if step == 0 or step % self._period:
      return state
    own = [run.eval_losses.get(step, math.inf) for run in self._runs]
    losses = all_gather_object(own)[0]  # others may not see the latest rows yet
    draws = [random.Random(f"{self._seed} {step} {run.name}") for run in self._runs]
    donors = choose_donors(losses, self._fraction, draws)
    if not donors:
      if self._fraction:
        self._console.print(f"step {step}: no exchange, since no member has a held-out loss there")
      return state
    (stacked,) = state
    before = process_allgather(hyperparameters(stacked.members.opt_state), tiled=True)
    donor_Z = np.arange(len(losses))
    donor_Z[[*donors]] = [*donors.values()]
    after = {key: values[donor_Z] for key, values in before.items()}
    for z, (key, change) in itertools.product(donors, self._perturbations.items()):
      after[key][z] = change(float(after[key][z]), draws[z].random())
    state = self._copy(state, donor_Z, after)
    for z, donor in donors.items():
      row = {"step": step, "member": self._runs[z].name, "from": self._runs[donor].name}
      row |= {"loss": losses[z], "from_loss": losses[donor]}
      old, new = ({key: float(own[z]) for key, own in each.items()} for each in (before, after))
      self._lineage.write(row | {"before": old, "after": new})
      changes = "".join(f", {key} {old[key]:.3g} -> {new[key]:.3g}" for key in new)
      self._console.print(
        f"step {step}: {row['member']} (loss {losses[z]:.4f}) continues from {row['from']} "
        f"({losses[donor]:.4f}){changes}"
      )
    self._lineage.flush()
    return state

  def close(self) -> None:
    self._lineage.close()


def choose_donors(
  losses: Sequence[float], fraction: float, draws: Sequence[random.Random]
) -> dict[int, int]:
  """{replaced member: its donor}: of the worst, each with one of the best drawn at random.

  Nothing is replaced if there are no finite losses.

  Args:
    losses: infinity for members without a finite one, which are the worst and no donors.
    fraction: of the members that are replaced, at least one unless it is 0.
  """
  count = max(int(fraction * len(losses)), 1) if fraction else 0
  order = sorted(range(len(losses)), key=losses.__getitem__)
  best = [z for z in order[:count] if math.isfinite(losses[z])]
  worst = order[len(order) - count :] if best else []
  return {z: draws[z].choice(best) for z in worst}


def ancestors(names: Iterable[str], rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
  """Per member, the one from whose initial weights its weights descend.

  Args:
    rows: of `LINEAGE`.
  """
  ancestor_of = {name: name for name in names}
  for row in rows:  # no donor is replaced at the same step
    ancestor_of[row["member"]] = ancestor_of[row["from"]]
  return ancestor_of


def copy_members(state: list[Any], donor_Z: jax.Array, values: dict[str, jax.Array]) -> list[Any]:
  """The state whose member z has all of the former member donor_Z[z], but its own `values`."""
  (stacked,) = state
  members = jax.tree.map(lambda leaf: leaf[donor_Z], stacked.members)
  members = members.replace(opt_state=with_hyperparameters(members.opt_state, values))
  return [stacked.replace(members=members)]
