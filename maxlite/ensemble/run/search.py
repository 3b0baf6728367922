"""Search: every round is an ensemble of the members that a sampler of Optuna proposes.

Nothing of the study is saved: its proposals are a function of the space, the seed and the members'
results, so that a restart repeats those of the finished rounds.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from maxlite.config import Config
from maxlite.config.members import MemberConfig, members_of
from maxlite.config.raw_values import FrozenMapping, show
from maxlite.config.schema import flatten
from maxlite.config.tuning import Dimension, Search, search_of, with_members
from maxlite.distributed.initialize import SeparateProcesses
from maxlite.distributed.object_collectives import all_gather_object
from maxlite.ensemble.members.run import MemberRun
from maxlite.ensemble.run.ensemble_run import train_ensemble
from maxlite.errors import UserError
from maxlite.registry import SAMPLERS
from maxlite.storage.json_values import Json

if TYPE_CHECKING:  # an optional package
  import optuna

# Proposals per member of a round, after which the space counts as having no further points.
_MAX_PROPOSALS = 100


def train_search(cfg: Config, peers: SeparateProcesses | None = None) -> int:
  """Train all rounds, or those that are left, and return the exit code.

  A round is an ensemble with the members of earlier rounds, which are finished. So there is one
  folder with one leaderboard, as if the members had been added by hand.

  Args:
    cfg: the config of the search.
    peers: as in `train_ensemble`.

  Raises:
    UserError: the folder has members of another search, or the space has too few points.
  """
  search = search_of(cfg.ensemble.search)
  study = Study(search)
  all_gather: Callable[[Json], list[Json]] = all_gather_object
  if peers is not None:
    all_gather = peers.all_gather
  entries: list[FrozenMapping] = []  # of `members`, so far
  for number in range(search.rounds):
    for n, point in enumerate(study.propose()):
      name = f"r{number:02d}_m{n:02d}"
      entries.append(FrozenMapping([("name", name), *point.items()]))
    round_cfg = with_members(cfg, entries)
    members = members_of(round_cfg)[-search.num_members :]
    is_finished_here = all(_is_finished(member, search) for member in members)
    is_finished = all_gather(is_finished_here)[0]
    is_last = number == search.rounds - 1
    if is_last or not is_finished:  # the leaderboard of the last round may be missing
      exit_code = train_ensemble(round_cfg, peers=peers)
      if exit_code:
        return exit_code
    losses_here = [_loss(MemberRun(member, print)) for member in members]
    study.tell(all_gather(losses_here)[0])
  return 0


class Study:
  """The proposals of a sampler, which minimizes the held-out loss."""

  def __init__(self, search: Search):
    import optuna  # optional

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    self._search = search
    self._states = optuna.trial.TrialState
    sampler = SAMPLERS[search.sampler](seed=search.seed)
    self._study = optuna.create_study(sampler=sampler)
    self._trial_of: dict[FrozenMapping, optuna.Trial] = {}  # by point, in the order of proposals

  def propose(self) -> list[FrozenMapping]:
    """The points of the next round, {key: raw value}, all different from each other and before.

    Raises:
      UserError: the space has too few points.
    """
    proposed: list[FrozenMapping] = []
    for _ in range(_MAX_PROPOSALS * self._search.num_members):
      trial = self._study.ask()
      values = {}
      for dimension in self._search.space:
        values[dimension.key] = dimension.draw(_suggest(trial, dimension))
      point = FrozenMapping(values.items())
      if point in self._trial_of:
        self._study.tell(trial, state=self._states.FAIL)
        continue
      self._trial_of[point] = trial
      proposed.append(point)
      if len(proposed) == self._search.num_members:
        return proposed
    raise UserError(
      f"search: the sampler finds no further points after {len(self._trial_of)}: write fewer "
      "rounds or members, or more values"
    )

  def tell(self, losses: Sequence[float]) -> None:
    """Report the round's held-out losses; infinity if the member diverged."""
    trials_of_round = list(self._trial_of.values())[-len(losses) :]
    for trial, loss in zip(trials_of_round, losses, strict=True):
      if math.isfinite(loss):
        self._study.tell(trial, loss)
      else:  # TPE ranks it below all others
        self._study.tell(trial, state=self._states.PRUNED)


def _suggest(trial: "optuna.Trial", dimension: Dimension) -> float:
  """A number in [0, 1), from which the dimension draws its value."""
  if not dimension.choices:
    return trial.suggest_float(dimension.key, 0, 1)
  index = trial.suggest_categorical(dimension.key, range(dimension.choices))
  return (index + 0.5) / dimension.choices


def _is_finished(member: MemberConfig, search: Search) -> bool:
  """Whether a member has taken all steps.

  Raises:
    UserError: it was trained with other values of the searched keys.
  """
  run = MemberRun(member, print)
  changes = run.folder.config_changes(flatten(member.config)) or {}
  for dimension in search.space:
    key = dimension.key
    if key in changes:
      before, now = changes[key]
      raise UserError(
        f"search: member {run.name} was trained with {key}={show(before)}, and this search "
        f"proposes {show(now)}: write the search that the run was started with, or another run_name"
      )
  run.find_step()
  return run.step >= member.config.run.steps


def _loss(run: MemberRun) -> float:
  """The best held-out loss; infinity if the last step has none, because the member diverged."""
  losses = run.eval_losses
  if run.config.run.steps not in losses:
    return math.inf
  return min(losses.values())
