"""Measure the peak memory of converting a checkpoint with random weights.

python tools/inspect/convert_memory.py [--layers 3] [--width 4096]

Each direction runs in a separate process, once with two layers of a tiny model, whose peak is the
memory of Python and JAX, and once with the large model, which has 2.1 GB with the defaults.
"""

import argparse
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from maxlite.hf.hf_folder import FolderWriter, write_json

VOCAB = 32_000
BFLOAT16 = np.dtype(jnp.bfloat16)
MB = 1e6
ROWS_AT_ONCE = 1024  # of a tensor that is written
# Runs a command and prints the peak resident memory of that process [KiB].
MEASURE = """
import resource, subprocess, sys

subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def hf_config(layers: int, width: int) -> dict:
  return {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": width,
    "intermediate_size": 4 * width,
    "num_hidden_layers": layers,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-5,
  }


def shapes(layers: int, width: int) -> dict[str, tuple[int, ...]]:
  """Return {tensor: shape}."""
  hidden = 4 * width
  block = {
    "self_attn.q_proj.weight": (width, width),
    "self_attn.k_proj.weight": (width, width),
    "self_attn.v_proj.weight": (width, width),
    "self_attn.o_proj.weight": (width, width),
    "mlp.gate_proj.weight": (hidden, width),
    "mlp.up_proj.weight": (hidden, width),
    "mlp.down_proj.weight": (width, hidden),
    "input_layernorm.weight": (width,),
    "post_attention_layernorm.weight": (width,),
  }
  tensors: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (VOCAB, width),
    "model.norm.weight": (width,),
    "lm_head.weight": (VOCAB, width),
  }
  for layer in range(layers):
    for name, shape in block.items():
      tensors[f"model.layers.{layer}.{name}"] = shape
  return tensors


def write_checkpoint(
  folder: Path,
  layers: int,
  width: int,
) -> None:
  folder.mkdir()
  write_json(folder / "config.json", hf_config(layers, width))
  tensors = shapes(layers, width)
  types_and_shapes = {name: (BFLOAT16, shape) for name, shape in tensors.items()}
  writer = FolderWriter(folder, types_and_shapes, 10**9)
  rng = np.random.default_rng(0)
  for name, (num_rows, *row_shape) in tensors.items():
    for start in range(0, num_rows, ROWS_AT_ONCE):
      end = min(start + ROWS_AT_ONCE, num_rows)
      rows = rng.normal(0, 0.02, (end - start, *row_shape))
      writer.write_rows(name, start, rows.astype(BFLOAT16))
  writer.close()


def peak(*arguments: str) -> float:
  """Return the peak resident memory of `python -m maxlite.convert ARGUMENTS` [bytes]."""
  convert = [sys.executable, "-m", "maxlite.convert", *arguments]
  measured = subprocess.run(
    [sys.executable, "-c", MEASURE, *convert],
    check=True,
    stdout=subprocess.PIPE,
    text=True,
  )
  return int(measured.stdout) * 1024


class Peaks(NamedTuple):
  """The peak memory of both directions [bytes]."""

  from_hf: float
  to_hf: float


def measure(
  root: Path,
  name: str,
  layers: int,
  width: int,
) -> Peaks:
  """Convert a checkpoint to a run and back, in subfolders of `root`."""
  folder = root / name
  write_checkpoint(folder, layers, width)
  run = [f"base_output_directory={root}", f"run_name={name}_run", "weight_dtype=bfloat16"]
  return Peaks(
    from_hf=peak("from_hf", str(folder), *run),
    to_hf=peak("to_hf", *run, f"output_path={folder}_again"),
  )


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
  parser.add_argument("--layers", type=int, default=3)
  parser.add_argument("--width", type=int, default=4096)
  args = parser.parse_args()
  with tempfile.TemporaryDirectory() as root:
    small = measure(Path(root), "small", 2, 64)
    large = measure(Path(root), "large", args.layers, args.width)
  sizes = {}
  for name, shape in shapes(args.layers, args.width).items():
    sizes[name] = BFLOAT16.itemsize * math.prod(shape)
  layer = 0
  for name, size in sizes.items():
    if ".layers.0." in name:
      layer += size
  largest = max(layer, sizes["lm_head.weight"])
  whole = sum(sizes.values())
  print(f"checkpoint {whole / MB:,.0f} MB, largest layer {largest / MB:,.0f} MB")
  for command, constant, total in zip(Peaks._fields, small, large, strict=True):
    print(
      f"{command}: peak {total / MB:,.0f} MB, of which {constant / MB:,.0f} MB for Python and JAX; "
      f"the rest is {(total - constant) / largest:.2f} x the largest layer"
    )


if __name__ == "__main__":
  main()
