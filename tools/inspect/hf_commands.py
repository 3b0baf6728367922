"""Run the commands of docs/models.md on a tiny random model of every model_type.

python tools/inspect/hf_commands.py [--out FOLDER] [MODEL_TYPE ...]

`transformers` writes each model, and a tokenizer whose tokens are single characters is added. The
model is imported, trained for a few steps, evaluated, and asked for a completion. Its export is
loaded by `transformers`, whose logits are compared with those of the run. Prints a row for each
model; FOLDER/MODEL_TYPE.log has the commands and what they print. Replaces the files of
an earlier call. Exits with 1 if one fails.

Needs `pip install -e .[hf]`. Three minutes for each model on a CPU core, mostly of compilation.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
import tokenizers
import torch
import transformers

import maxlite
from maxlite.hf.families import FAMILIES
from maxlite.hf.text_model import LARGER_MODELS

ROOT = Path(__file__).resolve().parents[2]
BASE = str(ROOT / "configs" / "base.yml")
CHARACTERS = " \n#'(),.:=_abcdefghijklmnopqrstuvwxyz"
SPECIAL = ("<unk>", "<s>", "</s>")  # bos is 1 and eos 2, as in config.json
LENGTH = 32
TOLERANCE = 1e-5  # of logits, relative to the largest
PROMPT = "class "
TRAIN = (
  f"dataset_path={ROOT / 'docs' / '*.md'}",
  f"max_target_length={LENGTH}",
  "per_device_batch_size=2",
  "steps=4",
  "log_period=1",
  "eval_interval=0",
  "eval_steps=2",
)
# Optimized for compile time, not run time.
FAST = {"xla_backend_optimization_level": 0}


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
  parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "hf_commands")
  parser.add_argument("model_type", nargs="*", default=[*FAMILIES, *LARGER_MODELS])
  args = parser.parse_args()
  transformers.utils.logging.disable_progress_bar()
  args.out.mkdir(parents=True, exist_ok=True)
  print("| model_type | loss of the steps | eval_loss | logits |")
  print("|---|---|---|---|", flush=True)
  num_failed = 0
  for model_type in args.model_type:
    try:
      result = check(model_type, args.out.resolve())
    except subprocess.CalledProcessError as error:
      result = f"failed: {' '.join(error.cmd[1:])} |"
      num_failed += 1
    except (OSError, ValueError) as error:  # of transformers, for an export that it cannot load
      result = f"failed: {str(error).splitlines()[0]} |"
      num_failed += 1
    print(f"| `{model_type}` | {result}", flush=True)
  return min(num_failed, 1)


def check(model_type: str, out: Path) -> str:
  """Run all commands on a new model and return the cells of its row."""
  folder = out / model_type
  export = out / f"{model_type}_export"
  run_folder = out / "runs" / f"{model_type}_run"
  for earlier in (folder, export, run_folder):
    shutil.rmtree(earlier, ignore_errors=True)
  shell = Shell(out, out / f"{model_type}.log")
  script = ROOT / "tools" / "fixtures" / "hf_parity.py"
  shell.run(str(script), "--only-models", "--out", str(out), model_type)
  write_tokenizer(folder)
  run = f"run_name={model_type}_run"
  shell.run("-m", "maxlite.convert", "from_hf", str(folder), run, f"max_target_length={LENGTH}")
  trained = shell.run("-m", "maxlite.train", BASE, run, *TRAIN)
  evaluated = shell.run("-m", "maxlite.evaluate", BASE, run, "eval_steps=2")
  shell.run("-m", "maxlite.generate", BASE, run, f"prompt={PROMPT}", "max_new_tokens=8")
  shell.run("-m", "maxlite.convert", "to_hf", run, f"output_path={export}")
  error = logits_error(run_folder, export)
  if not error <= TOLERANCE:
    raise ValueError(f"the logits of the export differ by {error:.0e} of the largest")
  losses = re.findall(r"loss +([\d.]+)  lr", trained)
  (eval_loss,) = re.findall(r"eval_loss ([\d.]+)", evaluated)
  return f"{' '.join(losses)} | {eval_loss} | {error:.0e} |"


class Shell:
  """Runs Python commands in the folder `cwd` and appends them and their output to `log`."""

  def __init__(self, cwd: Path, log: Path) -> None:
    self._cwd = cwd
    self._log = log
    log.unlink(missing_ok=True)

  def run(self, *args: str) -> str:
    """Return what the command prints; raise CalledProcessError if it fails."""
    self._append(f"$ python {' '.join(args)}\n")
    flags = " ".join(f"--{name}={value}" for name, value in FAST.items())
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": flags}
    process = subprocess.run(
      [sys.executable, *args],
      cwd=self._cwd,
      env=environment,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      text=True,
      check=False,
    )
    self._append(process.stdout)
    process.check_returncode()
    return process.stdout

  def _append(self, text: str) -> None:
    with self._log.open("a", encoding="utf-8") as log:
      log.write(text)


def write_tokenizer(folder: Path) -> None:
  """Add the files of a tokenizer whose tokens are single characters."""
  tokens = (*SPECIAL, *CHARACTERS)
  vocabulary = {token: number for number, token in enumerate(tokens)}
  model = tokenizers.models.BPE(vocab=vocabulary, merges=[], unk_token=SPECIAL[0])
  tokenizer = tokenizers.Tokenizer(model)
  tokenizer.normalizer = tokenizers.normalizers.Lowercase()
  tokenizer.decoder = tokenizers.decoders.Fuse()
  fast = transformers.PreTrainedTokenizerFast(
    tokenizer_object=tokenizer,
    unk_token=SPECIAL[0],
    bos_token=SPECIAL[1],
    eos_token=SPECIAL[2],
  )
  fast.save_pretrained(folder)


def logits_error(run: Path, export: Path) -> float:
  """Return the largest difference between the logits of a run and of its export, relative."""
  tokenizer = transformers.AutoTokenizer.from_pretrained(export)
  tokens_BT = np.array([tokenizer.encode(PROMPT * 4)])
  model, params = maxlite.load(run)
  ours_BTV = np.asarray(jax.jit(model.apply, compiler_options=FAST)(params, tokens_BT))
  auto = transformers.AutoModelForCausalLM
  # Not in transformers' table of causal models.
  auto.register(transformers.Mistral4Config, transformers.Mistral4ForCausalLM, exist_ok=True)
  theirs = auto.from_pretrained(export)
  with torch.no_grad():
    theirs_BTV = theirs(input_ids=torch.tensor(tokens_BT), use_cache=False).logits.numpy()
  return float(np.abs(ours_BTV - theirs_BTV).max() / np.abs(theirs_BTV).max())


if __name__ == "__main__":
  sys.exit(main())
