"""The exception for user mistakes, and the one handler that turns it into an exit code."""

import contextlib
import sys
from collections.abc import Iterator


class UserError(ValueError):
  """A mistake of the user: one line with its source, the keys, the rule and the fix."""


@contextlib.contextmanager
def exit_on_user_error(program: str) -> Iterator[None]:
  """Print a `UserError` as one line on stderr and exit with code 2; all else propagates."""
  try:
    yield
  except UserError as error:
    sys.stderr.write(f"{program}: {' '.join(str(error).split())}\n")
    raise SystemExit(2) from None
