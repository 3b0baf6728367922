"""`python -m maxlite.train configs/base.yml key=value`: train a model or an ensemble."""

import gc
import sys

from maxlite.config import main_config
from maxlite.config.rules.rollout_rules import has_rollouts
from maxlite.config.schema import flatten
from maxlite.config.values import EPOCH_KEYS
from maxlite.errors import exit_on_user_error
from maxlite.runs.saved_run import run_folder
from maxlite.training.model_folders import check_model_folders, losses_of


def main() -> int:
  if any(argument.lstrip("-").startswith(EPOCH_KEYS) for argument in sys.argv[1:]):
    from maxlite.runs.epochs import refuse_epochs  # imports NumPy

    with exit_on_user_error("maxlite.train"):
      refuse_epochs(sys.argv[1:])
  cfg = main_config(sys.argv[1:], "maxlite.train", command="maxlite.train")
  with exit_on_user_error("maxlite.train"):
    folder = run_folder(cfg)
    folder.require_writable()
    folder.config_changes(flatten(cfg))
    from maxlite.runs.resumed_data import check_resumed_data  # imports NumPy

    check_resumed_data(cfg, folder)
    check_model_folders(cfg, is_new=not folder.config.exists())
    if has_rollouts(cfg):
      from maxlite.rollouts.rewards import check_rewards  # imports NumPy

      check_rewards(cfg.rollouts, losses_of(cfg))
  # Imports JAX: only after the command line is checked.
  from maxlite.runs.open_run import join_hosts

  with join_hosts(cfg, "maxlite.train") as (cfg, peers):
    if cfg.ensemble.is_set:
      from maxlite.ensemble.run_members import run_members

      return run_members(cfg, peers)
    from maxlite.runs.run import run_training

    return run_training(cfg)


if __name__ == "__main__":
  exit_code = main()
  gc.freeze()  # collections at exit would visit all objects of JAX, for half a second
  sys.exit(exit_code)
