"""Causal grouped-query attention within the documents of packed rows.

All `ATTENTION_BACKENDS` (backend.py) implement one contract:
- Query t is row `q_start + t` of the sequence that the keys span. It attends keys up to and
  including its own row that have its segment number. With a `window`, it attends only its own row
  and the window - 1 rows before it.
- Padding is segment 0. It attends padding only, and its output is finite.
- Each group of H / G consecutive query heads shares a key/value head. Values may have a different
  number of channels than queries and keys; the output has the channels of the values.
- Scores are scaled, then soft-capped (kernels/numerics.py). The sinks `sink_H` add one score per
  query and head whose value is zero, so that a query can attend nothing; padding has them too.
- Scores, softmax and sums are float32 (float64 if the operands are).
- The output, and what the backward pass reads beside the operands, is named "attention_out" for
  rematerialization policies.
"""

import jax
import jax.numpy as jnp

from maxlite import registry
from maxlite.kernels.attention.backend import AttentionBackend, AttentionFeatures
from maxlite.kernels.attention.reference import AttentionMask, ScoreOptions
from maxlite.kernels.hardware import Hardware
from maxlite.registry import ATTENTION_BACKENDS

# Of these, "auto" chooses the first that supports the call.
AUTO = ("tokamax", "cudnn", "splash", "chunked")


def resolve_backend(name: str, hardware: Hardware, features: AttentionFeatures) -> str:
  """The name of the backend that `attention=name` selects; `auto` chooses by the other arguments.

  Raises:
    UserError: there is no such backend.
  """

  def supports(backend: AttentionBackend) -> bool:
    return backend.supports(hardware, features)

  return registry.resolve_backend("attention", ATTENTION_BACKENDS, AUTO, name, supports)


def attention(
  q_BTHC: jax.Array,
  k_BSGC: jax.Array,
  v_BSGC: jax.Array,
  *,
  q_segment_BT: jax.Array,
  kv_segment_BS: jax.Array,
  scale: float,
  backend: str,
  block_q: int,
  q_start: int | jax.Array = 0,
  window: int | None = None,
  soft_cap: float = 0.0,
  sink_H: jax.Array | None = None,
) -> jax.Array:
  """Returns o_BTHC in the type of the queries, as the contract at the top of this file says.

  Args:
    scale: factor of the scores, the products of queries and keys.
    backend: a name in ATTENTION_BACKENDS; see `resolve_backend`.
    block_q: queries per block of `chunked`; other backends ignore it.
    q_start: row of the first query among the keys. It may be traced, as on a shard of the context
      axis that holds a part of the queries and all keys. Backends skip blocks of keys in the future
      and before the window; `chunked` does so only if T == S and q_start is the int 0, or if S is a
      multiple of T.
    window: number of keys that a query attends; None: all.
    soft_cap: of the scores; 0: none.
    sink_H: scores of the sinks; None: none.

  Source: Beltagy et al., Longformer (2020), section 3.1, for windows; gpt-oss model card (2025),
  section 2.2, for sinks.
  """
  num_query_heads = q_BTHC.shape[2]
  num_kv_heads = k_BSGC.shape[2]
  assert num_query_heads % num_kv_heads == 0, f"{num_query_heads=} {num_kv_heads=}"
  assert q_segment_BT.shape == q_BTHC.shape[:2], f"{q_segment_BT.shape} for {q_BTHC.shape}"
  assert kv_segment_BS.shape == k_BSGC.shape[:2], f"{kv_segment_BS.shape} for {k_BSGC.shape}"
  assert v_BSGC.shape[:3] == k_BSGC.shape[:3], f"{v_BSGC.shape} for {k_BSGC.shape}"
  assert jnp.ndim(q_start) == 0, f"q_start has shape {jnp.shape(q_start)}"
  assert sink_H is None or sink_H.shape == (num_query_heads,), f"{sink_H.shape} {num_query_heads=}"
  return ATTENTION_BACKENDS[backend].run(
    q_BTHC,
    k_BSGC,
    v_BSGC,
    AttentionMask(q_segment_BT, kv_segment_BS, q_start, window),
    ScoreOptions(scale, block_q, soft_cap, sink_H),
  )
