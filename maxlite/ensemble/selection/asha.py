"""Successive halving: early stopping of members by their loss at equal steps.

`survivors` waits at a rung for all remaining members. `next_job` is asynchronous (ASHA), and
`AsynchronousHalving` schedules workers with it; its journal repeats their jobs after a restart.

Sources: Jamieson and Talwalkar, Non-stochastic best arm identification and hyperparameter
optimization (2016); Li et al., A system for massively parallel hyperparameter tuning (2020), for
the rungs and, in its Algorithm 2, `next_job`.
"""

import math
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path

from maxlite.config.errors import UserError
from maxlite.ensemble.run.member_run import MemberRun
from maxlite.metrics.writers import JsonlWriter, read_rows

JOURNAL = "asha.jsonl"  # in the folder of the ensemble: a row per decision and per result
_RESULTS = ("pause", "finish", "diverge")


def rungs(min_steps: int, reduction_factor: int, num_steps: int) -> list[int]:
  """The rungs: `min_steps` times powers of `reduction_factor`, below `num_steps`."""
  steps, rung = [], min_steps
  while reduction_factor and rung < num_steps:
    steps.append(rung)
    rung *= reduction_factor
  return steps


def survivors(
  losses: Mapping[str, Mapping[int, float]],
  reached: Mapping[str, int],
  steps: Sequence[int],
  reduction_factor: int,
) -> list[str]:
  """The members that continue after the rungs reached so far.

  At a rung that all remaining members have reached, the best 1 / reduction_factor of them continue,
  at least one.

  Args:
    losses: {name: {step: finite held-out loss}}; a member without one at a rung diverged before.
    reached: {name: step}
    steps: the rungs.
  """
  alive = list(losses)
  for rung in steps:
    if any(reached[name] < rung for name in alive):
      break
    rank = {name: losses[name].get(rung, math.inf) for name in alive}
    alive = sorted(alive, key=rank.get)[: max(len(alive) // reduction_factor, 1)]
  return alive


def next_job(
  names: Sequence[str], losses: Sequence[Mapping[str, float | None]], reduction_factor: int
) -> tuple[str, int] | None:
  """(member, rung) that a free worker trains next; None: nothing, before another result at least.

  The member is one of the best 1 / reduction_factor at the highest rung where such a one has not
  been promoted, otherwise a new one at rung 0. Unlike the paper's, members are finite: once all
  have started and none trains, the best of the highest rung continue until one is at the end.

  Args:
    names: the members, in the order in which they start.
    losses: by rung, the last of which is the end: {name: held-out loss}, None while it trains there
      and infinity if it diverged on the way.
  """
  finished = [{n: x for n, x in rung.items() if x is not None} for rung in losses]
  ranked = [sorted(rung, key=rung.__getitem__) for rung in finished]
  promotable = lambda rung, count: [
    (name, rung + 1)
    for name in ranked[rung][:count]
    if name not in losses[rung + 1] and math.isfinite(finished[rung][name])
  ]
  lower_rungs = range(len(losses) - 2, -1, -1)
  jobs = [job for k in lower_rungs for job in promotable(k, len(ranked[k]) // reduction_factor)]
  jobs += [(name, 0) for name in names if name not in losses[0]]
  if finished == list(losses) and not any(map(math.isfinite, losses[-1].values())):
    jobs += [job for k in lower_rungs for job in promotable(k, None)]
  return next(iter(jobs), None)


class AsynchronousHalving:
  """Schedule of jobs, each of which trains a member from its checkpoint to a rung; thread-safe.

  A row of the journal is the start of a job (`start`, or `promote` with the loss that it is for) or
  its result. Those are the whole state: jobs without a result run again, before new ones.
  """

  def __init__(
    self,
    members: Sequence[MemberRun],
    steps: Sequence[int],
    reduction_factor: int,
    journal: Path,
    report: Callable[[str], None],
  ):
    """Read the journal, if there is one.

    Args:
      steps: of the rungs, and the last one of the run.

    Raises:
      UserError: the journal has other rungs.
    """
    self._members = {member.name: member for member in members}
    self._steps, self._reduction_factor = steps, reduction_factor
    self._path, self._report = journal, report
    self._losses: list[dict[str, float | None]] = [{} for _ in steps]
    for row in read_rows(journal):
      name, rung = row["member"], row["rung"]
      if row["step"] not in steps[rung : rung + 1]:
        raise UserError(
          f"{journal}: rung {rung} was at step {row['step']}, and the rungs are now at {steps}: "
          "write the steps and asha_* keys that the run was started with, or another run_name"
        )
      if name in self._members:
        result = math.inf if row["result"] is None else row["result"]
        self._losses[rung][name] = result if row["decision"] in _RESULTS else None
    self._left = [(n, k) for k, own in enumerate(self._losses) for n in own if own[n] is None]
    self._running: set[tuple[str, int]] = set()
    self._changed = threading.Condition()

  @property
  def is_done(self) -> bool:
    return not self._left and not self._next_job()

  def describe_pause(self, name: str) -> str:
    """Where a member pauses; empty if it is at the end or diverged."""
    rung, loss = [(k, own[name]) for k, own in enumerate(self._losses) if name in own][-1]
    if rung == len(self._steps) - 1 or loss == math.inf:
      return ""
    return f"paused at rung {rung}, step {self._steps[rung]}, loss {loss:.4f}"

  def jobs(self) -> Generator[tuple[str, int], None, None]:
    """Yield (member's name, step to train to) to one worker; the next call records the result.

    Waits for the results of others while there is nothing to do. A generator that is closed instead
    leaves its job to a restart of the run.
    """
    while job := self._take():
      name, rung = job
      try:
        yield name, self._steps[rung]
        self._finish(name, rung)
      finally:
        with self._changed:
          self._running.discard(job)
          self._changed.notify_all()

  def _next_job(self) -> tuple[str, int] | None:
    return next_job(list(self._members), self._losses, self._reduction_factor)

  def _take(self) -> tuple[str, int] | None:
    with self._changed:
      while not (job := self._left[0] if self._left else self._next_job()):
        if not self._running:
          return None
        self._changed.wait()
      name, rung = job
      if self._left:
        self._left.pop(0)
      else:
        self._log("promote" if rung else "start", name, rung, self._losses[rung - 1].get(name))
        self._losses[rung][name] = None
      self._running.add(job)
      return job

  def _finish(self, name: str, rung: int) -> None:
    member, step = self._members[name], self._steps[rung]
    member.find_step()
    loss = member.eval_losses.get(step)
    if loss is None and member.step > step:
      raise UserError(
        f"member {name} is at step {member.step} and was not evaluated at step {step}, the rung "
        "where it is compared: choose another run_name"
      )
    decision = "finish" if rung == len(self._steps) - 1 else "pause"
    with self._changed:
      self._losses[rung][name] = math.inf if loss is None else loss
      self._log("diverge" if loss is None else decision, name, rung, loss)

  def _log(self, decision: str, name: str, rung: int, result: float | None) -> None:
    step, loss = self._steps[rung], "" if result is None else f", loss {result:.4f}"
    self._report(f"{decision} {name}: rung {rung}, step {step}{loss}")
    row = {"step": step, "member": name, "rung": rung, "decision": decision, "result": result}
    writer = JsonlWriter(self._path, self._steps[-1])
    writer.write(row | {"time": time.time()})
    writer.close()
