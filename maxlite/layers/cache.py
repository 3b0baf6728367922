"""The cache of keys and values for generation: the variable collection `cache`.

A layer applied with the collection mutable but empty stores the keys and values of its rows (a
*prefill*). Applied with entries in the collection, it adds the new positions and attends to all.
The collection goes through `Module.apply`, so that a decode step is a pure function:

  _, prefill = model.apply({"params": params}, tokens_BT, mutable=[COLLECTION])
  cache = insert(init_cache(...), prefill[COLLECTION], row_B, length_B)
  logits_BTV, cache = model.apply({"params": params, COLLECTION: cache}, ..., mutable=[COLLECTION])

A layer has `length` [B], the number of positions of each row, and entries that are ring buffers of
S slots: position p is in slot p % S, so a window of S positions needs S slots. A prefill entry is
an array [B, G, S, C]. The entries of a cache are split along S into blocks, each as large as all
blocks before it, so that attention can skip those that no row has reached. A recurrent layer has,
as `recurrent`, arrays whose first axis is the row; no position can be removed from them. Where
layers are scanned, every leaf has a leading N.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from maxlite.kernels.attention.cached import BlockMask
from maxlite.sharding.pytree import PyTree

COLLECTION = "cache"
_LENGTH = "length"
_RECURRENT = "recurrent"

Blocks = tuple[jax.Array, ...]  # The blocks of one entry.


def is_filled(layer: nn.Module) -> bool:
  """Whether `layer` was applied with entries."""
  return layer.has_variable(COLLECTION, _LENGTH)


def store_prefill(
  layer: nn.Module,
  segment_BT: jax.Array,
  window: int = 0,
  **new_BTGC: jax.Array,
) -> None:
  """Stores the entries of `layer` if the collection is mutable.

  Args:
    segment_BT: each row is one document from its first column on, followed by padding (segment 0).
    window: positions that a query attends, including its own; 0: all.
  """
  if not layer.is_mutable_collection(COLLECTION) or layer.is_initializing():
    return
  length_B = jnp.sum(segment_BT > 0, axis=1, dtype=jnp.int32)
  layer.put_variable(COLLECTION, _LENGTH, length_B)
  for name, x_BTGC in new_BTGC.items():
    x_BGTC = x_BTGC.swapaxes(1, 2)
    num_slots = x_BGTC.shape[2]
    if window:
      num_slots = min(num_slots, window)
    layer.put_variable(COLLECTION, name, _resize(x_BGTC, length_B, num_slots))


def update(
  layer: nn.Module,
  segment_BT: jax.Array,
  window: int | jax.Array = 0,
  **new_BTGC: jax.Array,
) -> tuple[list[Blocks], list[BlockMask]]:
  """Adds new positions; returns (the updated entries, the mask of each of their blocks).

  Padding (segment 0) does not advance the length: later positions overwrite it, as they do
  positions removed by `rewind`. T new positions need T - 1 slots more than the window (or than all
  positions), because slots are overwritten before all queries have attended their old content. The
  window may differ between queries: an array [B, T, 1].
  """
  length_B: jax.Array = layer.get_variable(COLLECTION, _LENGTH)
  num_real_B = jnp.sum(segment_BT > 0, axis=1, dtype=jnp.int32)
  layer.put_variable(COLLECTION, _LENGTH, length_B + num_real_B)
  entries = []
  for name, x_BTGC in new_BTGC.items():
    blocks: Blocks = layer.get_variable(COLLECTION, name)
    x_BGTC = x_BTGC.swapaxes(1, 2)
    blocks = _write(blocks, x_BGTC, length_B)
    layer.put_variable(COLLECTION, name, blocks)
    entries.append(blocks)
  return entries, _block_masks(entries[0], length_B, segment_BT, window)


def _block_masks(
  blocks: Blocks,
  length_B: jax.Array,
  segment_BT: jax.Array,
  window: int | jax.Array,
) -> list[BlockMask]:
  """The mask of each block, after new positions were added to `length_B` earlier ones."""
  num_new = segment_BT.shape[1]
  spans = _spans(blocks)
  num_slots = spans[-1].stop
  new_T = jnp.arange(num_new, dtype=jnp.int32)
  query_BT = length_B[:, None] + new_T[None]
  query_BT1 = query_BT[..., None]
  length_after_B = length_B + num_new
  position_BS = _positions(length_after_B, num_slots)
  position_B1S = position_BS[:, None]
  is_written_B1S = position_B1S >= 0
  is_past_BTS = position_B1S <= query_BT1
  visible_BTS = is_written_B1S & is_past_BTS
  if isinstance(window, jax.Array) or window:
    visible_BTS &= position_B1S > query_BT1 - window
  # Rows with padding only are idle and keep their length.
  is_active_B = segment_BT[:, 0] > 0
  longest = jnp.max(jnp.where(is_active_B, length_after_B, 0))
  masks = []
  for span in spans:
    is_reached = None
    if span.start:
      is_reached = longest > span.start
    masks.append(BlockMask(visible_BTS[:, :, span], is_reached))
  return masks


def is_storing(layer: nn.Module) -> bool:
  """Whether `layer` was applied to store a prefill."""
  is_mutable = layer.is_mutable_collection(COLLECTION)
  return is_mutable and not layer.is_initializing() and not is_filled(layer)


def read_recurrent(layer: nn.Module) -> PyTree:
  """Returns what `store_recurrent` or `update_recurrent` stored."""
  return layer.get_variable(COLLECTION, _RECURRENT)


def store_recurrent(layer: nn.Module, length_B: jax.Array, carry: PyTree) -> None:
  """Stores a pytree of arrays that hold what rows of `length_B` positions pass on."""
  layer.put_variable(COLLECTION, _LENGTH, length_B)
  layer.put_variable(COLLECTION, _RECURRENT, carry)


def update_recurrent(layer: nn.Module, num_new_B: jax.Array, carry: PyTree) -> None:
  """Replaces it by that after `num_new_B` more positions."""
  length_B: jax.Array = layer.get_variable(COLLECTION, _LENGTH)
  store_recurrent(layer, length_B + num_new_B, carry)


def has_recurrent(cache: PyTree) -> bool:
  """Whether any layer of the cache is recurrent."""
  leaves = jax.tree_util.tree_leaves_with_path(cache)
  return any(_is_recurrent(path) for path, _ in leaves)


def _row_axis(prefill: PyTree, path: tuple) -> int:
  """The axis of rows of a recurrent array: 1 where layers are stacked, else 0."""
  layer = prefill
  for key in path:
    if getattr(key, "key", "") == _RECURRENT:
      break
    layer = layer[key.key]
  return layer[_LENGTH].ndim - 1


def _is_recurrent(path: tuple) -> bool:
  return any(getattr(key, "key", "") == _RECURRENT for key in path)


def init_cache(prefill: PyTree, num_rows: int, num_new: int = 1, first_block: int = 0) -> PyTree:
  """A cache of `num_rows` rows without positions, to which `num_new` are added at a time.

  Args:
    prefill: shapes and types of a prefill of the maximum length.
    first_block: slots of the first block; 0: a single block.
  """

  def zeros(path: tuple, leaf: jax.Array) -> jax.Array | Blocks:
    if _is_recurrent(path):
      row_axis = _row_axis(prefill, path)
      shape = (*leaf.shape[:row_axis], num_rows, *leaf.shape[row_axis + 1 :])
      return jnp.zeros(shape, leaf.dtype)
    if path[-1].key == _LENGTH:
      return jnp.zeros((*leaf.shape[:-1], num_rows), leaf.dtype)
    *lead, _, num_heads, num_slots, num_channels = leaf.shape
    blocks = []
    for size in _block_sizes(num_slots + num_new - 1, first_block):
      shape = (*lead, num_rows, num_heads, size, num_channels)
      blocks.append(jnp.zeros(shape, leaf.dtype))
    return tuple(blocks)

  return jax.tree_util.tree_map_with_path(zeros, prefill)


def insert(cache: PyTree, prefill: PyTree, row_B: jax.Array, length_B: jax.Array) -> PyTree:
  """Writes the prefill's rows, of `length_B` positions each, to rows `row_B` of the cache.

  Rows whose `row_B` is out of range are not written.
  """

  def write(path: tuple, new: jax.Array, entry: jax.Array | Blocks) -> jax.Array | Blocks:
    if isinstance(entry, tuple):
      return _insert_rows(entry, new, row_B, length_B)
    if _is_recurrent(path):
      rows = (slice(None),) * _row_axis(prefill, path)
      return entry.at[(*rows, row_B)].set(new, mode="drop")
    assert path[-1].key == _LENGTH
    return entry.at[..., row_B].set(length_B.astype(entry.dtype), mode="drop")

  return jax.tree_util.tree_map_with_path(write, prefill, cache)


def _insert_rows(blocks: Blocks, new: jax.Array, row_B: jax.Array, length_B: jax.Array) -> Blocks:
  """`blocks` with the rows of a prefill's entry `new` [..., B, G, T, C]."""
  spans = _spans(blocks)
  num_slots = spans[-1].stop

  def resize(x_BGTC: jax.Array) -> jax.Array:
    return _resize(x_BGTC, length_B, num_slots)

  resize_layers = jnp.vectorize(resize, signature="(b,g,t,c)->(b,g,s,c)")
  resized = resize_layers(new)
  written = []
  for block, span in zip(blocks, spans, strict=True):
    rows = block.at[..., row_B, :, :, :]
    written.append(rows.set(resized[..., span, :], mode="drop"))
  return tuple(written)


def rewind(cache: PyTree, length_B: jax.Array) -> PyTree:
  """The cache with only the first `length_B` positions of each row; it has no recurrent layer."""

  def reset(path: tuple, leaf: jax.Array) -> jax.Array:
    # The blocks of an entry are a tuple, whose path ends in an index without a key.
    if getattr(path[-1], "key", "") == _LENGTH:
      return jnp.broadcast_to(length_B, leaf.shape)
    return leaf

  return jax.tree_util.tree_map_with_path(reset, cache)


def with_lengths_of(cache: PyTree, earlier: PyTree) -> PyTree:
  """The cache without the positions that were added since it was `earlier`; see `rewind`."""

  def reset(path: tuple, leaf: jax.Array, before: jax.Array) -> jax.Array:
    if getattr(path[-1], "key", "") == _LENGTH:
      return before
    return leaf

  return jax.tree_util.tree_map_with_path(reset, cache, earlier)


def _positions(length_B: jax.Array, num_slots: int) -> jax.Array:
  """[B, S] the latest of `length_B` positions in each slot; negative if there is none."""
  last_B1 = length_B[:, None] - 1
  slot_1S = jnp.arange(num_slots, dtype=jnp.int32)[None]
  # How many positions before the last one the position in each slot is.
  age_BS = (last_B1 - slot_1S) % num_slots
  return last_B1 - age_BS


def _resize(x_BGTC: jax.Array, length_B: jax.Array, num_slots: int) -> jax.Array:
  """x_BGSC: a ring buffer of T slots as one of `num_slots`."""
  old_num_slots = x_BGTC.shape[2]
  position_BS = jnp.maximum(_positions(length_B, num_slots), 0)
  old_slot_BS = position_BS % old_num_slots
  return jnp.take_along_axis(x_BGTC, old_slot_BS[:, None, :, None], axis=2)


def _write(blocks: Blocks, new_BGTC: jax.Array, length_B: jax.Array) -> Blocks:
  """The blocks with position length_B + t of each row in its slot."""
  spans = _spans(blocks)
  num_slots = spans[-1].stop
  written = list(blocks)
  num_new = new_BGTC.shape[2]
  for t in range(num_new):
    new_BGC = new_BGTC[:, :, t]
    slot_B = (length_B + t) % num_slots
    for i, span in enumerate(spans):
      # A slot before a block is mapped past its end; a negative index would count from the end.
      slot_or_end_B = jnp.where(slot_B < span.start, span.stop, slot_B)
      written[i] = _write_position(written[i], new_BGC, slot_or_end_B - span.start)
  return tuple(written)


@jax.vmap
def _write_position(block_GSC: jax.Array, new_GC: jax.Array, slot: jax.Array) -> jax.Array:
  """One row of a block, with a position in `slot`; unchanged if that is past its end."""
  return block_GSC.at[:, slot].set(new_GC, mode="drop")


def _block_sizes(num_slots: int, first: int) -> list[int]:
  """Sizes that double from `first` on; a remainder below half a block joins the previous block."""
  sizes = []
  end = first or num_slots  # Slots of all blocks up to and including the next one.
  previous_end = 0
  while 2 * (num_slots - end) >= end:
    sizes.append(end - previous_end)
    previous_end = end
    end = 2 * end
  sizes.append(num_slots - previous_end)
  return sizes


def _spans(blocks: Blocks) -> list[slice]:
  """The slots of each block."""
  spans = []
  start = 0
  for block in blocks:
    stop = start + block.shape[-2]
    spans.append(slice(start, stop))
    start = stop
  return spans
