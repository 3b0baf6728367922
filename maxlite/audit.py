"""Prove the step of a config: the same numbers on every mesh and path, in a tiny model of it.

python -m maxlite.audit configs/mine.yml
python -m maxlite.audit configs/mine.yml audit_meshes=-1  # every mesh of eight devices
python -m maxlite.audit configs/mine.yml audit_devices=all  # the model itself, on this machine
"""

import os
import sys

from maxlite.config import main_config
from maxlite.errors import UserError, exit_on_user_error

# The step runs on simulated devices of the CPU, whatever this machine has.
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}


def main() -> int:
  on_machine = any(each.lstrip("-") == "audit_devices=all" for each in sys.argv[1:])
  if not on_machine:
    os.environ.update(ENVIRONMENT)  # first, because plug-ins import JAX, which reads it
  cfg = main_config(sys.argv[1:], "maxlite.audit", needs_data=False, command="maxlite.audit")
  if not on_machine and cfg.audit.audit_devices == "all":
    with exit_on_user_error("maxlite.audit"):
      raise UserError("audit_devices=all of a file: write it on the command line")
  # Importing JAX is slow: only after the command line is validated.
  from maxlite.kernels.xla_cpu import add_threads_for_collectives

  add_threads_for_collectives()
  if on_machine:
    from maxlite.auditing.device_audit import run_device_audit

    return run_device_audit(cfg)
  from maxlite.auditing.audit_run import run_audit

  return run_audit(cfg)


if __name__ == "__main__":
  sys.exit(main())
