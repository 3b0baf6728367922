"""Mistakes in the keys of receive buffers, for test_mistakes.py."""

BUFFER_MISTAKES = {
  ("ragged_buffer_factor=-0.5",): ("ragged_buffer_factor=-0.5", "ragged_buffer_factor=1.25"),
  ("ragged_buffer_factor=2", "use_ring_of_experts=true"): (
    "use_ring_of_experts=true",
    "ragged_buffer_factor=-1",
  ),
  ("ragged_buffer_factor=2", "sparse_matmul=false"): (
    "sparse_matmul=false",
    "ragged_buffer_factor=-1",
  ),
  ("ragged_overflow=drop",): (
    "ragged_buffer_factor=-1.0 (default)",
    "ragged_buffer_factor=1.5, or ragged_overflow=replay",
  ),
  ("ragged_buffer_factor=1.5", "diloco_sync_period=10"): (
    "ragged_overflow=replay (default)",
    "ragged_overflow=drop, or diloco_sync_period=0",
  ),
  ("ragged_buffer_factor=1.5", "phases=[{name: a, train: [moe]}]"): (
    "ragged_overflow=drop, or phases=[]",
  ),
  ("ragged_buffer_factor=1.5", "members=[{}]"): ("ragged_overflow=drop, or members=[]",),
  ("members=[{}, {ragged_buffer_factor: 1.5}]",): (
    "members[1]: member m01 has ragged_buffer_factor=1.5",
    "ragged_overflow=drop",
  ),
}
