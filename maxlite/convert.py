"""`python -m maxlite.convert from_hf FOLDER run_name=NAME`: import and export; see USAGE."""

import sys
from pathlib import Path

from maxlite.config import load_config
from maxlite.config.command_line import check_arguments
from maxlite.config.help_text import help_text
from maxlite.errors import UserError, exit_on_user_error, prepare_process
from maxlite.runs.saved_run import config_of_run

USAGE = """\
usage: python -m maxlite.convert from_hf FOLDER run_name=NAME [key=value ...]
         import a Hugging Face folder as a run
       python -m maxlite.convert from_peft ADAPTER FOLDER run_name=NAME [key=value ...]
         import an adapter in the format of peft, with its base model in FOLDER, as a run
       python -m maxlite.convert to_hf run_name=NAME output_path=FOLDER
         export a run's latest checkpoint to a Hugging Face folder, with adapters merged
       python -m maxlite.convert to_peft FOLDER run_name=NAME output_path=FOLDER
         export a run's adapters in the format of peft, for the base model in FOLDER
       python -m maxlite.convert upcycle run_name=NAME output_path=NEW_NAME num_experts=8 [...]
         create a mixture-of-experts run that computes the same function as a dense run
"""
# The folders that a command names, in order.
COMMANDS = {
  "from_hf": ("FOLDER",),
  "from_peft": ("ADAPTER", "FOLDER"),
  "to_hf": (),
  "to_peft": ("FOLDER",),
  "upcycle": (),
}
IMPORTS = ("from_hf", "from_peft")


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
    folders = _pop_folders(command, argv)
    # Report mistakes before JAX is imported.
    if command[0] in ("to_hf", "to_peft"):
      cfg = config_of_run(argv, f"maxlite.convert {command[0]}")
    else:
      cfg = load_config(argv, needs_data=False, command=f"maxlite.convert {command[0]}")
    if command[0] not in IMPORTS and not cfg.convert.output_path:
      raise UserError("output_path is missing: write output_path=NAME for the result")
    if command[0] in IMPORTS and "://" not in folders[-1]:
      from maxlite.hf.hf_folder import read_config  # imports NumPy

      read_config(Path(folders[-1]).expanduser())
    from maxlite.hf.conversion import run_conversion

    return run_conversion(command[0], folders, argv)


def _pop_folders(command: list[str], argv: list[str]) -> list[str]:
  """Remove the folders that a command names from `argv` and return them.

  Raises:
    UserError: the arguments do not match USAGE.
  """
  if not command or command[0] not in COMMANDS:
    raise UserError(f"command line: write one of {', '.join(COMMANDS)} first; see --help")
  folders = []
  for name in COMMANDS[command[0]]:
    if not argv or ("=" in argv[0] and not ("://" in argv[0] or Path(argv[0]).is_dir())):
      kind = "adapter_config.json" if name == "ADAPTER" else "config.json"
      raise UserError(f"command line: {command[0]} {name} is missing; name the folder with {kind}")
    folders.append(argv.pop(0))
  return folders


if __name__ == "__main__":
  sys.exit(main())
