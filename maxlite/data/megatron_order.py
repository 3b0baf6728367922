"""The rows of a run of Megatron-LM, in its order.

Sources: `_build_document_sample_shuffle_indices` of `megatron/core/datasets/gpt_dataset.py`,
`build_sample_idx` and `build_blending_indices` of `helpers.cpp`, `blended_dataset.py` and
`blended_megatron_dataset_builder.py` there (Megatron-LM, 2026). The order depends on the number of
samples that are requested, since whole epochs are shuffled together.
"""

import hashlib
import math
from collections.abc import Sequence

import numpy as np

from maxlite.data.packing import Row
from maxlite.data.token_cache import Tokens
from maxlite.errors import UserError

_MAX_SEED = (1 << 32) - 1
_SEPARATE_BELOW = 0.80  # of an epoch: a last epoch with fewer samples is shuffled on its own
_SURPLUS = 0.005  # `mid_level_dataset_surplus`: samples of a source above those of the blend


class MegatronRows:
  """Row i is sample i of a GPTDataset.

  The sequences of all epochs are shuffled and concatenated; sample k has the ids [k T, k T + T] of
  that, and the samples are shuffled. By default a row is one segment, as in Megatron-LM.

  Args:
    num_samples: the samples that are requested, of which the number of epochs is a function.
    end_id: the token that ends documents.
    reset_attention_mask: attention and positions do not cross `end_id`.
    eod_mask_loss: the targets of `end_id` do not count.

  Raises:
    UserError: there are no tokens, or the seed is too large.
  """

  def __init__(
    self,
    tokens: Tokens,
    row_length: int,
    seed: int,
    num_samples: int,
    *,
    end_id: int,
    reset_attention_mask: bool,
    eod_mask_loss: bool,
  ) -> None:
    epoch_tokens = int(tokens.lengths.sum())
    if not epoch_tokens:
      raise UserError(
        "nothing is left to train on: raise the first share of megatron_split, or name other files"
      )
    if seed > _MAX_SEED:
      raise UserError(f"data_shuffle_seed={seed} is above {_MAX_SEED}, the largest of Megatron-LM")
    num_epochs = max(-(-(num_samples * row_length + 1) // epoch_tokens), 1)
    self.num_samples = (num_epochs * epoch_tokens - 1) // row_length
    # Samples that are shuffled together, and those of a last epoch that is shuffled on its own.
    num_first = self.num_samples
    is_separate = False
    if num_epochs > 1:
      without_last = ((num_epochs - 1) * epoch_tokens - 1) // row_length
      per_epoch = (epoch_tokens - 1) // row_length
      is_separate = num_samples - without_last < int(_SEPARATE_BELOW * per_epoch)
      if is_separate:
        num_first = without_last
    random = np.random.RandomState(seed)
    epochs = [num_epochs - 1, 1] if is_separate else [num_epochs]
    self._sequence_N = np.concatenate(
      [_shuffled(random, 0, len(tokens.lengths), repeats) for repeats in epochs]
    )
    self._starts = np.zeros(len(self._sequence_N) + 1, np.int64)
    np.cumsum(tokens.lengths[self._sequence_N], out=self._starts[1:])
    first_N = _shuffled(random, 0, num_first)
    last_N = _shuffled(random, num_first, self.num_samples)
    self._sample_N = np.concatenate([first_N, last_N])
    self._offsets = tokens.offsets
    self._file = tokens.file
    self._row_length = row_length
    self._end_id = end_id
    self._resets = reset_attention_mask
    self._masks_ends = eod_mask_loss
    digest = hashlib.blake2b(tokens.digest.encode(), digest_size=8)
    digest.update(self._sequence_N.tobytes())
    digest.update(self._sample_N.tobytes())
    masks = f"{end_id} {reset_attention_mask} {eod_mask_loss}"
    self.identity = f"megatron {digest.hexdigest()} {masks}"

  def __len__(self) -> int:
    return self.num_samples

  @property
  def num_tokens(self) -> int:
    return self.num_samples * self._row_length

  def __getitem__(self, index: int) -> Row:
    first = int(self._sample_N[index]) * self._row_length
    ids = self._read(first, first + self._row_length + 1)
    tokens_T = ids[:-1]
    is_end_T = tokens_T == self._end_id
    segment_T = np.ones(self._row_length, np.int32)
    position_T = np.arange(self._row_length, dtype=np.int32)
    weight_T = np.ones(self._row_length, np.float32)
    if self._resets:
      starts_after_T = np.roll(is_end_T, 1)
      starts_after_T[0] = False
      segment_T += np.cumsum(starts_after_T, dtype=np.int32)
      start_T = np.maximum.accumulate(np.where(starts_after_T, position_T, 0))
      position_T = position_T - start_T
    if self._masks_ends:
      weight_T[is_end_T] = 0
    return {
      "tokens_BT": tokens_T,
      "targets_BT": ids[1:],
      "segment_BT": segment_T,
      "position_BT": position_T,
      "weight_BT": weight_T,
    }

  def _read(self, first: int, last: int) -> np.ndarray:
    """Read the ids [first, last) of the concatenated sequences."""
    low = int(np.searchsorted(self._starts, first, "right")) - 1
    high = int(np.searchsorted(self._starts, last, "left"))
    parts = []
    for n in range(low, high):
      start, stop = int(self._starts[n]), int(self._starts[n + 1])
      begin, end = max(start, first), min(stop, last)
      if begin < end:
        offset = int(self._offsets[self._sequence_N[n]]) + begin - start
        parts.append(self._file.read(offset, end - begin))
    return np.concatenate(parts)


def _shuffled(random: np.random.RandomState, start: int, stop: int, repeats: int = 1) -> np.ndarray:
  """Return the numbers [start, stop), `repeats` times, shuffled together."""
  dtype = np.uint32 if stop < np.iinfo(np.uint32).max - 1 else np.int64
  numbers = np.tile(np.arange(start, stop, dtype=dtype), repeats)
  random.shuffle(numbers)
  return numbers


def split_places(split: str, num_sequences: int) -> tuple[int, int]:
  """Return where training and where evaluation end in the sequences, of a split such as 99,1,0."""
  shares = _normalized([float(share) for share in split.split(",")]).tolist()
  first = shares[0]
  second = first + sum(shares[1:2])
  return round(first * num_sequences), round(second * num_sequences)


def blend_sizes(weights: Sequence[float], num_samples: int) -> list[tuple[int, int]]:
  """Return, by source, its samples in a blend of `num_samples`, and those that it is built for."""
  sizes = []
  for weight in _normalized(weights).tolist():
    size = math.ceil(num_samples * weight)
    sizes.append((size, math.ceil(size * (1 + _SURPLUS))))
  return sizes


def blend(weights: Sequence[float], num_samples: int) -> np.ndarray:
  """Return the source [N] (int16) of each sample of a blend.

  The next sample is from the source that is furthest behind its share; of equal ones, the first.
  """
  # Megatron-LM normalizes twice, which can change the last bit.
  share_S = _normalized(_normalized(weights)).tolist()
  count_S = [0] * len(share_S)
  source_N = np.empty(num_samples, np.int16)
  for n in range(num_samples):
    place = float(max(n, 1))
    furthest = 0
    largest = share_S[0] * place - count_S[0]
    for s in range(1, len(share_S)):
      behind = share_S[s] * place - count_S[s]
      if behind > largest:
        largest = behind
        furthest = s
    count_S[furthest] += 1
    source_N[n] = furthest
  return source_N


def _normalized(weights: Sequence[float] | np.ndarray) -> np.ndarray:
  weight_S = np.array(weights, np.float64)
  return weight_S / np.sum(weight_S)
