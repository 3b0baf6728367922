"""The end of an ensemble run: leaderboard, combined predictions and plots."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from rich.console import Console

from maxlite.checkpoint.run_folder import RunFolder
from maxlite.config.file_io import write_atomically
from maxlite.config.schema import Config, LatentAttentionConfig, MoeConfig, flatten
from maxlite.ensemble.report.leaderboard import (
  LEADERBOARD,
  LeaderboardEntry,
  leaderboard_markdown,
  leaderboard_table,
  median_tokens_per_second,
  write_members,
)
from maxlite.ensemble.run.member_run import MemberRun
from maxlite.ensemble.selection.population import LINEAGE, ancestors
from maxlite.metrics.plots.calibration import draw_calibration
from maxlite.metrics.plots.ensemble_curves import draw_learning_curves
from maxlite.metrics.plots.lineage import draw_lineage
from maxlite.metrics.plots.parallel_coordinates import draw_parallel_coordinates
from maxlite.metrics.writers import read_rows
from maxlite.optim.build import hyperparameters


def finalize(
  members: Sequence[MemberRun], scores: Mapping[str, dict], folder: RunFolder, console: Console
) -> None:
  """Write members.jsonl, plots and leaderboard into the ensemble's folder, and print the results.

  Args:
    scores: of the combinations by `score_combinations`; may be empty.
  """
  directory = folder.directory
  lineage = read_rows(directory / LINEAGE)
  ancestor_of = ancestors([member.name for member in members], lineage)
  entries = [_entry(member, ancestor_of[member.name]) for member in members]
  write_members(entries, directory / "members.jsonl")
  plots = ["learning_curves.png"]
  draw_learning_curves({member.name: member.rows for member in members}, directory / plots[0])
  points = [
    keys_of_model(member.config) | entry.hyperparameters | {"best_loss": entry.best_loss}
    for member, entry in zip(members, entries, strict=True)
  ]
  overridden = dict.fromkeys(key for entry in entries for key in entry.overrides)
  for key in ("phases", "initial_phases"):  # their values have no scale
    overridden.pop(key, None)
  keys = [key for key in overridden if len({point.get(key) for point in points}) > 1]
  if keys:
    plots.append("parallel_coordinates.png")
    draw_parallel_coordinates(points, keys, directory / plots[-1])
  if lineage:
    plots.append("lineage.png")
    final = {entry.name: entry.hyperparameters for entry in entries}
    draw_lineage(final, lineage, max(member.step for member in members), directory / plots[-1])
  if scores:
    plots.append("calibration.png")
    draw_calibration(scores, directory / plots[-1])
  write_atomically(directory / LEADERBOARD, leaderboard_markdown(entries, scores))
  console.print(leaderboard_table(entries), soft_wrap=False)
  for name, own in scores.items():
    console.print(
      f"{name}: nll {own['nll']:.4f}, accuracy {own['accuracy']:.4f}, "
      f"Brier {own['brier']:.4f}, calibration error {own['ece']:.4f}"
    )
  files = ", ".join(["members.jsonl", *[LINEAGE] * bool(lineage), LEADERBOARD, *plots])
  console.print(f"{folder.place}: {files}; run folders of the members in {folder.place}/members")


def keys_of_model(cfg: Config) -> dict[str, Any]:
  """The keys of a config that its model reads."""
  keys = flatten(cfg)
  unread: dict[str, Any] = {}
  if not cfg.model.family.is_moe:
    unread |= flatten(MoeConfig())
  if not cfg.model.family.latent_attention:
    unread |= flatten(LatentAttentionConfig())
  return {name: value for name, value in keys.items() if name not in unread}


def _entry(member: MemberRun, ancestor: str) -> LeaderboardEntry:
  rows, status = member.rows, "finished"
  losses = list(member.eval_losses.values())
  if member.stop_status:
    status = member.stop_status
  elif member.diverged:
    status = f"diverged at step {rows[-1]['step'] if rows else 0}"
  if ancestor != member.name:
    status += f", from {ancestor}"
  return LeaderboardEntry(
    name=member.name,
    overrides=member.member.overrides,
    num_parameters=sum(leaf.size for leaf in jax.tree.leaves(member.state.params)),
    final_loss=losses[-1] if losses else None,
    best_loss=min(losses, default=None),
    tokens_per_second=median_tokens_per_second(rows),
    status=status,
    hyperparameters={
      key: float(f"{value:.4g}") for key, value in hyperparameters(member.state.opt_state).items()
    },
    ancestor=ancestor,
  )
