"""Settings from Python files, whose function `get_config` returns a `ml_collections.ConfigDict`."""

import ast
import re
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from maxlite.config.python_values import is_mapping, mapping_settings
from maxlite.config.values import Setting
from maxlite.errors import UserError

_PYTHON = re.compile(r"([^=]*\.py)(?::(.*))?", re.DOTALL)
_EXAMPLE = "def get_config(): return ml_collections.ConfigDict({'steps': 50})"


class PythonFile(NamedTuple):
  """`FILE.py`, or `FILE.py:ARGUMENT`."""

  path: Path
  argument: str | None  # what get_config is called with; None: nothing

  @classmethod
  def of(cls, name: str | Path) -> "PythonFile | None":
    """The Python file that `name` stands for; None if it is another one."""
    match = _PYTHON.fullmatch(str(name))
    if match is None:
      return None
    return cls(Path(match[1]), match[2])


def python_settings(file: PythonFile, code: bytes) -> list[Setting]:
  """Run the file, and return the settings of its `get_config`.

  Args:
    code: the content of the file.

  Raises:
    UserError: the file is not Python, its code fails, or `get_config` is missing or returns what
      is not a mapping with values of YAML.
  """
  path = file.path
  try:
    tree = ast.parse(code)
  except SyntaxError as error:
    raise UserError(f"{path}:{error.lineno or 1}: {error.msg}; correct the Python code") from None
  except (ValueError, RecursionError) as error:
    raise UserError(f"{path}: {error}; correct the Python code") from None
  folder = str(path.resolve().parent)
  sys.path.insert(0, folder)  # like that of a script, which may import the files beside it
  try:
    get_config = runpy.run_path(str(path)).get("get_config")
    config = _call(get_config, file)
    return mapping_settings(config, str(path), _lines_of_keys(tree))
  except UserError:
    raise
  except (Exception, SystemExit) as error:  # sys.exit() would end the command without a word
    cause = f"{type(error).__name__}: {error}"
    raise UserError(f"{_place(error, path)}: {cause}; correct the Python code") from None
  finally:
    if folder in sys.path:
      sys.path.remove(folder)


def _call(get_config: Callable[..., object] | None, file: PythonFile) -> object:
  if get_config is None:
    raise UserError(f"{file.path}: has no function get_config; write {_EXAMPLE}")
  if file.argument is None:
    config = get_config()
  else:
    config = get_config(file.argument)
  if not is_mapping(config):
    kind = type(config).__name__
    raise UserError(f"{file.path}: get_config() returned {kind}; return a ConfigDict or a dict")
  return config


def _place(error: BaseException, path: Path) -> str:
  """`FILE:LINE` of the code of this file that raised the error."""
  frames = traceback.extract_tb(error.__traceback__)
  lines = [frame.lineno for frame in frames if frame.filename == str(path)]
  if not lines:
    return str(path)
  return f"{path}:{lines[-1]}"


def _lines_of_keys(tree: ast.Module) -> dict[str, int]:
  """The lines that set a key, of the keys that one place of the file sets."""
  lines: dict[str, int] = {}
  repeated: set[str] = set()
  for key, line in _assigned_keys(tree):
    if key in lines:
      repeated.add(key)
    lines[key] = line
  return {key: line for key, line in lines.items() if key not in repeated}


def _assigned_keys(tree: ast.Module) -> Iterator[tuple[str, int]]:
  """(key, line) of `config.key = `, `config["key"] = `, `{"key": }` and `dict(key=)`."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
      yield node.attr, node.lineno
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
      yield from _text(node.slice)
    elif isinstance(node, ast.Dict):
      for key in node.keys:
        yield from _text(key)
    elif isinstance(node, ast.keyword) and node.arg is not None:
      yield node.arg, node.value.lineno


def _text(node: ast.expr | None) -> Iterator[tuple[str, int]]:
  """(text, line) of a literal text; nothing for other expressions."""
  if isinstance(node, ast.Constant) and isinstance(node.value, str):
    yield node.value, node.lineno
