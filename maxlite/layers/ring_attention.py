"""Ring attention over the context axis: no shard ever holds the keys of all positions.

Every shard has two chunks of n queries and of n keys (`zigzag_chunks`). Keys and values visit the
shards one after the other, in the backward pass with their gradients; each step of the ring has two
pairs of chunks that are not in the future, the first one three. Results of chunks are merged by
their log-sum-exp.

Source: Liu et al., Ring Attention with Blockwise Transformers (2023), section 3.

Here `i` and `j` count a shard's two chunks of queries and of keys; arrays are [2, b, n, ...].
"""

import functools
from typing import NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxlite.errors import UserError
from maxlite.kernels.attention.reference import RESIDUAL_NAME, AttentionMask, ScoreOptions
from maxlite.kernels.numerics import accumulator_dtype
from maxlite.layers.attention_shard import AttentionOptions, ShardOperands
from maxlite.registry import ATTENTION_BACKENDS, imported
from maxlite.sharding.collectives import from_zigzag, to_zigzag, zigzag_chunks


class _Ring(NamedTuple):
  """The shards of the ring, and the options of the kernel."""

  context: tuple[str, ...]
  options: AttentionOptions

  @property
  def num_shards(self) -> int:
    return jax.lax.axis_size(self.context)

  @property
  def score(self) -> ScoreOptions:
    """The options of a kernel for one pair of chunks."""
    return ScoreOptions(
      scale=self.options.scale,
      block_q=self.options.block_q,
      soft_cap=self.options.soft_cap,
    )


class _KeysValues(NamedTuple):
  """The keys and values that a shard holds in one step of the ring."""

  k_2bngc: jax.Array
  v_2bngc: jax.Array


class _Output(NamedTuple):
  """The output over the keys visited so far, and the log-sum-exp of their scores."""

  o_2bnhc: jax.Array
  lse_2bhn: jax.Array


class _Gradients(NamedTuple):
  """Gradients summed so far; those of keys and values travel with them."""

  dq_2bnhc: jax.Array
  dk_2bngc: jax.Array
  dv_2bngc: jax.Array


class _Residuals(NamedTuple):
  """What the backward pass reads."""

  q_2bnhc: jax.Array
  kv: _KeysValues
  sink_h: jax.Array | None
  segment_bS: jax.Array
  o_2bnhc: jax.Array
  lse_2bhn: jax.Array


class _Pair(NamedTuple):
  """One chunk of a shard's queries, and one of the keys that it holds."""

  i: int
  j: int
  mask: AttentionMask


_State = TypeVar("_State")  # what a pass over all pairs accumulates


class _AddPair(Protocol[_State]):
  """Returns the state with the results of one more pair of chunks."""

  def __call__(self, state: _State, kv: _KeysValues, /, *, pair: _Pair) -> _State: ...


def ring_attention(
  context: tuple[str, ...],
  operands: ShardOperands,
  options: AttentionOptions,
) -> jax.Array:
  """o_bthc of this shard's positions.

  Raises:
    UserError: the backend cannot merge results of chunks, or chunks would differ in size.
  """
  if ATTENTION_BACKENDS[options.backend].partial is None:
    raise UserError(
      f"context_parallel_strategy=ring does not support attention={options.backend}; write "
      "context_parallel_strategy=ulysses, or attention=chunked"
    )
  num_positions = operands.segment_bt.shape[1]
  if num_positions % 2:
    raise UserError(
      f"context_parallel_strategy=ring: {num_positions} positions per shard must be even; "
      "change max_target_length or ici_context_parallelism"
    )
  o_2bnhc = _attend(
    _Ring(context, options),
    to_zigzag(context, operands.q_bthc),
    to_zigzag(context, operands.k_bsgc),
    to_zigzag(context, operands.v_bsgc),
    operands.sink_h,
    operands.segment_bS,
  )
  return from_zigzag(context, o_2bnhc)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
  ring: _Ring,
  q_2bnhc: jax.Array,
  k_2bngc: jax.Array,
  v_2bngc: jax.Array,
  sink_h: jax.Array | None,
  segment_bS: jax.Array,
) -> jax.Array:
  """o_2bnhc"""
  o_2bnhc, _ = _forward(ring, q_2bnhc, k_2bngc, v_2bngc, sink_h, segment_bS)
  return o_2bnhc


def _forward(
  ring: _Ring,
  q_2bnhc: jax.Array,
  k_2bngc: jax.Array,
  v_2bngc: jax.Array,
  sink_h: jax.Array | None,
  segment_bS: jax.Array,
) -> tuple[jax.Array, _Residuals]:
  """(o_2bnhc, residuals)"""
  kernel = imported(ATTENTION_BACKENDS[ring.options.backend].partial)
  dtype = accumulator_dtype(q_2bnhc.dtype)

  def add_pair(output: _Output, kv: _KeysValues, *, pair: _Pair) -> _Output:
    o_bnhc, lse_bhn = kernel.forward(
      q_2bnhc[pair.i],
      kv.k_2bngc[pair.j],
      kv.v_2bngc[pair.j],
      pair.mask,
      ring.score,
    )
    return _add_output(output, pair.i, o_bnhc.astype(dtype), lse_bhn)

  def step(carry: tuple[_KeysValues, _Output], index: jax.Array) -> tuple[tuple, None]:
    kv, output = carry
    output = _add_pairs(ring, add_pair, output, kv, index, segment_bS)
    return (_pass_on(ring, kv), output), None

  own_kv = _KeysValues(k_2bngc, v_2bngc)
  output = _first_output(q_2bnhc, v_2bngc, sink_h, dtype)
  last = ring.num_shards - 1
  steps = jnp.arange(last, dtype=jnp.int32)
  (kv, output), _ = jax.lax.scan(step, (own_kv, output), steps)
  output = _add_pairs(ring, add_pair, output, kv, last, segment_bS)
  results = (output.o_2bnhc.astype(q_2bnhc.dtype), output.lse_2bhn)
  o_2bnhc, lse_2bhn = checkpoint_name(results, RESIDUAL_NAME)
  residuals = _Residuals(
    q_2bnhc=q_2bnhc,
    kv=own_kv,
    sink_h=sink_h,
    segment_bS=segment_bS,
    o_2bnhc=o_2bnhc,
    lse_2bhn=lse_2bhn,
  )
  return o_2bnhc, residuals


def _first_output(
  q_2bnhc: jax.Array,
  v_2bngc: jax.Array,
  sink_h: jax.Array | None,
  dtype: jnp.dtype,
) -> _Output:
  """The output over no keys; with sinks, over them."""
  lowest = jnp.finfo(dtype).min
  like_2bhn = q_2bnhc[..., 0].swapaxes(2, 3)
  lse_2bhn = jnp.full_like(like_2bhn, lowest, dtype=dtype)
  if sink_h is not None:
    lse_2bhn = jnp.zeros_like(lse_2bhn) + _per_head(sink_h, dtype)
  o_shape = (*q_2bnhc.shape[:-1], v_2bngc.shape[-1])
  o_2bnhc = jnp.zeros_like(q_2bnhc, shape=o_shape, dtype=dtype)
  return _Output(o_2bnhc, lse_2bhn)


def _add_output(output: _Output, i: int, o_bnhc: jax.Array, lse_bhn: jax.Array) -> _Output:
  """`output` with the results of the queries of chunk i over further keys."""
  merged_o, merged_lse = _merge(output.o_2bnhc[i], output.lse_2bhn[i], o_bnhc, lse_bhn)
  return _Output(
    o_2bnhc=output.o_2bnhc.at[i].set(merged_o),
    lse_2bhn=output.lse_2bhn.at[i].set(merged_lse),
  )


def _backward(
  ring: _Ring,
  residuals: _Residuals,
  do_2bnhc: jax.Array,
) -> tuple[jax.Array | None, ...]:
  """Gradients of the operands of `_attend`."""
  kernel = imported(ATTENTION_BACKENDS[ring.options.backend].partial)
  q_2bnhc = residuals.q_2bnhc

  def add_pair(total: _Gradients, kv: _KeysValues, *, pair: _Pair) -> _Gradients:
    gradients = kernel.gradients(
      q_2bnhc[pair.i],
      kv.k_2bngc[pair.j],
      kv.v_2bngc[pair.j],
      pair.mask,
      ring.score,
      residuals.o_2bnhc[pair.i],
      residuals.lse_2bhn[pair.i],
      do_2bnhc[pair.i],
    )
    return _add_gradients(total, pair, gradients)

  def step(carry: tuple[_KeysValues, _Gradients], index: jax.Array) -> tuple[tuple, None]:
    kv, total = carry
    dq, dk, dv = _add_pairs(ring, add_pair, total, kv, index, residuals.segment_bS)
    kv = _pass_on(ring, kv)
    dk, dv = _pass_on(ring, (dk, dv))
    return (kv, _Gradients(dq, dk, dv)), None

  dtype = residuals.lse_2bhn.dtype
  zeros = _Gradients(
    dq_2bnhc=jnp.zeros_like(q_2bnhc, dtype=dtype),
    dk_2bngc=jnp.zeros_like(residuals.kv.k_2bngc, dtype=dtype),
    dv_2bngc=jnp.zeros_like(residuals.kv.v_2bngc, dtype=dtype),
  )
  steps = jnp.arange(ring.num_shards, dtype=jnp.int32)
  (_, total), _ = jax.lax.scan(step, (residuals.kv, zeros), steps)
  dsink_h = _sink_gradient(residuals, do_2bnhc)
  dq, dk, dv = (gradient.astype(q_2bnhc.dtype) for gradient in total)
  return dq, dk, dv, dsink_h, None


def _add_gradients(
  total: _Gradients,
  pair: _Pair,
  gradients: tuple[jax.Array, jax.Array, jax.Array],
) -> _Gradients:
  """`total` with the gradients of a chunk of queries, and of a chunk of keys and values."""
  dq_bnhc, dk_bngc, dv_bngc = gradients
  dtype = total.dq_2bnhc.dtype
  return _Gradients(
    dq_2bnhc=total.dq_2bnhc.at[pair.i].add(dq_bnhc.astype(dtype)),
    dk_2bngc=total.dk_2bngc.at[pair.j].add(dk_bngc.astype(dtype)),
    dv_2bngc=total.dv_2bngc.at[pair.j].add(dv_bngc.astype(dtype)),
  )


def _sink_gradient(residuals: _Residuals, do_2bnhc: jax.Array) -> jax.Array | None:
  """dsink_h: the gradient of the sinks, each of which is a score whose value is zero."""
  sink_h = residuals.sink_h
  if sink_h is None:
    return None
  lse_2bhn = residuals.lse_2bhn
  dtype = lse_2bhn.dtype
  product_2bnhc = do_2bnhc.astype(dtype) * residuals.o_2bnhc.astype(dtype)
  product_2bnh = product_2bnhc.sum(-1)
  p_2bhn = jnp.exp(_per_head(sink_h, dtype) - lse_2bhn)
  dsink_2bhn = p_2bhn * product_2bnh.swapaxes(2, 3)
  return -dsink_2bhn.sum((0, 1, 3)).astype(sink_h.dtype)


def _per_head(sink_h: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """sink_11h1, to be broadcast over queries."""
  return sink_h.astype(dtype)[None, None, :, None]


_attend.defvjp(_forward, _backward)


def _add_pairs(
  ring: _Ring,
  add_pair: _AddPair[_State],
  state: _State,
  kv: _KeysValues,
  step: int | jax.Array,
  segment_bS: jax.Array,
) -> _State:
  """`state` with the pairs of this shard's queries and the keys that it holds at this step."""
  size = kv.k_2bngc.shape[2]
  shard = jax.lax.axis_index(ring.context)
  owner_of_keys = (shard - step) % ring.num_shards
  q_chunks = zigzag_chunks(shard, ring.num_shards)
  k_chunks = zigzag_chunks(owner_of_keys, ring.num_shards)
  for i, q_chunk in enumerate(q_chunks):
    for j, k_chunk in enumerate(k_chunks):
      mask = AttentionMask(
        _segment_of(q_chunk, size, segment_bS),
        _segment_of(k_chunk, size, segment_bS),
        (q_chunk - k_chunk) * size,
        ring.options.window,
      )
      add = functools.partial(add_pair, pair=_Pair(i, j, mask))
      is_visible = _is_visible(q_chunk, k_chunk, size, ring.options.window)
      state = jax.lax.cond(is_visible, add, _keep, state, kv)
  return state


def _keep(state: _State, kv: _KeysValues) -> _State:
  return state


def _segment_of(chunk: jax.Array, size: int, segment_bS: jax.Array) -> jax.Array:
  """segment_bn of the positions of a chunk."""
  return jax.lax.dynamic_slice_in_dim(segment_bS, chunk * size, size, axis=1)


def _is_visible(q_chunk: jax.Array, k_chunk: jax.Array, size: int, window: int | None) -> jax.Array:
  """Whether any query of a chunk may attend any key of another, by their positions."""
  is_past = k_chunk <= q_chunk
  if window is None:
    return is_past
  smallest_distance = (q_chunk - k_chunk - 1) * size + 1  # From the last key to the first query.
  return is_past & (smallest_distance < window)


def _merge(
  o_bnhc: jax.Array,
  lse_bhn: jax.Array,
  other_o_bnhc: jax.Array,
  other_lse_bhn: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Output and log-sum-exp of two disjoint sets of keys."""
  total_bhn = jnp.logaddexp(lse_bhn, other_lse_bhn)
  weight_bhn = jnp.exp(lse_bhn - total_bhn)
  other_weight_bhn = jnp.exp(other_lse_bhn - total_bhn)
  weight_bnh1 = weight_bhn.swapaxes(1, 2)[..., None]
  other_weight_bnh1 = other_weight_bhn.swapaxes(1, 2)[..., None]
  o_bnhc = o_bnhc * weight_bnh1 + other_o_bnhc * other_weight_bnh1
  return o_bnhc, total_bhn


def _pass_on(ring: _Ring, tree: _State) -> _State:
  """The arrays of the previous shard of the ring."""
  pairs = []
  for shard in range(ring.num_shards):
    next_shard = (shard + 1) % ring.num_shards
    pairs.append((shard, next_shard))
  return jax.tree.map(lambda x: jax.lax.ppermute(x, ring.context, pairs), tree)
