"""Causal grouped-query attention within documents, on every backend alike.

`BACKENDS` share one contract. Row t of the queries is row `q_start + t` of the sequence the keys
span; it attends every key up to and including its own row that carries its own segment number.
Padding is segment 0: it attends padding only, and stays finite. Query heads share a key/value head
in runs of H / G. Values, and with them the result, may have other channels than queries and keys.
A `window` hides all keys but those of the query's own row and the window - 1 rows before it. Scores
are scaled, then bent by `soft_cap` (kernels/soft_cap.py). The sinks `sink_H` are one more score per
head and query whose value is zero, so that a query may attend to nothing; padding has them too.
Scores, softmax and sums are in float32 (in float64 if that is the operands' type).
"""

import jax
import jax.numpy as jnp

from maxlite.config.errors import UserError
from maxlite.kernels.attention import chunked, dot_product, reference

BACKENDS = {
  "reference": reference.attention,
  "chunked": chunked.attention,
  "dot_product": dot_product.attention,
}


AUTO: dict[str, str] = {}  # by platform; `chunked` where none is named


def resolve_backend(name: str, platform: str) -> str:
  """The backend that `name` stands for on `platform` (`cpu`, `gpu`, `tpu`).

  Raises:
    UserError: if there is no such backend.
  """
  if name == "auto":
    return AUTO.get(platform, "chunked")
  if name not in BACKENDS:
    known = ", ".join(BACKENDS)
    raise UserError(f"attention={name!r} is no backend; choose auto or one of: {known}")
  return name


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
  window: int | jax.Array | None = None,
  soft_cap: float = 0.0,
  sink_H: jax.Array | None = None,
) -> jax.Array:
  """o_BTHC in q's type, with the channels of v.

  Args:
    block_q: queries scored at once by `chunked`; the other backends score all at once.
    q_start: row of the first query among the keys. May be traced, as on a shard of the context
      axis that holds some of the queries and all keys; a plain 0 with T == S lets `chunked` skip
      what lies in the future.
    window: may be traced, as in a scan over layers that differ in it; None: all keys.

  Source: Beltagy et al., Longformer (2020), section 3.1, for windows; gpt-oss model card (2025),
  section 2.2, for sinks.
  """
  num_query_heads, num_kv_heads = q_BTHC.shape[2], k_BSGC.shape[2]
  assert num_query_heads % num_kv_heads == 0, f"{num_query_heads=} {num_kv_heads=}"
  assert q_segment_BT.shape == q_BTHC.shape[:2], f"{q_segment_BT.shape} for {q_BTHC.shape}"
  assert kv_segment_BS.shape == k_BSGC.shape[:2], f"{kv_segment_BS.shape} for {k_BSGC.shape}"
  assert v_BSGC.shape[:3] == k_BSGC.shape[:3], f"{v_BSGC.shape} for {k_BSGC.shape}"
  assert jnp.ndim(q_start) == 0, f"q_start has shape {jnp.shape(q_start)}"
  assert sink_H is None or sink_H.shape == (num_query_heads,), f"{sink_H.shape} {num_query_heads=}"
  return BACKENDS[backend](
    q_BTHC,
    k_BSGC,
    v_BSGC,
    q_segment_BT=q_segment_BT,
    kv_segment_BS=kv_segment_BS,
    q_start=q_start,
    scale=scale,
    block_q=block_q,
    window=window,
    soft_cap=soft_cap,
    sink_H=sink_H,
  )
