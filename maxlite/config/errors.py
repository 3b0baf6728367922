"""The exception for user mistakes, and the one handler that turns it into an exit code."""

import contextlib
import errno
import faulthandler
import gc
import signal
import sys
from collections.abc import Iterator, Sequence
from types import TracebackType

from maxlite.config.libtpu_environment import quiet_libtpu

# Errors of the operating system that the user can correct: full or read-only disks, permissions.
_STORAGE_ERRORS = (
  errno.ENOSPC,
  errno.EDQUOT,
  errno.EROFS,
  errno.EACCES,
  errno.EPERM,
  errno.ENOTDIR,
)


class UserError(ValueError):
  """Mistakes of the user, each one line with its source, the keys, the rule and the fix."""

  @property
  def lines(self) -> list[str]:
    """The mistakes, each without line breaks."""
    lines = []
    for mistake in self.args:
      words = str(mistake).split()
      lines.append(" ".join(words))
    return lines

  def __str__(self) -> str:
    return "\n".join(map(str, self.args))


def raise_all(errors: Sequence[UserError]) -> None:
  """Raise one error with all mistakes of `errors`, in order and each once, if there are any."""
  mistakes: dict[object, None] = {}
  for error in errors:
    mistakes |= dict.fromkeys(error.args)
  if mistakes:
    raise UserError(*mistakes)


@contextlib.contextmanager
def exit_on_user_error(program: str) -> Iterator[None]:
  """Print a UserError, or an error of disks or permissions, and exit with code 2.

  Each mistake is one line on stderr, after the name of the program.
  """
  try:
    yield
    return
  except UserError as error:
    lines = error.lines
  except OSError as error:
    if error.errno not in _STORAGE_ERRORS:
      raise
    place = error.filename or "a file cannot be written"
    fix = "free space, change permissions or name another folder"
    lines = [f"{place}: {error.strerror}: {fix}"]
  for line in lines:
    sys.stderr.write(f"{program}: {line}\n")
  raise SystemExit(2)


def prepare_process(program: str) -> None:
  """Set up the process of an entry point; to be called before JAX is imported.

  Ctrl-C then ends the process in one line, also during imports, SIGUSR1 prints the stacks of all
  threads, and libtpu prints no errors on machines without a TPU.
  """
  quiet_libtpu()
  if sys.__stderr__ is not None:
    faulthandler.register(signal.SIGUSR1, sys.__stderr__)
  gc.set_threshold(50_000, 10, 10)  # else imports and tracing take a sixth longer

  def report(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    cause: BaseException | None = error
    # An interrupted import may raise another error, of which KeyboardInterrupt is the cause.
    while cause and not isinstance(cause, KeyboardInterrupt):
      cause = cause.__cause__ or cause.__context__
    if cause:
      sys.stderr.write(f"{program}: interrupted\n")
    else:
      sys.__excepthook__(kind, error, trace)

  sys.excepthook = report
