"""The batch of a training step: numpy rows of one host, or global arrays."""

import dataclasses
from collections.abc import Iterable
from typing import ClassVar, Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from numpy.typing import ArrayLike

from maxlite.errors import UserError

Field = TypeVar("Field")
_MAX_INT32 = np.iinfo(np.int32).max


class Batch(struct.PyTreeNode, Generic[Field]):
  """B rows of T positions, each row packed with segments of documents.

  `segment_BT` numbers the segments of a row 1, 2, ... and is 0 in padding; attention is limited to
  a segment. `position_BT` restarts at 0 in each segment. `targets_BT` is the next token of the
  same document; `weight_BT` (float32) is 0 where there is none. All other fields are int32. A loss
  may have batches with further fields of float32.

  `expert_BTNK`, if a batch has it, is the K experts of `tokens_BT` in each of the N MoE layers, in
  the order of the layers. The routers then do not choose; at padding it may be anything.
  """

  float_fields: ClassVar[tuple[str, ...]] = ("weight_BT",)

  tokens_BT: Field
  targets_BT: Field
  segment_BT: Field
  position_BT: Field
  weight_BT: Field
  expert_BTNK: Field | None = struct.field(default=None, kw_only=True)

  @staticmethod
  def of(tokens_BT: ArrayLike, segment_BT: ArrayLike | None = None) -> "Batch[np.ndarray]":
    """Build a batch in which every token predicts the next one of its segment.

    Args:
      tokens_BT: token ids, integers.
      segment_BT: numbers from 1 of the documents in each row, which must be contiguous, and 0 for
        padding; by default each row is one document.

    Raises:
      UserError: these are not two arrays [B, T] of integers from 0 that fit int32, or a document
        has a gap.
    """
    tokens_BT = _integers("tokens", tokens_BT)
    if segment_BT is None:
      segment_BT = np.ones_like(tokens_BT)
    segment_BT = _integers("segments", segment_BT)
    _require_shape("segments", segment_BT, tokens_BT.shape)
    _require_contiguous(segment_BT)

    is_start_BT = np.ones_like(tokens_BT, bool)
    is_start_BT[:, 1:] = segment_BT[:, 1:] != segment_BT[:, :-1]

    has_next_BT = np.zeros_like(is_start_BT)
    has_next_BT[:, :-1] = ~is_start_BT[:, 1:]
    has_next_BT[:, :-1] &= segment_BT[:, 1:] > 0
    next_BT = np.roll(tokens_BT, -1, axis=1)

    num_positions = tokens_BT.shape[1]
    column_1T = np.arange(num_positions, dtype=np.int32)[None]
    start_or_0_BT = np.where(is_start_BT, column_1T, 0)
    start_BT = np.maximum.accumulate(start_or_0_BT, axis=1)
    position_BT = np.where(segment_BT > 0, column_1T - start_BT, 0)
    return Batch(
      tokens_BT=tokens_BT,
      targets_BT=np.where(has_next_BT, next_BT, 0),
      segment_BT=segment_BT,
      position_BT=position_BT.astype(np.int32),
      weight_BT=has_next_BT.astype(np.float32),
    )


HostBatch = Batch[np.ndarray]  # The rows of one host.
DeviceBatch = Batch[jax.Array]  # The global batch.
AbstractBatch = Batch[jax.ShapeDtypeStruct]


def _array(name: str, values: ArrayLike) -> np.ndarray:
  """Return `values` as an array with their own dtype; UserError if they are ragged."""
  try:
    return np.asarray(values)
  except ValueError:
    raise UserError(f"{name} of a batch have rows of different lengths: pad them") from None


def _integers(name: str, values: ArrayLike) -> np.ndarray:
  """Return `values`, integers from 0, as int32 [B, T]."""
  array = _array(name, values)
  if array.ndim != 2 or not np.issubdtype(array.dtype, np.integer) or not array.size:
    raise UserError(
      f"{name} of a batch are {array.dtype} of shape {array.shape}: give integers [rows, positions]"
    )
  if array.min() < 0 or array.max() > _MAX_INT32:
    raise UserError(
      f"{name} of a batch are from {array.min()} to {array.max()}: give integers from 0 to "
      f"{_MAX_INT32}"
    )
  return array.astype(np.int32)


def token_ids(name: str, values: ArrayLike, vocab_size: int) -> np.ndarray:
  """Return `values` as int32 [B, T]; UserError unless they are ids of the vocabulary."""
  ids_BT = _integers(name, values)
  if ids_BT.max() >= vocab_size:
    raise UserError(
      f"{name} of a batch have ids from {ids_BT.min()} to {ids_BT.max()}, but vocab_size="
      f"{vocab_size}: give ids of the run's tokenizer"
    )
  return ids_BT


def _weights(values: ArrayLike) -> np.ndarray:
  """Return `values`, the weights of targets in the loss, as float32."""
  array = _array("weights", values)
  is_number = np.issubdtype(array.dtype, np.number) or array.dtype in (np.bool_, jnp.bfloat16)
  if not is_number or np.issubdtype(array.dtype, np.complexfloating):
    raise UserError(f"weights of a batch are {array.dtype}: give numbers from 0")
  with np.errstate(over="ignore"):
    weight_BT = array.astype(np.float32)
  if not np.isfinite(weight_BT).all() or weight_BT.min(initial=0) < 0:
    raise UserError(
      f"weights of a batch are from {array.min()} to {array.max()}: give finite numbers from 0"
    )
  total = weight_BT.sum(dtype=np.float64)
  if total < 1:  # the loss divides by at least 1
    raise UserError(
      f"weights of a batch sum to {total:g}: give 1 to a target that counts, and at least one"
    )
  return weight_BT


def _require_shape(name: str, array: np.ndarray, shape: tuple[int, ...]) -> None:
  if array.shape != shape:
    raise UserError(
      f"a batch has tokens of shape {shape} and {name} of shape {array.shape}: give them the same"
    )


def _require_contiguous(segment_BT: np.ndarray) -> None:
  """Raise UserError if a segment has a gap: its parts would attend to each other."""
  for row, segment_T in enumerate(segment_BT):
    starts = np.flatnonzero(np.diff(segment_T, prepend=-1))
    started = segment_T[starts]
    numbers, counts = np.unique(started[started > 0], return_counts=True)
    if (counts > 1).any():
      number = numbers[counts > 1][0]
      raise UserError(
        f"segment {number} of row {row} of a batch has a gap: give each document of a row its own "
        "number"
      )


def checked_batch(batch: HostBatch, vocab_size: int) -> HostBatch:
  """Return a caller's batch in the dtypes of a step, checked before anything is cast.

  Raises:
    UserError: a field is not what `Batch` says, the fields differ in shape, or an id is not in the
      vocabulary.
  """
  checked = Batch(
    tokens_BT=token_ids("tokens", batch.tokens_BT, vocab_size),
    targets_BT=token_ids("targets", batch.targets_BT, vocab_size),
    segment_BT=_integers("segments", batch.segment_BT),
    position_BT=_integers("positions", batch.position_BT),
    weight_BT=_weights(batch.weight_BT),
  )
  shape = checked.tokens_BT.shape
  _require_shape("targets", checked.targets_BT, shape)
  _require_shape("segments", checked.segment_BT, shape)
  _require_shape("positions", checked.position_BT, shape)
  _require_shape("weights", checked.weight_BT, shape)
  _require_contiguous(checked.segment_BT)
  return checked


def checked_experts(
  values: ArrayLike, shape: tuple[int, ...], num_experts: int, real_BT: np.ndarray
) -> np.ndarray:
  """Return the experts of a caller's batch as int32 [B, T, N, K].

  Raises:
    UserError: they have another shape than `shape`, or those of a real token are not K different
      numbers of experts.
  """
  array = _array("experts", values)
  if array.shape != shape or not np.issubdtype(array.dtype, np.integer):
    raise UserError(
      f"experts of a batch are {array.dtype} of shape {array.shape}: give integers {shape}, "
      "[rows, positions, MoE layers, experts of a token]"
    )
  expert_ANK = np.sort(array[real_BT], axis=-1)
  is_repeated = (expert_ANK[..., 1:] == expert_ANK[..., :-1]).any()
  if is_repeated or expert_ANK.min(initial=0) < 0 or expert_ANK.max(initial=0) >= num_experts:
    raise UserError(
      f"experts of a batch: give each token different ones from 0 to {num_experts - 1} in a layer"
    )
  return np.where(real_BT[..., None, None], array, 0).astype(np.int32)


def abstract_batch(
  shape: tuple[int, int],
  sharding: jax.sharding.Sharding | None = None,
  kind: type[Batch] = Batch,
  experts: tuple[int, int] | None = None,
) -> AbstractBatch:
  """Return the shapes, dtypes and sharding of a [B, T] batch.

  Args:
    experts: N and K of `expert_BTNK`; None: the batch has none.
  """
  fields = {}
  for field in dataclasses.fields(kind):
    own_shape: tuple[int, ...] = shape
    if field.name == "expert_BTNK":
      if experts is None:
        continue
      own_shape = (*shape, *experts)
    dtype = np.float32 if field.name in kind.float_fields else np.int32
    fields[field.name] = jax.ShapeDtypeStruct(own_shape, dtype, sharding=sharding)
  return kind(**fields)


def contiguous_rows(indices: Iterable[slice], num_rows: int) -> range:
  """Return the union of `indices`. Raises UserError if it has a gap."""
  distinct = set()
  for index in indices:
    start, stop, _ = index.indices(num_rows)
    distinct.add((start, stop))
  spans = sorted(distinct)
  start, stop = spans[0]
  for first, last in spans[1:]:
    if first > stop:
      raise UserError(
        f"this host's devices hold rows {start}-{stop - 1} and {first}-{last - 1} of a batch, "
        "none between: let the mesh axes data and fsdp (dcn_data_parallelism, "
        "dcn_fsdp_parallelism) span the hosts, and no other axis that shards rows"
      )
    stop = max(stop, last)
  return range(start, stop)


def local_rows(sharding: jax.sharding.Sharding, global_shape: tuple[int, int]) -> range:
  """Return the rows of a [B, T] batch that the devices of this process hold."""
  num_rows = global_shape[0]
  row_slices = []
  for index in sharding.addressable_devices_indices_map(global_shape).values():
    if index is not None:
      row_slices.append(index[0])
  return contiguous_rows(row_slices, num_rows)


def to_global(
  local: HostBatch, sharding: jax.sharding.Sharding, shape: tuple[int, int]
) -> DeviceBatch:
  """Assemble the global batch from each host's `local_rows` (numpy, all positions)."""

  def place(x: np.ndarray) -> jax.Array:
    return jax.make_array_from_process_local_data(sharding, x, (*shape, *x.shape[2:]))

  return jax.tree.map(place, local)


def interleave(x: jax.Array, num_parts: int) -> jax.Array:
  """[B, ...] -> [num_parts, B / num_parts, ...]; each part has rows of every shard."""
  rest = x.shape[1:]
  by_row = x.reshape((-1, num_parts, *rest))
  return by_row.swapaxes(0, 1)
