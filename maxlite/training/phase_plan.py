"""A run's phases: what each trains, by what, for how long, and whose turn it is."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from maxlite.config import Config
from maxlite.config.errors import UserError
from maxlite.config.phases import DATA_KEYS, PhaseConfig, UntilConfig, phases_of, warmup_of
from maxlite.config.raw_values import show
from maxlite.config.schema import flatten
from maxlite.metrics.phase_flops import phase_flops
from maxlite.metrics.plots.timeline import PhaseSpan, spans_of_rows
from maxlite.optim import build_optimizer, build_schedule, with_schedule_steps
from maxlite.phases.phase_optimizers import PhaseOptimizers, merge, partition_params, paths_in
from maxlite.phases.phase_schedule import PhaseSchedule, Plateau, Threshold
from maxlite.training.loss import LOSSES
from maxlite.training.state import TrainState
from maxlite.training.step import Part


class Turns:
  """The phases of a config, for a model whose parameters have the logical `names`."""

  def __init__(self, cfg: Config, params: Any, names: Any):
    """`params` need only be described.

    Raises:
      UserError: a regex matches no parameter, or optimizers that share state differ in kind.
    """
    self.phases, self._model, self._data = phases_of(cfg), cfg.model, flatten(cfg.data)
    self.schedule = PhaseSchedule({p.name: _length(p) for p in self.phases}, warmup_of(cfg))
    self._rates, optimizers, self._trained = [], {}, {}
    for phase in self.phases:
      try:
        self._trained[phase.name] = partition_params(params, phase.train)[0]
      except ValueError as error:
        raise UserError(f"phase {phase.name}: {error}") from None
      optimizer = with_schedule_steps(phase.optimizer, self._num_steps(phase, cfg.run.steps))
      self._rates.append(build_schedule(optimizer))
      own_names = partition_params(names, phase.train)[0]
      optimizers[phase.name] = build_optimizer(optimizer, own_names)
    share = cfg.phasing.phase_optimizer_state == "shared"
    self.optimizers = PhaseOptimizers(optimizers, self._trained, share=share)

  def init(self, params: Any) -> tuple[Any, Any]:
    """(optimizer states, clock) before the first step."""
    parts = {phase.name: partition_params(params, phase.train)[0] for phase in self.phases}
    return self.optimizers.init(parts), self.schedule.start()

  def part(self, index: int) -> Part:
    """What the phase trains."""
    phase, rate = self.phases[index], self._rates[index]

    def advance(state: TrainState, metrics: dict) -> TrainState:
      return state.replace(clock=self.schedule.advance(state.clock, index, metrics))

    return Part(
      split=lambda params: partition_params(params, phase.train),
      join=merge,
      update=lambda gradients, states, trained: self.optimizers.update(
        phase.name, gradients, states, trained
      ),
      learning_rate=lambda state: rate(state.clock.taken_P[index].astype(jnp.float32)),
      advance=advance,
      loss=LOSSES[phase.loss],
      phase=index,
    )

  def by_phase(self, row: Mapping[str, Any]) -> dict[str, Any]:
    """The losses of a step's row, named after its phase."""
    return losses_of(self.phases[int(row["phase"])], row)

  def describe(self, num_steps: int) -> list[str]:
    """Lines on what each phase trains, and on when which is due."""
    lines = self.describe_phases()
    turns = self.spans(num_steps)
    if turns:
      shown = [f"{name} {first}-{last}" for first, last, name in turns[:6]]
      lines.append(f"turns: {', '.join(shown)}" + (", ..." if len(turns) > len(shown) else ""))
    return lines

  def describe_phases(self) -> list[str]:
    """A line on what each phase trains, and on data of its own."""
    lines = []
    for phase in self.phases:
      sizes = [leaf.size for leaf in jax.tree.leaves(self._trained[phase.name])]
      length = f"{phase.steps} steps" if phase.steps else f"up to {phase.until.max_steps} steps"
      lines.append(
        f"phase {phase.name}: {length} of {phase.loss} by {phase.optimizer.opt_type}, trains "
        f"{sum(sizes):,} parameters ({', '.join(phase.train)})"
      )
      data = {key: x for key, x in flatten(phase.data).items() if x != self._data[key]}
      own = " ".join(f"{key}={show(data[key])}" for key in DATA_KEYS if key in data)
      lines[-1] += f", with {own}" if own else ""
    return lines

  def spans(self, num_steps: int, rows: Sequence[dict] = ()) -> list[PhaseSpan]:
    """(first step, last step, phase) of each turn in `num_steps` steps, counted from 1.

    Where a phase ends by a condition, only the logged `rows` can tell.
    """
    if all(phase.steps for phase in self.phases):
      return self.schedule.timeline(num_steps)
    return spans_of_rows(rows, [phase.name for phase in self.phases])

  def trained(self, tree: Any) -> Any:
    """Of a tree like the parameters, the leaves that some phase trains."""
    return merge(*(partition_params(tree, phase.train)[0] for phase in self.phases))

  def flops(self, params: Any, tokens: Mapping[str, int], row_length: int) -> list[float]:
    """By phase, FLOPs of one of its steps on as many `tokens` in rows of `row_length`."""
    leaves = jax.tree.leaves(params)
    sizes = {path: leaf.size for path, leaf in zip(paths_in(params), leaves, strict=True)}
    return [
      phase_flops(
        self._model,
        tokens[phase.name],
        row_length,
        sizes,
        set(paths_in(self._trained[phase.name])),
        phase.loss,
      )
      for phase in self.phases
    ]

  def untrained(self, params: Any) -> list[str]:
    """Paths of the parameters that no phase trains."""
    trained = {path for part in self._trained.values() for path in paths_in(part)}
    return [path for path in paths_in(params) if path not in trained]

  def _num_steps(self, phase: PhaseConfig, num_steps: int) -> int:
    """Steps the phase takes in a run of so many; where conditions decide, all of them."""
    if any(other.until for other in self.phases):
      return num_steps
    turns = self.schedule.timeline(num_steps)
    taken = sum(last - first + 1 for first, last, name in turns if name == phase.name)
    return max(taken, 1)


def losses_of(phase: PhaseConfig, row: Mapping[str, Any]) -> dict[str, Any]:
  """The losses of a step's row, named after its phase."""
  losses = ("loss", "draft_loss", "total_loss")
  return {f"{phase.name}/{loss}": row[loss] for loss in losses if loss in row}


def _length(phase: PhaseConfig) -> int | Plateau | Threshold:
  if phase.until is None:
    return phase.steps
  until: UntilConfig = phase.until
  if until.patience is not None:
    return Plateau(until.metric, until.patience, until.max_steps, until.min_delta)
  return Threshold(until.metric, until.max_steps, until.below, until.above)
