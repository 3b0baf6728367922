"""Bounded receive buffers have room for what they promise, and for the kernels' last tile."""

import pytest
from support.tiny import config_of

from maxlite.kernels.grouped_matmul.tiled import LARGEST
from maxlite.layers.moe.receive_buffer import choose_buffer


@pytest.mark.parametrize("even_load", [100, 512, 12_288])
@pytest.mark.parametrize("factor", [0.5, 1.0, 1.5])
def test_the_last_tile_of_live_rows_ends_within_a_bounded_buffer(factor, even_load):
  cfg = config_of(sparse_matmul=True, ragged_buffer_factor=factor, ragged_overflow="drop")
  worst_case = 16 * even_load
  buffer = choose_buffer(cfg.model.moe, even_load, worst_case)
  assert factor * even_load <= buffer.limit < worst_case
  tile = max(LARGEST)
  assert buffer.num_rows % tile == 0
  # A tile starts at a live row, and would be moved back if it extended past the end.
  assert buffer.limit + tile <= buffer.num_rows


def test_a_buffer_is_not_larger_than_the_worst_case():
  cfg = config_of(sparse_matmul=True, ragged_buffer_factor=8.0, ragged_overflow="drop")
  assert choose_buffer(cfg.model.moe, 1000, 4000) == (4000, 4000)
