"""Plan a training step: memory, FLOPs and communication, without the hardware.

python -m maxlite.plan configs/base.yml compile_topology=v5p-64
python -m maxlite.plan configs/base.yml compile_topology=v5p-2048 estimate  # without compiling
python -m maxlite.plan configs/alternating/router.yml phases  # the schedule of the phases
"""

import os
import sys

from maxlite.config import main_config
from maxlite.config.help_text import USAGE
from maxlite.errors import exit_on_user_error
from maxlite.libtpu_environment import NO_TPU_ENVIRONMENT
from maxlite.planning.topology import parse_topology
from maxlite.training.model_folders import check_model_folders

# Arguments beside those of the config.
PHASES = "phases"
ESTIMATE = "estimate"
_USAGE = f"""{USAGE}
`{ESTIMATE}` plans from shapes, without compiling; `{PHASES}` prints the schedule of the phases.
"""
# Nothing runs, so this machine's accelerators are not used. libtpu must not query the metadata
# server, and must allow a second process.
COMPILE_ONLY_ENV = NO_TPU_ENVIRONMENT | {
  "JAX_PLATFORMS": "cpu",
  "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def main() -> int:
  arguments = [argument for argument in sys.argv[1:] if argument not in (PHASES, ESTIMATE)]
  cfg = main_config(
    arguments, "maxlite.plan", needs_data=False, usage=_USAGE, command="maxlite.plan"
  )
  with exit_on_user_error("maxlite.plan"):
    check_model_folders(cfg)
    if name := cfg.plan.compile_topology:
      parse_topology(name, cfg.plan.compile_topology_num_slices)
      os.environ.update(COMPILE_ONLY_ENV)
  # Importing JAX reads the environment, and is slow: only after the command line is validated.
  from maxlite.planning.plan_run import run_phase_plan, run_plan

  if PHASES in sys.argv:
    return run_phase_plan(cfg)
  return run_plan(cfg, compiles=ESTIMATE not in sys.argv)


if __name__ == "__main__":
  sys.exit(main())
