"""The largest attention logit of every head over a batch, which QK-clip needs.

Kernels of attention keep no scores, so the products of queries and keys are computed once more, in
blocks and without a gradient. Keys of all positions are gathered over the context axis, whatever
`context_parallel_strategy` is.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from maxlite.kernels.attention.reference import visible
from maxlite.kernels.numerics import accumulator_dtype
from maxlite.layers.sharded_attention import MAX_LOGITS
from maxlite.sharding import ROWS
from maxlite.sharding.collectives import pmax

NAME = "logit"  # of the variable of a module


def store_max_logits(
  module: nn.Module,
  q_BTHC: jax.Array,
  k_BTGC: jax.Array,
  segment_BT: jax.Array,
  *,
  scale: float,
  window: int = 0,
  is_local: jax.Array | None = None,
) -> None:
  """Store max_H of the documents in `segment_BT`; -inf if there are none.

  Args:
    module: an attention, whose collection MAX_LOGITS is mutable.
    scale, window, is_local: as of `attend`.
  """
  cfg, sharder = module.cfg, module.sharder
  context = sharder.mesh_axes("activation_length")
  over = (*sharder.mesh_axes("activation_batch"), *context)

  def on_shard(
    q_bthc: jax.Array,
    k_bSgc: jax.Array,
    segment_bt: jax.Array,
    segment_bS: jax.Array,
    is_local: jax.Array | None,
  ) -> jax.Array:
    num_queries, num_heads = q_bthc.shape[1:3]
    num_groups = k_bSgc.shape[2]
    block = next(n for n in range(cfg.attention_block_q, 0, -1) if num_queries % n == 0)
    start = jax.lax.axis_index(context) * num_queries if context else 0
    limit: int | jax.Array | None = window or None
    if window and is_local is not None:
      limit = jnp.where(is_local, window, jnp.iinfo(jnp.int32).max)

    def max_of_block(first: jax.Array) -> jax.Array:
      q_bnhc = jax.lax.dynamic_slice_in_dim(q_bthc, first, block, axis=1)
      segment_bn = jax.lax.dynamic_slice_in_dim(segment_bt, first, block, axis=1)
      q_bngmc = q_bnhc.reshape(*q_bnhc.shape[:2], num_groups, -1, q_bnhc.shape[3])
      logit_bgmnS = jnp.einsum(
        "bngmc,bsgc->bgmns",
        q_bngmc,
        k_bSgc,
        preferred_element_type=accumulator_dtype(q_bthc.dtype),
      )
      row_n = start + first + jnp.arange(block, dtype=jnp.int32)
      row_bn = jnp.broadcast_to(row_n[None], segment_bn.shape)
      visible_bnS = visible(row_bn, segment_bn, segment_bS, limit) & (segment_bn > 0)[..., None]
      logit_bgmnS = jnp.where(visible_bnS[:, None, None], logit_bgmnS * scale, -jnp.inf)
      return jnp.max(logit_bgmnS, axis=(0, 3, 4)).reshape(num_heads)

    max_Nh = jax.lax.map(max_of_block, jnp.arange(0, num_queries, block, dtype=jnp.int32))
    return pmax(jnp.max(max_Nh, axis=0), over)

  heads = "activation_q_heads"
  kv_rows = ("activation_batch", "activation_kv_length")
  measure = jax.shard_map(
    on_shard,
    mesh=sharder.mesh,
    in_specs=(
      sharder.spec((*ROWS, heads, None)),
      sharder.spec((*kv_rows, "activation_kv_heads", None)),
      sharder.spec(ROWS),
      sharder.spec(kv_rows),
      jax.P(),
    ),
    out_specs=sharder.spec((heads,)),
    check_vma=sharder.check_vma,
  )
  q_BTHC, k_BTGC = jax.lax.stop_gradient((q_BTHC, k_BTGC))
  with jax.named_scope("max_logits"):
    max_H = measure(q_BTHC, k_BTGC, segment_BT, segment_BT, is_local)
  module.put_variable(MAX_LOGITS, NAME, max_H)
