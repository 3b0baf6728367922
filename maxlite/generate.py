"""`python -m maxlite.generate configs/base.yml run_name=mine prompt="def "`: generate text."""

import sys

from maxlite.training.saved_run import main_run_config


def main() -> int:
  argv = sys.argv[1:]
  cfg = main_run_config(argv, "maxlite.generate")
  # JAX is imported only after the command line is validated.
  from maxlite.inference.generation import run_generation

  return run_generation(cfg, argv)


if __name__ == "__main__":
  sys.exit(main())
