"""The end of an ensemble run: leaderboard, combined predictions and plots."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import jax
from rich.console import Console
from rich.text import Text

from maxlite.checkpoint.run_folder import RunFolder
from maxlite.config.schema import Config, LatentAttentionConfig, MoeConfig, flatten
from maxlite.ensemble.members.run import MemberRun
from maxlite.ensemble.report.leaderboard import (
  LEADERBOARD,
  LeaderboardEntry,
  leaderboard_markdown,
  leaderboard_table,
  median_tokens_per_second,
  write_members,
)
from maxlite.ensemble.report.seeds import seeds_table
from maxlite.ensemble.selection.population import LINEAGE, LINEAGE_ROWS, ancestors
from maxlite.metrics.plots.calibration import Calibration, draw_calibration
from maxlite.metrics.plots.ensemble_curves import draw_learning_curves
from maxlite.metrics.plots.lineage import draw_lineage
from maxlite.metrics.plots.parallel_coordinates import draw_parallel_coordinates
from maxlite.metrics.writers import read_rows
from maxlite.optim.build import hyperparameters
from maxlite.storage.file_io import write_atomically
from maxlite.storage.json_values import Json, JsonObject


def finalize(
  members: Sequence[MemberRun],
  scores: Mapping[str, JsonObject],
  folder: RunFolder,
  console: Console,
  *,
  compares: bool = True,
) -> None:
  """Write members.jsonl, plots and leaderboard into the ensemble's folder, and print the results.

  Args:
    members: those of the whole ensemble, with their states.
    scores: the scores of the combinations, by `score_combinations`; may be empty.
    folder: the ensemble's.
    console: prints the leaderboard and the scores.
    compares: whether members that differ in their seeds only are compared.
  """
  directory = folder.directory
  lineage = read_rows(directory / LINEAGE, LINEAGE_ROWS)
  ancestor_of = ancestors([member.name for member in members], lineage)
  entries = [_entry(member, ancestor_of[member.name]) for member in members]
  write_members(entries, directory / "members.jsonl")
  plots = _draw_plots(members, entries, lineage, scores, directory)
  of_seeds = seeds_table(entries) if compares else ""
  sections = [f"# Over seeds\n\n{of_seeds}"] if of_seeds else []
  write_atomically(directory / LEADERBOARD, leaderboard_markdown(entries, scores, sections))
  console.print(leaderboard_table(entries), soft_wrap=False)
  if of_seeds:
    console.print(Text(f"Over seeds, by final loss\n{of_seeds}\n"))
  for name, own in scores.items():
    console.print(
      f"{name}: nll {own['nll']:.4f}, accuracy {own['accuracy']:.4f}, "
      f"Brier {own['brier']:.4f}, calibration error {own['ece']:.4f}"
    )
  files = ["members.jsonl"]
  if lineage:
    files.append(LINEAGE)
  files.append(LEADERBOARD)
  files.extend(plots)
  console.print(
    f"{folder.place}: {', '.join(files)}; run folders of the members in {folder.place}/members"
  )


def _draw_plots(
  members: Sequence[MemberRun],
  entries: Sequence[LeaderboardEntry],
  lineage: Sequence[JsonObject],
  scores: Mapping[str, JsonObject],
  directory: Path,
) -> list[str]:
  """Write the plots that these results have, and return the names of their files."""
  plots = ["learning_curves.png"]
  rows_of_members = {member.name: member.rows for member in members}
  draw_learning_curves(rows_of_members, directory / "learning_curves.png")
  points = []
  for member, entry in zip(members, entries, strict=True):
    point = keys_of_model(member.config)
    point.update(entry.hyperparameters)
    point["best_loss"] = entry.best_loss
    points.append(point)
  keys = _varying_keys(entries, points)
  if keys:
    plots.append("parallel_coordinates.png")
    draw_parallel_coordinates(points, keys, directory / "parallel_coordinates.png")
  if lineage:
    plots.append("lineage.png")
    final = {entry.name: entry.hyperparameters for entry in entries}
    last_step = max(member.step for member in members)
    draw_lineage(final, lineage, last_step, directory / "lineage.png")
  if scores:
    plots.append("calibration.png")
    calibrations = cast(Mapping[str, Calibration], scores)
    draw_calibration(calibrations, directory / "calibration.png")
  return plots


def _varying_keys(
  entries: Sequence[LeaderboardEntry],
  points: Sequence[Mapping[str, Json]],
) -> list[str]:
  """The overridden keys of which two members have different values, except those of phases."""
  overridden: dict[str, None] = {}
  for entry in entries:
    overridden.update(dict.fromkeys(entry.overrides))
  for key in ("phases", "initial_phases"):  # their values have no scale
    overridden.pop(key, None)
  varying = []
  for key in overridden:
    values = {point.get(key) for point in points}
    if len(values) > 1:
      varying.append(key)
  return varying


def keys_of_model(cfg: Config) -> JsonObject:
  """The keys of a config that its model reads."""
  unread: set[str] = set()
  if not cfg.model.family.is_moe:
    unread.update(flatten(MoeConfig()))
  if not cfg.model.family.reads("mla"):
    unread.update(flatten(LatentAttentionConfig()))
  return {key: value for key, value in flatten(cfg).items() if key not in unread}


def _entry(member: MemberRun, ancestor: str) -> LeaderboardEntry:
  """The member's row of the leaderboard.

  Args:
    ancestor: the member whose initial weights it has.
  """
  status = _status(member)
  if ancestor != member.name:
    status += f", from {ancestor}"
  final_loss = None
  losses = list(member.eval_losses.values())
  if losses:
    final_loss = losses[-1]
  at_the_end = {}
  for key, value in hyperparameters(member.state.opt_state).items():
    at_the_end[key] = float(f"{value:.4g}")
  return LeaderboardEntry(
    name=member.name,
    overrides=member.member.overrides,
    num_parameters=sum(leaf.size for leaf in jax.tree.leaves(member.state.params)),
    final_loss=final_loss,
    best_loss=min(losses, default=None),
    tokens_per_second=median_tokens_per_second(member.rows),
    status=status,
    hyperparameters=at_the_end,
    ancestor=ancestor,
  )


def _status(member: MemberRun) -> str:
  """How the member's training ended."""
  if member.stop_status:
    return member.stop_status
  if not member.diverged:
    return "finished"
  last_step = 0
  if member.rows:
    last_step = member.rows[-1]["step"]
  return f"diverged at step {last_step}"
