"""Time 30 mistakes, from the command to its error, and print a Markdown table of them.

Each is one process that must end with code 2 within LIMIT seconds of CPU time, in one-line errors.

python tools/inspect/mistakes.py
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from maxlite.config import load_config, save_resolved

LIMIT = 0.5  # [s]
ROOT = Path(__file__).resolve().parents[2]
# Program and arguments; FOLDER has the run `mine` and the files of `write_files`.
MISTAKES = (
  "train configs/base.yml ici_fsdp_paralelism=2",
  "train configs/base.yml --noscan_layer",
  "train configs/base.yml dropout_rate=0.1 ici_pipeline_parallelism=2 hf_path=allenai/c4",
  "train configs/base.yml dataset_type=hf attention=flash remat_policy=qkv_proj_offloaded",
  "train configs/base.yml eval_period=100",
  "train configs/base.yml steps=3.5",
  "train configs/base.yml learning_rate=1e-3x",
  "train configs/base.yml warmup_steps_fraction=2",
  "train configs/base.yml steps =3",
  "train configs/base.yml step",
  "train configs/bse.yml",
  "train --flagfile=gone.txt",
  "train --help=stepz",
  "train FOLDER/broken.yml",
  "train FOLDER/twice.yml",
  "train model_name=llama3.1-405b",
  "train configs/base.yml base_num_query_heads=6",
  "train configs/base.yml ici_tensor_parallelism=3",
  "train configs/base.yml capacity_factor=1.5",
  "train configs/base.yml tokenizer_type=huggingface tokenizer_path=gpt2",
  "train configs/base.yml dataset_path=gone/*.txt",
  "train configs/base.yml dataset_type=chat",
  "train configs/base.yml members=[{learning_rte:1}]",
  "train configs/base.yml plugins=gone.py",
  "train configs/base.yml base_output_directory=FOLDER run_name=mine base_emb_dim=64",
  "train configs/base.yml base_output_directory=FOLDER run_name=mine members=[{}]",
  "generate configs/base.yml base_output_directory=FOLDER run_name=gone",
  "evaluate configs/base.yml base_output_directory=FOLDER run_name=mine",
  "convert to_hf run_name=mine",
  "plan configs/base.yml compile_topology_num_slices=2",
)


class Answer(NamedTuple):
  """The end of one process."""

  exit_code: int
  lines: list[str]
  seconds: float
  cpu_seconds: float


def write_files(folder: Path) -> None:
  """Write two wrong files, and a run folder without checkpoints."""
  (folder / "broken.yml").write_text("steps: [1\n", encoding="utf-8")
  (folder / "twice.yml").write_text("steps: 1\nsteps: 2\n", encoding="utf-8")
  save_resolved(load_config([]), folder / "mine" / "config.yml")
  (folder / "mine" / "metrics.jsonl").touch()


def measure(mistake: str, folder: Path) -> Answer:
  """Run one command and return its answer."""
  program, *words = mistake.replace("FOLDER", str(folder)).split()
  before = resource.getrusage(resource.RUSAGE_CHILDREN)
  start = time.perf_counter()
  process = subprocess.run(
    [sys.executable, "-m", f"maxlite.{program}", *words],
    cwd=ROOT,
    env=os.environ | {"PYTHONPATH": str(ROOT)},
    capture_output=True,
    text=True,
    check=False,
  )
  seconds = time.perf_counter() - start
  after = resource.getrusage(resource.RUSAGE_CHILDREN)
  user = after.ru_utime - before.ru_utime
  system = after.ru_stime - before.ru_stime
  return Answer(process.returncode, process.stderr.splitlines(), seconds, user + system)


def answers(folder: Path) -> Iterator[tuple[str, Answer]]:
  """Each mistake with its answer; the first process only fills the caches of files."""
  measure(MISTAKES[0], folder)
  for mistake in MISTAKES:
    yield mistake, measure(mistake, folder)


def main() -> int:
  """Returns the exit code: 1 if an answer is late or not a list of one-line errors."""
  num_wrong = 0
  print("| command | seconds | of CPU | answer |")
  print("|---|---|---|---|")
  with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    write_files(folder)
    for mistake, answer in answers(folder):
      program = mistake.split()[0]
      is_answered = answer.exit_code == 2 and bool(answer.lines)
      is_plain = all(line.startswith(f"maxlite.{program}: ") for line in answer.lines)
      is_right = is_answered and is_plain and answer.cpu_seconds <= LIMIT
      num_wrong += not is_right
      text = " ".join(answer.lines).replace(name, "FOLDER").replace("|", "\\|")
      if not is_right:
        text = f"WRONG: {text}"
      print(f"| `{mistake}` | {answer.seconds:.2f} | {answer.cpu_seconds:.2f} | {text} |")
  print(f"\n{len(MISTAKES) - num_wrong} of {len(MISTAKES)} are answered within {LIMIT} s")
  return int(num_wrong > 0)


if __name__ == "__main__":
  sys.exit(main())
