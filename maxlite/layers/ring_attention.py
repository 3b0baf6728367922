"""Ring attention over the context axis: no shard ever holds the keys of all positions.

Every shard has two chunks of n queries and of n keys (`zigzag_chunks`). Keys and values visit the
shards one after the other, in the backward pass with their gradients; each step of the ring has two
pairs of chunks that are not in the future, the first one three. Results of chunks are merged by
their log-sum-exp.

Source: Liu et al., Ring Attention with Blockwise Transformers (2023), section 3.

Here `i` and `j` count a shard's two chunks of queries and of keys; arrays are [2, b, n, ...].
"""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxlite.config.errors import UserError
from maxlite.config.registry import PARTIAL_ATTENTION_BACKENDS
from maxlite.kernels.attention.reference import RESIDUAL_NAME, AttentionMask
from maxlite.kernels.numerics import accumulator_dtype
from maxlite.sharding.collectives import from_zigzag, to_zigzag, zigzag_chunks


class _Ring(NamedTuple):
  context: tuple[str, ...]
  backend: str
  block_q: int
  scale: float
  soft_cap: float = 0.0
  window: int | None = None

  @property
  def kernel_options(self) -> dict[str, Any]:
    return {"block_q": self.block_q, "scale": self.scale, "soft_cap": self.soft_cap}


def ring_attention(
  context: tuple[str, ...], q_bthc, k_btgc, v_btgc, sink_h, segment_bt, segment_bS, **options
) -> jax.Array:
  """o_bthc of this shard's positions.

  Args:
    options: backend, block_q, scale, soft_cap and window; see kernels/attention/api.py.

  Raises:
    UserError: the backend cannot merge results of chunks, or chunks would differ in size.
  """
  ring = _Ring(context, **options)
  if ring.backend not in PARTIAL_ATTENTION_BACKENDS:
    raise UserError(
      f"context_parallel_strategy=ring does not support attention={ring.backend}; write "
      "context_parallel_strategy=ulysses, or attention=chunked"
    )
  if segment_bt.shape[1] % 2:
    raise UserError(
      f"context_parallel_strategy=ring: {segment_bt.shape[1]} positions per shard must be even; "
      "change max_target_length or ici_context_parallelism"
    )
  operands = (to_zigzag(context, x) for x in (q_bthc, k_btgc, v_btgc))
  return from_zigzag(context, _attend(ring, *operands, sink_h, segment_bS))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(ring: _Ring, q_2bnhc, k_2bngc, v_2bngc, sink_h, segment_bS) -> jax.Array:
  return _forward(ring, q_2bnhc, k_2bngc, v_2bngc, sink_h, segment_bS)[0]


def _forward(ring: _Ring, q_2bnhc, k_2bngc, v_2bngc, sink_h, segment_bS):
  """(o_2bnhc, residuals)"""
  kernel, dtype = PARTIAL_ATTENTION_BACKENDS[ring.backend], accumulator_dtype(q_2bnhc.dtype)
  lse_2bhn = jnp.full_like(q_2bnhc[..., 0].swapaxes(2, 3), jnp.finfo(dtype).min, dtype=dtype)
  if sink_h is not None:
    lse_2bhn = jnp.zeros_like(lse_2bhn) + sink_h.astype(dtype)[None, None, :, None]
  o_2bnhc = jnp.zeros_like(q_2bnhc, shape=(*q_2bnhc.shape[:-1], v_2bngc.shape[-1]), dtype=dtype)

  def add_pair(state, kv, i, j, mask):
    o, lse = kernel.forward(q_2bnhc[i], kv[0][j], kv[1][j], mask, **ring.kernel_options)
    merged = _merge(state[0][i], state[1][i], o.astype(dtype), lse)
    return tuple(total.at[i].set(new) for total, new in zip(state, merged, strict=True))

  def step(carry, index):
    kv, state = carry
    state = _add_pairs(ring, add_pair, state, kv, index, segment_bS)
    return (_pass_on(ring, kv), state), None

  last = jax.lax.axis_size(ring.context) - 1
  carry = (k_2bngc, v_2bngc), (o_2bnhc, lse_2bhn)
  (kv, state), _ = jax.lax.scan(step, carry, jnp.arange(last, dtype=jnp.int32))
  o_2bnhc, lse_2bhn = _add_pairs(ring, add_pair, state, kv, last, segment_bS)
  results = checkpoint_name((o_2bnhc.astype(q_2bnhc.dtype), lse_2bhn), RESIDUAL_NAME)
  return results[0], (q_2bnhc, k_2bngc, v_2bngc, sink_h, segment_bS, *results)


def _backward(ring: _Ring, residuals, do_2bnhc):
  q_2bnhc, k_2bngc, v_2bngc, sink_h, segment_bS, o_2bnhc, lse_2bhn = residuals
  kernel, dtype = PARTIAL_ATTENTION_BACKENDS[ring.backend], lse_2bhn.dtype

  def add_pair(state, kv, i, j, mask):
    operands = q_2bnhc[i], kv[0][j], kv[1][j], mask, o_2bnhc[i], lse_2bhn[i], do_2bnhc[i]
    gradients = kernel.gradients(*operands, **ring.kernel_options)
    added = zip(state, gradients, (i, j, j), strict=True)
    return tuple(total.at[chunk].add(new.astype(dtype)) for total, new, chunk in added)

  def step(carry, index):
    kv, state = carry
    dq, *dkv = _add_pairs(ring, add_pair, state, kv, index, segment_bS)
    return (_pass_on(ring, kv), (dq, *_pass_on(ring, dkv))), None

  state = tuple(jnp.zeros_like(x, dtype=dtype) for x in (q_2bnhc, k_2bngc, v_2bngc))
  steps = jnp.arange(jax.lax.axis_size(ring.context), dtype=jnp.int32)
  (_, state), _ = jax.lax.scan(step, ((k_2bngc, v_2bngc), state), steps)
  dsink_h = None
  if sink_h is not None:
    mean_2bnh = (do_2bnhc.astype(dtype) * o_2bnhc.astype(dtype)).sum(-1)
    p_2bhn = jnp.exp(sink_h.astype(dtype)[None, None, :, None] - lse_2bhn)
    dsink_h = -(p_2bhn * mean_2bnh.swapaxes(2, 3)).sum((0, 1, 3)).astype(sink_h.dtype)
  return *(total.astype(q_2bnhc.dtype) for total in state), dsink_h, None


_attend.defvjp(_forward, _backward)


def _add_pairs(ring: _Ring, add_pair, state, kv, step, segment_bS):
  """`state` with the pairs of this shard's queries and the keys that it holds at this step."""
  num_shards, size = jax.lax.axis_size(ring.context), kv[0].shape[2]
  shard = jax.lax.axis_index(ring.context)
  q_chunks, k_chunks = (zigzag_chunks(x, num_shards) for x in (shard, (shard - step) % num_shards))
  segment = lambda chunk: jax.lax.dynamic_slice_in_dim(segment_bS, chunk * size, size, axis=1)
  for (i, q_chunk), (j, k_chunk) in itertools.product(enumerate(q_chunks), enumerate(k_chunks)):
    q_start = (q_chunk - k_chunk) * size
    mask = AttentionMask(segment(q_chunk), segment(k_chunk), q_start, ring.window)
    add = functools.partial(add_pair, i=i, j=j, mask=mask)
    is_visible = _is_visible(q_chunk, k_chunk, size, ring.window)
    state = jax.lax.cond(is_visible, add, lambda state, kv: state, state, kv)
  return state


def _is_visible(q_chunk: Any, k_chunk: Any, size: int, window: int | None) -> Any:
  """Whether any query of a chunk may attend any key of another, by their positions."""
  is_past = k_chunk <= q_chunk
  # From the last key to the first query.
  return is_past if window is None else is_past & ((q_chunk - k_chunk - 1) * size + 1 < window)


def _merge(o_bnhc, lse_bhn, other_o_bnhc, other_lse_bhn) -> tuple[jax.Array, jax.Array]:
  """Output and log-sum-exp of two disjoint sets of keys."""
  total_bhn = jnp.logaddexp(lse_bhn, other_lse_bhn)
  weight, other_weight = (
    jnp.exp(lse - total_bhn).swapaxes(1, 2)[..., None] for lse in (lse_bhn, other_lse_bhn)
  )
  return o_bnhc * weight + other_o_bnhc * other_weight, total_bhn


def _pass_on(ring: _Ring, tree: Any) -> Any:
  """The arrays of the previous shard of the ring."""
  num_shards = jax.lax.axis_size(ring.context)
  pairs = [(shard, (shard + 1) % num_shards) for shard in range(num_shards)]
  return jax.tree.map(lambda x: jax.lax.ppermute(x, ring.context, pairs), tree)
