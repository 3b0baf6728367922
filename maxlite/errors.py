"""The exception for user mistakes, and the one handler that turns it into an exit code."""

import contextlib
import errno
import faulthandler
import gc
import logging
import re
import resource
import signal
import sys
import traceback
import unicodedata
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TextIO

from maxlite.libtpu_environment import quiet_libtpu

# Errors of the operating system that the user can correct: full or read-only disks, permissions,
# links and special files in the place of files.
_STORAGE_ERRORS = (
  errno.ENOSPC,
  errno.EDQUOT,
  errno.EROFS,
  errno.EACCES,
  errno.EPERM,
  errno.ENOTDIR,
  errno.ELOOP,
  errno.ENXIO,
)


# What libraries raise when memory cannot be mapped, also for the stack of a thread.
_NO_MEMORY = re.compile("failed to map segment|[Cc]annot allocate memory|can't start new thread")
_MAX_REASON = 200  # characters


class UserError(ValueError):
  """Mistakes of the user, each one line with its source, the keys, the rule and the fix."""

  @property
  def lines(self) -> list[str]:
    """The mistakes, each without line breaks and other characters that a terminal obeys."""
    return [printable(str(mistake)) for mistake in self.args]

  def __str__(self) -> str:
    return "\n".join(self.lines)


def escape(text: str) -> str:
  """Return `text` with escapes for what is not printable, except line breaks and tabs.

  Names of keys, members and tensors, and the texts of peers, may be a stranger's: a terminal would
  obey their control characters.
  """
  if text.isprintable():
    return text
  parts = []
  for character in text:
    if character.isprintable() or character in "\n\t":
      parts.append(character)
    else:
      parts.append(character.encode("unicode_escape").decode())
  return "".join(parts)


def escape_controls(text: str) -> str:
  """Return `text` with escapes for control characters alone; other scripts have joiners, marks."""
  return "".join(escape(part) if unicodedata.category(part) == "Cc" else part for part in text)


def printable(text: str) -> str:
  """Return `text` as one line, escaped."""
  return escape(" ".join(text.split()))


def write_line(line: str, stream: TextIO | None = None) -> None:
  """Write a line to `stream` at once, by default stderr, with escapes for control characters."""
  stream = stream or sys.stderr
  stream.write(f"{escape(line)}\n")
  stream.flush()


def _escape_record(record: logging.LogRecord) -> bool:
  record.msg = escape(record.getMessage())
  record.args = None
  return True


def get_logger(name: str) -> logging.Logger:
  """Return the logger of a module, whose messages are escaped."""
  logger = logging.getLogger(name)
  logger.addFilter(_escape_record)
  return logger


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
    lines = [printable(f"{place}: {error.strerror}: {fix}")]
  for line in lines:
    write_line(f"{program}: {line}")
  raise SystemExit(2)


def _address_space_limit() -> int | None:
  """Return the bytes of memory that this process may map; None if they are not limited."""
  limit, _ = resource.getrlimit(resource.RLIMIT_AS)
  return None if limit == resource.RLIM_INFINITY else limit


def _lack_of_memory(error: BaseException | None) -> str:
  """Return a line if an error, or one that led to it, is that this host has no memory; or empty."""
  limit = _address_space_limit()
  line = ""
  while error is not None:
    # A library that cannot be initialized does not say why.
    is_likely = limit is not None and isinstance(error, ImportError) and "initializ" in str(error)
    if is_likely or isinstance(error, MemoryError) or _NO_MEMORY.search(str(error)):
      reason = printable(f"{type(error).__name__}: {error}")[:_MAX_REASON]
      fix = "free memory"
      if limit is not None:
        fix += f", or raise the limit of {limit:,} bytes (ulimit -v)"
      line = f"out of memory ({reason}): {fix}"
    error = error.__cause__ or error.__context__
  return line  # of the first cause


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
    elif lack := _lack_of_memory(error):
      write_line(f"{program}: {lack}")
    else:
      write_line("".join(traceback.format_exception(kind, error, trace)).rstrip())

  def report_unraisable(unraisable: "sys.UnraisableHookArgs") -> None:
    # When a write fails, Orbax (0.12.8) closes its event loop, and threads of TensorStore report
    # that once for every other write. The error of the write itself is raised elsewhere.
    if str(unraisable.exc_value) != "Event loop is closed":
      sys.__unraisablehook__(unraisable)

  sys.excepthook = report
  sys.unraisablehook = report_unraisable
