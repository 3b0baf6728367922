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
from typing import NamedTuple

from maxlite.ensemble.members.run import MemberRun
from maxlite.errors import UserError
from maxlite.metrics.writers import JsonlWriter, RowFormat, is_number, read_rows
from maxlite.storage.json_values import JsonObject

JOURNAL = "asha.jsonl"  # in the folder of the ensemble: a row per decision and per result
_STARTS = ("start", "promote")
_RESULTS = ("pause", "finish", "diverge")  # the decisions that end a job
_COLUMNS = ("member", "rung", "decision", "result", "time")


# By member, its loss at a rung: None while it trains, and infinity if it diverged on the way.
RungLosses = Mapping[str, float | None]


class Job(NamedTuple):
  """Training of a member up to a rung."""

  name: str  # of the member
  rung: int


def rungs(min_steps: int, reduction_factor: int, num_steps: int) -> list[int]:
  """The rungs: `min_steps` times powers of `reduction_factor`, below `num_steps`.

  There are none if the factor is 0.
  """
  steps: list[int] = []
  if reduction_factor == 0:
    return steps
  rung = min_steps
  while rung < num_steps:
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
    losses: by member and step, the finite held-out losses. A member without one at a rung diverged
      before.
    reached: by member, its step.
    steps: the rungs.
  """
  alive = list(losses)
  for rung in steps:
    if any(reached[name] < rung for name in alive):
      break
    loss_at_rung = {}
    for name in alive:
      loss_at_rung[name] = losses[name].get(rung, math.inf)
    num_kept = max(len(alive) // reduction_factor, 1)
    ranked = sorted(alive, key=lambda name: loss_at_rung[name])
    alive = ranked[:num_kept]
  return alive


def next_job(
  names: Sequence[str],
  losses: Sequence[RungLosses],
  reduction_factor: int,
) -> Job | None:
  """The job that a free worker trains next; None: there is none before another result at least.

  The member is one of the best 1 / reduction_factor at the highest rung where such a one has not
  been promoted, otherwise a new one at rung 0. Unlike the paper's, members are finite: once all
  have started and none trains, the best of the highest rung continue until one is at the end.

  Args:
    names: the members, in the order in which they start.
    losses: by rung, the last of which is the end, the held-out losses of the members that were
      started there.
  """
  lower_rungs = range(len(losses) - 2, -1, -1)  # the highest first
  for rung in lower_rungs:
    ranked = _ranked(losses[rung])
    promotable = ranked[: len(ranked) // reduction_factor]
    name = _first_to_promote(promotable, losses, rung)
    if name is not None:
      return Job(name, rung + 1)
  for name in names:
    if name not in losses[0]:
      return Job(name, 0)
  if any(None in own.values() for own in losses):
    return None  # a member trains
  losses_at_end = _finished(losses[-1]).values()
  if any(math.isfinite(loss) for loss in losses_at_end):
    return None
  for rung in lower_rungs:
    name = _first_to_promote(_ranked(losses[rung]), losses, rung)
    if name is not None:
      return Job(name, rung + 1)
  return None


def _finished(losses_at_rung: RungLosses) -> dict[str, float]:
  """The losses of the members that do not train any more."""
  finished = {}
  for name, loss in losses_at_rung.items():
    if loss is not None:
      finished[name] = loss
  return finished


def _ranked(losses_at_rung: RungLosses) -> list[str]:
  """The members that have finished a rung, the one with the lowest loss first."""
  finished = _finished(losses_at_rung)
  return sorted(finished, key=lambda name: finished[name])


def _first_to_promote(
  names: Sequence[str],
  losses: Sequence[RungLosses],
  rung: int,
) -> str | None:
  """The first of the members that did not diverge and were not started at the next rung."""
  finished = _finished(losses[rung])
  started_at_next = losses[rung + 1]
  for name in names:
    if math.isfinite(finished[name]) and name not in started_at_next:
      return name
  return None


def _is_decision(row: JsonObject) -> bool:
  """Whether a row of the journal has what `_log` writes."""
  if row.keys() != {"step", *_COLUMNS} or row["decision"] not in (*_STARTS, *_RESULTS):
    return False
  if not isinstance(row["member"], str) or not is_number(row["time"]):
    return False
  if type(row["rung"]) is not int or row["rung"] < 0:
    return False
  if row["decision"] in ("start", "diverge"):
    return row["result"] is None
  return is_number(row["result"])


JOURNAL_ROWS = RowFormat(_is_decision, sealed=_COLUMNS)


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
      members: the members of the ensemble.
      steps: the step of each rung, and the last step of the run.
      reduction_factor: as in `next_job`.
      journal: the file of the journal.
      report: called with a line for every decision and result.

    Raises:
      UserError: the journal has other rungs, or is damaged.
    """
    self._members = {member.name: member for member in members}
    self._steps = steps
    self._reduction_factor = reduction_factor
    self._path = journal
    self._report = report
    # As in `next_job`.
    self._losses: list[dict[str, float | None]] = [{} for _ in steps]
    self._read_journal()
    # The jobs of an earlier start that have no result.
    self._left: list[Job] = []
    for rung, own in enumerate(self._losses):
      for name, loss in own.items():
        if loss is None:
          self._left.append(Job(name, rung))
    self._running: set[Job] = set()
    self._changed = threading.Condition()

  def _read_journal(self) -> None:
    """Set the losses from the rows of the journal."""
    for row in read_rows(self._path, JOURNAL_ROWS):
      name = row["member"]
      rung = row["rung"]
      step = row["step"]
      if rung >= len(self._steps) or self._steps[rung] != step:
        raise UserError(
          f"{self._path}: rung {rung} was at step {step}, and the rungs are now at {self._steps}: "
          "write the steps and asha_* keys that the run was started with, or another run_name"
        )
      if name not in self._members:
        continue
      if row["decision"] not in _RESULTS:
        self._losses[rung][name] = None  # the job has started
      elif row["result"] is None:
        self._losses[rung][name] = math.inf  # the member diverged
      else:
        self._losses[rung][name] = row["result"]

  @property
  def is_done(self) -> bool:
    """Whether there is no further job, unless one is running."""
    return not self._left and self._next_job() is None

  def describe_pause(self, name: str) -> str:
    """Where a member pauses; empty if it is at the end or diverged."""
    rung = max(rung for rung, own in enumerate(self._losses) if name in own)
    step = self._steps[rung]
    loss = self._losses[rung][name]
    is_at_the_end = rung == len(self._steps) - 1
    if is_at_the_end or loss == math.inf:
      return ""
    return f"paused at rung {rung}, step {step}, loss {loss:.4f}"

  def jobs(self) -> Generator[tuple[str, int], None, None]:
    """Yield (member's name, step to train to) to one worker; the next call records the result.

    Waits for the results of others while there is nothing to do. A generator that is closed instead
    leaves its job to a restart of the run.
    """
    while True:
      job = self._take()
      if job is None:
        return
      try:
        yield job.name, self._steps[job.rung]
        self._finish(job)
      finally:
        with self._changed:
          self._running.discard(job)
          self._changed.notify_all()

  def _next_job(self) -> Job | None:
    return next_job(list(self._members), self._losses, self._reduction_factor)

  def _take(self) -> Job | None:
    """Start a job, once there is one; None if there will be none."""
    job: Job | None
    with self._changed:
      while True:
        if self._left:
          job = self._left.pop(0)
          break
        job = self._next_job()
        if job is not None:
          self._log_start(job)
          self._losses[job.rung][job.name] = None
          break
        if not self._running:
          return None
        self._changed.wait()
      self._running.add(job)
      return job

  def _log_start(self, job: Job) -> None:
    """Log that a member starts, or that its loss at the rung below promotes it."""
    if job.rung == 0:
      self._log("start", job, None)
      return
    losses_below = self._losses[job.rung - 1]
    self._log("promote", job, losses_below[job.name])

  def _finish(self, job: Job) -> None:
    """Record the loss of a member that a worker has trained.

    Raises:
      UserError: the member was not evaluated at the rung.
    """
    member = self._members[job.name]
    step = self._steps[job.rung]
    member.find_step()
    loss = member.eval_losses.get(step)
    if loss is None and member.step > step:
      raise UserError(
        f"member {job.name} is at step {member.step} and was not evaluated at step {step}, the "
        "rung where it is compared: choose another run_name"
      )
    with self._changed:
      if loss is None:
        self._losses[job.rung][job.name] = math.inf
        self._log("diverge", job, None)
      else:
        is_last = job.rung == len(self._steps) - 1
        self._losses[job.rung][job.name] = loss
        self._log("finish" if is_last else "pause", job, loss)

  def _log(self, decision: str, job: Job, result: float | None) -> None:
    """Report a decision or a result, and write its row to the journal."""
    step = self._steps[job.rung]
    line = f"{decision} {job.name}: rung {job.rung}, step {step}"
    if result is not None:
      line += f", loss {result:.4f}"
    self._report(line)
    row = {
      "step": step,
      "member": job.name,
      "rung": job.rung,
      "decision": decision,
      "result": result,
      "time": time.time(),
    }
    writer = JsonlWriter(self._path, self._steps[-1], JOURNAL_ROWS)
    writer.write(row)
    writer.close()
