"""`python -m maxlite.evaluate configs/base.yml run_name=mine`: print the held-out loss of a run."""

import sys

from maxlite.errors import exit_on_user_error
from maxlite.runs.saved_run import main_run_config, run_folder


def main() -> int:
  cfg = main_run_config(sys.argv[1:], "maxlite.evaluate")
  if cfg.observe.eval_documents:
    with exit_on_user_error("maxlite.evaluate"):
      run_folder(cfg).require_writable()
  # Imports JAX: only after the command line is checked.
  from maxlite.runs.evaluate_run import run_evaluation
  from maxlite.runs.open_run import join_hosts

  with join_hosts(cfg, "maxlite.evaluate") as (cfg, _):
    return run_evaluation(cfg)


if __name__ == "__main__":
  sys.exit(main())
