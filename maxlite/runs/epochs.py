"""Commands that ask for epochs: the answer names how many steps those are.

Does not import JAX, as all mistakes of a command line are reported before.
"""

import math
from collections.abc import Sequence

from maxlite.config import Config, load_config
from maxlite.config.mixture import mixture_of
from maxlite.config.values import EPOCH_KEYS
from maxlite.data.open_source import open_source
from maxlite.errors import UserError
from maxlite.runs.resumed_data import are_read_here
from maxlite.runs.saved_run import token_cache


def refuse_epochs(argv: Sequence[str]) -> None:
  """Raise UserError if an argument is a number of epochs, with their steps.

  The data are read if they are files of one source, small, and on this machine; otherwise the
  config refuses the argument as it does all unknown keys.
  """
  for argument in argv:
    name, _, value = argument.lstrip("-").partition("=")
    if name not in EPOCH_KEYS:
      continue
    try:
      num_epochs = float(value)
      cfg = load_config([other for other in argv if other != argument])
    except ValueError:  # also a UserError: the config reports all mistakes
      return
    steps = _describe_steps(cfg, num_epochs)
    if steps:
      raise UserError(f"command line: {argument} is not a key; {steps}")


def _describe_steps(cfg: Config, num_epochs: float) -> str:
  """How many steps an epoch has, and what to write; empty if the data are not read here."""
  is_single = not (cfg.data.dataset_mixture or cfg.data.batch_size_schedule or cfg.phasing.phases)
  parts = [source.data for source in mixture_of(cfg.data)]
  if not is_single or not are_read_here(cfg, cfg.data, parts):
    return ""
  source = open_source(cfg.data, cfg.model.vocab_size, token_cache(cfg), evaluates=True)
  rows = len(source.train)
  batch = f"global_batch_size={cfg.data.global_batch_size}"
  rows_per_step: float = cfg.data.global_batch_size
  if not rows_per_step:
    rows_per_step = cfg.data.per_device_batch_size
    batch = f"per_device_batch_size={rows_per_step:g} on one device"
  steps = rows / rows_per_step
  return (
    f"an epoch has {rows:,} rows, {steps:,.1f} steps of {batch}; write "
    f"steps={math.ceil(num_epochs * steps)}"
  )
