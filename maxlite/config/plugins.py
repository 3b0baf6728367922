"""Plug-ins: the user's modules that add entries to the tables of the registry."""

import importlib
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from maxlite.config.schema import KEYS
from maxlite.config.values import Setting, parse


def import_plugins(settings: Sequence[Setting]) -> tuple[str, ...] | None:
  """Import the modules of the last setting of `plugins`; None without such a setting.

  All settings are checked before its code runs, except names that it may register. Paths become
  absolute, so that the config of a run finds them from any folder.

  Raises:
    UserError: a setting is wrong, or a module cannot be imported.
  """
  chosen = None
  for setting in settings:
    if setting.name == "plugins":
      chosen = setting
  if chosen is None:
    return None
  plugins = parse(chosen)
  if plugins:
    for setting in settings:
      parse(setting, any_choice=True)
  return tuple(_import(plugin, chosen) for plugin in plugins)


def import_function(key: str, reference: str, known: Iterable[str] = ()) -> Callable[..., Any]:
  """Import the function that a value of `key` names as FILE.py:FUNCTION.

  Args:
    known: other values that the key takes, for the error message.

  Raises:
    UserError: there is no such function.
  """
  setting = Setting(key, reference, "config")
  file, separator, name = reference.partition(":")
  if not separator or not name.isidentifier():
    raise setting.error(f"is not FILE.py:FUNCTION; write that, or one of {', '.join(known)}")
  path = Path(os.path.abspath(os.path.expanduser(file)))
  if not path.is_file():
    raise setting.error(f"cannot be imported: there is no file {path}; correct the path")
  module = _import_module(path.stem, str(path.parent), file, setting)
  function = getattr(module, name, None)
  if not callable(function):
    raise setting.error(f"cannot be imported: {path} has no function {name}; correct the name")
  return function


def refuse_code(settings: Sequence[Setting]) -> None:
  """Raise UserError if a run's file sets one of these keys, which name code, to run code."""
  for setting in settings:
    value = parse(setting, any_choice=True)
    if value and value != KEYS[setting.name].default:
      raise setting.error(
        f"names code, which opening a run does not execute; write {setting.name}=... on the "
        "command line, or trust_plugins=true if you trust this run"
      )


def _import(plugin: str, setting: Setting) -> str:
  """Import a module by its name, or by the path of its file; return the name or absolute path."""
  if not plugin.endswith(".py"):
    _import_module(plugin, os.getcwd(), plugin, setting)
    return plugin
  path = Path(os.path.abspath(os.path.expanduser(plugin)))
  if not path.is_file():
    raise setting.error(f"cannot be imported: there is no file {path}; correct the path")
  module = _import_module(path.stem, str(path.parent), plugin, setting)
  if module.__file__ is None or not os.path.samefile(module.__file__, path):
    raise setting.error(f"has the name of another module, {module.__file__}; rename the file")
  return str(path)


def _import_module(name: str, folder: str, plugin: str, setting: Setting) -> ModuleType:
  """Import a module that `folder` or the path of modules holds.

  Args:
    plugin: the module as the user wrote it in `setting`, for error messages.
  """
  if not all(part.isidentifier() for part in name.split(".")):
    raise setting.error(f"cannot be imported: {plugin} is not the name of a module; rename it")
  if folder not in sys.path:
    sys.path.append(folder)
  importlib.invalidate_caches()
  try:
    return importlib.import_module(name)
  except SystemExit as error:
    raise setting.error(f"ends the program (sys.exit({error.code!r})); remove that call") from None
  except (ImportError, SyntaxError) as error:
    fix = "write the path of a .py file, or a module of this folder or of PYTHONPATH"
    raise setting.error(f"cannot be imported: {type(error).__name__}: {error}; {fix}") from None
