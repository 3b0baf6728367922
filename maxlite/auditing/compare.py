"""Compares the results of a variant with the reference, and explains the first difference."""

import dataclasses
import math

import numpy as np

from maxlite.auditing.measure import Arrays, StepResults
from maxlite.auditing.shrink import LENGTH, ROWS
from maxlite.auditing.variants import Variant

COLUMNS = ("loss", "gradients", "norm", "update", "state", "metrics")
# Relative to the largest element of an array. Sums of float64 in another order differ by about
# 1e-15, which a few layers, the norms and Muon's iteration amplify to at most 1e-12.
TOLERANCE = 1e-9
# Relative to the largest element of all gradients: a gradient that is zero in exact arithmetic,
# such as that of a bias before a softmax, is rounding of at most this size.
NOISE = 1e-12
# An optimizer that normalizes the gradient (Lion, Adafactor, Muon) turns rounding into updates of
# full size where the gradient is this small beside its largest element.
SMALL_GRADIENT = 1e-5


@dataclasses.dataclass(frozen=True)
class Difference:
  """A result that differs from the reference."""

  variant: str
  objective: str
  column: str  # one of COLUMNS
  name: str  # of the parameter or metric
  error: float  # relative to the largest element
  explanation: str

  def __str__(self) -> str:
    result = self.column
    if self.name not in (self.column, "grad_norm"):
      result = f"{self.column} of {self.name}"
    return f"{self.variant}: {result} ({self.objective}): {self.explanation}"


@dataclasses.dataclass(frozen=True)
class Comparison:
  """How a variant compares with the reference."""

  errors: dict[str, float]  # by column, the largest, relative to the largest element of the array
  differences: list[Difference]  # those beyond rounding, of the first column first


def compare(
  variant: Variant, got: dict[str, StepResults], want: dict[str, StepResults]
) -> Comparison:
  """Compare the results of all objectives."""
  errors = dict.fromkeys(COLUMNS, 0.0)
  differences: list[Difference] = []
  for objective, expected in want.items():
    found = _columns(got[objective], reported_norm(got[objective]))
    for column, references in _columns(expected, true_norm(expected)).items():
      floor = _floor(column, expected)
      results = found[column]
      for name in sorted(results.keys() | references.keys()):
        if name not in results or name not in references:
          where = "the reference" if name not in results else "this variant"
          reason = f"only {where} has it"
          differences.append(Difference(str(variant), objective, column, name, math.inf, reason))
          continue
        one, other = results[name], references[name]
        if column in ("update", "state"):
          one, other = _reliable(one, other, name.removeprefix("ema/"), expected)
        error = _error(one, other, floor)
        errors[column] = max(errors[column], error)
        if error > TOLERANCE:
          reason = explain(variant, one, other)
          differences.append(Difference(str(variant), objective, column, name, error, reason))
  differences.sort(key=lambda each: COLUMNS.index(each.column))
  return Comparison(errors, differences)


def _columns(results: StepResults, norm: np.ndarray) -> dict[str, Arrays]:
  metrics = {name: value for name, value in results.metrics.items() if name != "grad_norm"}
  return {
    "loss": {"loss": results.loss},
    "gradients": results.gradients,
    "norm": {"grad_norm": norm},
    "update": results.update,
    "state": results.state,
    "metrics": metrics,
  }


def _floor(column: str, expected: StepResults) -> float:
  """The size below which an array is compared with this size instead of its own largest element."""
  if column == "update":
    return _largest(expected.update)
  if column in ("gradients", "state"):
    return NOISE / TOLERANCE * _largest(expected.gradients)
  return 0.0


def _largest(arrays: Arrays) -> float:
  sizes = [_float(np.abs(array).max(initial=0)) for array in arrays.values()]
  return max(sizes, default=0.0)


def _float(x: object) -> float:
  return float(np.asarray(x, np.float64))


def reported_norm(results: StepResults) -> np.ndarray:
  """The norm that the step reports, by which it clips."""
  return np.asarray(results.metrics.get("grad_norm", true_norm(results)))


def true_norm(results: StepResults) -> np.ndarray:
  """The norm of the gradients, computed here."""
  squares = [np.sum(np.square(gradient)) for gradient in results.gradients.values()]
  return np.sqrt(np.sum(squares))


def _reliable(
  one: np.ndarray, other: np.ndarray, path: str, expected: StepResults
) -> tuple[np.ndarray, np.ndarray]:
  """Two values after the update, with zeros where its gradient is too small.

  Optimizers that normalize would turn its rounding into updates of full size.
  """
  gradient = expected.gradients.get(path)
  if gradient is None or one.shape != other.shape or not np.any(gradient):
    return one, other
  size = np.abs(gradient)
  if size.max() < NOISE * _largest(expected.gradients):
    return np.zeros_like(one), np.zeros_like(other)
  is_large = (size >= SMALL_GRADIENT * size.max()) | (size == 0)
  return np.where(is_large, one, 0), np.where(is_large, other, 0)


def _error(one: np.ndarray, other: np.ndarray, floor: float) -> float:
  """The largest difference, relative to the largest element of `other`, at least `floor`."""
  if one.shape != other.shape:
    return math.inf
  one, other = np.asarray(one, np.float64), np.asarray(other, np.float64)
  if np.array_equal(one, other, equal_nan=True):
    return 0.0
  if not (np.isfinite(one).all() and np.isfinite(other).all()):
    return math.inf
  scale = max(np.abs(other).max(), floor)
  difference = np.abs(one - other).max()
  return float(difference / scale) if scale > 0 else math.inf


def explain(variant: Variant, got: np.ndarray, want: np.ndarray) -> str:
  """In words, how `got` differs from `want`, and what usually causes it."""
  if got.shape != want.shape:
    return f"shape {got.shape} instead of {want.shape}"
  one, other = np.asarray(got, np.float64).ravel(), np.asarray(want, np.float64).ravel()
  if not np.isfinite(one).all():
    return "not finite"
  square = float(other @ other)
  if square == 0:
    return f"up to {np.abs(one).max():.3g} instead of zero"
  factor = float(one @ other) / square
  rest = np.abs(one - factor * other).max() / np.abs(other).max()
  if rest < 1e-6:
    return _explain_factor(variant, factor)
  changed = np.abs(one - other) > TOLERANCE * np.abs(other).max()
  share = f"{changed.sum()} of {changed.size} elements differ"
  index = int(np.argmax(np.abs(one - other)))
  place = tuple(int(i) for i in np.unravel_index(index, want.shape))
  text = f"no multiple: {share}, most at {list(place)}: {one[index]:.6g} instead of "
  text += f"{other[index]:.6g}"
  return text + _suspects(variant)


def _suspects(variant: Variant) -> str:
  """What often causes a difference that is no factor by name."""
  if variant.mesh:
    axes = " and ".join(f"`{axis}`" for axis in variant.mesh)
    return (
      f"; in a part of it a sum over {axes} forgotten or too many, a mean of the shards' means, or "
      "random numbers per shard?"
    )
  if variant.rows:
    return "; does padding take part, or does a result depend on the order of rows?"
  if variant.accumulation > 1:
    return "; a mean of the micro-batches' means?"
  return ""


def _explain_factor(variant: Variant, factor: float) -> str:
  """The factor by name, with the mesh axis or number that it is."""
  if abs(factor) < 1e-6:
    return "zero instead of the reference's value: cut from the loss, or detached?"
  for name, number in _numbers(variant):
    for power, sense in (
      (1, "too large"),
      (-1, "too small"),
      (0.5, "too large"),
      (-0.5, "too small"),
    ):
      if math.isclose(factor, number**power, rel_tol=1e-6):
        root = "the square root of " if abs(power) == 0.5 else ""
        return f"{_times(factor)} the value, {sense} by {root}{name}{_cause(name, power)}"
  for number in (2, 3):
    if math.isclose(factor, number, rel_tol=1e-6):
      return f"{_times(factor)} the value: added {number} times?"
    if math.isclose(factor, 1 / number, rel_tol=1e-6):
      return (
        f"{_times(factor)} the value: divided by {number}, or {number - 1} of {number} left out?"
      )
  return f"{_times(factor)} the value{_suspects(variant)}"


def _times(factor: float) -> str:
  if math.isclose(factor, 2, rel_tol=1e-6):
    return "twice"
  if math.isclose(factor, 0.5, rel_tol=1e-6):
    return "half"
  return f"{factor:.6g} times"


def _numbers(variant: Variant) -> list[tuple[str, int]]:
  """Numbers that a wrong factor may be, by name: degrees, products of them, counts of tokens."""
  mesh = variant.mesh
  numbers = [(f"`{axis}`={degree}", degree) for axis, degree in mesh.items()]
  if variant.accumulation > 1:
    numbers.append((f"{variant.accumulation} micro-batches", variant.accumulation))
  if len(mesh) > 1:
    axes = list(mesh)
    for i, axis in enumerate(axes):
      for other in axes[i + 1 :]:
        numbers.append(
          (f"`{axis}` x `{other}`={mesh[axis] * mesh[other]}", mesh[axis] * mesh[other])
        )
    numbers.append((f"the {variant.num_devices} devices", variant.num_devices))
  numbers += [(f"the {LENGTH} positions", LENGTH), (f"the {ROWS} rows", ROWS)]
  return numbers


def _cause(name: str, power: float) -> str:
  if name.startswith("`"):
    axes = name.split("=", maxsplit=1)[0]
    if power > 0:
      return f": a sum over {axes} too many?"
    return f": a sum over {axes} forgotten, or a mean too many?"
  if "micro-batches" in name:
    return ": micro-batches added or averaged once too often?"
  return ""
