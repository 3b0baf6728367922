"""Rows that cannot be read: an error, or counted and left out (`on_bad_row`)."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NoReturn, TypeVar

from maxlite.errors import UserError, get_logger

T = TypeVar("T")
U = TypeVar("U")
# Receives the reason why a row cannot be read; the row is left out if it returns.
Reject = Callable[[UserError], None]
_SKIPPED = "bad rows skipped"
REPORT_SECONDS = 10.0

log = get_logger(__name__)


def raise_error(error: UserError) -> NoReturn:
  raise error


def build_reject(on_bad_row: str, counts: Counter[str]) -> Reject:
  """Build the policy of a config; `counts` receives the number of rows left out.

  That number is logged every few seconds, since a file of bad rows gives nothing else to report.
  """
  reported = time.monotonic()

  def reject(error: UserError) -> None:
    nonlocal reported
    if on_bad_row == "error":
      raise UserError(f"{error}, or set on_bad_row=skip to leave such rows out") from None
    if not counts[_SKIPPED]:
      log.warning("on_bad_row=skip leaves out rows, the first: %s", error)
    counts[_SKIPPED] += 1
    if time.monotonic() > reported + REPORT_SECONDS:
      reported = time.monotonic()
      log.warning("on_bad_row=skip has left out %d rows, up to: %s", counts[_SKIPPED], error)

  return reject


def convert_rows(rows: Iterable[T], convert: Callable[[T], U], reject: Reject) -> Iterator[U]:
  """Yield `convert` of each row; rows for which it raises UserError go to `reject`."""
  for row in rows:
    try:
      converted = convert(row)
    except UserError as error:
      reject(error)
    else:
      yield converted
