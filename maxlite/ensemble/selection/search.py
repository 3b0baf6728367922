"""Search: every round is an ensemble of the members that a sampler of Optuna proposes.

Nothing of the study is saved: its proposals are a function of the space, the seed and the members'
results, so that a restart repeats those of the finished rounds.
"""

import math
from collections.abc import Sequence

from maxlite.config import Config, UserError
from maxlite.config.members import MemberConfig, members_of
from maxlite.config.raw_values import FrozenMapping, show
from maxlite.config.registry import SAMPLERS
from maxlite.config.schema import flatten
from maxlite.config.tuning import Search, search_of, with_members
from maxlite.distributed.initialize import SeparateProcesses
from maxlite.distributed.object_collectives import all_gather_object
from maxlite.ensemble.run.ensemble_run import train_ensemble
from maxlite.ensemble.run.member_run import MemberRun

_MAX_PROPOSALS = 100  # per member, before the space counts as having no further points


def train_search(cfg: Config, peers: SeparateProcesses | None = None) -> int:
  """Train all rounds, or those that are left, and return the exit code.

  A round is an ensemble with the members of earlier rounds, which are finished. So there is one
  folder with one leaderboard, as if the members had been added by hand.

  Raises:
    UserError: the folder has members of another search, or the space has too few points.
  """
  search = search_of(cfg.ensemble.search)
  study, entries = Study(search), list[FrozenMapping]()
  all_gather = peers.all_gather if peers else all_gather_object
  for number in range(search.rounds):
    names = (f"r{number:02d}_m{n:02d}" for n in range(search.num_members))
    points = zip(names, study.propose(), strict=True)
    entries += [FrozenMapping([("name", name), *point.items()]) for name, point in points]
    round_cfg = with_members(cfg, entries)
    members = members_of(round_cfg)[-search.num_members :]
    is_finished = all_gather(all(_is_finished(member, search) for member in members))[0]
    is_last = number == search.rounds - 1  # its leaderboard may be missing
    exit_code = 0 if is_finished and not is_last else train_ensemble(round_cfg, peers=peers)
    if exit_code:
      return exit_code
    study.tell(all_gather([_loss(MemberRun(member, print)) for member in members])[0])
  return 0


class Study:
  """The proposals of a sampler, which minimizes the held-out loss."""

  def __init__(self, search: Search):
    import optuna  # optional

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    self._search, self._states = search, optuna.trial.TrialState
    self._study = optuna.create_study(sampler=SAMPLERS[search.sampler](seed=search.seed))
    self._trial_of: dict[FrozenMapping, optuna.Trial] = {}

  def propose(self) -> list[FrozenMapping]:
    """The points of the next round, {key: raw value}, all different from each other and before.

    Raises:
      UserError: the space has too few points.
    """
    end = len(self._trial_of) + self._search.num_members
    for _ in range(_MAX_PROPOSALS * self._search.num_members):
      trial, point = self._study.ask(), {}
      for key, draw, choices in self._search.space:
        if choices:
          share = (trial.suggest_categorical(key, range(choices)) + 0.5) / choices
        point[key] = draw(share if choices else trial.suggest_float(key, 0, 1))
      if self._trial_of.setdefault(FrozenMapping(point.items()), trial) is not trial:
        self._study.tell(trial, state=self._states.FAIL)
      elif len(self._trial_of) == end:
        return list(self._trial_of)[-self._search.num_members :]
    raise UserError(
      f"search: the sampler finds no further points after {len(self._trial_of)}: write fewer "
      "rounds or members, or more values"
    )

  def tell(self, losses: Sequence[float]) -> None:
    """Report the round's held-out losses; infinity if the member diverged."""
    for trial, loss in zip(list(self._trial_of.values())[-len(losses) :], losses, strict=True):
      if math.isfinite(loss):
        self._study.tell(trial, loss)
      else:  # TPE ranks it below all others
        self._study.tell(trial, state=self._states.PRUNED)


def _is_finished(member: MemberConfig, search: Search) -> bool:
  """Whether it has taken all steps; UserError if with other values of the searched keys."""
  run = MemberRun(member, print)
  changes = run.folder.config_changes(flatten(member.config)) or {}
  for key in (dimension.key for dimension in search.space if dimension.key in changes):
    before, now = map(show, changes[key])
    raise UserError(
      f"search: member {run.name} was trained with {key}={before}, and this search proposes "
      f"{now}: write the search that the run was started with, or another run_name"
    )
  run.find_step()
  return run.step >= member.config.run.steps


def _loss(run: MemberRun) -> float:
  """The best held-out loss; infinity if the last step has none, because the member diverged."""
  losses = run.eval_losses
  return min(losses.values()) if run.config.run.steps in losses else math.inf
