"""Configuration: the knobs (`schema`), how values are found (`load`), what fits (`validate`)."""

from maxlite.config.errors import UserError, exit_on_user_error
from maxlite.config.load import load_config, main_config
from maxlite.config.saved import (
  describe_changes,
  differences,
  read_saved,
  save_keys,
  save_resolved,
)
from maxlite.config.schema import Config

__all__ = [
  "Config",
  "UserError",
  "describe_changes",
  "differences",
  "exit_on_user_error",
  "load_config",
  "main_config",
  "read_saved",
  "save_keys",
  "save_resolved",
]
