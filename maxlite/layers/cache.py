"""What attention keeps of earlier positions for later queries: the collection `cache`.

A layer applied with the collection mutable but empty leaves the keys and values of the rows it was
given (a *prefix*). Applied with entries in the collection, it appends and attends to all of them.
The collection goes in and comes out of `Module.apply`, so a step of generation is a pure function:

  _, kept = model.apply({"params": params}, tokens_BT, mutable=[COLLECTION])
  cache = insert(empty(...), kept[COLLECTION], rows)
  logits_BTV, kept = model.apply({"params": params, COLLECTION: cache}, ..., mutable=[COLLECTION])

A layer has `length` [B], the positions seen of each row, and entries of S places that are a ring:
position p lies in place p % S. So a window of S positions takes S places. A prefix is an array
[B, G, S, C]; what is appended to is cut along S into blocks, arrays of their own, each as large as
all before it, so that attention can pass over those that no row has reached. Where layers are
scanned over, every leaf has a leading N.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from maxlite.kernels.attention.cached import BlockMask

COLLECTION = "cache"
_LENGTH = "length"

Blocks = tuple[jax.Array, ...]  # of an entry


def is_filled(layer: nn.Module) -> bool:
  """Whether `layer` was applied with entries to append to."""
  return layer.has_variable(COLLECTION, _LENGTH)


def store_prefill(
  layer: nn.Module, segment_BT: jax.Array, window: int = 0, **new_BTGC: jax.Array
) -> None:
  """Leaves the prefix of `layer`, if the collection is asked for.

  Each row is one document from its first column on, and padding (segment 0) behind that.

  Args:
    window: how many positions a query attends, itself included; 0: all.
  """
  if not layer.is_mutable_collection(COLLECTION) or layer.is_initializing():
    return
  length_B = _num_real(segment_BT)
  layer.put_variable(COLLECTION, _LENGTH, length_B)
  for name, x_BTGC in new_BTGC.items():
    x_BGTC = x_BTGC.swapaxes(1, 2)
    num_places = min(x_BGTC.shape[2], window) if window else x_BGTC.shape[2]
    layer.put_variable(COLLECTION, name, _arrange(x_BGTC, length_B, num_places))


def update(
  layer: nn.Module, segment_BT: jax.Array, window: int | jax.Array = 0, **new_BTGC: jax.Array
) -> tuple[list[Blocks], list[BlockMask]]:
  """(entries with the new positions in them, what queries attend of each of their blocks).

  Padding (segment 0) is counted as no position: a later one takes its place, as of positions that
  `rewind` takes back. T new positions need T - 1 places more than the window, or than all positions
  where there is none: a place is written before all queries that attend what it held have done so.
  """
  length_B = layer.get_variable(COLLECTION, _LENGTH)
  layer.put_variable(COLLECTION, _LENGTH, length_B + _num_real(segment_BT))
  entries = []
  for name, x_BTGC in new_BTGC.items():
    blocks = _write(layer.get_variable(COLLECTION, name), x_BTGC.swapaxes(1, 2), length_B)
    layer.put_variable(COLLECTION, name, blocks)
    entries.append(blocks)
  num_new, spans = segment_BT.shape[1], _spans(entries[0])
  query_BT1 = (length_B[:, None] + jnp.arange(num_new, dtype=jnp.int32)[None])[..., None]
  held_B1S = _held(length_B + num_new, spans[-1].stop)[:, None]
  visible_BTS = (held_B1S >= 0) & (held_B1S <= query_BT1)
  if isinstance(window, jax.Array) or window:
    visible_BTS &= held_B1S > query_BT1 - window
  # Rows of padding alone, which are idle, are as long as they were.
  most = jnp.max(jnp.where(segment_BT[:, 0] > 0, length_B + num_new, 0))
  return entries, [
    BlockMask(visible_BTS[:, :, span], most > span.start if span.start else None) for span in spans
  ]


def init_cache(prefix: Any, num_rows: int, num_new: int = 1, first_block: int = 0) -> Any:
  """A cache of `num_rows` rows without a position, to which `num_new` are appended at a time.

  Args:
    prefix: what layers keep (shapes and types suffice) of rows as long as any is to become.
    first_block: places of the first block; 0: all are one.
  """

  def zeros(path: tuple, leaf: jax.Array) -> jax.Array | Blocks:
    if path[-1].key == _LENGTH:
      return jnp.zeros((*leaf.shape[:-1], num_rows), leaf.dtype)
    *lead, _, num_heads, num_places, num_channels = leaf.shape
    return tuple(
      jnp.zeros((*lead, num_rows, num_heads, size, num_channels), leaf.dtype)
      for size in _block_sizes(num_places + num_new - 1, first_block)
    )

  return jax.tree_util.tree_map_with_path(zeros, prefix)


def insert(cache: Any, prefix: Any, row_B: jax.Array, length_B: jax.Array) -> Any:
  """`cache` with the prefix's rows, of `length_B` positions each, as its rows `row_B`.

  A prefix's row whose `row_B` is out of range goes nowhere.
  """

  def put(path: tuple, new: jax.Array, into: jax.Array | Blocks) -> jax.Array | Blocks:
    if path[-1].key == _LENGTH:
      return into.at[..., row_B].set(length_B.astype(into.dtype), mode="drop")
    spans = _spans(into)
    arrange = jnp.vectorize(
      lambda x_BGTC: _arrange(x_BGTC, length_B, spans[-1].stop), signature="(b,g,t,c)->(b,g,s,c)"
    )
    arranged = arrange(new)
    return tuple(
      block.at[..., row_B, :, :, :].set(arranged[..., span, :], mode="drop")
      for block, span in zip(into, spans, strict=True)
    )

  return jax.tree_util.tree_map_with_path(put, prefix, cache)


def rewind(cache: Any, length_B: jax.Array) -> Any:
  """`cache` as if only the first `length_B` positions of its rows had been appended."""

  def back(path: tuple, leaf: jax.Array) -> jax.Array:
    is_length = getattr(path[-1], "key", "") == _LENGTH
    return jnp.broadcast_to(length_B, leaf.shape) if is_length else leaf

  return jax.tree_util.tree_map_with_path(back, cache)


def _num_real(segment_BT: jax.Array) -> jax.Array:
  return jnp.sum(segment_BT > 0, axis=1, dtype=jnp.int32)


def _held(length_B: jax.Array, num_places: int) -> jax.Array:
  """[B, S] the newest of `length_B` positions that lies in each place; below 0: none."""
  last_B1 = length_B[:, None] - 1
  return last_B1 - (last_B1 - jnp.arange(num_places, dtype=jnp.int32)[None]) % num_places


def _arrange(x_BGTC: jax.Array, length_B: jax.Array, num_places: int) -> jax.Array:
  """x_BGSC: a ring of T places in one of `num_places`."""
  place_BS = jnp.maximum(_held(length_B, num_places), 0) % x_BGTC.shape[2]
  return jnp.take_along_axis(x_BGTC, place_BS[:, None, :, None], axis=2)


def _write(blocks: Blocks, new_BGTC: jax.Array, length_B: jax.Array) -> Blocks:
  """The blocks with position length_B + t of each row in its place."""
  put = jax.vmap(lambda block, new, place: block.at[:, place].set(new, mode="drop"))
  spans = _spans(blocks)
  for t in range(new_BGTC.shape[2]):
    place_B = (length_B + t) % spans[-1].stop
    # A place before the block becomes one behind it; a negative one would count from its end.
    places = [jnp.where(place_B < s.start, s.stop, place_B) - s.start for s in spans]
    blocks = tuple(put(x, new_BGTC[:, :, t], p) for x, p in zip(blocks, places, strict=True))
  return blocks


def _block_sizes(num_places: int, first: int) -> list[int]:
  """Doubled from `first` on, but that a rest of less than half its block goes to the one before."""
  ends = [first or num_places]
  while 2 * (num_places - ends[-1]) >= ends[-1]:
    ends.append(2 * ends[-1])
  return np.diff([0, *ends[:-1], num_places]).tolist()


def _spans(blocks: Blocks) -> list[slice]:
  """The places of each block."""
  ends = np.cumsum([0, *(block.shape[-2] for block in blocks)]).tolist()
  return [slice(*pair) for pair in itertools.pairwise(ends)]
