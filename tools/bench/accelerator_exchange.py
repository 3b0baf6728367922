"""Times of the exchange of rows over the expert axis, in several forms; see accelerator_parts.py.

A form receives the same rows in another way:
- `ragged`: the ragged all-to-all of a training step, with one message per pair of shard and expert.
- `ragged, N messages`: the same collective with each of these messages split into N, because GPUs
  move few large messages slowly.
- `padded`: an all-to-all of blocks that are padded to the largest possible number of rows.
- `all_gather`: all rows of all shards.
"""

import functools
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from maxlite.sharding.all_to_all import (
  Chunks,
  DispatchPlan,
  dispatch,
  padded_all_to_all,
  plan_dispatch,
)

AXES = ("expert",)
ROUNDS = 5

# (rows of this shard, plan) -> rows received
Form = Callable[[jax.Array, DispatchPlan], jax.Array]


class ExchangeSize(NamedTuple):
  """What each shard sends."""

  num_rows: int
  width: int
  num_experts: int  # of all shards

  @property
  def num_received(self) -> int:
    """Rows of the receive buffer."""
    return 2 * self.num_rows


def split_chunks(chunks: Chunks, num_messages: int) -> Chunks:
  """The same rows with every chunk in `num_messages` chunks, whose sizes differ by at most one."""
  part_1n = jnp.arange(num_messages + 1, dtype=jnp.int32)[None]
  sent_cn = chunks.send_sizes[:, None] * part_1n // num_messages  # rows before each message
  received_cn = chunks.recv_sizes[:, None] * part_1n // num_messages
  input_cn = chunks.input_offsets[:, None] + sent_cn[:, :-1]
  output_cn = chunks.output_offsets[:, None] + sent_cn[:, :-1]
  return Chunks(
    input_offsets=input_cn.reshape(-1),
    send_sizes=jnp.diff(sent_cn, axis=1).reshape(-1),
    output_offsets=output_cn.reshape(-1),
    recv_sizes=jnp.diff(received_cn, axis=1).reshape(-1),
  )


def _ragged(
  num_messages: int,
  x: jax.Array,
  plan: DispatchPlan,
) -> jax.Array:
  return dispatch(x, plan.replace(to_experts=split_chunks(plan.to_experts, num_messages)))


def _padded(x: jax.Array, plan: DispatchPlan) -> jax.Array:
  return padded_all_to_all(
    x,
    plan.to_experts,
    plan.num_received,
    plan.mesh_axes,
    zeros=False,
  )


def _all_gather(x: jax.Array, plan: DispatchPlan) -> jax.Array:
  return jax.lax.all_gather(x, plan.mesh_axes, tiled=True)


FORMS: dict[str, Form] = {
  "ragged": dispatch,
  "ragged, 4 messages": functools.partial(_ragged, 4),
  "ragged, 16 messages": functools.partial(_ragged, 16),
  "ragged, 32 messages": functools.partial(_ragged, 32),
  "padded": _padded,
  "all_gather": _all_gather,
}


def build_exchange(
  mesh: Mesh,
  form: Form,
  size: ExchangeSize,
) -> Callable[..., jax.Array]:
  """A jitted function of rows [P * num_rows, width] and counts [P, E] that returns all rows."""

  def on_shard(x: jax.Array, counts_1E: jax.Array) -> jax.Array:
    plan = plan_dispatch(counts_1E[0], AXES, num_sent=size.num_rows, num_received=size.num_received)
    return form(x, plan)

  spec = jax.P(AXES)
  return jax.jit(
    jax.shard_map(
      on_shard,
      mesh=mesh,
      in_specs=(spec, spec),
      out_specs=spec,
    )
  )


def draw_counts(
  size: ExchangeSize,
  num_shards: int,
  skew: float,
) -> np.ndarray:
  """[P, E] rows of each shard for each expert; without skew, nearly the same for all."""
  share_PE = np.random.default_rng(0).uniform(0.5, 1, (num_shards, size.num_experts)) ** skew
  share_PE /= share_PE.sum(axis=1, keepdims=True)
  return np.floor(share_PE * size.num_rows).astype(np.int32)


def median_seconds(
  exchange: Callable[..., jax.Array],
  x: jax.Array,
  counts_PE: np.ndarray,
) -> float:
  """The time of one exchange."""
  seconds = []
  for _ in range(2 + ROUNDS):
    start = time.perf_counter()
    jax.block_until_ready(exchange(x, counts_PE))
    seconds.append(time.perf_counter() - start)
  return statistics.median(seconds[2:])


def time_forms(mesh: Mesh, size: ExchangeSize) -> list[tuple[str, str, str, str]]:
  """Rows of the table: form, load, milliseconds, GB/s that each shard sends to others."""
  num_shards = mesh.size
  x = jnp.ones((num_shards * size.num_rows, size.width), jnp.bfloat16)
  rows = []
  for load, skew in (("uniform", 0.0), ("skewed", 4.0)):
    counts_PE = draw_counts(size, num_shards, skew)
    sent_bytes = counts_PE.sum() / num_shards * size.width * x.dtype.itemsize
    sent_bytes *= (num_shards - 1) / num_shards  # about this share leaves the shard
    for name, form in FORMS.items():
      seconds = median_seconds(build_exchange(mesh, form, size), x, counts_PE)
      rate = sent_bytes / seconds / 1e9
      rows.append((name, load, f"{seconds * 1e3:.2f}", f"{rate:,.2f}"))
  return rows
