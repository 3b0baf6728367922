"""What attention keeps of earlier positions for later queries: the collection `cache`.

A layer applied with the collection mutable but empty leaves the keys and values of the rows it was
given (a *prefix*). Applied with entries in the collection, it appends and attends to all of them.
The collection goes in and comes out of `Module.apply`, so a step of generation is a pure function:

  _, kept = model.apply({"params": params}, tokens_BT, mutable=[COLLECTION])
  cache = insert(empty(...), kept[COLLECTION], rows)
  logits_BTV, kept = model.apply({"params": params, COLLECTION: cache}, ..., mutable=[COLLECTION])

A layer has `length` [B], the positions seen of each row, and entries [B, G, S, C] whose S places
are a ring: position p lies in place p % S. So a window of S positions takes S places. Where
layers are scanned over, every leaf has a leading N.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

COLLECTION = "cache"
_LENGTH = "length"


def is_filled(layer: nn.Module) -> bool:
  """Whether `layer` was applied with entries to append to."""
  return layer.has_variable(COLLECTION, _LENGTH)


def keep(layer: nn.Module, segment_BT: jax.Array, window: int = 0, **new_BTGC: jax.Array) -> None:
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


def append(
  layer: nn.Module, segment_BT: jax.Array, window: int | jax.Array = 0, **new_BTGC: jax.Array
) -> tuple[list[jax.Array], jax.Array]:
  """(entries BGSC with the new positions in them, [B, T, S] which of them each query attends).

  Padding (segment 0) is counted as no position: a later one takes its place, as of positions that
  `rewind` takes back. T new positions need T - 1 places more than the window, or than all positions
  where there is none: a place is written before all queries that attend what it held have done so.
  """
  length_B = layer.get_variable(COLLECTION, _LENGTH)
  layer.put_variable(COLLECTION, _LENGTH, length_B + _num_real(segment_BT))
  entries = []
  for name, x_BTGC in new_BTGC.items():
    entry_BGSC = _write(layer.get_variable(COLLECTION, name), x_BTGC.swapaxes(1, 2), length_B)
    layer.put_variable(COLLECTION, name, entry_BGSC)
    entries.append(entry_BGSC)
  num_new = segment_BT.shape[1]
  query_BT1 = (length_B[:, None] + jnp.arange(num_new, dtype=jnp.int32)[None])[..., None]
  held_B1S = _held(length_B + num_new, entries[0].shape[2])[:, None]
  visible_BTS = (held_B1S >= 0) & (held_B1S <= query_BT1)
  if isinstance(window, jax.Array) or window:
    visible_BTS &= held_B1S > query_BT1 - window
  return entries, visible_BTS


def empty(prefix: Any, num_rows: int, num_new: int = 1) -> Any:
  """A cache of `num_rows` rows without a position, to which `num_new` are appended at a time.

  Args:
    prefix: what layers keep (shapes and types suffice) of rows as long as any is to become.
  """

  def zeros(path: tuple, leaf: jax.Array) -> jax.Array:
    if path[-1].key == _LENGTH:
      return jnp.zeros((*leaf.shape[:-1], num_rows), leaf.dtype)
    *lead, _, num_heads, num_places, num_channels = leaf.shape
    shape = (*lead, num_rows, num_heads, num_places + num_new - 1, num_channels)
    return jnp.zeros(shape, leaf.dtype)

  return jax.tree_util.tree_map_with_path(zeros, prefix)


def insert(cache: Any, prefix: Any, row_B: jax.Array, length_B: jax.Array) -> Any:
  """`cache` with the prefix's rows, of `length_B` positions each, as its rows `row_B`.

  A prefix's row whose `row_B` is out of range goes nowhere.
  """

  def put(path: tuple, into: jax.Array, new: jax.Array) -> jax.Array:
    if path[-1].key == _LENGTH:
      return into.at[..., row_B].set(length_B.astype(into.dtype), mode="drop")
    arranged = jnp.vectorize(
      lambda x_BGTC: _arrange(x_BGTC, length_B, into.shape[-2]),
      signature="(b,g,t,c)->(b,g,s,c)",
    )(new)
    return into.at[..., row_B, :, :, :].set(arranged, mode="drop")

  return jax.tree_util.tree_map_with_path(put, cache, prefix)


def rewind(cache: Any, length_B: jax.Array) -> Any:
  """`cache` as if only the first `length_B` positions of its rows had been appended."""

  def back(path: tuple, leaf: jax.Array) -> jax.Array:
    return jnp.broadcast_to(length_B, leaf.shape) if path[-1].key == _LENGTH else leaf

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


def _write(entry_BGSC: jax.Array, new_BGTC: jax.Array, length_B: jax.Array) -> jax.Array:
  """The entry with position length_B + t of each row in its place."""
  put = jax.vmap(lambda entry, new, place: jax.lax.dynamic_update_slice(entry, new, (0, place, 0)))
  for t in range(new_BGTC.shape[2]):
    place_B = (length_B + t) % entry_BGSC.shape[2]
    entry_BGSC = put(entry_BGSC, new_BGTC[:, :, t : t + 1], place_B)
  return entry_BGSC
