"""Selection of a kernel's backend by name and platform."""

from collections.abc import Mapping

from maxlite.config.errors import UserError
from maxlite.config.registry import Registry


def resolve_backend(
  key: str, backends: Registry, auto: Mapping[str, str], name: str, platform: str
) -> str:
  """The entry of `backends` that `name` selects on `platform` (`cpu`, `gpu`, `tpu`).

  Args:
    key: the config key that selects the backend, for the error message.
    auto: the choice of "auto" by platform, and "other".

  Raises:
    UserError: there is no such backend.
  """
  if name == "auto":
    return auto.get(platform, auto["other"])
  if name not in backends:
    known = ", ".join(backends)
    raise UserError(f"{key}={name!r} is not a backend; choose auto or one of: {known}")
  return name
