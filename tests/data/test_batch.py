"""Rows of a host, and their assembly into global arrays."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support import trees

from maxlite.data.batch import Batch, contiguous_rows, local_rows, to_global


def test_adjacent_and_repeated_slices_are_one_range():
  slices = [slice(6, 8), slice(4, 6), slice(4, 6)]
  assert contiguous_rows(slices, 16) == range(4, 8)
  assert contiguous_rows([slice(None)], 16) == range(16)


def test_a_gap_between_rows_is_an_error_with_a_fix():
  with pytest.raises(ValueError, match=r"rows 0-1 and 4-5 .*dcn_data_parallelism"):
    contiguous_rows([slice(0, 2), slice(4, 6)], 8)


@pytest.mark.parametrize("spec", [P("data"), P("data", "context"), P(None, "context"), P()])
def test_global_batch_equals_the_local_rows(spec):
  devices = np.array(jax.devices()).reshape(4, 2)
  sharding = NamedSharding(Mesh(devices, ("data", "context")), spec)
  x_BT = np.arange(8 * 6, dtype=np.int32).reshape(8, 6)
  rows = local_rows(sharding, x_BT.shape)
  assert rows == range(8)
  local = Batch(x_BT, x_BT + 1, x_BT + 2, x_BT + 3, x_BT.astype(np.float32))
  batch = to_global(local, sharding, x_BT.shape)
  for got, wanted in trees.leaf_pairs(batch, local):
    assert got.sharding == sharding
    assert got.dtype == wanted.dtype
    np.testing.assert_array_equal(got, wanted)
