"""The loop of the Python APIs: steps, evaluations, progress, and stopping without improvement."""

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple, TypedDict

import jax
import numpy as np
import orbax.checkpoint as ocp

from maxlite.errors import UserError
from maxlite.metrics.waits import print_to_stderr
from maxlite.sharding.pytree import PyTree

Row = dict[str, np.ndarray]  # `step`, `loss` and other metrics, and `eval_loss`
Report = Callable[[str], object]  # receives a line


class Fitted(NamedTuple):
  """The result of `fit`."""

  state: PyTree  # after the last step, or, with a patience, those with the lowest held-out losses
  rows: list[Row]  # one per period, and one of the last step


class FitKeywords(TypedDict, total=False):
  """Keyword arguments of both APIs, as in `FitOptions`."""

  period: int
  patience: int | None
  report: Report


class FitOptions(NamedTuple):
  """How to train."""

  num_steps: int
  period: int = 100  # steps between two rows
  patience: int | None = None  # evaluations without a lower loss after which training stops
  report: Report = print_to_stderr


def check_fit(options: FitOptions, *, has_eval: bool) -> None:
  """Raise UserError if the options are out of range, or patience has nothing to compare."""
  for name in ("num_steps", "period", "patience"):
    value = getattr(options, name)
    if value is not None and (not isinstance(value, int) or value < 1):
      raise UserError(f"fit: {name}={value!r} must be an integer of at least 1")
  if options.patience is not None and not has_eval:
    raise UserError(f"fit: patience={options.patience} compares held-out losses: give eval_batches")


def fit(
  step: Callable[[PyTree, PyTree], tuple[PyTree, dict]],
  state: PyTree,
  batches: Iterable[PyTree],
  options: FitOptions,
  *,
  evaluate: Callable[[PyTree], np.ndarray] | None,
  keep: Callable[[PyTree, np.ndarray], None],
  describe: Callable[[str, np.ndarray], str],
) -> Fitted:
  """Train for `num_steps`, or until nothing has improved for `patience` evaluations.

  Args:
    step: (state, batch) -> (state, metrics).
    evaluate: (state) -> held-out losses, a scalar or one per member; None: there are none.
    keep: called with (state, whether each loss is the lowest so far) if there is a patience.
    describe: (name, values) -> their text in a line of progress.

  Raises:
    UserError: there are fewer batches than steps.
  """
  rows: list[Row] = []
  best = np.array(np.inf)
  num_worse = np.array(0)
  since = time.perf_counter()
  stream = iter(batches)
  last_row = 0
  for number in range(1, options.num_steps + 1):
    batch = next(stream, None)
    if batch is None:
      raise UserError(
        f"fit: the batches end after {number - 1} of num_steps={options.num_steps}: give an "
        "iterable that repeats, such as itertools.cycle(batches), or fewer steps"
      )
    state, metrics = step(state, batch)
    if number % options.period and number < options.num_steps:
      continue
    row = {"step": np.asarray(number), **jax.device_get(metrics)}
    if evaluate is not None:
      row["eval_loss"] = evaluate(state)
    seconds = (time.perf_counter() - since) / (number - last_row)
    last_row = number
    parts = [f"step {number}/{options.num_steps}"]
    parts += [describe(name, row[name]) for name in ("loss", "eval_loss") if name in row]
    options.report("  ".join([*parts, f"{seconds:.3g} s per step"]))
    since = time.perf_counter()
    rows.append(row)
    if options.patience is None:
      continue
    is_over = num_worse >= options.patience
    improved = (row["eval_loss"] < best) & ~is_over
    best = np.where(improved, row["eval_loss"], best)
    num_worse = np.where(improved, 0, num_worse + 1)
    if improved.any():
      keep(state, improved)
    if (num_worse >= options.patience).all():
      options.report(f"no held-out loss is lower than {options.patience} evaluations ago: stopped")
      break
  return Fitted(state, rows)


def read_states(path: str | os.PathLike[str], abstract: PyTree) -> PyTree:
  """Read states that Orbax's StandardCheckpointer wrote; `abstract` has their shapes.

  Raises:
    UserError: there are none, or they are of another form.
  """
  folder = Path(path).absolute()
  if not folder.is_dir():
    raise UserError(f"there is no folder {folder}: write it with save(state, path)")
  try:
    with ocp.StandardCheckpointer() as checkpointer:
      return checkpointer.restore(folder, abstract)
  except (ValueError, KeyError, TypeError, OSError) as error:
    first_line = str(error).strip().partition("\n")[0]
    raise UserError(
      f"{folder} holds no states of these models and optimizers: {first_line}"
    ) from error
