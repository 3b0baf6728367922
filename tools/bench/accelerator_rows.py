"""What a part of accelerator.py prints: a row of a table, or the first line of an error."""

import json
from typing import Any


def add_row(table: str, *cells: Any) -> None:
  """Print a row of a table, which accelerator.py reads."""
  print("ROW", json.dumps({"table": table, "cells": cells}), flush=True)


def first_line(error: Exception) -> str:
  """The type and at most 300 characters of the first line of an error."""
  lines = str(error).strip().splitlines()
  text = "no message"
  if lines:
    text = lines[0][:300]
  return f"{type(error).__name__}: {text}"
