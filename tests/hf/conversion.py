"""The command `maxlite.convert`, in this process."""

import sys

import pytest

from maxlite import convert


def converted(arguments: list, **keys: object) -> int:
  """Run `maxlite.convert` with these config keys, and return its exit code."""
  arguments = [*arguments, *(f"{name}={value}" for name, value in keys.items())]
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(sys, "argv", ["convert", *map(str, arguments)])
    try:
      return convert.main()
    except SystemExit as error:
      return error.code
