"""Compiles Megablox for absent TPUs: `python megablox_compiles.py CHIPS SHAPES`.

Prints one JSON line per program: chip, shape, kernels and compile time, or the compiler's error.
Requires libtpu, but no TPU.
"""

import functools
import json
import os
import sys
import time

os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from maxlite.kernels.grouped_matmul.api import grouped_matmul

CHIPS = {
  "v4": {"topology_name": "v4:2x2x1", "chip_config_name": "megacore"},
  "v5e": {"topology_name": "v5e:2x2"},
  "v5p": {"topology_name": "v5p:2x2x1"},
  "v6e": {"topology_name": "v6e:2x2"},
  "tpu7x": {"topology_name": "tpu7x:2x2x1"},
}
# Rows, groups and weight axes of the matmul of one expert shard.
SHAPES = {
  "odd": (1000, 3, 200, 136),
  "deepseek2-16b": (49152, 16, 2048, 1408),
  "deepseek2-16b, worst case": (196608, 16, 2048, 1408),
  "deepseek2-16b, all experts": (49152, 64, 2048, 1408),
  "deepseek2-236b": (49152, 40, 5120, 1536),
  "mixtral-8x7b": (49152, 2, 4096, 14336),
  "mixtral-8x7b, all experts": (49152, 8, 4096, 14336),
  "deepseek2-16b, gate and up": (196608, 16, 2048, 2816),
  "mixtral-8x7b, gate and up": (65536, 2, 4096, 28672),
  "qwen3-30b-a3b": (196608, 32, 2048, 768),
}


def compile_for(chip: str, num_rows: int, num_groups: int, num_in: int, num_out: int) -> str:
  """The program's HLO: value and both gradients, bfloat16 rows and float32 weights."""
  topology = topologies.get_topology_desc(platform="tpu", **CHIPS[chip])
  mesh = jax.sharding.Mesh(np.array(topology.devices[:1]), ("expert",))
  whole = PartitionSpec()
  multiply = functools.partial(grouped_matmul, backend="megablox")
  # check_vma=False: JAX's kernels do not declare the varying axes of their results.
  sharded = jax.shard_map(multiply, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)

  def all_three(x_MD, w_GDF, sizes_G, dy_MF):
    y_MF, vjp = jax.vjp(lambda x, w: sharded(x, w, sizes_G), x_MD, w_GDF)
    return y_MF, *vjp(dy_MF)

  arrays = (
    ((num_rows, num_in), jnp.bfloat16),
    ((num_groups, num_in, num_out), jnp.float32),
    ((num_groups,), jnp.int32),
    ((num_rows, num_out), jnp.bfloat16),
  )
  structs = [jax.ShapeDtypeStruct(*a, sharding=NamedSharding(mesh, whole)) for a in arrays]
  return jax.jit(all_three).lower(*structs).compile().as_text()


def main(chips: list[str], shapes: list[str]) -> None:
  for chip in chips:
    for shape in shapes:
      rows, groups, *dims = SHAPES[shape]
      for num_in, num_out in (dims, dims[::-1]):
        start = time.perf_counter()
        report = {"chip": chip, "shape": shape, "in": num_in, "out": num_out}
        try:
          hlo = compile_for(chip, rows, groups, num_in, num_out)
          report["kernels"] = hlo.count('custom_call_target="tpu_custom_call"')
          report["dense_products"] = hlo.count(" dot(") + hlo.count(" convolution(")
        except jax.errors.JaxRuntimeError as error:
          report["error"] = str(error)[:2000]
        print(json.dumps(report | {"seconds": round(time.perf_counter() - start, 1)}), flush=True)


if __name__ == "__main__":
  main(sys.argv[1].split(","), sys.argv[2].split(";"))
