"""`python -m maxlite.train configs/base.yml key=value`: trains a model."""

import sys

from maxlite.config import main_config


def main() -> int:
  cfg = main_config(sys.argv[1:], "maxlite.train")
  # JAX is loaded only for a command line that is right.
  from maxlite.training.run import run_training

  return run_training(cfg)


if __name__ == "__main__":
  sys.exit(main())
