"""`maxlite.evaluate`: the held-out loss of a checkpoint, and that of each held-out document."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from maxlite.config import Config
from maxlite.data.loader import DataLoader
from maxlite.errors import exit_on_user_error, write_line
from maxlite.evaluation.document_losses import document_losses, loss_row
from maxlite.evaluation.held_out import compile_eval_step, evaluate
from maxlite.metrics.waits import report_wait
from maxlite.runs.evaluations import open_evaluations
from maxlite.runs.open_run import open_run_data, open_weights
from maxlite.runs.run_report import describe_data
from maxlite.runs.saved_run import run_folder
from maxlite.sharding.pytree import PyTree
from maxlite.storage.file_io import write_atomically
from maxlite.training.program import Program


def run_evaluation(cfg: Config) -> int:
  """Print what the run evaluates of a checkpoint, over `eval_steps` held-out batches (-1: all)."""
  with exit_on_user_error("maxlite.evaluate"):
    program, params, averages, step = open_weights(cfg)
    data = open_run_data(cfg, program)
    evaluations = open_evaluations(cfg, program, data)
    if not evaluations:
      data.eval_batches()  # raises the error
    result: dict[str, float] = {}
    with report_wait("compiling the evaluation, and evaluating"):
      for evaluation in evaluations:
        result |= evaluation(params, averages, step)
  sums_DX = None
  if cfg.observe.eval_documents:
    with exit_on_user_error("maxlite.evaluate"), report_wait("evaluating documents"):
      sums_DX = document_losses(program, params, data, averages)
  if jax.process_index() == 0:
    folder = run_folder(cfg)
    for line in describe_data("data", data):
      write_line(line, sys.stdout)
    write_line(f"{folder.place} step {step}  {_format(result)}", sys.stdout)
    if sums_DX is not None:
      with exit_on_user_error("maxlite.evaluate"):
        _write_documents(sums_DX, folder.eval_documents)
        folder.upload()
  return 0


def evaluate_held_out(
  cfg: Config, program: Program, params: PyTree, averages: PyTree, num_batches: int
) -> tuple[dict[str, float], DataLoader]:
  """Open the run's data and evaluate a checkpoint on its held-out batches.

  Args:
    averages: moving averages of the parameters; None if the run has none.
    num_batches: the number of batches; -1: all.

  Returns:
    The result of `evaluate`, and the data.
  """
  data = open_run_data(cfg, program)
  batches = data.eval_batches_by_source(num_batches)
  eval_step = compile_eval_step(program, data.source.num_bytes_V)
  with report_wait("compiling the evaluation step, and evaluating"):
    result = evaluate(program, eval_step, params, batches, averages)
  return result, data


def _write_documents(sums_DX: np.ndarray, file: Path) -> None:
  """Write a JSON line per document and print the totals."""
  lines = []
  for index, sums_X in enumerate(sums_DX):
    row = {"document": index} | loss_row(sums_X)
    lines.append(f"{json.dumps(row)}\n")
  write_atomically(file, "".join(lines))
  total = loss_row(sums_DX.sum(axis=0))
  write_line(f"{file}: {len(sums_DX):,} documents  {_format(total)}", sys.stdout)


def _format(row: Mapping[str, float]) -> str:
  return "  ".join(f"{name} {value:.6g}" for name, value in row.items())
