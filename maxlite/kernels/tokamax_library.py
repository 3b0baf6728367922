"""Access to tokamax, the kernel library of the JAX team, which the extra `cuda` installs.

Its kernels are Mosaic GPU programs for Hopper and later. They support neither CPUs nor an
interpreter; its `xla` implementations, with which the tests run the adapters, run everywhere.
"""

import functools
import importlib
import importlib.util
import logging
from types import ModuleType
from typing import NamedTuple

from maxlite.errors import UserError

KERNELS = "mosaic_gpu"  # the implementation of tokamax's functions for NVIDIA GPUs


class AttentionModules(NamedTuple):
  """Modules of tokamax's attention."""

  api: ModuleType
  base: ModuleType


def is_installed() -> bool:
  """Whether tokamax can be imported; nothing is."""
  return importlib.util.find_spec("tokamax") is not None


def import_tokamax() -> ModuleType:
  """The package.

  Raises:
    UserError: it is not installed.
  """
  if not is_installed():
    raise UserError(
      "attention=tokamax: the package tokamax is not installed; install it with "
      "pip install 'maxlite[cuda]' (Python 3.12 or later), or write attention=auto"
    )
  _drop_warnings_of_tuning()
  return importlib.import_module("tokamax")


@functools.cache
def _drop_warnings_of_tuning() -> None:
  """Drop tokamax's warning, of a thousand characters, for every call with shapes never tuned."""

  def is_other(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("Autotuning cache miss")

  logging.getLogger("absl").addFilter(is_other)


@functools.cache
def find_attention() -> AttentionModules | None:
  """The modules of tokamax's attention; None if there are none with the names that are used here.

  tokamax's public function takes a mask of all scores only. The class `Mask`, which takes a range
  of keys per query, the operations that take such a mask, and their gradient rules are private, and
  may be renamed by any release. `attention=auto` then chooses another backend.
  """
  if not is_installed():
    return None
  _drop_warnings_of_tuning()
  try:
    api = importlib.import_module("tokamax._src.ops.attention.api")
    base = importlib.import_module("tokamax._src.ops.attention.base")
  except ImportError:
    return None
  names = ("Mask", "DotProductAttentionVjp")
  has_names = all(hasattr(base, name) for name in names) and hasattr(api, "IMPLEMENTATIONS")
  if not has_names:
    return None
  return AttentionModules(api, base)


def import_attention() -> AttentionModules:
  """The modules of tokamax's attention.

  Raises:
    UserError: tokamax is not installed, or this version of it has no such modules.
  """
  modules = find_attention()
  if modules is None:
    tokamax = import_tokamax()
    raise UserError(
      f"attention=tokamax: tokamax {tokamax.__version__} has not the masks that documents need; "
      "install tokamax 0.0.17, or write attention=auto"
    )
  return modules
