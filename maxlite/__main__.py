"""`python -m maxlite`: list the commands."""

import importlib.util
import sys

COMMANDS = {
  "maxlite.train": "train a model or an ensemble, and resume",
  "maxlite.evaluate": "print the held-out loss of a run",
  "maxlite.generate": "complete prompts",
  "maxlite.rollout": "complete prompts, verify every token, and reward the completions",
  "maxlite.serve": "serve a run over HTTP, with OpenAI's API and a web page",
  "maxlite.tinker": "serve a run as the base of adapters, to the Tinker client",
  "maxlite.data": "tokenize, print and export the data of a run, and train a tokenizer on them",
  "maxlite.tokenizer": "the same as maxlite.data train_tokenizer",
  "maxlite.plan": "print memory, FLOPs and communication of a training step, without the hardware",
  "maxlite.audit": "compare the step of a config over meshes and other choices, in a tiny model",
  "maxlite.compare": "say which run is better on held-out documents, or that it is chance",
  "maxlite.diff": "find where two runs that should be equal differ first",
  "maxlite.convert": "import and export Hugging Face folders and adapters; dense to experts",
  "maxlite.ensemble": "export members of an ensemble, and soups of them",
  "maxlite.lm_eval_adapter": "evaluate with lm-eval (pip install 'maxlite[lm_eval]')",
}
_HELP = "Each prints its keys with --help. Start with: python -m maxlite.train configs/base.yml"


def main() -> int:
  """Print the commands; the exit code is 2 after an argument that is not a request for help."""
  arguments = sys.argv[1:]
  width = max(map(len, COMMANDS))
  lines = [f"  python -m {name:{width}}  {purpose}\n" for name, purpose in COMMANDS.items()]
  text = f"commands:\n{''.join(lines)}{_HELP}\n"
  if not arguments or arguments[0] in ("--help", "-h", "help"):
    sys.stdout.write(text)
    return 0
  name = f"maxlite.{arguments[0].removeprefix('maxlite.')}"
  if name in COMMANDS and importlib.util.find_spec(name):
    sys.stderr.write(f"maxlite: write a dot: python -m {' '.join([name, *arguments[1:]])}\n")
  else:
    sys.stderr.write(f"maxlite: {arguments[0]} is not a command\n{text}")
  return 2


if __name__ == "__main__":
  sys.exit(main())
