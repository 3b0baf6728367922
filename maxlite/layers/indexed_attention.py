"""Multi-head latent attention to the keys that an indexer selects, over packed rows.

All scores are computed, in blocks of queries, and those of keys that are not selected are masked:
training costs no less than dense attention, but gives the gradients of sparse attention and the
distributions that the indexer learns from. Over the context axis every shard has the keys of all
positions; over the tensor axis every shard has all heads of the indexer, so that all shards select
the same keys.

Source: DeepSeek-AI, DeepSeek-V3.2 (2025), section 2.1.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from maxlite.kernels.attention import cached, indexed
from maxlite.kernels.attention.reference import RESIDUAL_NAME, visible
from maxlite.layers import cache
from maxlite.layers.indexer import Index, Indexer, IndexerSums
from maxlite.layers.layer_inputs import LayerInputs
from maxlite.layers.layer_specs import IndexedAttentionSpec
from maxlite.layers.mla import LatentAttention
from maxlite.layers.rope import scale_queries
from maxlite.sharding import ROWS
from maxlite.sharding.collectives import MeshAxes, psum
from maxlite.sharding.pytree import PyTree

_IndexTree: Any = Index  # of other leaves than arrays


class IndexedAttention(LatentAttention):
  """Causal attention of each query to the spec's num_keys best keys of its segment.

  Returns ((y_BTD, IndexerSums), None). The cache holds the indexer's keys too; with a cache that is
  filled, the sums are zero.
  """

  spec: IndexedAttentionSpec

  @nn.compact
  def __call__(self, x_BTD: jax.Array, inputs: LayerInputs) -> tuple[PyTree, None]:
    segment_BT = inputs.segment_BT
    rope = inputs.tables_of(self.spec)
    latent_BTQ = self._query_input(x_BTD)
    q_BTHC = scale_queries(self._queries(latent_BTQ, rope), inputs.query_scale_BT)
    latent_BTL, rotated_BT1R = self._latents(x_BTD, rope)
    entry_BT1C = jnp.concatenate([latent_BTL[:, :, None], rotated_BT1R], axis=-1)
    indexer = Indexer(self.cfg, self.sharder, self.spec, name="indexer")
    index = indexer(x_BTD, latent_BTQ, rope)
    key_BT1C = index.k_BTC[:, :, None]
    if cache.is_filled(self):
      entries, masks = cache.update(self, segment_BT, latent=entry_BT1C, index_key=key_BT1C)
      latent_blocks, key_blocks = entries
      masks = self._select_cached(index, key_blocks, masks)
      o_BTHC = self._attend_latents(q_BTHC, latent_blocks, masks)
      sums = IndexerSums(jnp.zeros(()), jnp.zeros(()))
    else:
      cache.store_prefill(self, segment_BT, latent=entry_BT1C, index_key=key_BT1C)
      k_BTHC, v_BTHC = self._keys_and_values(latent_BTL, rotated_BT1R)
      o_BTHC, divergence_BT = self._attend_selected(q_BTHC, k_BTHC, v_BTHC, index, segment_BT)
      real_BT = segment_BT > 0
      sums = IndexerSums(
        tokens=jnp.sum(real_BT, dtype=divergence_BT.dtype),
        divergence=jnp.sum(jnp.where(real_BT, divergence_BT, 0)),
      )
    return (self._output(o_BTHC, x_BTD.shape[-1]), sums), None

  def _select_cached(
    self, index: Index, key_blocks: cache.Blocks, masks: list[cached.BlockMask]
  ) -> list[cached.BlockMask]:
    """The masks of cached keys, less the keys that are not selected."""
    visible_BTS = jnp.concatenate([mask.visible_BTS for mask in masks], axis=-1)
    if not 0 < self.spec.num_keys < visible_BTS.shape[-1]:
      return masks
    k_BSC = jnp.concatenate([block_B1SC[:, 0] for block_B1SC in key_blocks], axis=1)
    score_BTS = indexed.index_scores(index.q_BTIC, k_BSC, index.weight_BTI)
    selected_BTS = indexed.select(score_BTS, visible_BTS, self.spec.num_keys)
    selected = []
    start = 0
    for mask in masks:
      stop = start + mask.visible_BTS.shape[-1]
      selected.append(cached.BlockMask(selected_BTS[:, :, start:stop], mask.is_reached))
      start = stop
    return selected

  def _attend_selected(
    self,
    q_BTHC: jax.Array,
    k_BTHC: jax.Array,
    v_BTHC: jax.Array,
    index: Index,
    segment_BT: jax.Array,
  ) -> tuple[jax.Array, jax.Array]:
    """(o_BTHC, divergence_BT of the indexer) of whole rows."""
    sharder = self.sharder
    heads = "activation_q_heads"
    kv_rows = ("activation_batch", "activation_kv_length")
    query_specs = sharder.spec((*ROWS, heads, None))
    kv_specs = sharder.spec((*kv_rows, heads, None))
    index_specs = _IndexTree(
      sharder.spec((*ROWS, None, None)),
      sharder.spec((*kv_rows, None)),
      sharder.spec((*ROWS, None)),
    )
    on_shard = functools.partial(
      _attend_shard,
      context=sharder.mesh_axes("activation_length"),
      head_axes=sharder.mesh_axes(heads),
      num_keys=self.spec.num_keys,
      block=self.cfg.attention_block_q,
      scale=self._score_scale(),
    )
    sharded = jax.shard_map(
      on_shard,
      mesh=sharder.mesh,
      in_specs=(
        query_specs,
        kv_specs,
        kv_specs,
        index_specs,
        sharder.spec(ROWS),
        sharder.spec(kv_rows),
      ),
      out_specs=(query_specs, sharder.spec(ROWS)),
      check_vma=sharder.check_vma,
    )
    with jax.named_scope("indexed_attention"):
      o_BTHC, divergence_BT = sharded(q_BTHC, k_BTHC, v_BTHC, index, segment_BT, segment_BT)
    return checkpoint_name(o_BTHC, RESIDUAL_NAME), divergence_BT


def _attend_shard(
  q_bthc: jax.Array,
  k_bShc: jax.Array,
  v_bShc: jax.Array,
  index: Index,
  segment_bt: jax.Array,
  segment_bS: jax.Array,
  *,
  context: MeshAxes,
  head_axes: MeshAxes,
  num_keys: int,
  block: int,
  scale: float,
) -> tuple[jax.Array, jax.Array]:
  """(o_bthc, divergence_bt) of the queries of one shard, in blocks of at most `block`."""
  num_queries = q_bthc.shape[1]
  block = next(n for n in range(block, 0, -1) if num_queries % n == 0)
  start = jax.lax.axis_index(context) * num_queries if context else 0

  @jax.checkpoint
  def attend_block(first: jax.Array) -> tuple[jax.Array, jax.Array]:
    def of_block(x: jax.Array) -> jax.Array:
      return jax.lax.dynamic_slice_in_dim(x, first, block, axis=1)

    segment_bn = of_block(segment_bt)
    row_n = start + first + jnp.arange(block, dtype=jnp.int32)
    row_bn = jnp.broadcast_to(row_n[None], segment_bn.shape)
    visible_bnS = visible(row_bn, segment_bn, segment_bS)
    score_bnS = indexed.index_scores(
      of_block(index.q_BTIC), index.k_BTC, of_block(index.weight_BTI)
    )
    attended_bnS = indexed.select(score_bnS, visible_bnS, num_keys)
    o_bnhc, mass_bnS = indexed.attention(of_block(q_bthc), k_bShc, v_bShc, attended_bnS, scale)
    mass_bnS = psum(jax.lax.stop_gradient(mass_bnS), head_axes)
    divergence_bn = indexed.divergence(mass_bnS, score_bnS, attended_bnS)
    return o_bnhc.astype(q_bthc.dtype), divergence_bn

  firsts = jnp.arange(0, num_queries, block, dtype=jnp.int32)
  o_Nbnhc, divergence_Nbn = jax.lax.map(attend_block, firsts)
  o_bthc = jnp.moveaxis(o_Nbnhc, 0, 1).reshape(*q_bthc.shape[:3], -1)
  return o_bthc, jnp.moveaxis(divergence_Nbn, 0, 1).reshape(segment_bt.shape)
