"""The exception for user mistakes, and the one handler that turns it into an exit code."""

import contextlib
import errno
import gc
import sys
from collections.abc import Iterator
from types import TracebackType

_OF_FILES = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR)


class UserError(ValueError):
  """A mistake of the user: one line with its source, the keys, the rule and the fix."""


@contextlib.contextmanager
def exit_on_user_error(program: str) -> Iterator[None]:
  """Print a `UserError`, or an error of disks and permissions, as one line and exit with code 2."""
  try:
    yield
    return
  except UserError as error:
    message = str(error)
  except OSError as error:
    if error.errno not in _OF_FILES:
      raise
    place = error.filename or "a file cannot be written"
    message = f"{place}: {error.strerror}: free space, change permissions or name another folder"
  sys.stderr.write(f"{program}: {' '.join(message.split())}\n")
  raise SystemExit(2)


def prepare_process(program: str) -> None:
  """Have the process of an entry point end in one line on Ctrl-C, also during imports."""
  gc.set_threshold(50_000, 10, 10)  # else imports and tracing take a sixth longer

  def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    cause: BaseException | None = error
    while cause and not isinstance(cause, KeyboardInterrupt):  # an import may convert it
      cause = cause.__cause__ or cause.__context__
    if cause:
      sys.stderr.write(f"{program}: interrupted\n")
    else:
      sys.__excepthook__(kind, error, trace)

  sys.excepthook = report
