"""Configuration: the knobs (`schema`), how values are found (`load`), what fits (`validate`)."""

from maxlite.config.knob import ConfigError
from maxlite.config.load import exit_with_one_line, load_config, main_config
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
  "ConfigError",
  "describe_changes",
  "differences",
  "exit_with_one_line",
  "load_config",
  "main_config",
  "read_saved",
  "save_keys",
  "save_resolved",
]
