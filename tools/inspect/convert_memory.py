"""Measure the peak memory of converting a checkpoint with random weights.

python tools/inspect/convert_memory.py [--layers 3] [--width 4096]

Each direction runs in a separate process, once with two layers of a tiny model, whose peak is the
memory of Python and JAX, and once with the large model, which has 2.1 GB with the defaults.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from maxlite.hf.hf_folder import FolderWriter, write_json

VOCAB = 32_000
BFLOAT16 = np.dtype(jnp.bfloat16)
MB = 1e6


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
  square, up, down = (width, width), (4 * width, width), (width, 4 * width)
  block = {f"self_attn.{name}_proj.weight": square for name in "qkvo"}
  block |= {"mlp.gate_proj.weight": up, "mlp.up_proj.weight": up, "mlp.down_proj.weight": down}
  block |= {"input_layernorm.weight": (width,), "post_attention_layernorm.weight": (width,)}
  tensors = {"model.embed_tokens.weight": (VOCAB, width), "model.norm.weight": (width,)}
  tensors["lm_head.weight"] = (VOCAB, width)
  for layer in range(layers):
    tensors |= {f"model.layers.{layer}.{name}": shape for name, shape in block.items()}
  return tensors


def write_checkpoint(folder: Path, layers: int, width: int) -> None:
  folder.mkdir()
  write_json(folder / "config.json", hf_config(layers, width))
  tensors = shapes(layers, width)
  writer = FolderWriter(folder, {name: (BFLOAT16, shape) for name, shape in tensors.items()}, 10**9)
  rng = np.random.default_rng(0)
  for name, shape in tensors.items():
    for low in range(0, shape[0], 1024):
      rows = (min(low + 1024, shape[0]) - low, *shape[1:])
      writer.write_rows(name, low, rng.normal(0, 0.02, rows).astype(BFLOAT16))
  writer.close()


def peak(*arguments: str) -> float:
  """Return the peak resident memory of `python -m maxlite.convert ARGUMENTS` [bytes]."""
  code = (
    "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, "
    "stdout=subprocess.DEVNULL); print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
  )
  command = [sys.executable, "-c", code, sys.executable, "-m", "maxlite.convert", *arguments]
  return int(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout) * 1024


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
  parser.add_argument("--layers", type=int, default=3)
  parser.add_argument("--width", type=int, default=4096)
  args = parser.parse_args()
  with tempfile.TemporaryDirectory() as root:
    peaks = {}
    for name, layers, width in (("small", 2, 64), ("large", args.layers, args.width)):
      folder, run = Path(root) / name, [f"base_output_directory={root}", f"run_name={name}_run"]
      write_checkpoint(folder, layers, width)
      run.append("weight_dtype=bfloat16")
      peaks[name, "from_hf"] = peak("from_hf", str(folder), *run)
      peaks[name, "to_hf"] = peak("to_hf", *run, f"output_path={folder}_again")
  sizes = {name: 2 * np.prod(s) for name, s in shapes(args.layers, args.width).items()}
  layer = sum(size for name, size in sizes.items() if ".layers.0." in name)
  largest = max(layer, sizes["lm_head.weight"])
  print(f"checkpoint {sum(sizes.values()) / MB:,.0f} MB, largest layer {largest / MB:,.0f} MB")
  for command in ("from_hf", "to_hf"):
    constant, total = peaks["small", command], peaks["large", command]
    print(
      f"{command}: peak {total / MB:,.0f} MB, of which {constant / MB:,.0f} MB for Python and JAX; "
      f"the rest is {(total - constant) / largest:.2f} x the largest layer"
    )


if __name__ == "__main__":
  main()
