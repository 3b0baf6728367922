"""Ladders: members of several widths and equal FLOPs, and the fit of the best size per budget.

A ladder is an ensemble whose members are written by the config, and whose steps follow from the
FLOPs of a step. Members of one budget and width train together, one cell after another. Rerunning
the command with more budgets, widths or seeds trains what is new, and fits all again.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
from rich.console import Console
from rich.text import Text

from maxlite.config import Config
from maxlite.config.ladder import (
  Ladder,
  budget_name,
  ladder_of,
  member_entry,
  width_settings,
  width_step,
)
from maxlite.config.members import members_of
from maxlite.config.raw_values import FrozenMapping, show
from maxlite.config.schema import ModelConfig, build, flatten
from maxlite.config.tuning import with_members
from maxlite.distributed.initialize import SeparateProcesses
from maxlite.ensemble.members.run import MemberRun
from maxlite.ensemble.report.ladder import (
  LADDER,
  cells_table,
  ladder_json,
  law_lines,
  minima_table,
)
from maxlite.ensemble.run.ensemble_run import train_ensemble
from maxlite.errors import UserError
from maxlite.evaluation.isoflop import Cell, LadderFit, fit_ladder
from maxlite.metrics.flops import active_parameter_count, parameter_sizes, train_flops
from maxlite.metrics.writers import open_console
from maxlite.runs.saved_run import run_folder
from maxlite.storage.file_io import write_atomically
from maxlite.training.batch_shape import global_batch_size

MIN_STEPS = 50  # of a member: whole steps cost the budget to within a percent
_NUM_NEXT = 2  # widths that are proposed beyond an edge


class _Size(NamedTuple):
  """A width of the ladder, on this batch."""

  width: int
  num_parameters: int  # active ones
  flops_per_step: float


@dataclasses.dataclass(frozen=True)
class _Plan:
  """What a cell costs."""

  budget: float
  size: _Size
  source: str  # for error messages

  @property
  def steps(self) -> int:
    return round(self.budget / self.size.flops_per_step)


def train_ladder(cfg: Config, peers: SeparateProcesses | None = None) -> int:
  """Train all members, or what is left of them, fit, and return the exit code.

  Args:
    cfg: the config of the ladder.
    peers: as in `train_ensemble`.

  Raises:
    UserError: a budget is too small for a width, or the folder does not fit.
  """
  ladder = ladder_of(cfg.ensemble.ladder)
  num_devices = jax.device_count()
  is_first = jax.process_index() == 0
  if peers is not None:
    num_devices = sum(peers.all_gather(num_devices))
    is_first = peers.process_id == 0
  shape = (global_batch_size(cfg.data, num_devices), cfg.data.max_target_length)
  plans = _plans(cfg.model, ladder, shape)
  console = open_console(quiet=not is_first, log_format=cfg.observe.log_format)
  num_flops = sum(plan.budget for plan in plans) * ladder.seeds
  console.print(f"ladder: {len(plans)} cells x {ladder.seeds} seeds, {num_flops:.3g} FLOPs")
  entries = []
  for plan in plans:
    for seed in range(ladder.seeds):
      entry = member_entry(cfg.model, plan.budget, plan.size.width, seed)
      entries.append(FrozenMapping([*entry.items(), ("steps", str(plan.steps))]))
  members_cfg = with_members(cfg, entries)
  exit_code = train_ensemble(members_cfg, peers=peers, compares=False)
  if exit_code == 0 and is_first:
    members = [MemberRun(member, console.print) for member in members_of(members_cfg)]
    cells = _cells(plans, ladder.seeds, members, math.prod(shape))
    fit = fit_ladder(cells)
    _write_report(cfg, fit, next_cells(cfg.model, ladder, fit, shape), console)
  return exit_code


def _plans(model: ModelConfig, ladder: Ladder, shape: tuple[int, int]) -> list[_Plan]:
  """The cells, by budget and width.

  Raises:
    UserError: a member has too few steps.
  """
  plans = []
  for rung in ladder.rungs:
    for width in rung.widths:
      plan = _Plan(rung.budget, _size(model, width, shape), rung.source)
      if plan.steps < MIN_STEPS:
        raise UserError(
          f"{rung.source}: width {width} takes {plan.steps} steps of {shape[0]} x {shape[1]} "
          f"tokens at {budget_name(rung.budget)} FLOPs; write widths or a batch that give "
          f"{MIN_STEPS} steps or more"
        )
      plans.append(plan)
  return plans


def _size(model: ModelConfig, width: int, shape: tuple[int, int]) -> _Size:
  own: ModelConfig = build(ModelConfig, flatten(model) | width_settings(model, width))
  sizes = parameter_sizes(own)
  flops = train_flops(own, sizes, shape, drafts=own.mtp_num_layers > 0).total
  return _Size(width, active_parameter_count(sizes, own), flops)


def _cells(
  plans: Sequence[_Plan], seeds: int, members: Sequence[MemberRun], num_tokens: int
) -> list[Cell]:
  """The results; the loss of a member that diverged is NaN.

  Args:
    num_tokens: of a batch.

  Raises:
    UserError: there are no held-out losses.
  """
  cells = []
  of_member = iter(members)
  for plan in plans:
    losses = []
    for _ in range(seeds):
      member = next(of_member)
      losses.append(member.eval_losses.get(plan.steps, math.nan))
    size = plan.size
    tokens = plan.steps * num_tokens
    cells.append(Cell(plan.budget, size.width, size.num_parameters, tokens, tuple(losses)))
  if all(math.isnan(loss) for cell in cells for loss in cell.losses):
    raise UserError("ladder: no member has a held-out loss; set eval_fraction above 0")
  return cells


def _write_report(cfg: Config, fit: LadderFit, advice: str, console: Console) -> None:
  """Write ladder.md, ladder.json and ladder.png into the run folder, and print the results."""
  from maxlite.ensemble.report.ladder_plot import draw_ladder  # slow to import

  folder = run_folder(cfg)
  directory = folder.directory
  results = [minima_table(fit), *law_lines(fit)]
  if advice:
    results.append(advice)
  text = "\n\n".join(["# Ladder", *results, "# Cells", cells_table(fit)])
  write_atomically(directory / LADDER, f"{text}\n")
  write_atomically(directory / "ladder.json", ladder_json(fit))
  draw_ladder(fit, directory / "ladder.png")
  console.print(Text("\n".join(["Ladder, by final held-out loss", *results])))
  console.print(f"{folder.place}: {LADDER}, ladder.json, ladder.png")
  folder.upload()


def next_cells(model: ModelConfig, ladder: Ladder, fit: LadderFit, shape: tuple[int, int]) -> str:
  """The ladder that continues where minima are at an edge; empty if there are none.

  Args:
    fit: of this ladder.
    shape: rows and positions of a batch.
  """
  is_longer = False
  entries: list[tuple[str, tuple[str, ...]]] = []
  for rung, found in zip(ladder.rungs, fit.budgets, strict=True):
    widths = list(rung.widths)
    if found.edge:
      for width in _widths_beyond(rung.widths, found.edge, width_step(model)):
        plan = _Plan(rung.budget, _size(model, width, shape), rung.source)
        if plan.steps >= MIN_STEPS:
          widths.append(width)
    is_longer |= len(widths) > len(rung.widths)
    entries.append((budget_name(rung.budget), tuple(str(width) for width in sorted(widths))))
  if is_longer:
    budgets = FrozenMapping(entries)
    longer = FrozenMapping([("budgets", budgets), ("seeds", str(ladder.seeds))])
    return f"next cells: the same command with 'ladder={show(longer)}'"
  if any(found.edge for found in fit.budgets):
    return (
      "no cell beyond the edge fits: write a smaller base model or a smaller batch, which give "
      "narrower widths or more steps"
    )
  return ""


def _widths_beyond(widths: Sequence[int], edge: int, step: int) -> list[int]:
  """Multiples of `step` that continue ascending widths below (-1) or above (1), in their ratio."""
  last, inner = widths[0], widths[1]
  if edge > 0:
    last, inner = widths[-1], widths[-2]
  beyond: list[int] = []
  for n in range(1, _NUM_NEXT + 1):
    exact = last * (last / inner) ** n
    width = round(exact / step) * step
    if edge > 0:
      width = max(width, (beyond or [last])[-1] + step)
    else:
      width = min(width, (beyond or [last])[-1] - step)
    if width > 0:
      beyond.append(width)
  return beyond
