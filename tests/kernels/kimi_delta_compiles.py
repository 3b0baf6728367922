"""Compare tokamax's Kimi delta attention with the gated delta rule in chunks.

  python tests/kernels/kimi_delta_compiles.py errors           # interpreted on a CPU
  python tests/kernels/kimi_delta_compiles.py programs [NAME]  # compiled for a TPU v6e, by libtpu

Both run value and gradients. Kimi delta attention has a decay per channel; one decay for all
channels of a head is the gated delta rule.
"""

import functools
import json
import os
import sys
from collections.abc import Callable
from unittest import mock

from maxlite.plan import COMPILE_ONLY_ENV

os.environ.update(COMPILE_ONLY_ENV)

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding, PartitionSpec
from tokamax import config as tokamax_config
from tokamax.ops import tpu as tokamax_tpu

from maxlite.kernels.gated_delta import chunked, reference
from maxlite.kernels.gated_delta.inputs import DeltaInputs
from maxlite.planning.hlo import parse
from maxlite.planning.hlo_traffic import hbm_traffic

Rule = Callable[[DeltaInputs], jax.Array]

NUM_CHANNELS = 128  # of keys and of values
PROGRAM_SHAPE = (1, 4096, 64)  # rows, positions and heads of a layer of qwen3.5-397b-a17b
ERROR_SHAPE = (1, 128, 1)
STARTS = (0, 50, 65)  # of documents
MEAN_LOG_DECAYS = (-1, -5)
RESULTS = ("y", "dq", "dk", "dv", "dlog_decay", "dbeta")


def run_reference(inputs: DeltaInputs) -> jax.Array:
  return reference.gated_delta(inputs, _zero_state(inputs))[0]


def run_chunked(inputs: DeltaInputs) -> jax.Array:
  return chunked.gated_delta(inputs, _zero_state(inputs))[0]


def _zero_state(inputs: DeltaInputs) -> jax.Array:
  num_rows, _, num_heads, num_channels = inputs.q_BTHC.shape
  return jnp.zeros((num_rows, num_heads, num_channels, inputs.v_BTHU.shape[-1]), jnp.float32)


def run_kimi(max_documents: int | None, inputs: DeltaInputs) -> jax.Array:
  """Runs tokamax's kernels with at most `max_documents` per row; None: each row is one."""
  log_decay_HBT = jnp.moveaxis(inputs.log_decay_BTH, 2, 0)
  segment_BT = None
  if max_documents is not None:
    segment_BT = jnp.cumsum(inputs.is_start_BT, axis=1, dtype=jnp.int32)
  with tokamax_config.cross_compile(True):
    y_HBTU, _ = tokamax_tpu.KimiDeltaAttention()(
      query=jnp.moveaxis(inputs.q_BTHC, 2, 0),
      key=jnp.moveaxis(inputs.k_BTHC, 2, 0),
      value=jnp.moveaxis(inputs.v_BTHU, 2, 0),
      gate=jnp.broadcast_to(log_decay_HBT[..., None], (*log_decay_HBT.shape, NUM_CHANNELS)),
      beta=jnp.moveaxis(inputs.beta_BTH, 2, 0),
      scale=1.0,
      segment_ids=segment_BT,
      max_num_segments=max_documents,
    )
  return jnp.moveaxis(y_HBTU, 0, 2)


def with_gradients(rule: Rule, inputs: DeltaInputs, dy_BTHU: jax.Array) -> tuple[jax.Array, ...]:
  """Returns y and the gradients of all operands except the starts of documents."""

  def run(*floats: jax.Array) -> jax.Array:
    return rule(DeltaInputs(*floats, inputs.is_start_BT))

  y_BTHU, vjp = jax.vjp(run, *inputs[:-1])
  return y_BTHU, *vjp(dy_BTHU)


def print_errors() -> None:
  """Print the largest errors relative to the largest element, by the recurrence in float32."""
  os.environ["PALLAS_INTERPRET"] = "1"  # read by tokamax
  v6e = pltpu.get_tpu_info_for_chip(pltpu.ChipVersion.TPU_V6E, 1)
  rules = {"chunked": run_chunked, "kimi": functools.partial(run_kimi, len(STARTS))}
  with mock.patch.object(pltpu, "get_tpu_info", return_value=v6e):
    for mean in MEAN_LOG_DECAYS:
      inputs, dy_BTHU = _draw(mean)
      expected = with_gradients(run_reference, inputs, dy_BTHU)
      for name, rule in rules.items():
        report = {"mean_log_decay": mean, "rule": name}
        found = with_gradients(rule, inputs, dy_BTHU)
        for result, want, got in zip(RESULTS, expected, found, strict=True):
          error = jnp.max(jnp.abs(got - want)) / jnp.max(jnp.abs(want))
          report[result] = f"{error:.1e}"
        print(json.dumps(report), flush=True)


def _draw(mean_log_decay: float) -> tuple[DeltaInputs, jax.Array]:
  """Draws operands and the gradient of y; log decays are exponentially distributed."""
  rng = np.random.default_rng(0)
  is_start_BT = np.zeros(ERROR_SHAPE[:2], bool)
  is_start_BT[:, list(STARTS)] = True

  def normal() -> np.ndarray:
    return rng.normal(size=(*ERROR_SHAPE, NUM_CHANNELS)).astype(np.float32)

  def unit_length() -> jax.Array:
    x = normal()
    return jnp.asarray(x / np.linalg.norm(x, axis=-1, keepdims=True))

  inputs = DeltaInputs(
    q_BTHC=unit_length(),
    k_BTHC=unit_length(),
    v_BTHU=jnp.asarray(normal()),
    log_decay_BTH=jnp.asarray(mean_log_decay * rng.exponential(size=ERROR_SHAPE), jnp.float32),
    beta_BTH=jnp.asarray(rng.uniform(size=ERROR_SHAPE), jnp.float32),
    is_start_BT=jnp.asarray(is_start_BT),
  )
  return inputs, jnp.asarray(normal())


def print_programs(names: list[str]) -> None:
  """Print the bytes that programs for one chip move between HBM and the chip, and keep in HBM."""
  topology = topologies.get_topology_desc(platform="tpu", topology_name="v6e:2x2")
  mesh = jax.sharding.Mesh(np.array(topology.devices[:1]), ("data",))
  whole = PartitionSpec()
  rules = {
    "chunked": run_chunked,
    "kimi": functools.partial(run_kimi, None),
    "kimi, 16 documents": functools.partial(run_kimi, 16),
  }

  def array(shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, whole))

  wide = array((*PROGRAM_SHAPE, NUM_CHANNELS))
  narrow = array(PROGRAM_SHAPE)
  inputs = DeltaInputs(wide, wide, wide, narrow, narrow, array(PROGRAM_SHAPE[:2], jnp.bool_))
  for name in names or rules:
    sharded = jax.shard_map(
      rules[name],
      mesh=mesh,
      in_specs=(whole,),
      out_specs=whole,
      # tokamax's kernels do not declare the varying axes of their results.
      check_vma=False,
    )

    def run(inputs: DeltaInputs, dy: jax.Array, rule: Rule = sharded) -> tuple[jax.Array, ...]:
      return with_gradients(rule, inputs, dy)

    program = jax.jit(run).lower(inputs, wide).compile()
    traffic = sum(part.num_bytes for part in hbm_traffic(parse(program.as_text())))
    temporaries = program.memory_analysis().temp_size_in_bytes
    report = {"rule": name, "HBM_GB": round(traffic / 1e9, 2)}
    report["temporaries_GB"] = round(temporaries / 1e9, 2)
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
  if sys.argv[1] == "errors":
    print_errors()
  else:
    print_programs(sys.argv[2:])
