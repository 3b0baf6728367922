"""`python -m maxlite.generate configs/base.yml run_name=mine prompt="def "`: generate text."""

import sys

from maxlite.runs.saved_run import main_run_config


def main() -> int:
  cfg = main_run_config(sys.argv[1:], "maxlite.generate")
  # JAX is imported only after the command line is validated.
  from maxlite.inference.generation import run_generation

  return run_generation(cfg)


if __name__ == "__main__":
  sys.exit(main())
