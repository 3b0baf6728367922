"""A phase whose loss does not depend on what it trains, found at its first step."""

from collections.abc import Collection

import numpy as np

from maxlite.errors import UserError

_NUM_SHOWN = 3


def zero_among(paths: list[str], zero_N: np.ndarray) -> set[str]:
  """Paths of the parameters whose gradient is zero.

  Args:
    paths: of all parameters.
    zero_N: the metric ZERO_GRADIENTS of a step.
  """
  return {path for path, is_zero in zip(paths, zero_N, strict=True) if is_zero}


def check_any_gradient(phase: str, trained: Collection[str], zero: Collection[str]) -> None:
  """Raise UserError if the gradient of everything that `phase` trains is zero.

  Args:
    trained: paths of the parameters that are trained by their gradient.
    zero: paths of the parameters whose gradient is zero in the first step.
  """
  if trained and set(trained) <= set(zero):
    raise UserError(
      f"phase {phase} trains {shown_paths(trained)}, whose gradient is exactly zero in its first "
      "step: its loss does not depend on them, or multiplies them by zeros; check its loss, its "
      "regexes and the order of phases"
    )


def shown_paths(paths: Collection[str]) -> str:
  """The first of `paths`, and how many more there are."""
  listed = sorted(paths)
  more = len(listed) - _NUM_SHOWN
  shown = ", ".join(listed[:_NUM_SHOWN])
  if more > 0:
    return f"{shown} and {more} more"
  return shown
