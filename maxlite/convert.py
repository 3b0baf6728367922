"""`python -m maxlite.convert from_hf FOLDER run_name=NAME`: import and export; see USAGE."""

import sys
from pathlib import Path

from maxlite.config import exit_on_user_error, load_config
from maxlite.config.argument_mistakes import check_arguments
from maxlite.config.command_line import help_text
from maxlite.config.errors import UserError, prepare_process
from maxlite.runs.saved_run import config_of_run

USAGE = """\
usage: python -m maxlite.convert from_hf FOLDER run_name=NAME [key=value ...]
         import a Hugging Face folder as a run
       python -m maxlite.convert to_hf run_name=NAME output_path=FOLDER
         export a run's latest checkpoint to a Hugging Face folder, with adapters merged
       python -m maxlite.convert to_peft FOLDER run_name=NAME output_path=FOLDER
         export a run's adapters in the format of peft, for the base model in FOLDER
       python -m maxlite.convert upcycle run_name=NAME output_path=NEW_NAME num_experts=8 [...]
         create a mixture-of-experts run that computes the same function as a dense run
"""
COMMANDS = ("from_hf", "to_hf", "to_peft", "upcycle")
NEED_FOLDER = ("from_hf", "to_peft")


def main() -> int:
  command = sys.argv[1:2]  # empty if there are no arguments
  argv = sys.argv[2:]
  prepare_process("maxlite.convert")
  with exit_on_user_error("maxlite.convert"):
    for argument in check_arguments(sys.argv[1:]):
      name, _, topic = argument.partition("=")
      if name in ("--help", "-h"):
        sys.stdout.write(help_text("maxlite.convert", topic, USAGE))
        return 0
    folder = _pop_folder(command, argv)
    # Report mistakes before JAX is imported.
    if command[0] in ("to_hf", "to_peft"):
      cfg = config_of_run(argv, f"maxlite.convert {command[0]}")
    else:
      cfg = load_config(argv, needs_data=False, command=f"maxlite.convert {command[0]}")
    if command[0] != "from_hf" and not cfg.convert.output_path:
      raise UserError("output_path is missing: write output_path=NAME for the result")
    if command[0] == "from_hf" and "://" not in folder:
      from maxlite.hf.hf_folder import read_config  # imports NumPy

      read_config(Path(folder).expanduser())
    from maxlite.hf.conversion import run_conversion

    return run_conversion(command[0], folder, argv)


def _pop_folder(command: list[str], argv: list[str]) -> str:
  """Remove FOLDER from `argv` and return it; empty for commands without one.

  Raises:
    UserError: the arguments do not match USAGE.
  """
  if not command or command[0] not in COMMANDS:
    raise UserError(f"command line: write one of {', '.join(COMMANDS)} first; see --help")
  if command[0] not in NEED_FOLDER:
    return ""
  if not argv or ("=" in argv[0] and not ("://" in argv[0] or Path(argv[0]).is_dir())):
    raise UserError(f"command line: {command[0]} FOLDER is missing; name the one with config.json")
  return argv.pop(0)


if __name__ == "__main__":
  sys.exit(main())
