"""`python -m maxlite.tinker run_name=mine`: serve a run to the official Tinker client."""

import sys

from maxlite.errors import exit_on_user_error
from maxlite.inference.server.address import listen, read_api_key
from maxlite.runs.saved_run import main_run_config


def main() -> int:
  cfg = main_run_config(sys.argv[1:], "maxlite.tinker")
  with exit_on_user_error("maxlite.tinker"):
    read_api_key(cfg.serve)
    listening = listen(cfg.serve.serve_host, cfg.serve.serve_port)
  # JAX is imported only after the command line is validated.
  from maxlite.tinker.serving import run_serving

  return run_serving(cfg, listening)


if __name__ == "__main__":
  sys.exit(main())
