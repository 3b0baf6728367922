"""Reads of checkpoints that are repeated before a checkpoint counts as damaged.

Files are damaged if two reads fail in the same way, for example by the same wrong checksum. Missing
permissions, a store that answers with errors, and reads that fail differently each time are
problems of the environment: the files may be whole.
"""

import errno
import re
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from maxlite.distributed.object_collectives import all_gather_object
from maxlite.errors import UserError

T = TypeVar("T")
_PAUSES = (0.1, 0.5, 1.0, 2.0)  # between reads [s]
_MAX_REASON = 200  # characters in a message
_ENVIRONMENT_CODES = (
  errno.EACCES,
  errno.EPERM,
  errno.EIO,
  errno.EAGAIN,
  errno.EBUSY,
  errno.ESTALE,
  errno.ENOMEM,
  errno.EMFILE,
  errno.ENFILE,
  errno.ENOBUFS,
  errno.ENETDOWN,
  errno.ENETUNREACH,
  errno.EHOSTDOWN,
  errno.EHOSTUNREACH,
  errno.ENOTCONN,
  getattr(errno, "EREMOTEIO", errno.EIO),  # of s3fs, for a status of 500
)
# What libraries of stores raise, unless an object is missing.
_STORE_PACKAGES = ("aiohttp", "botocore", "aiobotocore", "google", "gcsfs", "requests", "urllib3")
# Status codes of TensorStore, with which its messages begin.
_STORE_STATUS = re.compile(
  "PERMISSION_DENIED|UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|UNAUTHENTICATED|ABORTED"
)
# Of arrays in one damaged file, the one that was opened first.
_FIRST_ARRAY = re.compile(r'"[^"]*/\.zarray"')


class _Failure(NamedTuple):
  """Why a process could not read; empty texts if it could."""

  reason: str = ""  # one line
  details: str = ""  # the same for reads that failed in the same way
  is_environment: bool = False


def _accept(value: object) -> str:
  del value
  return ""


def read_repeatedly(
  name: str,
  read: Callable[[], T],
  check: Callable[[T], str] = _accept,
) -> tuple[T | None, str]:
  """Return (value, "") or (None, damage); all processes call it, with the same outcome.

  Args:
    name: what is read, for messages.
    read: the read of this process.
    check: called with the value if all processes could read; returns what is wrong with it, the
      same on all processes. It may be a collective computation. By default nothing is wrong.

  Raises:
    UserError: the environment prevents the read.
  """
  earlier: list[list[str]] = []
  for pause in (*_PAUSES, None):
    value, failures = _read_on_all(read)
    if value is not None:
      wrong = check(value)
      if not wrong:
        return value, ""
      failures = [_Failure(reason=wrong, details=wrong)]
    is_environment = any(failure.is_environment for failure in failures)
    reason = next(failure.reason for failure in failures if failure.reason)
    details = [failure.details for failure in failures]
    if details in earlier and not is_environment:
      return None, reason
    earlier.append(details)
    if pause is not None:
      time.sleep(pause)
  raise UserError(
    f"{name} cannot be read, also repeatedly, but is not known to be damaged ({reason}): check "
    "permissions, disk, memory and network, and start again; nothing was moved"
  )


def _read_on_all(
  read: Callable[[], T],
) -> tuple[T | None, list[_Failure]]:
  """Return (this process's value, failures of all processes); no value if any has failed."""
  value = None
  own_failure = _Failure()
  try:
    value = read()
  # Damaged files raise any error of JSON, zstd, TensorStore or Orbax.
  except Exception as error:
    own_failure = _Failure(
      reason=one_line(error),
      details=_details(error),
      is_environment=is_environment_error(error),
    )
  failures = [_Failure(*fields) for fields in all_gather_object(own_failure)]
  if any(failure.reason for failure in failures):
    return None, failures
  return value, failures


def is_environment_error(error: BaseException) -> bool:
  """Return whether an error says nothing about the content of files."""
  if isinstance(error, FileNotFoundError):
    return False
  if isinstance(error, UserError | TimeoutError | ConnectionError | MemoryError):
    return True
  if isinstance(error, OSError) and error.errno in _ENVIRONMENT_CODES:
    return True
  package, _, _ = type(error).__module__.partition(".")
  if package in _STORE_PACKAGES:
    return True
  if _STORE_STATUS.match(str(error)):
    return True
  return error.__cause__ is not None and is_environment_error(error.__cause__)


def one_line(error: BaseException) -> str:
  """Shorten an error of TensorStore or Orbax to one line."""
  if isinstance(error, OSError) and error.filename and error.strerror:
    return f"{error.filename}: {error.strerror}"
  line = first_line(error)
  if type(error) is not OSError:  # raised by the checks of checkpoints
    line = f"{type(error).__name__}: {line}"
  # A reason from the operating system comes after the names of many files.
  found = re.search(r"[^:]*\[os_error_code='\d+'", line)
  if found:
    reason, _, _ = found[0].partition(" [")
    return reason.strip()
  return line[:_MAX_REASON]


def first_line(error: BaseException) -> str:
  """Return the first line of an error, without the internals that TensorStore appends."""
  line, _, _ = str(error).partition("\n")
  message, _, _ = line.partition(" See full")
  return message


def _details(error: BaseException) -> str:
  """Return the texts of an error and its causes, without the internals of TensorStore."""
  line = f"{type(error).__name__}: {first_line(error)}"
  text, _, _ = line.partition(" [tensorstore_spec")
  text = _FIRST_ARRAY.sub("", text)
  if error.__cause__ is not None:
    text += f"; {_details(error.__cause__)}"
  return text
