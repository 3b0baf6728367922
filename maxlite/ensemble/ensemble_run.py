"""One command's ensemble: opened or taken up again, trained in stretches, combined and ranked.

On disk there are only members, each in the folder that a run of its own would have. So any strategy
goes on from what another left, a member can be added or dropped between two starts, and whoever is
behind (a member that is new, or one whose last save was cut off) trains first, on the batches it
missed, until it has caught up.
"""

import dataclasses
import functools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console

from maxlite import __version__
from maxlite.config import Config, exit_on_user_error, save_resolved
from maxlite.config.errors import UserError
from maxlite.config.members import members_of
from maxlite.config.schema import DataConfig, flatten
from maxlite.data.batch import Batch
from maxlite.data.loader import DataLoader, open_data
from maxlite.ensemble.asha import rungs, survivors
from maxlite.ensemble.engines.processes import gpu_names
from maxlite.ensemble.finalize import LEADERBOARD, conclude
from maxlite.ensemble.from_config import Decoders
from maxlite.ensemble.member_program import Program
from maxlite.ensemble.member_run import Book, MemberCheckpoints, MembersLog, Streams, gather_metrics
from maxlite.ensemble.planner import choose
from maxlite.ensemble.strategies import Request
from maxlite.ensemble.worker_pool import GPU_MEMORY_SHARE, run_workers, share_out
from maxlite.kernels.xla_cpu import enable_compilation_cache
from maxlite.metrics.flops import active_parameter_count
from maxlite.metrics.profiler import Profiler
from maxlite.training.evaluation import held_out_row
from maxlite.training.loop import Ending, Run, train
from maxlite.training.open_run import run_folder

MAX_RESTARTS = 3  # of a worker process that dies


def run_ensemble(cfg: Config, names: Sequence[str] = (), num_rows: int = 0) -> int:
  """Trains all members (or those of these `names`) to the last step and returns the exit code.

  `num_rows` of a batch are by default what a run on all devices has.
  """
  width = None if sys.stdout.isatty() else 120  # tables have room where nobody's screen is small
  console = Console(highlight=False, markup=False, soft_wrap=True, width=width)
  with exit_on_user_error("maxlite.train"):
    enable_compilation_cache(cfg.run.jax_cache_dir)
    if jax.process_count() > 1:
      raise UserError(
        f"an ensemble is trained by one process, and this run has {jax.process_count()}: write "
        "num_processes=1, or train each member as a run of its own"
      )
    folder = run_folder(cfg)
    changes = folder.config_changes(flatten(cfg))
    run = EnsembleRun(cfg, names, num_rows or _rows_of_all_devices(cfg), console)
    in_workers = cfg.ensemble.ensemble_strategy == "processes"
    if in_workers:
      run.find_steps()  # without touching the devices, which are the workers'
    else:
      run.restore()
    if run.is_done and (names or (folder.directory / LEADERBOARD).exists()):
      console.print(
        f"{folder.directory} is at step {cfg.run.steps} with all its members: nothing to do. Give "
        "it more steps or members, or choose another run_name."
      )
      return 0
    if run.is_done:  # but was stopped before it had compared its members
      if in_workers:
        run.restore()
      conclude(run, folder, console)
      run.close()
      return 0
    run.introduce()
    if not in_workers:
      run.prepare()
  if not names:
    folder.save_config(changes, lambda path: save_resolved(cfg, path))
  exit_code = run.train_in_workers() if in_workers else run.train()
  if not names and not exit_code:
    conclude(run, folder, console)
  run.close()
  return exit_code


def _rows_of_all_devices(cfg: Config) -> int:
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
def _open_data(cfg: DataConfig, vocab_size: int, num_rows: int) -> DataLoader:
  return open_data(
    cfg,
    vocab_size=vocab_size,
    global_batch_size=num_rows,
    rows=range(num_rows),
    cache_directory=Path(cfg.token_cache_directory).expanduser(),
  )


@dataclasses.dataclass
class Progress:
  """Where one member stands; while it trains, its state is with the engine."""

  book: Book
  step: int = 0
  state: Any = None
  data_state: dict | None = None
  is_out: bool = False  # stopped by halving

  @property
  def name(self) -> str:
    return self.book.member.name

  @property
  def config(self) -> Config:
    return self.book.member.config

  @property
  def diverged(self) -> bool:
    return int(self.state.skipped_in_a_row) >= self.config.training.max_skipped_steps


class EnsembleRun:
  """The members of one command and how far each of them is."""

  def __init__(self, cfg: Config, names: Sequence[str], num_rows: int, console: Console):
    """Of all members, or of those of these `names`."""
    self.cfg, self.console, self.num_rows = cfg, console, num_rows
    self.devices = jax.devices()
    members = [m for m in members_of(cfg) if not names or m.name in names]
    self.progress = [Progress(Book(member, console.print)) for member in members]
    self.data = self._data(self.progress[0])
    self._decoders = Decoders(self.devices, num_rows, self.data.source.num_bytes_V)
    degree = cfg.mesh.ici_ensemble_parallelism * cfg.mesh.dcn_ensemble_parallelism
    self._spread = 0 < degree < len(self.devices)
    halving = cfg.ensemble
    self._rungs = rungs(halving.halving_first_rung, halving.halving_factor, cfg.run.steps)
    self._engines: dict[tuple[str, ...], Any] = {}
    if self._rungs and halving.ensemble_strategy == "processes":
      raise UserError(
        "halving compares members at the same step, which those in processes do not keep: write "
        "halving_factor=0 or another ensemble_strategy"
      )
    if self._rungs and self.data.source.eval is None:
      raise UserError("halving judges by held-out loss: set eval_fraction above 0")

  @property
  def is_done(self) -> bool:
    return not self._training()

  def find_steps(self) -> None:
    """Finds how far every member's newest checkpoint is."""
    for progress in self.progress:
      checkpoints = progress.book.checkpoints
      progress.step = (checkpoints.latest_step() or 0) if checkpoints else 0

  def restore(self) -> None:
    """Finds every member's newest checkpoint; who has none starts anew."""
    home = self.devices if self._spread else self.devices[:1]
    programs = self._programs(self.progress, home)
    for progress, program in zip(self.progress, programs, strict=True):
      shardings = program.shardings or jax.sharding.SingleDeviceSharding(self.devices[0])
      abstract = jax.eval_shape(program.init, jnp.uint32(0))
      restored = progress.book.restore(abstract, shardings)
      if restored:
        progress.state, progress.data_state, progress.step = restored
    for step in sorted({progress.step for progress in self.progress if progress.step}):
      at = [progress.name for progress in self.progress if progress.step == step]
      self.console.print(f"going on from the checkpoints of step {step}: {', '.join(at)}")
    self._judge()

  def introduce(self) -> None:
    """What runs on what."""
    self.console.print(
      f"maxlite {__version__}, jax {jax.__version__}: {len(self.devices)} x "
      f"{self.devices[0].device_kind}, {len(self.progress)} members; {self.data.source.summary}; "
      f"{self.num_rows} x {self.cfg.data.max_target_length} tokens per step"
    )

  def prepare(self) -> None:
    """Chooses how to train and tells it."""
    group, _ = self._next_stretch()
    plan, _ = self._engine(group)
    self.console.print(plan.table(), soft_wrap=False)

  def train(self) -> int:
    """Trains until all members are at the last step, or out; returns the exit code."""
    while True:
      ending = self._train_stretch(*self._next_stretch())
      self._judge()
      if ending.reason:
        last = self.cfg.run.steps
        self.console.print(f"{ending.reason}; left after step {ending.step} of {last}")
      if ending.reason or self.is_done:
        return ending.exit_code

  def train_in_workers(self) -> int:
    """As `train`, in processes that go on from where each member is."""
    ensemble, folder = self.cfg.ensemble, run_folder(self.cfg).directory.absolute()
    training = self._training()
    shares = share_out(
      [progress.name for progress in training],
      [float(active_parameter_count(progress.config.model)) for progress in training],
      ensemble.ensemble_num_workers,
      gpus=gpu_names(self.devices),
      memory_fraction=self._memory_fraction(),
    )
    command = [sys.executable, "-m", "maxlite.ensemble", "worker", str(folder), str(self.num_rows)]
    workers = [
      share.worker([*command, *share.names], folder / "workers" / f"{n}.log")
      for n, share in enumerate(shares)
    ]
    self.console.print(f"{len(workers)} workers: {folder / 'workers'}")
    codes = run_workers(
      workers,
      executor=ensemble.ensemble_executor,
      max_restarts=MAX_RESTARTS,
      report=self.console.print,
    )
    failed = [code for code in codes.values() if code]
    if failed:
      return failed[0] if failed[0] > 0 else 128 - failed[0]
    self.restore()
    return 0

  def _memory_fraction(self) -> float:
    """Of a GPU, for all workers on it: what ensemble_memory_gb is of it, or all that is sane."""
    budget, stats = self.cfg.ensemble.ensemble_memory_gb * 1e9, self.devices[0].memory_stats()
    if not budget or not stats:
      return GPU_MEMORY_SHARE
    return min(budget / stats["bytes_limit"], GPU_MEMORY_SHARE)

  def engine(self, group: Sequence[Progress]) -> Any:
    """What trains these members together, or computes anything else of them."""
    return self._engine(group)[1]

  def close(self) -> None:
    for progress in self.progress:
      progress.book.close()

  def _training(self) -> list[Progress]:
    return [p for p in self.progress if p.step < self.cfg.run.steps and not p.is_out]

  def _next_stretch(self) -> tuple[list[Progress], int]:
    """(members that are furthest behind, step up to which nothing changes for them)."""
    training = self._training()
    first = min(progress.step for progress in training)
    group = [progress for progress in training if progress.step == first]
    stops = [self.cfg.run.steps, *self._rungs, *(progress.step for progress in training)]
    return group, min(stop for stop in stops if stop > first)

  def _judge(self) -> None:
    """Takes out whom halving does not promote."""
    if not self._rungs:
      return
    losses = {
      p.name: {row["step"]: row.get("eval_loss") for row in p.book.rows} for p in self.progress
    }
    reached = {progress.name: progress.step for progress in self.progress}
    alive = survivors(losses, reached, self._rungs, self.cfg.ensemble.halving_factor)
    for progress in self.progress:
      if progress.name not in alive and not progress.is_out:
        progress.is_out = True
        self.console.print(f"{progress.name} is stopped at step {progress.step} by halving")

  def _data(self, progress: Progress) -> DataLoader:
    return _open_data(progress.config.data, self.cfg.model.vocab_size, self.num_rows)

  def _programs(self, group: Sequence[Progress], devices: Sequence[jax.Device]) -> list[Program]:
    return self._decoders.programs([progress.book.member for progress in group], devices)

  def _has_own_batches(self, group: Sequence[Progress]) -> bool:
    return len({progress.config.data for progress in group}) > 1

  def _engine(self, group: Sequence[Progress]) -> tuple[Any, Any]:
    """(plan, engine) of these members."""
    names = tuple(progress.name for progress in group)
    if names not in self._engines:
      self._engines.clear()
      shape = (self.num_rows, self.cfg.data.max_target_length)
      of = lambda field: jnp.float32 if field.name == "weight_BT" else jnp.int32
      fields = dataclasses.fields(Batch)
      request = Request(
        build=functools.partial(self._programs, group),
        batch=Batch(**{f.name: jax.ShapeDtypeStruct(shape, of(f)) for f in fields}),
        devices=self.devices,
        spread=self._spread,
        own_batches=self._has_own_batches(group),
        finish=gather_metrics,
      )
      ensemble = self.cfg.ensemble
      strategy = ensemble.ensemble_strategy
      if strategy == "processes":  # they are done: what is left is to ask them all
        strategy = "fused"
      self._engines[names] = choose(request, strategy, ensemble.ensemble_memory_gb)
    return self._engines[names]

  def packed_state(self, group: Sequence[Progress]) -> Any:
    """The engine's state of these members, who give theirs away; new members start."""
    engine = self.engine(group)
    states = [progress.state for progress in group]
    for progress in group:
      progress.state = None
    if all(state is None for state in states):
      return engine.init()
    if any(state is None for state in states):
      fresh = engine.unpack(engine.init())
      states = [new if own is None else own for own, new in zip(states, fresh, strict=True)]
    return engine.pack(states)

  def _streams(self, group: Sequence[Progress]) -> Streams:
    readers = group if self._has_own_batches(group) else group[:1]
    streams = []
    for progress in readers:
      stream = self._data(progress).train_stream()
      if progress.data_state is not None:
        stream.restore(progress.data_state)
      streams.append(stream)
    return Streams(streams, len(group))

  def _train_stretch(self, group: list[Progress], stop: int) -> Ending:
    engine, first = self.engine(group), group[0].step
    streams = self._streams(group)
    for progress in group:
      progress.book.save_config()
    writers = [progress.book.open_writers(first) for progress in group]
    log = MembersLog(
      self.cfg,
      [progress.book.member for progress in group],
      writers,
      flops=[program.flops for program in engine.programs],
      devices=self.devices,
      console=self.console,
    )
    profiler = Profiler(self.cfg.observe, run_folder(self.cfg).profile)
    trainer = Together(self.cfg, engine)
    checkpoints = MemberCheckpoints([progress.book for progress in group], engine.unpack)
    evaluate = None
    if self.data.source.eval is not None:
      evaluate = functools.partial(self._evaluate, engine, len(group))
    try:
      run = Run(trainer, checkpoints, log, profiler, evaluate)
      ending = train(run, self.packed_state(group), streams, first + 1, stop)
      states = engine.unpack(ending.state)
      for progress, state, data_state in zip(group, states, streams.state(), strict=True):
        progress.step, progress.state, progress.data_state = ending.step, state, data_state
    finally:
      profiler.close()
      streams.close()
      for writer in writers:
        writer.close()
    return dataclasses.replace(ending, state=None)

  def _evaluate(self, engine: Any, num_members: int, state: Any) -> list[dict[str, float]]:
    """Per member, its figures on the same held-out batches."""
    batches = self.data.eval_batches(self.cfg.observe.eval_steps)
    sums = [jax.device_get(engine.predict(state, batch, "evaluate")) for batch in batches]
    return [held_out_row(batch[z] for batch in sums) for z in range(num_members)]


@dataclasses.dataclass(frozen=True)
class Together:
  """What the loop drives: an engine in a trainer's place."""

  cfg: Config
  engine: Any

  def train_step(self, state: Any, batch: Batch) -> tuple[Any, Any]:
    return self.engine.step(state, batch)

  def next_batch(self, stream: Streams, _state: Any) -> Batch:
    """As it is: the engine knows where its members are."""
    return next(stream)
