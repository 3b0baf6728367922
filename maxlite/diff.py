"""`python -m maxlite.diff RUN_A RUN_B`: where two runs that should be equal differ first."""

import sys
from pathlib import Path

from maxlite.config.command_line import check_arguments
from maxlite.errors import UserError, exit_on_user_error, prepare_process, write_line

USAGE = """\
usage: python -m maxlite.diff RUN_A RUN_B [json=FILE]
         compare two run folders, or two checkpoints: RUN/checkpoints/STEP. Prints the config keys,
         versions, data, metrics and parameters that differ, and what usually causes it; the exit
         code is 1 if data, metrics or states differ
"""


def main() -> int:
  prepare_process("maxlite.diff")
  with exit_on_user_error("maxlite.diff"):
    arguments = check_arguments(sys.argv[1:])
    if {"--help", "-h"} & set(arguments):
      sys.stdout.write(USAGE)
      return 0
    runs = [each for each in arguments if "=" not in each]
    options = dict(each.removeprefix("--").split("=", 1) for each in arguments if "=" in each)
    if len(runs) != 2 or options.keys() - {"json"}:
      raise UserError(USAGE.partition("\n")[0])
    # Importing JAX is slow: only after the command line is validated.
    from maxlite.auditing.run_diff import diff

    found = diff(*runs)
    for line in str(found).splitlines():
      write_line(line, sys.stdout)
    if "json" in options:
      found.write(Path(options["json"]).expanduser())
    return 0 if found.is_equal else 1


if __name__ == "__main__":
  sys.exit(main())
