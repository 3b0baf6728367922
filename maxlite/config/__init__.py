"""Configuration: the schema, its sources (files, command line, saved runs) and its rules."""

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
  "describe_changes",
  "differences",
  "load_config",
  "main_config",
  "public_values",
  "read_saved",
  "read_values",
  "save_keys",
  "save_resolved",
]
