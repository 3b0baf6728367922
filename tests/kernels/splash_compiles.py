"""Compiles splash attention for absent TPUs: `python splash_compiles.py CHIPS SHAPES`.

Prints one JSON line per program: chip, shape, kernels and compile time, or the compiler's error.
Requires libtpu, but no TPU.
"""

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
from megablox_compiles import CHIPS

from maxlite.kernels.attention.api import attention
from maxlite.planning.hlo import parse
from maxlite.planning.hlo_cost import matmul_flops
from maxlite.planning.hlo_traffic import hbm_traffic


class Shape(NamedTuple):
  """The sizes and options of an attention layer."""

  num_positions: int
  num_heads: int
  num_kv_heads: int
  num_channels: int  # of queries and keys
  num_value_channels: int
  window: int | None = None
  soft_cap: float = 0.0
  sinks: bool = False
  dtype: str = "bfloat16"


SHAPES = {
  "small": Shape(2304, 4, 2, 192, 128, window=100, soft_cap=50.0, sinks=True),
  "llama3.1-8b": Shape(8192, 32, 8, 128, 128),
  "deepseek2-16b": Shape(2048, 16, 16, 192, 128),
  "gemma2-9b": Shape(8192, 16, 8, 256, 256, window=4096, soft_cap=50.0),
  "gpt-oss-20b": Shape(8192, 64, 8, 64, 64, window=128, sinks=True),
  "gemma3-4b": Shape(8192, 8, 4, 256, 256, window=1024),
  "float32": Shape(2048, 2, 2, 256, 256, soft_cap=50.0, sinks=True, dtype="float32"),
}


def compile_for(chip: str, shape: str) -> str:
  """The program's HLO: value and all gradients."""
  topology = topologies.get_topology_desc(platform="tpu", **CHIPS[chip])
  mesh = jax.sharding.Mesh(np.array(topology.devices[:1]), ("data",))
  sizes = SHAPES[shape]

  def attend(q_BTHC, k_BSGC, v_BSGC, sink_H, segment_BT):
    return attention(
      q_BTHC,
      k_BSGC,
      v_BSGC,
      q_segment_BT=segment_BT,
      kv_segment_BS=segment_BT,
      scale=sizes.num_channels**-0.5,
      backend="splash",
      block_q=64,
      window=sizes.window,
      soft_cap=sizes.soft_cap,
      sink_H=sink_H if sizes.sinks else None,
    )

  whole = PartitionSpec()
  # check_vma=False: JAX's kernels do not declare the varying axes of their results.
  sharded = jax.shard_map(attend, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)

  def value_and_gradients(do_BTHC, segment_BT, q_BTHC, k_BSGC, v_BSGC, sink_H):
    def attend_in_segments(q_BTHC, k_BSGC, v_BSGC, sink_H):
      return sharded(q_BTHC, k_BSGC, v_BSGC, sink_H, segment_BT)

    o_BTHC, vjp = jax.vjp(attend_in_segments, q_BTHC, k_BSGC, v_BSGC, sink_H)
    return o_BTHC, vjp(do_BTHC)

  def array(shape, dtype=sizes.dtype):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=NamedSharding(mesh, whole))

  queries = (1, sizes.num_positions, sizes.num_heads)
  keys = (1, sizes.num_positions, sizes.num_kv_heads)
  lowered = jax.jit(value_and_gradients).lower(
    array((*queries, sizes.num_value_channels)),
    array((1, sizes.num_positions), "int32"),
    array((*queries, sizes.num_channels)),
    array((*keys, sizes.num_channels)),
    array((*keys, sizes.num_value_channels)),
    array((sizes.num_heads,), "float32"),
  )
  return lowered.compile().as_text()


def main(chips: list[str], shapes: list[str]) -> None:
  for chip in chips:
    for shape in shapes:
      start = time.perf_counter()
      report = {"chip": chip, "shape": shape}
      try:
        hlo = compile_for(chip, shape)
        report["kernels"] = hlo.count('custom_call_target="tpu_custom_call"')
        report["flops"] = matmul_flops(parse(hlo)).total
        report["hbm_bytes"] = sum(part.num_bytes for part in hbm_traffic(parse(hlo)))
      except jax.errors.JaxRuntimeError as error:
        report["error"] = str(error)[:2000]
      report["seconds"] = round(time.perf_counter() - start, 1)
      print(json.dumps(report), flush=True)


if __name__ == "__main__":
  main(sys.argv[1].split(","), sys.argv[2].split(";"))
