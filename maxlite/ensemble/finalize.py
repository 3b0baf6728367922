"""The end of an ensemble's run: who did best, how good all are together, and the pictures of it."""

from typing import Any

from rich.console import Console

from maxlite.checkpoint.run_folder import RunFolder
from maxlite.config.schema import flatten
from maxlite.ensemble.evaluate_combinations import score_combinations
from maxlite.ensemble.leaderboard import Entry, leaderboard, write_leaderboard, write_members
from maxlite.metrics.flops import parameter_count
from maxlite.metrics.plots.ensemble_curves import (
  draw_calibration,
  draw_learning_curves,
  draw_parallel_coordinates,
)

LEADERBOARD = "leaderboard.md"  # the last file that is written


def conclude(run: Any, folder: RunFolder, console: Console) -> None:
  """Writes leaderboard, members.jsonl and pictures into the ensemble's folder, and prints them."""
  entries = [_entry(progress) for progress in run.progress]
  combinations = _combinations(run)
  directory = folder.directory
  write_members(entries, directory / "members.jsonl")
  pictures = ["learning_curves.png"]
  rows = {progress.name: progress.book.rows for progress in run.progress}
  draw_learning_curves(rows, directory / pictures[0])
  points = [
    flatten(progress.config) | {"best_loss": entry.best_loss}
    for progress, entry in zip(run.progress, entries, strict=True)
  ]
  overridden = dict.fromkeys(key for entry in entries for key in entry.overrides)
  for key in ("phases", "initial_phases"):  # whose values no scale could show
    overridden.pop(key, None)
  keys = [key for key in overridden if len({point[key] for point in points}) > 1]
  if keys:
    pictures.append("parallel_coordinates.png")
    draw_parallel_coordinates(points, keys, directory / pictures[-1])
  if combinations:
    pictures.append("calibration.png")
    draw_calibration(combinations, directory / pictures[-1])
  write_leaderboard(entries, combinations, directory / LEADERBOARD)
  console.print(leaderboard(entries), soft_wrap=False)
  for name, scores in combinations.items():
    console.print(
      f"{name}: nll {scores['nll']:.4f}, accuracy {scores['accuracy']:.4f}, "
      f"Brier {scores['brier']:.4f}, calibration error {scores['ece']:.4f}"
    )
  files = ", ".join(["members.jsonl", LEADERBOARD, *pictures])
  console.print(f"{directory}: {files}; each member's own run in {directory / 'members'}")


def _combinations(run: Any) -> dict[str, dict]:
  """Scores of the members that came to the end; none without held-out data."""
  finished = [p for p in run.progress if p.step >= run.cfg.run.steps and not p.diverged]
  if run.data.source.eval is None or len(finished) < 2:
    return {}
  engine, state = run.engine(finished), run.packed_state(finished)
  source, num_batches = run.data.source, run.cfg.observe.eval_steps
  scores = score_combinations(
    lambda batch: engine.predict(state, batch),
    lambda: run.data.eval_batches(num_batches),
    source.num_bytes_V,
  )
  for progress, own in zip(finished, engine.unpack(state), strict=True):
    progress.state = own
  return scores


def _entry(progress: Any) -> Entry:
  rows = progress.book.rows
  held_out = [row["eval_loss"] for row in rows if row.get("eval_loss") is not None]
  speed = [row["num_tokens"] / row["step_seconds"] for row in rows]
  status = "finished"
  last = rows[-1]["step"] if rows else 0
  if progress.is_out:
    status = f"stopped at step {progress.step} by halving"
  elif progress.diverged:
    status = f"diverged at step {last}"
  return Entry(
    name=progress.name,
    overrides=progress.book.member.overrides,
    num_parameters=parameter_count(progress.config.model),
    final_loss=held_out[-1] if held_out else None,
    best_loss=min(held_out, default=None),
    tokens_per_second=speed[-1] if speed else 0.0,
    status=status,
  )
