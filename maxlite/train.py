"""`python -m maxlite.train configs/base.yml key=value`: trains a model, or many."""

import sys

from maxlite.config import main_config


def main() -> int:
  cfg = main_config(sys.argv[1:], "maxlite.train")
  # JAX is loaded only for a command line that is right.
  from maxlite.training.multi_host import join_hosts

  with join_hosts(cfg, "maxlite.train") as cfg:
    if cfg.ensemble.members or cfg.ensemble.sweep:
      from maxlite.ensemble.ensemble_run import run_ensemble

      return run_ensemble(cfg)
    from maxlite.training.run import run_training

    return run_training(cfg)


if __name__ == "__main__":
  sys.exit(main())
