"""maxlite: a small trainer for dense and mixture-of-experts language models in Flax Linen.

The names of the Python API are imported on first use: JAX is not imported with the
package, so that commands report config errors fast.
"""

import importlib
import sys
from types import ModuleType
from typing import Any

__version__ = "0.2.0"
_MODULES = {
  "Batch": "maxlite.data.batch",
  "Callback": "maxlite.training.callbacks",
  "Config": "maxlite.config",
  "Run": "maxlite.api.trained_run",
  "UserError": "maxlite.errors",
  "compare": "maxlite.runs.compare_runs",
  "diff": "maxlite.auditing.run_diff",
  "get_config": "maxlite.api.config_dict",
  "load": "maxlite.hf.load_model",
  "open_run": "maxlite.api.trained_run",
  "train": "maxlite.api.train_function",
}
__all__ = [
  "Batch",
  "Callback",
  "Config",
  "Run",
  "UserError",
  "compare",
  "diff",
  "get_config",
  "load",
  "open_run",
  "train",
]


class _Package(ModuleType):
  """Keeps `maxlite.train` a function: an import of the command's module would replace it."""

  def __setattr__(self, name: str, value: object) -> None:
    if name not in _MODULES or not isinstance(value, ModuleType):
      super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
  if name not in _MODULES:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  importlib.import_module("maxlite.libtpu_environment").quiet_libtpu()  # before JAX
  return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
  own = [name for name, value in globals().items() if _is_subpackage(value)]
  return sorted({*own, *__all__, "__version__"})


def _is_subpackage(value: object) -> bool:
  return isinstance(value, ModuleType) and value.__name__.startswith(f"{__name__}.")
