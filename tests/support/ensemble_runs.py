"""Ensembles of tiny members from the command line, and the rows and checksums of members."""

import contextlib
import json
from pathlib import Path

from support.tiny import KEYS
from support.tiny_run import CLOCK, Output, keys_in

from maxlite.config import load_config
from maxlite.ensemble.run.ensemble_run import run_ensemble
from maxlite.metrics.writers import read_rows

STEPS = 4
TINY = {
  "decoder_block": "llama",
  "base_num_decoder_layers": 1,
  "steps": STEPS,
  "learning_rate_schedule_steps": STEPS,
  "gradient_accumulation_steps": 1,
  "router_jitter": 0,
  "eval_interval": 2,
  "eval_steps": 2,
}
FAST = "{name: fast, learning_rate: 1e-2, init_weights_seed: 1}"
ALIKE = f"{{name: slow, learning_rate: 1e-3}}, {FAST}"
SIZES = "{name: deep, base_num_decoder_layers: 2, base_emb_dim: 24, init_weights_seed: 2}"
MOE = "{name: moe, decoder_block: mixtral, init_weights_seed: 3}"
ONE_EACH = {"ici_ensemble_parallelism": 8, "ici_fsdp_parallelism": 1}
TOLERANCE = 2e-5


def config(folder: Path, members: str, **keys: object):
  keys = KEYS | keys_in(folder, **(TINY | {"run_name": "ens"} | keys))
  arguments = [f"{name}={value}" for name, value in keys.items()]
  return load_config([*arguments, f"members={members}"], needs_data=False)


def start(folder: Path, members: str, output: Output | None = None, **keys: object):
  output = output or Output()
  with contextlib.redirect_stdout(output):
    code = run_ensemble(config(folder, members, **keys))
  return code, output.getvalue()


def rows_of(folder: Path, name: str) -> list[dict]:
  """The rows of a member's metrics without timings."""
  rows = read_rows(folder / "ens/members" / name / "metrics.jsonl")
  for row in rows:
    for key in CLOCK:
      row.pop(key, None)
  return rows


def checksums(folder: Path, name: str, step: int = STEPS) -> dict:
  path = folder / f"ens/members/{name}/checkpoints/{step}/manifest/metadata"
  return json.loads(path.read_text())["body"]["leaves"]


def entries_of(folder):
  """The rows of members.jsonl, best member first."""
  lines = (folder / "ens/members.jsonl").read_text().splitlines()
  return [json.loads(line) for line in lines]
