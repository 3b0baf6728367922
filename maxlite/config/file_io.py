"""Files that are written or read as a whole."""

import json
import os
from pathlib import Path
from typing import Any

from maxlite.config.errors import UserError


def write_atomically(path: Path, text: str) -> None:
  """Replace `path` by a file with `text`, which is on disk on return; create its folder."""
  path.parent.mkdir(parents=True, exist_ok=True)
  unfinished = path.with_name(f".{path.name}.{os.getpid()}")
  with unfinished.open("w", encoding="utf-8") as file:
    file.write(text)
    file.flush()
    os.fsync(file.fileno())
  unfinished.replace(path)


def read_json_object(path: Path, fix: str) -> dict[str, Any]:
  """Read a JSON object; raise UserError that ends in `fix` if the file has none."""
  try:
    value = json.loads(path.read_bytes())
  except (OSError, ValueError, RecursionError) as error:
    raise UserError(f"{path} is not JSON ({error}): {fix}") from None
  if not isinstance(value, dict):
    raise UserError(f"{path} is not a JSON object: {fix}")
  return value
