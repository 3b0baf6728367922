"""Training steps of a model with an indexer: meshes, micro-batches, and the dense warm-up."""

import jax
import numpy as np
import pytest
from support.slow_cases import slow
from support.tiny import assert_same_steps, mesh_keys, take_steps, uneven_batch

from maxlite.checkpoint.checksum import leaves_by_path

KEYS = {
  "decoder_block": "deepseek",
  "q_lora_rank": 8,
  "kv_lora_rank": 8,
  "qk_nope_head_dim": 4,
  "qk_rope_head_dim": 4,
  "v_head_dim": 4,
  "use_indexer": True,
  "indexer_n_heads": 4,
  "indexer_head_dim": 8,
  "indexer_topk": 4,
  "indexer_loss_scaling_factor": 0.5,
}
REPLICATED = "ensemble=8"  # every device computes the whole batch, as one device would
CASES = [
  ("fsdp=2 context=2 tensor=2", {}),
  slow("data=2 fsdp=2 expert=2", {}),
  slow("context=8", {}),
  slow("data=4 tensor=2", {"gradient_accumulation_steps": 2}),
  slow("context=4 fsdp=2", {"indexer_sparse_training": False, "gradient_accumulation_steps": 2}),
]


@pytest.mark.parametrize(("mesh", "changes"), CASES)
def test_steps_equal_those_on_one_device(program_of, mesh, changes):
  dense = {name: changes[name] for name in changes if name == "indexer_sparse_training"}
  whole = program_of(**KEYS, **dense, **mesh_keys(REPLICATED))
  before = jax.device_get(whole.init(0))
  batches = [uneven_batch(seed) for seed in range(2)]
  expected = take_steps(whole, before, batches)
  for row in expected[1]:
    total = row["loss"] + 0.5 * row["indexer_loss"]
    total += 0.01 * row["load_balance_loss"] + 0.001 * row["router_z_loss"]
    np.testing.assert_allclose(row["total_loss"], total, rtol=1e-6)
  program = program_of(**KEYS, **changes, **mesh_keys(mesh))
  assert_same_steps(take_steps(program, before, batches), expected)


# test_indexed_attention.py has the dense warm-up, test_run_phases.py what a phase leaves alone.
@pytest.mark.slow
def test_a_phase_warms_up_the_indexer_alone(program_of):
  """As published: dense attention, the indexer learns from it, everything else is frozen."""
  program = program_of(
    **KEYS,
    indexer_sparse_training=False,
    phases="[{name: indexer, train: ['.*/indexer/.*'], steps: 8, learning_rate: 0.03}]",
    **mesh_keys("fsdp=8"),
  )
  before = jax.device_get(program.init(0))
  after, rows = take_steps(program, before, [uneven_batch(0)] * 8)
  assert rows[-1]["indexer_loss"] < 0.9 * rows[0]["indexer_loss"]
  assert rows[-1]["loss"] == rows[0]["loss"]
  old = leaves_by_path(before.params)
  for path, leaf in leaves_by_path(after.params).items():
    assert np.array_equal(leaf, old[path]) == ("/indexer/" not in path), path
