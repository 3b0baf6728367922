"""The order of Megatron-LM, against an implementation that builds its indices token by token."""

import json
import math
import random

import pytest
from batch_streams import assert_same, join, take
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.token_files import write_indexed

from maxlite.config.raw_values import FrozenMapping
from maxlite.config.schema import DataConfig
from maxlite.data.loader import open_data
from maxlite.errors import UserError

END = 1


class LegacyRandom:
  """The Mersenne Twister as NumPy's RandomState seeds and shuffles with it."""

  def __init__(self, seed):
    words = [seed]
    for i in range(1, 624):
      words.append((1812433253 * (words[-1] ^ (words[-1] >> 30)) + i) % 2**32)
    self._twister = random.Random()
    self._twister.setstate((3, (*words, 624), None))

  def shuffle(self, values):
    for i in range(len(values) - 1, 0, -1):
      mask = 2 ** i.bit_length() - 1
      j = self._twister.getrandbits(32) & mask
      while j > i:
        j = self._twister.getrandbits(32) & mask
      values[i], values[j] = values[j], values[i]


def gpt_samples(sequences, length, num_samples, seed):
  """The samples, of `length` + 1 ids each, of the published algorithm of GPTDataset."""
  tokens_per_epoch = sum(len(sequence) for sequence in sequences)
  num_epochs = 1
  while num_epochs * tokens_per_epoch < num_samples * length + 1:
    num_epochs += 1
  without_last = ((num_epochs - 1) * tokens_per_epoch - 1) // length
  per_epoch = (tokens_per_epoch - 1) // length
  separate = num_epochs > 1 and num_samples - without_last < int(0.8 * per_epoch)
  twister = LegacyRandom(seed)
  groups = [num_epochs - 1, 1] if separate else [num_epochs]
  document_index = []
  for epochs in groups:
    numbers = []
    for _ in range(epochs):
      numbers += range(len(sequences))
    twister.shuffle(numbers)
    document_index += numbers
  stream = []
  for number in document_index:
    stream += sequences[number]
  samples = []
  first = 0
  while first + length + 1 <= len(stream):
    samples.append(stream[first : first + length + 1])
    first += length
  together = without_last if separate else len(samples)
  order = list(range(together))
  twister.shuffle(order)
  rest = list(range(together, len(samples)))
  twister.shuffle(rest)
  return [samples[place] for place in order + rest]


def normalized(weights):
  total = 0.0  # added one by one: `sum` compensates the rounding of floats
  for weight in weights:
    total += weight
  return [weight / total for weight in weights]


def blended(sources, weights, length, num_samples, seed):
  """The samples of the published algorithm of BlendedDataset."""
  shares = normalized(weights)
  sizes = [math.ceil(num_samples * share) for share in shares]
  # The last bit decides between sources that are equally far behind.
  shares = normalized(shares)
  datasets = [
    gpt_samples(sequences, length, math.ceil(size * 1.005), seed)
    for sequences, size in zip(sources, sizes, strict=True)
  ]
  taken = [0] * len(sources)
  samples = []
  for n in range(sum(sizes)):
    errors = [share * max(n, 1) - count for share, count in zip(shares, taken, strict=True)]
    source = errors.index(max(errors))
    samples.append(datasets[source][taken[source]])
    taken[source] += 1
  return samples[:num_samples]


def config(length, num_samples, seed, **keys):
  defaults = {
    "dataset_type": "tokens",
    "max_target_length": length,
    "data_shuffle_seed": seed,
    "megatron_order": True,
    "megatron_num_samples": num_samples,
    "megatron_split": "1,0,0",
    "document_end_id": END,
  }
  return DataConfig(**{**defaults, **keys})


def opened(cfg, folder, batch_size=1, rows=None):
  return open_data(
    cfg,
    vocab_size=1 << 16,
    global_batch_size=batch_size,
    rows=rows or range(batch_size),
    cache_directory=folder,
    evaluates=False,
  )


def samples_of(cfg, folder):
  data = opened(cfg, folder)
  samples = []
  for n in range(cfg.megatron_num_samples):
    row = data.source.train[data.order[n]]
    samples.append([*row["tokens_BT"].tolist(), row["targets_BT"][-1]])
    assert row["tokens_BT"][1:].tolist() == row["targets_BT"][:-1].tolist()
  return samples


def draw_sequences(seed, num_sequences):
  draw = random.Random(seed)
  return [
    [*(draw.randrange(2, 60000) for _ in range(draw.randrange(0, 12))), END][: draw.randrange(13)]
    for _ in range(num_sequences)
  ] + [[5, 6, 7]]


ORDERS = {
  "length": st.integers(2, 9),
  "num_samples": st.integers(1, 120),
  "seed": st.integers(0, 2**32 - 1),
  "num_sequences": st.integers(1, 30),
}


@settings(max_examples=15, deadline=None)
@given(**ORDERS)
@example(length=4, num_samples=1, seed=0, num_sequences=3)
def test_samples_are_those_of_gpt_dataset(
  tmp_path_factory, length, num_samples, seed, num_sequences
):
  folder = tmp_path_factory.mktemp("order")
  sequences = draw_sequences(seed, num_sequences)
  file = write_indexed(folder / "a", [[sequence] for sequence in sequences])
  cfg = config(length, num_samples, seed, dataset_path=(str(file),))
  expected = gpt_samples(sequences, length, num_samples, seed)[:num_samples]
  assert samples_of(cfg, folder) == expected


@settings(max_examples=8, deadline=None)
@given(weights=st.lists(st.integers(1, 50), min_size=1, max_size=4), **ORDERS)
@example(weights=[50, 39, 27], length=2, num_samples=120, seed=0, num_sequences=9)
def test_blends_are_those_of_blended_dataset(
  tmp_path_factory, weights, length, num_samples, seed, num_sequences
):
  folder = tmp_path_factory.mktemp("blend")
  sources, entries = [], []
  for n, weight in enumerate(weights):
    sources.append(draw_sequences(seed + n, num_sequences))
    file = write_indexed(folder / str(n), [[sequence] for sequence in sources[-1]])
    entries.append(FrozenMapping({"name": str(n), "path": str(file), "weight": str(weight)}))
  cfg = config(length, num_samples, seed, dataset_mixture=tuple(entries))
  try:
    expected = blended(sources, weights, length, num_samples, seed)
  except IndexError:  # Megatron-LM refuses it, too
    with pytest.raises(UserError, match="the blend of Megatron-LM takes"):
      samples_of(cfg, folder)
    return
  assert samples_of(cfg, folder) == expected


def test_samples_of_megatron_lm_itself(tmp_path):
  """Computed by BlendedMegatronDatasetBuilder of NVIDIA/Megatron-LM at d98e8a64, seed 1234."""
  documents = [[[*range(10 * n, 10 * n + 1 + n % 7), END]] for n in range(1, 13)]
  file = write_indexed(tmp_path / "a", documents)
  cfg = config(5, 9, 1234, dataset_path=(str(file),), megatron_split="80,15,5")
  assert samples_of(cfg, tmp_path) == [
    [64, 65, 66, 1, 70, 1],
    [22, 1, 10, 11, 1, 90],
    [51, 52, 53, 54, 55, 1],
    [32, 33, 1, 100, 101, 102],
    [90, 91, 92, 1, 50, 51],
    [1, 40, 41, 42, 43, 44],
    [80, 81, 1, 30, 31, 32],
    [102, 103, 1, 20, 21, 22],
    [1, 60, 61, 62, 63, 64],
  ]
  other = write_indexed(tmp_path / "b", documents[::-1])
  entries = [
    FrozenMapping({"name": "a", "path": str(file), "weight": "0.7"}),
    FrozenMapping({"name": "b", "path": str(other), "weight": "0.3"}),
  ]
  cfg = config(5, 12, 1234, dataset_mixture=tuple(entries))
  assert samples_of(cfg, tmp_path) == [
    [31, 32, 33, 1, 100, 101],
    [1, 100, 101, 102, 103, 1],
    [61, 62, 63, 64, 65, 66],
    [123, 124, 125, 1, 30, 31],
    [1, 70, 1, 60, 61, 62],
    [92, 1, 120, 121, 122, 123],
    [11, 1, 50, 51, 52, 53],
    [43, 44, 1, 10, 11, 1],
    [111, 112, 113, 114, 1, 20],
    [101, 102, 103, 1, 110, 111],
    [80, 81, 1, 90, 91, 92],
    [55, 1, 40, 41, 42, 43],
  ]


def test_masks_are_those_of_megatron_lm(tmp_path):
  file = write_indexed(tmp_path / "a", [[[2, 3, END, 4, END, END, 5, 6, 7]]])
  rows = {}
  for resets in (False, True):
    for masks in (False, True):
      cfg = config(
        8, 1, 0, dataset_path=(str(file),), reset_attention_mask=resets, eod_mask_loss=masks
      )
      rows[resets, masks] = opened(cfg, tmp_path).source.train[0]
  assert rows[True, False]["segment_BT"].tolist() == [1, 1, 1, 2, 2, 3, 4, 4]
  assert rows[True, False]["position_BT"].tolist() == [0, 1, 2, 0, 1, 0, 0, 1]
  assert rows[False, True]["segment_BT"].tolist() == [1] * 8
  assert rows[False, True]["position_BT"].tolist() == [*range(8)]
  assert rows[False, True]["weight_BT"].tolist() == [1, 1, 0, 1, 0, 0, 1, 1]
  assert rows[False, False]["weight_BT"].tolist() == [1] * 8


def test_an_order_resumes_and_ends_with_its_samples(tmp_path):
  sequences = draw_sequences(0, 20)
  file = write_indexed(tmp_path / "a", [[sequence] for sequence in sequences])
  cfg = config(4, 96, 3, dataset_path=(str(file),))  # several epochs
  stream = opened(cfg, tmp_path, batch_size=2).train_stream()
  take(stream, 29)
  state = json.loads(json.dumps(stream.state()))
  following = take(stream, 19)
  with pytest.raises(UserError, match="megatron_num_samples=96 ends after 48 batches"):
    next(stream)
  stream.close()
  parts = []
  for host in range(2):
    resumed = opened(cfg, tmp_path, batch_size=2, rows=range(host, host + 1)).train_stream()
    resumed.restore(state)
    parts.append(take(resumed, 19))
    resumed.close()
  assert_same([join(list(batches)) for batches in zip(*parts, strict=True)], following)
  longer = opened(config(4, 100, 3, dataset_path=(str(file),)), tmp_path, batch_size=2)
  other = longer.train_stream()
  with pytest.raises(UserError, match="set megatron_num_samples=96"):
    other.restore(state)
  other.close()


def test_the_split_of_megatron_lm(tmp_path):
  documents = [[[10 * n, 10 * n + 1]] for n in range(1, 41)]
  file = write_indexed(tmp_path / "a", documents)
  source = opened(config(2, 5, 0, dataset_path=(str(file),), megatron_split="80,15,5"), tmp_path)
  train = {i for row in range(len(source.source.train)) for i in read(source.source.train, row)}
  held_out = {i for row in range(len(source.source.eval)) for i in read(source.source.eval, row)}
  assert train <= {i for [ids] in documents[:32] for i in ids}
  assert held_out == {i for [ids] in documents[32:38] for i in ids}


def test_a_split_without_training_sequences_is_refused(tmp_path):
  file = write_indexed(tmp_path / "a", [[[5, 6]]])
  with pytest.raises(UserError, match="nothing is left to train on: raise the first share"):
    opened(config(2, 5, 0, dataset_path=(str(file),), megatron_split="1,9"), tmp_path)
  with pytest.raises(UserError, match="data_shuffle_seed=4294967296 is above 4294967295"):
    opened(config(2, 5, 1 << 32, dataset_path=(str(file),)), tmp_path)


def read(rows, index):
  row = rows[index]
  return row["tokens_BT"][row["segment_BT"] > 0].tolist()
