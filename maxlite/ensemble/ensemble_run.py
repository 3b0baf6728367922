"""An ensemble run: opened or resumed, trained in segments, combined and ranked.

On disk there are only members, each in a folder like that of its solo run. So any strategy can
resume what another one saved, and members can be added or removed between two starts. A member that
is behind (it is new, or its last checkpoint was lost) trains first, on the batches it missed.
"""

import dataclasses
import functools
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from maxlite import __version__
from maxlite.config import Config, exit_on_user_error, save_resolved
from maxlite.config.errors import UserError
from maxlite.config.members import members_of
from maxlite.config.schema import DataConfig, flatten
from maxlite.data.batch import abstract_batch
from maxlite.data.loader import DataLoader, open_data
from maxlite.ensemble.asha import rungs, survivors
from maxlite.ensemble.engines.engine_base import EngineRequest, EnsembleEngine
from maxlite.ensemble.ensemble_trainer import (
  EnsembleLog,
  EnsembleTrainer,
  MemberStreams,
  gather_metrics,
)
from maxlite.ensemble.evaluate_combinations import score_combinations
from maxlite.ensemble.finalize import LEADERBOARD, finalize
from maxlite.ensemble.from_config import ConfigPrograms
from maxlite.ensemble.member_run import MemberRun
from maxlite.ensemble.planner import Plan, choose
from maxlite.ensemble.worker_pool import GPU_MEMORY_SHARE, assign_workers, gpu_names, run_workers
from maxlite.kernels.xla_cpu import enable_compilation_cache
from maxlite.metrics.flops import active_parameter_count, parameter_sizes
from maxlite.metrics.profiler import Profiler
from maxlite.training.loop import LoopContext, TrainResult, train
from maxlite.training.open_run import run_folder

MAX_RESTARTS = 3  # of a worker process that dies


def run_ensemble(cfg: Config, names: Sequence[str] = (), batch_size: int = 0) -> int:
  """Train all members, or those in `names`, to the last step; return the exit code.

  The default batch size is that of a run on all devices.
  """
  width = None if sys.stdout.isatty() else 120  # wide tables in files
  console = Console(highlight=False, markup=False, soft_wrap=True, width=width)
  with exit_on_user_error("maxlite.train"):
    enable_compilation_cache(cfg.run.jax_cache_dir)
    if jax.process_count() > 1:
      raise UserError(
        f"an ensemble is trained by one process, and this run has {jax.process_count()}: write "
        "num_processes=1, or train each member as a solo run"
      )
    folder = run_folder(cfg)
    changes = folder.config_changes(flatten(cfg))
    run = EnsembleRun(cfg, names, batch_size or _batch_size(cfg), console)
    run.open()
    is_finalized = names or (folder.directory / LEADERBOARD).exists()
    if run.is_done and is_finalized:
      console.print(
        f"{folder.directory} is at step {cfg.run.steps} with all its members: nothing to do. Give "
        "it more steps or members, or choose another run_name."
      )
      return 0
    if not run.is_done:
      run.print_header()
  if not names and not run.is_done:
    folder.save_config(changes, lambda path: save_resolved(cfg, path))
  exit_code = run.train()
  if not names and not exit_code:
    finalize(run.members, run.score_combinations(), folder.directory, console)
  run.close()
  return exit_code


def _batch_size(cfg: Config) -> int:
  if cfg.data.global_batch_size:
    return cfg.data.global_batch_size
  num_devices = jax.device_count()
  rows = cfg.data.per_device_batch_size * num_devices
  if rows != round(rows):
    raise UserError(
      f"per_device_batch_size={cfg.data.per_device_batch_size:g} x {num_devices} devices = "
      f"{rows:g} rows: set per_device_batch_size={max(round(rows), 1) / num_devices:g}"
    )
  return round(rows)


@functools.cache
def _open_data(cfg: DataConfig, vocab_size: int, batch_size: int) -> DataLoader:
  return open_data(
    cfg,
    vocab_size=vocab_size,
    global_batch_size=batch_size,
    rows=range(batch_size),
    cache_directory=Path(cfg.token_cache_directory).expanduser(),
  )


class EnsembleRun:
  """The members of one command, trained by engines or in worker processes."""

  def __init__(self, cfg: Config, names: Sequence[str], batch_size: int, console: Console):
    """`names`: of the members to train; empty: all."""
    self.cfg, self.console, self.batch_size = cfg, console, batch_size
    self.devices = jax.devices()
    members = [m for m in members_of(cfg) if not names or m.name in names]
    self.members = [MemberRun(member, console.print) for member in members]
    self.data = self._data(self.members[0])
    self._programs = ConfigPrograms(self.devices, batch_size, self.data.source.num_bytes_V)
    degree = cfg.mesh.ici_ensemble_parallelism * cfg.mesh.dcn_ensemble_parallelism
    self._spread = 0 < degree < len(self.devices)
    ensemble = cfg.ensemble
    self._in_workers = ensemble.ensemble_strategy == "processes"
    self._rungs = rungs(ensemble.asha_min_steps, ensemble.asha_reduction_factor, cfg.run.steps)
    self._engine_of: tuple[tuple[str, ...], Plan, EnsembleEngine] | None = None
    if self._rungs and self._in_workers:
      raise UserError(
        "ASHA compares members at the same step, which separate processes do not keep: write "
        "asha_reduction_factor=0 or another ensemble_strategy"
      )
    if self._rungs and self.data.source.eval is None:
      raise UserError("ASHA compares held-out losses: set eval_fraction above 0")

  @property
  def is_done(self) -> bool:
    return not self._unfinished()

  def open(self) -> None:
    """Restore all members; if workers will train them, only find their steps."""
    if self._in_workers:
      for member in self.members:  # without using the devices, which the workers need
        member.find_step()
    else:
      self._restore()

  def print_header(self) -> None:
    """Print versions, devices and data; choose and print the strategy."""
    self.console.print(
      f"maxlite {__version__}, jax {jax.__version__}: {len(self.devices)} x "
      f"{self.devices[0].device_kind}, {len(self.members)} members; {self.data.source.summary}; "
      f"{self.batch_size} x {self.cfg.data.max_target_length} tokens per step"
    )
    if not self._in_workers:
      group, _ = self._next_segment()
      self.console.print(self._plan(group)[0].table(), soft_wrap=False)

  def train(self) -> int:
    """Train until all members are at the last step or stopped; return the exit code."""
    if self._in_workers:
      return self._train_in_workers()
    while not self.is_done:
      result = self._train_segment(*self._next_segment())
      self._apply_halving()
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
    (_, engine), state = self._plan(members), self._packed_state(members)
    scores = score_combinations(
      lambda batch: engine.predict(state, batch),
      lambda: self.data.eval_batches(self.cfg.observe.eval_steps),
      self.data.source.num_bytes_V,
    )
    for member, own in zip(members, engine.unpack(state), strict=True):
      member.state = own
    return scores

  def _packed_state(self, group: Sequence[MemberRun]) -> Any:
    """The engine's state of these members, which give theirs up; new members are initialized."""
    _, engine = self._plan(group)
    states = [member.state for member in group]
    for member in group:
      member.state = None
    if all(state is None for state in states):
      return engine.init()
    if any(state is None for state in states):
      fresh = engine.unpack(engine.init())
      states = [new if own is None else own for own, new in zip(states, fresh, strict=True)]
    return engine.pack(states)

  def close(self) -> None:
    for member in self.members:
      member.close()

  def _restore(self) -> None:
    devices = self.devices if self._spread else self.devices[:1]
    programs = self._programs.build([run.member for run in self.members], devices)
    for member, program in zip(self.members, programs, strict=True):
      member.restore(program, self.devices[0])
    step_of = lambda member: member.step
    for step, group in itertools.groupby(sorted(self.members, key=step_of), step_of):
      if step:
        names = ", ".join(member.name for member in group)
        self.console.print(f"resuming from the checkpoints of step {step}: {names}")
    self._apply_halving()

  def _train_in_workers(self) -> int:
    unfinished = self._unfinished()
    if unfinished and (exit_code := self._run_workers(unfinished)):
      return exit_code
    self._restore()
    return 0

  def _run_workers(self, members: Sequence[MemberRun]) -> int:
    ensemble, folder = self.cfg.ensemble, run_folder(self.cfg).directory.absolute()
    models = [member.config.model for member in members]
    assignments = assign_workers(
      [float(active_parameter_count(parameter_sizes(model), model)) for model in models],
      ensemble.ensemble_num_workers,
      gpus=gpu_names(self.devices),
      memory_fraction=self._memory_fraction(),
    )
    argv = [sys.executable, "-m", "maxlite.ensemble", "worker", str(folder), str(self.batch_size)]
    workers = []
    for n, assignment in enumerate(assignments):
      names = [members[z].name for z in assignment.members]
      log = folder / "workers" / f"{n}.log"
      workers.append(assignment.command(" ".join(names), [*argv, *names], log))
    self.console.print(f"{len(workers)} workers: {folder / 'workers'}")
    codes = run_workers(
      workers,
      executor=ensemble.ensemble_executor,
      max_restarts=MAX_RESTARTS,
      report=self.console.print,
    )
    code = next(filter(None, codes.values()), 0)
    return code if code >= 0 else 128 - code

  def _memory_fraction(self) -> float:
    """The fraction of a GPU's memory for all its workers, from ensemble_memory_gb."""
    limit, stats = self.cfg.ensemble.ensemble_memory_gb * 1e9, self.devices[0].memory_stats()
    if not limit or not stats:
      return GPU_MEMORY_SHARE
    return min(limit / stats["bytes_limit"], GPU_MEMORY_SHARE)

  def _unfinished(self) -> list[MemberRun]:
    return [m for m in self.members if m.step < self.cfg.run.steps and not m.is_stopped]

  def _next_segment(self) -> tuple[list[MemberRun], int]:
    """(the members that are furthest behind, the step up to which they train together)."""
    unfinished = self._unfinished()
    first = min(member.step for member in unfinished)
    group = [member for member in unfinished if member.step == first]
    ends = [self.cfg.run.steps, *self._rungs, *(member.step for member in unfinished)]
    return group, min(end for end in ends if end > first)

  def _apply_halving(self) -> None:
    """Stop the members that ASHA does not promote."""
    if not self._rungs:
      return
    losses = {m.name: {row["step"]: row.get("eval_loss") for row in m.rows} for m in self.members}
    reached = {member.name: member.step for member in self.members}
    alive = survivors(losses, reached, self._rungs, self.cfg.ensemble.asha_reduction_factor)
    for member in self.members:
      if member.name not in alive and not member.is_stopped:
        member.is_stopped = True
        self.console.print(f"{member.name} is stopped at step {member.step} by halving")

  def _data(self, member: MemberRun) -> DataLoader:
    return _open_data(member.config.data, self.cfg.model.vocab_size, self.batch_size)

  def _has_own_batches(self, group: Sequence[MemberRun]) -> bool:
    return len({member.config.data for member in group}) > 1

  def _plan(self, group: Sequence[MemberRun]) -> tuple[Plan, EnsembleEngine]:
    names = tuple(member.name for member in group)
    if self._engine_of is None or self._engine_of[0] != names:
      self._engine_of = None  # frees the memory of the former engine
      request = EngineRequest(
        build=functools.partial(self._programs.build, [run.member for run in group]),
        batch=abstract_batch((self.batch_size, self.cfg.data.max_target_length)),
        devices=self.devices,
        spread=self._spread,
        own_batches=self._has_own_batches(group),
        finish=gather_metrics,
      )
      # After training in worker processes, only predictions remain.
      strategy = "fused" if self._in_workers else self.cfg.ensemble.ensemble_strategy
      plan, engine = choose(request, strategy, self.cfg.ensemble.ensemble_memory_gb)
      self._engine_of = (names, plan, engine)
    return self._engine_of[1:]

  def _open_streams(self, group: Sequence[MemberRun]) -> MemberStreams:
    streams = []
    for member in group if self._has_own_batches(group) else group[:1]:
      stream = self._data(member).train_stream()
      if member.data_state is not None:
        stream.restore(member.data_state)
      streams.append(stream)
    return MemberStreams(streams, len(group))

  def _train_segment(self, group: list[MemberRun], last_step: int) -> TrainResult:
    trainer = EnsembleTrainer(self.cfg, self._plan(group)[1], group)
    streams = self._open_streams(group)
    for member in group:
      member.save_config()
    writers = [member.open_writers() for member in group]
    log = EnsembleLog(trainer, writers, self.console)
    profiler = Profiler(self.cfg.observe, run_folder(self.cfg).profile)
    evaluate = None
    if self.data.source.eval is not None:
      eval_steps = self.cfg.observe.eval_steps
      evaluate = lambda state: trainer.evaluate(state, self.data.eval_batches(eval_steps))
    try:
      context = LoopContext(trainer, trainer, log, profiler, evaluate)
      result = train(context, self._packed_state(group), streams, group[0].step + 1, last_step)
      states = trainer.engine.unpack(result.state)
      for member, state, data_state in zip(group, states, streams.state(), strict=True):
        member.step, member.state, member.data_state = result.step, state, data_state
    finally:
      profiler.close()
      streams.close()
      for writer in writers:
        writer.close()
    return dataclasses.replace(result, state=None)
