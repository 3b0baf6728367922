"""`python -m maxlite.convert from_hf FOLDER run_name=mine`: models in and out; see USAGE."""

import sys

from maxlite.config import exit_on_user_error, load_config
from maxlite.config.command_line import help_text
from maxlite.config.errors import UserError

USAGE = """\
usage: python -m maxlite.convert from_hf FOLDER run_name=NAME [key=value ...]
         makes a run of a folder in Hugging Face's format
       python -m maxlite.convert to_hf run_name=NAME output_path=FOLDER
         makes such a folder of a run's newest checkpoint, adapters merged
       python -m maxlite.convert to_peft FOLDER run_name=NAME output_path=FOLDER
         makes a folder of the peft package of a run's adapters, which add to the weights in FOLDER
       python -m maxlite.convert upcycle run_name=NAME output_path=NEW_NAME num_experts=8 [...]
         makes a run with a mixture of experts of a dense one, which computes the same at first
"""
VERBS = ("from_hf", "to_hf", "to_peft", "upcycle")
OF_FOLDERS = ("from_hf", "to_peft")


def main() -> int:
  verb, words = sys.argv[1:2], sys.argv[2:]
  if {"--help", "-h"} & {*verb, *words}:
    sys.stdout.write(USAGE + "\n" + help_text("maxlite.convert"))
    return 0
  with exit_on_user_error("maxlite.convert"):
    folder = _folder(verb, words)
    load_config(words, needs_data=False)  # told of a mistake before JAX is loaded
    from maxlite.hf.conversion import run_conversion

    return run_conversion(verb[0], folder, words)


def _folder(verb: list[str], words: list[str]) -> str:
  """The FOLDER of OF_FOLDERS, taken from `words`; empty for the others.

  Raises:
    UserError: the words are none of USAGE.
  """
  if not verb or verb[0] not in VERBS:
    raise UserError(f"command line: write one of {', '.join(VERBS)} first; --help tells more")
  for word in words:
    if word.endswith((".yml", ".yaml")):
      raise UserError(f"command line: {word} is no word of {verb[0]}, which takes key=value only")
  if verb[0] not in OF_FOLDERS:
    return ""
  if not words or "=" in words[0]:
    raise UserError(f"command line: {verb[0]} FOLDER is missing; name the one with config.json")
  return words.pop(0)


if __name__ == "__main__":
  sys.exit(main())
