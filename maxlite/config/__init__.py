"""Configuration: the schema, its sources (files, command line, saved runs) and its rules."""

from maxlite.config.errors import UserError, exit_on_user_error
from maxlite.config.load import load_config, main_config
from maxlite.config.saved import (
  describe_changes,
  differences,
  public_values,
  read_saved,
  read_values,
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
  "public_values",
  "read_saved",
  "read_values",
  "save_keys",
  "save_resolved",
]
