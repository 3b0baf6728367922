"""`python -m maxlite.compare RUN RUN ...`: which run is better on held-out documents, or chance."""

import sys
from pathlib import Path

from maxlite.config.command_line import check_arguments
from maxlite.errors import UserError, exit_on_user_error, prepare_process, write_line

USAGE = """\
usage: python -m maxlite.compare RUN RUN ... [json=FILE] [key=value ...]
         the loss of each run folder on the same held-out documents, and its difference to the best
         run with a 95 % interval (paired bootstrap over documents). The members of an ensemble's
         folder are runs. Keys are those of maxlite.evaluate and hold for every run, such as
         eval_dataset_path=... for other documents
"""


def main() -> int:
  prepare_process("maxlite.compare")
  with exit_on_user_error("maxlite.compare"):
    arguments = check_arguments(sys.argv[1:])
    if {"--help", "-h"} & set(arguments):
      sys.stdout.write(USAGE)
      return 0
    runs = [each for each in arguments if "=" not in each]
    keys = dict(each.removeprefix("--").split("=", 1) for each in arguments if "=" in each)
    file = keys.pop("json", None)
    if not runs:
      raise UserError(USAGE.partition("\n")[0])
    # Importing JAX is slow: only after the command line is validated.
    from maxlite.runs.compare_runs import compare

    found = compare(*runs, **keys)
    for line in str(found).splitlines():
      write_line(line, sys.stdout)
    if file is not None:
      found.write(Path(file).expanduser())
  return 0


if __name__ == "__main__":
  sys.exit(main())
