"""`python -m maxlite.serve configs/base.yml run_name=mine`: serve a run over HTTP."""

import sys

from maxlite.training.saved_run import main_run_config


def main() -> int:
  argv = sys.argv[1:]
  cfg = main_run_config(argv, "maxlite.serve")
  # JAX is imported only after the command line is validated.
  from maxlite.inference.server.serving import run_serving

  return run_serving(cfg, argv)


if __name__ == "__main__":
  sys.exit(main())
