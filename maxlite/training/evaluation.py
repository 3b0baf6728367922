"""`maxlite.evaluate`, and the held-out loss of a run."""

import functools
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxlite.config import Config, exit_on_user_error
from maxlite.data.batch import Batch
from maxlite.data.loader import DataLoader
from maxlite.metrics.step_row import bits_per_byte
from maxlite.metrics.waits import report_wait
from maxlite.training.document_loss import document_losses, loss_row
from maxlite.training.open_run import open_trainer_data, open_weights
from maxlite.training.saved_run import run_folder
from maxlite.training.state import TrainState, averaged_params
from maxlite.training.trainer import Trainer


def run_evaluation(cfg: Config) -> int:
  """Print the loss of a checkpoint of the run over `eval_steps` held-out batches (-1: all)."""
  with exit_on_user_error("maxlite.evaluate"):
    trainer, params, averages, step = open_weights(cfg)
    result, data = evaluate_held_out(trainer, params, averages, cfg.observe.eval_steps)
  sums_DX = None
  if cfg.observe.eval_documents:
    with exit_on_user_error("maxlite.evaluate"), report_wait("evaluating documents"):
      sums_DX = document_losses(trainer, params, data, averages)
  if jax.process_index() == 0:
    folder = run_folder(cfg)
    sys.stdout.write(f"{folder.place} step {step}  {_format(result)}\n")
    if sums_DX is not None:
      _write_documents(sums_DX, folder.eval_documents)
      with exit_on_user_error("maxlite.evaluate"):
        folder.upload()
  return 0


def evaluate_held_out(
  trainer: Trainer, params: Any, averages: Any, num_batches: int
) -> tuple[dict[str, float], DataLoader]:
  """Open the run's data, and return (the result of `evaluate` on `num_batches`, -1: all, data)."""
  data = open_trainer_data(trainer)
  batches = data.eval_batches_by_source(num_batches)
  eval_step = trainer.eval_step(data.source.num_bytes_V)
  with report_wait("compiling the evaluation step, and evaluating"):
    return evaluate(trainer, eval_step, params, batches, averages), data


def _write_documents(sums_DX: np.ndarray, file: Path) -> None:
  """Write a JSON line per document and print the totals."""
  rows = ({"document": n} | loss_row(sums_X) for n, sums_X in enumerate(sums_DX))
  file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
  total = loss_row(sums_DX.sum(axis=0))
  sys.stdout.write(f"{file}: {len(sums_DX):,} documents  {_format(total)}\n")


def _format(row: Mapping[str, float]) -> str:
  return "  ".join(f"{name} {value:.6g}" for name, value in row.items())


def build_evaluation(
  trainer: Trainer, data: DataLoader
) -> Callable[[TrainState], dict[str, float]] | None:
  """Build the evaluation of a state in a run; None without held-out data."""
  if data.source.eval is None:
    return None
  eval_step = trainer.eval_step(data.source.num_bytes_V)

  def evaluate_state(state: TrainState) -> dict[str, float]:
    batches = data.eval_batches_by_source(trainer.cfg.observe.eval_steps)
    return evaluate(trainer, eval_step, state.params, batches, averaged_params(state))

  return evaluate_state


def evaluate(
  trainer: Trainer,
  eval_step: Callable[[Any, Batch], dict],
  params: Any,
  batches: Mapping[str, Iterable[Batch]],
  averages: Any = None,
) -> dict[str, float]:
  """Compute `eval_loss` [nats per token], `eval_bits_per_byte` and `eval_tokens` of `batches`.

  With moving averages of the parameters also `eval_ema_loss` and `eval_ema_bits_per_byte`.

  Args:
    batches: by source; with several sources, the results are over the tokens of all, and
      `eval_loss/SOURCE` is the loss of each.
  """

  def sums(batch: Batch) -> dict:
    batch = trainer.place(batch)
    found = eval_step(params, batch)
    return found if averages is None else found | {"ema": eval_step(averages, batch)}

  return held_out_row({name: map(sums, each) for name, each in batches.items()})


def held_out_row(batches: Mapping[str, Iterable[dict]]) -> dict[str, float]:
  """The results of `evaluate` from the evaluation step's sums of every batch, by source.

  With draft heads also `eval_acceptance_1`, ..., the share of each head's drafts that are accepted,
  and `eval_accepted_length`, the mean number of accepted drafts in a chain.
  """
  # In float64: float32 rounds every sum, and cannot count beyond 2**24 tokens.
  in_float64 = lambda sums: jax.tree.map(np.float64, jax.device_get(sums))
  total = lambda each: functools.reduce(functools.partial(jax.tree.map, np.add), each)
  by_source = {name: total(map(in_float64, each)) for name, each in batches.items()}
  sums = total(by_source.values())
  row = _results(sums) | {"eval_tokens": int(sums["weight"])}
  if len(by_source) > 1:
    row |= {f"eval_loss/{name}": float(s["nll"] / s["weight"]) for name, s in by_source.items()}
  averaged = _results(sums["ema"]) if "ema" in sums else {}
  return row | {name.replace("eval_", "eval_ema_", 1): x for name, x in averaged.items()}


def _results(sums: dict) -> dict[str, float]:
  results = {"eval_loss": float(sums["nll"] / sums["weight"])}
  if sums["num_bytes"]:
    results["eval_bits_per_byte"] = bits_per_byte(float(sums["nll"]), float(sums["num_bytes"]))
  if drafts := sums.get("draft"):
    shares_J = drafts["accepted_J"] / np.maximum(drafts["drafts_J"], 1)
    results |= {f"eval_acceptance_{j}": float(share) for j, share in enumerate(shares_J, start=1)}
    results["eval_accepted_length"] = float(drafts["length"] / np.maximum(drafts["chains"], 1))
  return results
