"""An ensemble run: opened or resumed, trained in segments, combined and ranked.

On disk there are only members, each in a folder like that of its solo run. So any strategy can
resume what another one saved, and members can be added or removed between two starts. A member that
is new trains first, up to the others. Members that trained together resume from a step that all
have, see common_step.py. Members with other `steps` train one set after another, the shortest
first: no program has members that wait for the others, or is compiled again when some have ended.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from rich.console import Console

from maxlite import __version__
from maxlite.checkpoint.run_folder import Changes
from maxlite.config import Config
from maxlite.config.members import members_of
from maxlite.config.raw_values import show
from maxlite.config.schema import flatten
from maxlite.data.batch import abstract_batch
from maxlite.distributed.initialize import (
  SeparateProcesses,
  describe_process,
)
from maxlite.distributed.object_collectives import all_gather_object
from maxlite.distributed.signals import stop_on_signals
from maxlite.ensemble.engines.engine_base import EngineRequest, Placement, own_placement
from maxlite.ensemble.engines.planner import choose
from maxlite.ensemble.members.common_step import common_step, group_by_segment, read_segment
from maxlite.ensemble.members.program import MemberFunctions, MemberProgram
from maxlite.ensemble.members.run import MemberRun
from maxlite.ensemble.report.leaderboard import LEADERBOARD
from maxlite.ensemble.run.combination_scores import score_members
from maxlite.ensemble.run.divided_members import check_division, members_of_process
from maxlite.ensemble.run.ensemble_data import EnsembleData
from maxlite.ensemble.run.ensemble_trainer import EnsembleTrainer, train_members
from maxlite.ensemble.run.from_config import ConfigPrograms
from maxlite.ensemble.run.member_workers import MemberWorkers
from maxlite.ensemble.selection.asha import JOURNAL, AsynchronousHalving, rungs, survivors
from maxlite.errors import UserError, exit_on_user_error
from maxlite.kernels.xla_cpu import add_threads_for_collectives, enable_compilation_cache
from maxlite.metrics.waits import report_wait
from maxlite.metrics.writers import open_console
from maxlite.registry import ENSEMBLE_STRATEGIES
from maxlite.runs.open_run import lock_folder, save_config
from maxlite.runs.run_report import describe_rates
from maxlite.runs.saved_run import run_folder
from maxlite.storage.json_values import Json, JsonObject
from maxlite.training.batch_shape import global_batch_size


def run_ensemble(
  cfg: Config,
  names: Sequence[str] = (),
  batch_size: int = 0,
  last_step: int = 0,
) -> int:
  """`train_ensemble` for the command: a mistake ends in one line."""
  with exit_on_user_error("maxlite.train"):
    return train_ensemble(cfg, names, batch_size, last_step)


def train_ensemble(
  cfg: Config,
  names: Sequence[str] = (),
  batch_size: int = 0,
  last_step: int = 0,
  peers: SeparateProcesses | None = None,
  *,
  compares: bool = True,
) -> int:
  """Train all members, or those in `names`, to the last step; return the exit code.

  Args:
    cfg: the config of the ensemble.
    names: the names of the members that a worker process trains; empty: all.
    batch_size: rows of a batch; 0: those of a run on all devices.
    last_step: the step at which the members pause; 0: each at its own last one.
    compares: whether the members are compared over seeds, and combined, at the end.
    peers: the other processes, if this process trains its part of the members. Process 0 writes
      the leaderboard.

  Raises:
    UserError: a mistake in the config, or a run folder that does not fit it.
  """
  if cfg.ensemble.ensemble_strategy != "submesh":  # which shards no member
    add_threads_for_collectives()
  # The parent of a worker reads its lines.
  log_format = "text" if names else cfg.observe.log_format
  console = open_console(quiet=not _is_first_process(peers), log_format=log_format)
  enable_compilation_cache(cfg.run.jax_cache_dir)
  process = describe_process(peers)
  if process:
    open_console(log_format=log_format).print(process)
  folder = run_folder(cfg)
  changes = folder.config_changes(flatten(cfg))
  num_devices = sum(_gather(jax.device_count(), peers))
  run = EnsembleRun(
    cfg,
    names,
    batch_size or global_batch_size(cfg.data, num_devices),
    last_step,
    console,
    peers,
  )
  # The parent of a worker has locked the folder.
  is_owner = not names and (peers is None or _is_first_process(peers))
  if is_owner:
    lock_folder(folder)
  with report_wait(f"opening {len(run.members)} members", console.print):
    run.open()
  is_over = run.is_done and (bool(names) or (folder.directory / LEADERBOARD).exists())
  if all(_gather(is_over, peers)):
    run.print_nothing_to_do()
    return 0
  if not run.is_done:
    run.print_header(changes or {})
    if is_owner:
      save_config(cfg, folder, changes)
      # An earlier leaderboard is of fewer members or steps.
      (folder.directory / LEADERBOARD).unlink(missing_ok=True)
  exit_code = run.train()
  if is_owner and exit_code == 0:
    _finalize(run, compares=compares)
  run.close()
  folder.unlock()
  return max(_gather(exit_code, peers))


def _is_first_process(peers: SeparateProcesses | None) -> bool:
  if peers is None:
    return jax.process_index() == 0
  return peers.process_id == 0


def _gather(value: Json, peers: SeparateProcesses | None) -> list[Json]:
  """The values of all separate processes, or the one of this process if it has no peers."""
  if peers is None:
    return [value]
  return peers.all_gather(value)


def _finalize(run: "EnsembleRun", *, compares: bool) -> None:
  """Score the combinations of the members, and write the results in process 0."""
  scores = run.score_combinations() if compares else {}
  if jax.process_index() != 0:
    return
  from maxlite.ensemble.run.finalize import finalize  # its plots are slow to import

  folder = run_folder(run.cfg)
  finalize(run.members, scores, folder, run.console, compares=compares)
  folder.upload()


class EnsembleRun:
  """The members of one command, trained by engines or in worker processes."""

  def __init__(
    self,
    cfg: Config,
    names: Sequence[str],
    batch_size: int,
    last_step: int,
    console: Console,
    peers: SeparateProcesses | None = None,
  ):
    """
    Args:
      cfg: the config of the ensemble.
      names: the names of the members to train; empty: all.
      batch_size: rows of a batch.
      last_step: the step up to which they are trained; 0: each to its own last one.
      console: prints the progress.
      peers: as in `train_ensemble`.

    Raises:
      UserError: the members cannot be trained as the config says.
    """
    self.cfg = cfg
    self.console = console
    self.batch_size = batch_size
    self._pause_step = last_step
    self.devices = jax.devices()
    self._peers = peers
    self._is_worker = bool(names)
    ensemble = cfg.ensemble
    self._starts_processes = _starts_processes(ensemble.ensemble_strategy)
    self._in_workers = self._starts_processes or peers is not None
    self._rungs = rungs(ensemble.asha_min_steps, ensemble.asha_reduction_factor, cfg.run.steps)
    if jax.process_count() > 1 and self._starts_processes:
      raise UserError(
        f"ensemble_strategy=processes starts its own, and this run has {jax.process_count()}: "
        "write num_processes=1, or ensemble_strategy=stacked or fused"
      )
    chosen = [member for member in members_of(cfg) if not names or member.name in names]
    self.members = [MemberRun(member, console.print) for member in chosen]
    if peers is not None:
      check_division(cfg, len(self.members), peers)
    degree = cfg.mesh.ici_ensemble_parallelism * cfg.mesh.dcn_ensemble_parallelism
    self._spread = 0 < degree < len(self.devices)
    # The devices of a member's own program.
    self._placement = own_placement(self.devices, spread=self._spread)
    self._data = EnsembleData(cfg, batch_size, spread=self._spread)
    self.source = self._data.local(self.members[0].config.data).source
    self._programs = ConfigPrograms(self.devices, batch_size, self.source.num_bytes_V)
    self._trainer: EnsembleTrainer | None = None
    self._check_comparisons()
    self._asynchronous: AsynchronousHalving | None = None
    if self._rungs and self._in_workers:
      self._asynchronous = AsynchronousHalving(
        self.members,
        steps=[*self._rungs, cfg.run.steps],
        reduction_factor=ensemble.asha_reduction_factor,
        journal=run_folder(cfg).directory / JOURNAL,
        report=console.print,
      )

  @property
  def is_done(self) -> bool:
    """Whether all members are at the last step or stopped."""
    if self._asynchronous is not None:
      return self._asynchronous.is_done
    return not self._unfinished()

  def open(self) -> None:
    """Restore all members; if workers will train them, only find their steps."""
    if self._in_workers:
      for member in self.members:  # without using the devices, which the workers need
        member.find_step()
    else:
      self._restore()

  def print_header(self, changes: Changes) -> None:
    """Print versions, devices, data and config changes; choose and print the strategy.

    Args:
      changes: the keys of the ensemble that have changed since the last start.
    """
    self.console.print(
      f"maxlite {__version__}, jax {jax.__version__}: {len(self.devices)} x "
      f"{self.devices[0].device_kind}, {len(self.members)} members; {self.source.summary}; "
      f"{self.source.describe_batches(self.batch_size, self.cfg.data.max_target_length)}"
    )
    if self.source.files:
      self.console.print(f"data: {self.source.files}")
    # The changes of `members` and `sweep` are printed as those of the members' keys.
    self._print_changes("", changes, besides=("members", "sweep"))
    for member in self.members:
      self._print_changes(f"{member.name} ", member.changes or {}, besides=tuple(changes))
      for line in describe_rates(member.config, member.changes or {}, member.step):
        self.console.print(f"  {member.name}{line}")
    if not self._in_workers:
      group, _ = self._next_segment()
      self.console.print(self._trainer_of(group).plan.table(), soft_wrap=False)

  def print_nothing_to_do(self) -> None:
    """Print that the run has ended before."""
    self.console.print(
      f"{run_folder(self.cfg).place} is at {self._describe_end()} with all its members: nothing to "
      "do. Give it more steps or members, or choose another run_name."
    )

  def _print_changes(self, owner: str, changes: Changes, besides: Sequence[str]) -> None:
    """Print the changed keys of the ensemble or of a member, except those in `besides`."""
    for key, (before, now) in changes.items():
      if key not in besides:
        change = f"{owner}{key}={show(now)} (was {show(before)})"
        self.console.print(f"  since the last start: {change}")

  def train(self) -> int:
    """Train until all members are at the last step or stopped; return the exit code."""
    if self._in_workers:
      return self._train_in_other_processes()
    while not self.is_done:
      group, last_step = self._next_segment()
      if self._has_other_ends(group):
        self.console.print(f"{len(group)} members train up to step {self._end_of(group[0])}")
      result = train_members(self._trainer_of(group), last_step, self.console)
      self._apply_halving()
      if self._is_worker and all(member.diverged for member in group):
        continue  # a result of the members, which does not end the worker with an error
      if result.reason:
        last = group[0].config.run.steps
        self.console.print(f"{result.reason}; stopped after step {result.step} of {last}")
        return result.exit_code
    return 0

  def _train_in_other_processes(self) -> int:
    """Train in worker processes, or each process its members; read all; return the exit code."""
    if self._peers is not None:
      exit_code = self._train_own_members(self._peers)
    elif self.is_done:
      exit_code = 0
    else:
      exit_code = self._run_workers()
    is_reader = self._peers is None or self._peers.process_id == 0
    if exit_code or not is_reader:
      return exit_code
    self._restore()
    if all(member.diverged for member in self.members):
      self.console.print("all members diverged")
      return 1
    return 0

  def score_combinations(self) -> dict[str, JsonObject]:
    """Score combinations of the members that completed all steps; empty without held-out data."""
    members = []
    for member in self.members:
      if member.step >= member.config.run.steps and not member.diverged:
        members.append(member)
    if self.source.eval is None or len(members) < 2:
      return {}

    def functions_of(member: MemberRun) -> MemberFunctions:
      return self._programs.build(member.member, self._placement).functions

    return score_members(
      self._trainer_of(members),
      functions_of,
      self.source.num_bytes_V,
      self.console,
    )

  def close(self) -> None:
    """Wait for the members' checkpoints, and unlock their folders."""
    for member in self.members:
      member.close()

  def _restore(self) -> None:
    """Restore all members from their latest checkpoints, and print their steps."""
    programs = [self._programs.build(run.member, self._placement) for run in self.members]
    default: Sharding = SingleDeviceSharding(self.devices[0])
    if jax.process_count() > 1:
      default = NamedSharding(Mesh(np.array(self.devices), ("device",)), jax.P())
    program_of = {program.name: program for program in programs}
    for first_step, names in self._groups_of_last_segments():
      together = [member for member in self.members if member.name in names]
      self._restore_group(together, first_step, program_of, default)
    for member in self.members:
      if member.state is None and program_of[member.name].base_params and jax.process_count() > 1:
        raise UserError("load_parameters_path: members read it in one process: num_processes=1")
    by_step = sorted(self.members, key=_step_of)
    for step, resumed in itertools.groupby(by_step, key=_step_of):
      if step:
        listed = ", ".join(member.name for member in resumed)
        self.console.print(f"resuming from the checkpoints of step {step}: {listed}")
    self._apply_halving()

  def _groups_of_last_segments(self) -> list[tuple[int, list[str]]]:
    """(first step, names) of the members that trained together last: all, in a population."""
    if not self.cfg.ensemble.pbt_period:
      segments = {member.name: read_segment(member.folder.directory) for member in self.members}
      return list(group_by_segment(segments))
    names = [member.name for member in self.members]
    changed = set(names) ^ set(run_folder(self.cfg).member_names())
    if changed and any(member.saved_steps for member in self.members):
      raise UserError(
        f"a population keeps its members, and {min(changed)} is added or removed: choose another "
        "run_name"
      )
    return [(0, names)]

  def _restore_group(
    self,
    group: Sequence[MemberRun],
    first_step: int,
    program_of: Mapping[str, MemberProgram],
    default: Sharding,
  ) -> None:
    """Restore members at the last step that all have; without such a step, each at its last one.

    Args:
      group: members that trained together from `first_step` on.
      program_of: by name, their programs.
      default: the sharding of programs that have none.
    """
    while True:
      step = common_step([member.saved_steps for member in group], first_step)
      if step is None and self.cfg.ensemble.pbt_period:
        step = 0  # a population exchanges at equal steps
      for member in group:
        member.restore(program_of[member.name], default, step)
      # If a checkpoint was damaged, restoring has moved it aside.
      if step is None or all(member.step == step for member in group):
        return

  def _check_comparisons(self) -> None:
    """Raise UserError if members that are to be compared have no held-out losses."""
    ensemble = self.cfg.ensemble
    if self.source.eval is None:
      text = "compares held-out losses: set eval_fraction above 0"
      if self._rungs:
        raise UserError(f"ASHA {text}")
      if ensemble.pbt_period:
        raise UserError(f"PBT {text}")
    if ensemble.pbt_period and len(self.members) < 2:
      raise UserError("PBT copies members from others: write two or more, or pbt_period=0")

  def _train_own_members(self, peers: SeparateProcesses) -> int:
    """Train the unfinished members of this process; return the largest exit code of all."""
    own = members_of_process(self.members, peers)
    names = [member.name for member in self._unfinished() if member in own]
    exit_code = 0
    if names:
      exit_code = train_ensemble(self.cfg, names, self.batch_size, self._pause_step)
    with stop_on_signals() as stop:  # while the others train
      exit_codes = peers.all_gather(exit_code)
    received = stop.after(max(self._end_of(member) for member in self.members))
    if received:
      return 128 + received
    return max(exit_codes)

  def _run_workers(self) -> int:
    """Train the unfinished members in worker processes; return the exit code."""
    workers = MemberWorkers(
      self.cfg,
      self.devices,
      self.batch_size,
      self.console,
    )
    if self._asynchronous is not None:
      return workers.train_jobs(self.members, self._asynchronous)
    return workers.train(self._unfinished())

  def _unfinished(self) -> list[MemberRun]:
    """The members that are neither at their last step nor stopped."""
    unfinished = []
    for member in self.members:
      has_ended = member.step >= self._end_of(member) or bool(member.stop_status)
      if self._is_worker and member.state is not None and member.diverged:
        has_ended = True
      if not has_ended:
        unfinished.append(member)
    return unfinished

  def _next_segment(self) -> tuple[list[MemberRun], int]:
    """(the members that train next, the step up to which they train together).

    Of the members that end first, those are next that are furthest behind.
    """
    unfinished = self._unfinished()
    last_step = min(self._end_of(member) for member in unfinished)
    alike = [member for member in unfinished if self._end_of(member) == last_step]
    first = min(member.step for member in alike)
    group = [member for member in alike if member.step == first]
    ends = [last_step, *self._rungs]
    ends.extend(member.step for member in alike)
    return group, min(end for end in ends if end > first)

  def _end_of(self, member: MemberRun) -> int:
    """The step up to which this process trains the member."""
    return self._pause_step or member.config.run.steps

  def _has_other_ends(self, group: Sequence[MemberRun]) -> bool:
    """Whether members of the run end at other steps than those of `group`."""
    return any(self._end_of(member) != self._end_of(group[0]) for member in self.members)

  def _describe_end(self) -> str:
    """The step, or the steps, at which the members end."""
    ends = sorted({self._end_of(member) for member in self.members})
    if len(ends) == 1:
      return f"step {ends[0]}"
    return f"steps {ends[0]} to {ends[-1]}"

  def _apply_halving(self) -> None:
    """Stop the members that ASHA does not promote."""
    if self._asynchronous is not None:
      for member in self.members:
        member.stop_status = self._asynchronous.describe_pause(member.name)
      return
    if not self._rungs:
      return
    losses = {member.name: member.eval_losses for member in self.members}
    reached = {member.name: member.step for member in self.members}
    alive = survivors(losses, reached, self._rungs, self.cfg.ensemble.asha_reduction_factor)
    # Process 0 decides for all: the others may not see the latest rows yet.
    alive = all_gather_object(sorted(alive))[0]
    for member in self.members:
      if member.name not in alive and not member.stop_status:
        member.stop_status = f"stopped at step {member.step} by halving"
        self.console.print(f"{member.name} is {member.stop_status}")

  def _trainer_of(self, group: Sequence[MemberRun]) -> EnsembleTrainer:
    """The trainer of these members; only the latest one is kept."""
    if self._trainer is None or self._trainer.runs != list(group):
      self._trainer = None  # frees the memory of the former engine
      self._trainer = self._build_trainer(group)
    return self._trainer

  def _build_trainer(self, group: Sequence[MemberRun]) -> EnsembleTrainer:
    """Choose the strategy for these members, and open their data."""

    def program_of(z: int, placement: Placement) -> MemberProgram:
      return self._programs.build(group[z].member, placement)

    data_configs = {member.config.data for member in group}
    request = EngineRequest(
      num_members=len(group),
      program=program_of,
      batch=abstract_batch((self.batch_size, self.cfg.data.max_target_length)),
      devices=self.devices,
      spread=self._spread,
      own_batches=len(data_configs) > 1,
      no_factory="not estimated; ensemble_strategy=processes trains each member in a process",
    )
    strategy = self.cfg.ensemble.ensemble_strategy
    remedy = "use fused"
    if self.cfg.ensemble.pbt_period:
      strategy = "stacked"
      remedy = "a population has one architecture"
    elif self._starts_processes:
      strategy = "fused"  # after training in worker processes, only predictions remain
    with report_wait(f"tracing {len(group)} members to choose a strategy", self.console.print):
      plan, engine = choose(
        request,
        strategy,
        self.cfg.ensemble.ensemble_memory_gb,
        remedy=remedy,
      )
    run = dataclasses.replace(self.cfg.run, steps=group[0].config.run.steps)
    return EnsembleTrainer(
      cfg=dataclasses.replace(self.cfg, run=run),
      plan=plan,
      engine=engine,
      runs=list(group),
      loaders=[self._data.local(member.config.data) for member in group],
      whole_batches=self._data.whole(group[0].config.data),
    )


def _starts_processes(strategy: str) -> bool:
  """Whether the strategy trains members in worker processes; `auto` does not choose such a one."""
  return strategy != "auto" and ENSEMBLE_STRATEGIES.entry(strategy).starts_processes


def _step_of(member: MemberRun) -> int:
  return member.step
