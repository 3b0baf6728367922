"""Attention within chunks of a document, of which documents and windows are the parts."""

import numpy as np
import pytest

from maxlite.kernels.attention.reference import visible
from maxlite.layers.chunked_attention import chunk_segments, chunk_window

SEGMENT_BT = np.repeat([[1, 2, 3, 0]], [7, 4, 10, 3], axis=1).astype(np.int32)
POSITION_BT = np.array([[*range(7), *range(4), *range(10), *range(3)]], np.int32)
ROW_BT = np.arange(SEGMENT_BT.shape[1], dtype=np.int32)[None]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_a_query_attends_its_chunk_of_its_document_up_to_itself(size):
  chunk_BT = chunk_segments(SEGMENT_BT, POSITION_BT, size)
  got_BTS = np.asarray(visible(ROW_BT, chunk_BT, chunk_BT, size))
  same_BTS = SEGMENT_BT[:, :, None] == SEGMENT_BT[:, None]
  number_BT = POSITION_BT // size
  same_BTS &= number_BT[:, :, None] == number_BT[:, None]
  want_BTS = same_BTS & (ROW_BT[:, :, None] >= ROW_BT[:, None])
  is_real_BT = SEGMENT_BT > 0
  np.testing.assert_array_equal(got_BTS[is_real_BT], want_BTS[is_real_BT])
  np.testing.assert_array_equal(chunk_BT == 0, SEGMENT_BT == 0)
  # As a cache counts them.
  window_BT1 = np.asarray(chunk_window(POSITION_BT, size))
  np.testing.assert_array_equal(window_BT1[is_real_BT][:, 0], want_BTS.sum(-1)[is_real_BT])
