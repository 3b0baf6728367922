"""Prove the step of a config: the same numbers on every mesh and path, in a tiny model of it.

python -m maxlite.audit configs/mine.yml
python -m maxlite.audit configs/mine.yml audit_meshes=-1  # every mesh of eight devices
"""

import os
import sys

from maxlite.config import main_config

# The step runs on simulated devices of the CPU, whatever this machine has.
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}


def main() -> int:
  os.environ.update(ENVIRONMENT)  # first, because plug-ins import JAX, which reads it
  cfg = main_config(sys.argv[1:], "maxlite.audit", needs_data=False, command="maxlite.audit")
  # Importing JAX is slow: only after the command line is validated.
  from maxlite.kernels.xla_cpu import add_threads_for_collectives

  add_threads_for_collectives()
  from maxlite.auditing.audit_run import run_audit

  return run_audit(cfg)


if __name__ == "__main__":
  sys.exit(main())
