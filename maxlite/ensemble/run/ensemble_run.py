"""An ensemble run: opened or resumed, trained in segments, combined and ranked.

On disk there are only members, each in a folder like that of its solo run. So any strategy can
resume what another one saved, and members can be added or removed between two starts. A member that
is behind (it is new, or its last checkpoint was lost) trains first, on the batches it missed.
"""

import contextlib
import functools
import itertools
import math
import sys
from collections.abc import Generator, Sequence
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding
from rich.console import Console

from maxlite import __version__
from maxlite.checkpoint.run_folder import Changes
from maxlite.config import Config, UserError, exit_on_user_error
from maxlite.config.members import members_of
from maxlite.config.raw_values import show
from maxlite.config.schema import DataConfig, flatten
from maxlite.data.batch import abstract_batch, local_rows
from maxlite.data.loader import DataLoader, open_data
from maxlite.distributed.initialize import (
  SeparateProcesses,
  describe_process,
  process_0_first,
)
from maxlite.distributed.object_collectives import all_gather_object
from maxlite.distributed.signals import stop_on_signals
from maxlite.ensemble.engines.engine_base import EngineRequest, Placement
from maxlite.ensemble.engines.submesh import assign_lpt
from maxlite.ensemble.from_config import ConfigPrograms
from maxlite.ensemble.member_program import MemberProgram
from maxlite.ensemble.planner import choose
from maxlite.ensemble.report.ensemble_metrics import score_combinations
from maxlite.ensemble.report.leaderboard import LEADERBOARD
from maxlite.ensemble.report.soups import score_soups
from maxlite.ensemble.run.ensemble_trainer import EnsembleTrainer, train_members
from maxlite.ensemble.run.member_run import MemberRun
from maxlite.ensemble.selection.asha import JOURNAL, AsynchronousHalving, rungs, survivors
from maxlite.ensemble.workers.worker_pool import (
  GPU_MEMORY_SHARE,
  WorkerAssignment,
  assign_workers,
  gpu_names,
  run_queues,
)
from maxlite.ensemble.workers.worker_process import WorkerCommand
from maxlite.ensemble.workers.worker_progress import WorkerProgress
from maxlite.kernels.xla_cpu import enable_compilation_cache
from maxlite.metrics.flops import active_parameter_count, parameter_sizes
from maxlite.metrics.waits import report_wait
from maxlite.metrics.writers import open_console
from maxlite.runs.open_run import lock_folder, save_config
from maxlite.runs.saved_run import run_folder
from maxlite.sharding import Sharder, build_mesh
from maxlite.training.batch_shape import global_batch_size
from maxlite.training.trainer import mesh_degrees

MAX_RESTARTS = 3  # of a worker process that dies


def run_ensemble(
  cfg: Config, names: Sequence[str] = (), batch_size: int = 0, last_step: int = 0
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
) -> int:
  """Train all members, or those in `names`, to the last step; return the exit code.

  The default batch size is that of a run on all devices.
  The default last step is that of the run; at another one the members pause.
  With `peers`, this process trains its part of the members, and process 0 writes the leaderboard.
  """
  is_first = (peers.process_id if peers else jax.process_index()) == 0
  console = open_console(quiet=not is_first)
  enable_compilation_cache(cfg.run.jax_cache_dir)
  if process := describe_process(peers):
    sys.stdout.write(f"{process}\n")
  folder = run_folder(cfg)
  changes = folder.config_changes(flatten(cfg))
  num_devices = sum(peers.all_gather(jax.device_count())) if peers else jax.device_count()
  batch_size = batch_size or global_batch_size(cfg.data, num_devices)
  run = EnsembleRun(cfg, names, batch_size, last_step or cfg.run.steps, console, peers)
  is_owner = not names and (is_first or not peers)  # a worker's parent has locked the folder
  if is_owner:
    lock_folder(folder)
  with report_wait(f"opening {len(run.members)} members", console.print):
    run.open()
  is_over = run.is_done and bool(names or (folder.directory / LEADERBOARD).exists())
  if all(peers.all_gather(is_over)) if peers else is_over:
    console.print(
      f"{folder.place} is at step {run.last_step} with all its members: nothing to do. Give "
      "it more steps or members, or choose another run_name."
    )
    return 0
  if not run.is_done:
    run.print_header(changes or {})
    if is_owner:
      save_config(cfg, folder, changes)
      (folder.directory / LEADERBOARD).unlink(missing_ok=True)  # of fewer members or steps
  exit_code = run.train()
  if is_owner and not exit_code:
    scores = run.score_combinations()
    if jax.process_index() == 0:
      from maxlite.ensemble.run.finalize import finalize  # its plots are slow to import

      finalize(run.members, scores, folder, console)
      folder.upload()
  run.close()
  folder.unlock()
  return max(peers.all_gather(exit_code)) if peers else exit_code


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
    """`names`: of the members to train up to `last_step`; empty: all."""
    self.cfg, self.console, self.batch_size, self._peers = cfg, console, batch_size, peers
    self.last_step, self._is_worker = last_step, bool(names)
    self.devices, ensemble = jax.devices(), cfg.ensemble
    self._in_workers = ensemble.ensemble_strategy == "processes" or peers is not None
    self._rungs = rungs(ensemble.asha_min_steps, ensemble.asha_reduction_factor, cfg.run.steps)
    if jax.process_count() > 1 and ensemble.ensemble_strategy == "processes":
      raise UserError(
        f"ensemble_strategy=processes starts its own, and this run has {jax.process_count()}: "
        "write num_processes=1, or ensemble_strategy=stacked or fused"
      )
    members = [m for m in members_of(cfg) if not names or m.name in names]
    self.members = [MemberRun(member, console.print) for member in members]
    if peers:
      self._check_peers(peers)
    degree = cfg.mesh.ici_ensemble_parallelism * cfg.mesh.dcn_ensemble_parallelism
    self._spread = 0 < degree < len(self.devices)
    self._rows = self._local_rows()
    self.data = self._data(self.members[0].config.data, self._rows)
    self._programs = ConfigPrograms(self.devices, batch_size, self.data.source.num_bytes_V)
    self._trainer: EnsembleTrainer | None = None
    for name, is_on in (("ASHA", self._rungs), ("PBT", ensemble.pbt_period)):
      if is_on and self.data.source.eval is None:
        raise UserError(f"{name} compares held-out losses: set eval_fraction above 0")
    if ensemble.pbt_period and len(self.members) < 2:
      raise UserError("PBT copies members from others: write two or more, or pbt_period=0")
    self._asynchronous: AsynchronousHalving | None = None
    if self._rungs and self._in_workers:
      steps, journal = [*self._rungs, cfg.run.steps], run_folder(cfg).directory / JOURNAL
      factor, report = ensemble.asha_reduction_factor, console.print
      self._asynchronous = AsynchronousHalving(self.members, steps, factor, journal, report)

  @property
  def _placement(self) -> Placement:
    """The devices of a member's own program."""
    return Placement(tuple(self.devices if self._spread else self.devices[:1]))

  @property
  def is_done(self) -> bool:
    return self._asynchronous.is_done if self._asynchronous else not self._unfinished()

  def open(self) -> None:
    """Restore all members; if workers will train them, only find their steps."""
    if self._in_workers:
      for member in self.members:  # without using the devices, which the workers need
        member.find_step()
    else:
      self._restore()

  def print_header(self, changes: Changes) -> None:
    """Print versions, devices, data and config changes; choose and print the strategy."""
    self.console.print(
      f"maxlite {__version__}, jax {jax.__version__}: {len(self.devices)} x "
      f"{self.devices[0].device_kind}, {len(self.members)} members; {self.data.source.summary}; "
      f"{self.batch_size} x {self.cfg.data.max_target_length} tokens per step"
    )
    if files := self.data.source.files:
      self.console.print(f"data: {files}")
    for name, own in ("", changes), *((f"{m.name} ", m.changes or {}) for m in self.members):
      for key, (before, now) in own.items():
        if key not in (changes if name else ("members", "sweep")):
          change = f"{name}{key}={show(now)} (was {show(before)})"
          self.console.print(f"  since the last start: {change}")
    if not self._in_workers:
      group, _ = self._next_segment()
      self.console.print(self._trainer_of(group).plan.table(), soft_wrap=False)

  def train(self) -> int:
    """Train until all members are at the last step or stopped; return the exit code."""
    if self._in_workers:
      if self._peers:
        exit_code = self._train_own_members(self._peers)
      else:
        exit_code = 0 if self.is_done else self._run_workers()
      if not exit_code and not (self._peers and self._peers.process_id):
        self._restore()
        if all(member.diverged for member in self.members):
          self.console.print("all members diverged")
          return 1
      return exit_code
    while not self.is_done:
      group, last_step = self._next_segment()
      result = train_members(self._trainer_of(group), last_step, self.console)
      self._apply_halving()
      if self._is_worker and all(member.diverged for member in group):
        continue  # a result of theirs, and not of the worker
      if result.reason:
        last = self.cfg.run.steps
        self.console.print(f"{result.reason}; stopped after step {result.step} of {last}")
        return result.exit_code
    return 0

  def score_combinations(self) -> dict[str, dict]:
    """Score combinations of the members that completed all steps; empty without held-out data."""
    members = [m for m in self.members if m.step >= self.cfg.run.steps and not m.diverged]
    if self.data.source.eval is None or len(members) < 2:
      return {}
    trainer = self._trainer_of(members)
    state = trainer.pack()
    with report_wait("scoring combined predictions", self.console.print):
      scores = score_combinations(
        lambda batch: trainer.predict(state, batch),
        trainer.eval_batches,
        self.data.source.num_bytes_V,
      )
    trainer.unpack(state)
    return scores | self._score_soups(trainer)

  def _score_soups(self, trainer: EnsembleTrainer) -> dict[str, dict]:
    """Score the soups of all members that have the shapes of the one with the lowest loss."""
    if jax.process_count() > 1:
      self.console.print("soups are not scored: an ensemble on several hosts has no host with all")
      return {}
    best = min(trainer.runs, key=lambda run: run.eval_losses.get(run.step, math.inf))
    shapes = lambda run: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), run.state.params)
    alike = [run for run in trainer.runs if shapes(run) == shapes(best)]
    if len(alike) < 2:
      return {}
    if others := [run.name for run in trainer.runs if run not in alike]:
      text = f"soups leave out {', '.join(others)}: other shapes than {best.name}"
      self.console.print(text)
    program = self._programs.build(best.member, self._placement)
    params = {run.name: jax.device_get(run.state.params) for run in alike}
    with report_wait("scoring soups", self.console.print):
      return score_soups(
        program.functions, params, trainer.eval_batches, self.data.source.num_bytes_V
      )

  def close(self) -> None:
    for member in self.members:
      member.close()

  def _restore(self) -> None:
    programs = [self._programs.build(run.member, self._placement) for run in self.members]
    default: Sharding = SingleDeviceSharding(self.devices[0])
    if jax.process_count() > 1:
      default = NamedSharding(Mesh(np.array(self.devices), ("device",)), jax.P())
    for member, program in zip(self.members, programs, strict=True):
      member.restore(program, default)
      if member.state is None and program.base_params and jax.process_count() > 1:
        raise UserError("load_parameters_path: members read it in one process: num_processes=1")
    if self.cfg.ensemble.pbt_period:
      self._restore_common_step(programs, default)
    step_of = lambda member: member.step
    for step, group in itertools.groupby(sorted(self.members, key=step_of), step_of):
      if step:
        names = ", ".join(member.name for member in group)
        self.console.print(f"resuming from the checkpoints of step {step}: {names}")
    self._apply_halving()

  def _restore_common_step(self, programs: Sequence[MemberProgram], default: Sharding) -> None:
    """Restore all members at the last step that all have: a population exchanges at equal steps."""
    changed = {m.name for m in self.members} ^ set(run_folder(self.cfg).member_names())
    if changed and any(member.step for member in self.members):
      raise UserError(
        f"a population keeps its members, and {min(changed)} is added or removed: choose another "
        "run_name"
      )
    while (first := min(m.step for m in self.members)) < max(m.step for m in self.members):
      for member, program in zip(self.members, programs, strict=True):
        if member.step > first:
          member.restore(program, default, first)

  def _check_peers(self, peers: SeparateProcesses) -> None:
    """Raise UserError if the members cannot be divided among the processes."""
    count, fix = peers.num_processes, "write ensemble_strategy=stacked or fused"
    refusals = {
      "the hosts of a TPU slice form one run": jax.process_count() > 1,
      "halving would compare members of all hosts": bool(self._rungs),
      "process 0 reads the folders of all members": run_folder(self.cfg).mirror,
      "members are read from checkpoints": not self.cfg.checkpoint.enable_checkpointing,
      f"{len(self.members)} members are too few for {count} processes": len(self.members) < count,
    }
    for why, is_refused in refusals.items():
      if is_refused:
        raise UserError(f"ensemble_strategy=submesh on several processes: {why}; {fix}")

  def _train_own_members(self, peers: SeparateProcesses) -> int:
    """Train the unfinished members of this process; return the largest exit code of all."""
    part_of = assign_lpt(self._costs(self.members), peers.num_processes)
    own = [run for run, part in zip(self.members, part_of, strict=True) if part == peers.process_id]
    names = [run.name for run in own if run in self._unfinished()]
    exit_code = train_ensemble(self.cfg, names, self.batch_size, self.last_step) if names else 0
    with stop_on_signals() as stop:  # while the others train
      exit_codes = peers.all_gather(exit_code)
    received = stop.after(self.last_step)
    return 128 + received if received else max(exit_codes)

  def _costs(self, members: Sequence[MemberRun]) -> list[float]:
    """The active parameters of every member."""
    models = [member.config.model for member in members]
    return [float(active_parameter_count(parameter_sizes(model), model)) for model in models]

  def _run_workers(self) -> int:
    """Train the unfinished members in processes; return the exit code."""
    ensemble, folder = self.cfg.ensemble, run_folder(self.cfg).directory.absolute()
    members = self.members if self._asynchronous else self._unfinished()
    limit, stats = ensemble.ensemble_memory_gb * 1e9, self.devices[0].memory_stats()
    limited = limit / stats["bytes_limit"] if limit and stats else GPU_MEMORY_SHARE
    assignments = assign_workers(
      self._costs(members),
      ensemble.ensemble_num_workers,
      gpus=gpu_names(self.devices),
      memory_fraction=min(limited, GPU_MEMORY_SHARE),
    )
    names = [[members[z].name for z in assignment.members] for assignment in assignments]
    logs = [folder / "workers" / f"{n}.log" for n in range(len(assignments))]
    self.console.print(f"{len(logs)} workers: {folder / 'workers'}")
    progress = WorkerProgress(members, logs, self.cfg.run.steps, self.console)
    with contextlib.nullcontext() if self._asynchronous else progress.printed():
      codes = run_queues(
        list(map(self._commands, assignments, names, logs)),
        executor=ensemble.ensemble_executor,
        max_restarts=MAX_RESTARTS,
        report=self.console.print,
      )
    code = next(filter(None, codes), 0)
    return code if code >= 0 else 128 - code

  def _commands(
    self, assignment: WorkerAssignment, names: list[str], log: Path
  ) -> Generator[WorkerCommand, None, None]:
    """The commands of one worker: of `names` to the last step, or of jobs of ASHA."""
    folder = str(run_folder(self.cfg).directory.absolute())
    start = [sys.executable, "-m", "maxlite.ensemble", "worker", folder, str(self.batch_size)]
    command = lambda names, step: assignment.command(
      " ".join(names), [*start, str(step), *names], log
    )
    if not self._asynchronous:
      yield command(names, self.last_step)
      return
    with contextlib.closing(self._asynchronous.jobs()) as jobs:
      for name, step in jobs:
        yield command([name], step)

  def _unfinished(self) -> list[MemberRun]:
    has_ended = lambda m: self._is_worker and m.state is not None and m.diverged
    left = [m for m in self.members if m.step < self.last_step and not m.stop_status]
    return [member for member in left if not has_ended(member)]

  def _next_segment(self) -> tuple[list[MemberRun], int]:
    """(the members that are furthest behind, the step up to which they train together)."""
    unfinished = self._unfinished()
    first = min(member.step for member in unfinished)
    group = [member for member in unfinished if member.step == first]
    ends = [self.last_step, *self._rungs, *(member.step for member in unfinished)]
    return group, min(end for end in ends if end > first)

  def _apply_halving(self) -> None:
    """Stop the members that ASHA does not promote."""
    if self._asynchronous:
      for member in self.members:
        member.stop_status = self._asynchronous.describe_pause(member.name)
    if not self._rungs or self._asynchronous:
      return
    losses = {member.name: member.eval_losses for member in self.members}
    reached = {member.name: member.step for member in self.members}
    alive = survivors(losses, reached, self._rungs, self.cfg.ensemble.asha_reduction_factor)
    alive = all_gather_object(sorted(alive))[0]  # others may not see the latest rows yet
    for member in self.members:
      if member.name not in alive and not member.stop_status:
        member.stop_status = f"stopped at step {member.step} by halving"
        self.console.print(f"{member.name} is {member.stop_status}")

  def _data(self, cfg: DataConfig, rows: range) -> DataLoader:
    opened = lambda: _open_data(cfg, self.cfg.model.vocab_size, self.batch_size, rows)
    return process_0_first(opened, "the data is tokenized")

  def _local_rows(self) -> range:
    """The rows of a batch that the devices of this process hold: all, if a device holds all."""
    if not self._spread or jax.process_count() == 1:
      return range(self.batch_size)
    mesh = build_mesh(*(mesh_degrees(self.cfg.mesh, group) for group in ("ici", "dcn")))
    sharder = Sharder(mesh, dict(self.cfg.mesh.logical_axis_rules))
    sharding = sharder.sharding(("activation_batch", "activation_length"))
    return local_rows(sharding, (self.batch_size, self.cfg.data.max_target_length))

  def _trainer_of(self, group: Sequence[MemberRun]) -> EnsembleTrainer:
    """The trainer of these members; only the latest one is kept."""
    if self._trainer is None or self._trainer.runs != list(group):
      self._trainer = None  # frees the memory of the former engine
      data = list({member.config.data: None for member in group})
      request = EngineRequest(
        num_members=len(group),
        program=lambda z, placement: self._programs.build(group[z].member, placement),
        batch=abstract_batch((self.batch_size, self.cfg.data.max_target_length)),
        devices=self.devices,
        spread=self._spread,
        own_batches=len(data) > 1,
        no_factory="not estimated; ensemble_strategy=processes trains each member in a process",
      )
      # After training in worker processes, only predictions remain.
      ensemble = self.cfg.ensemble
      strategy, remedy = ensemble.ensemble_strategy, "use fused"
      strategy = "fused" if strategy == "processes" else strategy
      if ensemble.pbt_period:
        strategy, remedy = "stacked", "a population has one architecture"
      with report_wait(f"tracing {len(group)} members to choose a strategy", self.console.print):
        plan, engine = choose(request, strategy, ensemble.ensemble_memory_gb, remedy=remedy)
      loaders = [self._data(member.config.data, self._rows) for member in group]
      whole = self._data(group[0].config.data, range(self.batch_size))
      self._trainer = EnsembleTrainer(self.cfg, plan, engine, list(group), loaders, whole)
    return self._trainer


@functools.cache
def _open_data(cfg: DataConfig, vocab_size: int, batch_size: int, rows: range) -> DataLoader:
  return open_data(
    cfg,
    vocab_size=vocab_size,
    global_batch_size=batch_size,
    rows=rows,
    cache_directory=Path(cfg.token_cache_directory).expanduser(),
  )
