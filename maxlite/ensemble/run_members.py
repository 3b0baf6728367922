"""Training of the members that a config describes: an ensemble, a ladder, or rounds of a search."""

from maxlite.config import Config
from maxlite.distributed.initialize import SeparateProcesses
from maxlite.ensemble.run.ensemble_run import train_ensemble
from maxlite.ensemble.run.ladder import train_ladder
from maxlite.ensemble.run.search import train_search
from maxlite.errors import exit_on_user_error


def run_members(cfg: Config, peers: SeparateProcesses | None = None) -> int:
  """`train_members_of` for the command: a mistake ends in one line."""
  with exit_on_user_error("maxlite.train"):
    return train_members_of(cfg, peers)


def train_members_of(cfg: Config, peers: SeparateProcesses | None = None) -> int:
  """Train an ensemble, a ladder or a search, and return the exit code.

  Args:
    peers: the other processes, if each trains its own members.

  Raises:
    UserError: a mistake in the config, or a run folder that does not fit it.
  """
  if cfg.ensemble.search:
    return train_search(cfg, peers=peers)
  if cfg.ensemble.ladder:
    return train_ladder(cfg, peers=peers)
  return train_ensemble(cfg, peers=peers)
