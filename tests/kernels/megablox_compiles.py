"""Compiles Megablox for absent TPUs: `python megablox_compiles.py CHIPS SHAPES`.

Prints one JSON line per program: chip, shape, kernels and compile time, or the compiler's error.
Requires libtpu, but no TPU.
"""

import functools
import json
import os
import sys
import time
from typing import NamedTuple

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


class Shape(NamedTuple):
  """The sizes of the matmul of one expert shard."""

  num_rows: int
  num_groups: int
  num_in: int
  num_out: int

  @property
  def transposed(self) -> "Shape":
    """The shape of the matmul back to the width of the rows."""
    return self._replace(num_in=self.num_out, num_out=self.num_in)


SHAPES = {
  "odd": Shape(1000, 3, 200, 136),
  "deepseek2-16b": Shape(49152, 16, 2048, 1408),
  "deepseek2-16b, worst case": Shape(196608, 16, 2048, 1408),
  "deepseek2-16b, all experts": Shape(49152, 64, 2048, 1408),
  "deepseek2-236b": Shape(49152, 40, 5120, 1536),
  "mixtral-8x7b": Shape(49152, 2, 4096, 14336),
  "mixtral-8x7b, all experts": Shape(49152, 8, 4096, 14336),
  "deepseek2-16b, gate and up": Shape(196608, 16, 2048, 2816),
  "mixtral-8x7b, gate and up": Shape(65536, 2, 4096, 28672),
  "qwen3-30b-a3b": Shape(196608, 32, 2048, 768),
}


def compile_for(chip: str, shape: Shape) -> str:
  """The program's HLO: value and both gradients, bfloat16 rows and float32 weights."""
  topology = topologies.get_topology_desc(platform="tpu", **CHIPS[chip])
  mesh = jax.sharding.Mesh(np.array(topology.devices[:1]), ("expert",))
  whole = PartitionSpec()
  multiply = functools.partial(grouped_matmul, backend="megablox")
  # check_vma=False: JAX's kernels do not declare the varying axes of their results.
  sharded = jax.shard_map(multiply, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)

  def all_three(x_MD, w_GDF, sizes_G, dy_MF):
    def multiply_groups(x_MD, w_GDF):
      return sharded(x_MD, w_GDF, sizes_G)

    y_MF, vjp = jax.vjp(multiply_groups, x_MD, w_GDF)
    return y_MF, *vjp(dy_MF)

  def array(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, whole))

  lowered = jax.jit(all_three).lower(
    array((shape.num_rows, shape.num_in), jnp.bfloat16),
    array((shape.num_groups, shape.num_in, shape.num_out), jnp.float32),
    array((shape.num_groups,), jnp.int32),
    array((shape.num_rows, shape.num_out), jnp.bfloat16),
  )
  return lowered.compile().as_text()


def main(chips: list[str], shapes: list[str]) -> None:
  for chip in chips:
    for name in shapes:
      for shape in (SHAPES[name], SHAPES[name].transposed):
        start = time.perf_counter()
        report = {"chip": chip, "shape": name, "in": shape.num_in, "out": shape.num_out}
        try:
          hlo = compile_for(chip, shape)
          report["kernels"] = hlo.count('custom_call_target="tpu_custom_call"')
          report["dense_products"] = hlo.count(" dot(") + hlo.count(" convolution(")
        except jax.errors.JaxRuntimeError as error:
          report["error"] = str(error)[:2000]
        report["seconds"] = round(time.perf_counter() - start, 1)
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
  main(sys.argv[1].split(","), sys.argv[2].split(";"))
