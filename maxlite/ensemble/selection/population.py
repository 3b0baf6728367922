"""Population-based training (PBT): the worst members continue from copies of the best.

Source: Jaderberg et al., Population Based Training of Neural Networks (2017), with truncation
selection.
"""

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from rich.console import Console

from maxlite.config import Config
from maxlite.config.tuning import perturbations_of
from maxlite.distributed.object_collectives import all_gather_object
from maxlite.ensemble.engines.group_trees import take_row
from maxlite.ensemble.engines.member_group import GroupState
from maxlite.ensemble.engines.stacked import StackedEngine
from maxlite.ensemble.members.run import MemberRun
from maxlite.errors import UserError
from maxlite.metrics.step_row import LoggedRow
from maxlite.metrics.writers import JsonlWriter, RowFormat, Writers, is_number
from maxlite.optim.build import hyperparameters, with_hyperparameters
from maxlite.storage.json_values import JsonObject

LINEAGE = "lineage.jsonl"  # in the folder of the ensemble: a row per copy
_COLUMNS = ("member", "from", "loss", "from_loss", "before", "after")


def _is_copy(row: JsonObject) -> bool:
  """Whether a row has what `_Copy.row` returns."""
  if row.keys() != {"step", *_COLUMNS}:
    return False
  names = (row["member"], row["from"])
  losses = (row["loss"], row["from_loss"])
  values = (row["before"], row["after"])
  return (
    all(isinstance(name, str) for name in names)
    and all(loss is None or is_number(loss) for loss in losses)
    and all(isinstance(each, dict) and all(map(is_number, each.values())) for each in values)
  )


LINEAGE_ROWS = RowFormat(_is_copy, sealed=_COLUMNS)


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
    """Open the log in `directory`, and drop its rows from the current step on.

    Args:
      cfg: the config of the ensemble.
      runs: the members.
      engine: that of the members, all of which are one group.
      directory: the folder of the ensemble.
      console: prints the exchanges.
    """
    self._period = cfg.ensemble.pbt_period
    self._fraction = cfg.ensemble.pbt_fraction
    self._seed = cfg.run.init_weights_seed
    self._perturbations = perturbations_of(cfg.optimizer)
    self._runs = runs
    self._console = console
    writers = []
    if jax.process_index() == 0:
      writers.append(JsonlWriter(directory / LINEAGE, runs[0].step - 1, LINEAGE_ROWS))
    self._lineage = Writers(writers)
    self._copy = jax.jit(copy_members, out_shardings=engine.shardings, donate_argnums=0)

  def next_step(self, step: int) -> int:
    """The step of the first exchange after `step`."""
    return step + self._period - step % self._period

  def exchange(self, state: list[GroupState], step: int) -> list[GroupState]:
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
    for z, donor in donors.items():
      donor_Z[z] = donor
    after = self._perturbed(before, donor_Z, list(donors), draws)
    state = self._copy(state, donor_Z, after)
    for z, donor in donors.items():
      copy = _Copy(
        step=step,
        member=self._runs[z].name,
        donor=self._runs[donor].name,
        loss=losses[z],
        donor_loss=losses[donor],
        before={key: float(values_Z[z]) for key, values_Z in before.items()},
        after={key: float(values_Z[z]) for key, values_Z in after.items()},
      )
      self._lineage.write(copy.row())
      self._console.print(copy.describe())
    self._lineage.flush()
    return state

  def _perturbed(
    self,
    before: Mapping[str, np.ndarray],
    donor_Z: np.ndarray,
    replaced: Sequence[int],
    draws: Sequence[random.Random],
  ) -> dict[str, np.ndarray]:
    """The hyperparameters [Z] after an exchange: those of the donors, perturbed.

    Args:
      before: the hyperparameters [Z] before it.
      donor_Z: for every member, the one that it copies; for one that is not replaced, itself.
      replaced: the members that are replaced, whose hyperparameters are perturbed.
      draws: by member, its random numbers.
    """
    after = {key: values_Z[donor_Z] for key, values_Z in before.items()}
    for z in replaced:
      for key, perturb in self._perturbations.items():
        after[key][z] = perturb(float(after[key][z]), draws[z].random())
    return after

  def close(self) -> None:
    self._lineage.close()


class _Copy(NamedTuple):
  """A member that continues from a copy of another one."""

  step: int
  member: str
  donor: str
  loss: float  # held-out [nats per token]; infinity if the member has none
  donor_loss: float
  before: dict[str, float]  # the member's hyperparameters
  after: dict[str, float]

  def row(self) -> JsonObject:
    """The row of `LINEAGE`."""
    return {
      "step": self.step,
      "member": self.member,
      "from": self.donor,
      "loss": self.loss,
      "from_loss": self.donor_loss,
      "before": self.before,
      "after": self.after,
    }

  def describe(self) -> str:
    """The line on the console."""
    changes = ""
    for key, value in self.after.items():
      changes += f", {key} {self.before[key]:.3g} -> {value:.3g}"
    return (
      f"step {self.step}: {self.member} (loss {self.loss:.4f}) continues from {self.donor} "
      f"({self.donor_loss:.4f}){changes}"
    )


def choose_donors(
  losses: Sequence[float],
  fraction: float,
  draws: Sequence[random.Random],
) -> dict[int, int]:
  """{replaced member: its donor}: of the worst, each with one of the best drawn at random.

  Nothing is replaced if there are no finite losses.

  Args:
    losses: by member; infinity for members without a finite loss, which are the worst and no
      donors.
    fraction: the share of the members that are replaced, at least one unless it is 0.
    draws: by member, its random numbers.
  """
  if fraction == 0:
    return {}
  num_replaced = max(int(fraction * len(losses)), 1)
  order = sorted(range(len(losses)), key=lambda z: losses[z])
  best = [z for z in order[:num_replaced] if math.isfinite(losses[z])]
  if not best:
    return {}
  donors = {}
  for z in order[len(order) - num_replaced :]:
    donors[z] = draws[z].choice(best)
  return donors


def ancestors(names: Iterable[str], rows: Sequence[LoggedRow]) -> dict[str, str]:
  """Per member, the one from whose initial weights its weights descend.

  Args:
    names: the members.
    rows: the rows of `LINEAGE`.

  Raises:
    UserError: a row names another member.
  """
  ancestor_of = {name: name for name in names}
  for row in rows:  # no donor is replaced at the same step
    for name in (row["member"], row["from"]):
      if name not in ancestor_of:
        raise UserError(f"{LINEAGE}: {name} of step {row['step']} is no member: move the file away")
    ancestor_of[row["member"]] = ancestor_of[row["from"]]
  return ancestor_of


def copy_members(
  state: list[GroupState], donor_Z: jax.Array, values: dict[str, jax.Array]
) -> list[GroupState]:
  """The state whose member z has all of the former member donor_Z[z], but its own `values`."""
  (stacked,) = state
  members = take_row(stacked.members, donor_Z)
  opt_state = with_hyperparameters(members.opt_state, values)
  members = members.replace(opt_state=opt_state)
  return [stacked.replace(members=members)]
