"""`python -m maxlite.evaluate configs/base.yml run_name=mine`: print the held-out loss of a run."""

import sys

from maxlite.training.saved_run import main_run_config


def main() -> int:
  cfg = main_run_config(sys.argv[1:], "maxlite.evaluate")
  # Imports JAX: only after the command line is checked.
  from maxlite.training.evaluation import run_evaluation
  from maxlite.training.open_run import join_hosts

  with join_hosts(cfg, "maxlite.evaluate") as (cfg, _):
    return run_evaluation(cfg)


if __name__ == "__main__":
  sys.exit(main())
