"""`python -m maxlite.plan configs/base.yml compile_topology=v5p-64`: what a step would need.

`python -m maxlite.plan configs/base.yml compile_topology=v5p-2048 estimate`: the same by arithmetic
on shapes, without a compiler.

`python -m maxlite.plan configs/alternating/router.yml phases`: which phase trains what, and when.
"""

import os
import sys

from maxlite.config import main_config

PHASES, ESTIMATE = "phases", "estimate"
# Nothing is run, so the accelerators of this machine, if any, are left alone; libtpu is kept from
# asking a metadata server what it runs on, and from refusing a second process.
DESCRIBED_ONLY = {
  "JAX_PLATFORMS": "cpu",
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_ACCELERATOR_TYPE": "v5p-8",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def main() -> int:
  words = [word for word in sys.argv[1:] if word not in (PHASES, ESTIMATE)]
  cfg = main_config(words, "maxlite.plan", needs_data=False)
  if cfg.plan.compile_topology:
    os.environ.update(DESCRIBED_ONLY)
  # JAX is loaded only for a command line that is right, and reads the environment when it is.
  from maxlite.planning.plan_run import run_phase_plan, run_plan

  if PHASES in sys.argv:
    return run_phase_plan(cfg)
  return run_plan(cfg, compiles=ESTIMATE not in sys.argv)


if __name__ == "__main__":
  sys.exit(main())
