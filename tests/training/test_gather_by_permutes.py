"""gather_by_permutes: the same step without all-gathers and reduce-scatters of layers' weights."""

import jax
import pytest
from support.slow_cases import slow
from support.tiny import assert_same_steps, build, config_of, mesh_keys, take_steps, uneven_batch


@pytest.mark.parametrize(
  ("keys", "mesh"),
  [
    ({"decoder_block": "mixtral", "sparse_matmul": True}, "fsdp=4 expert=2"),
    slow({"decoder_block": "llama", "scan_layers": True}, "fsdp=2 context=2 tensor=2"),
  ],
)
def test_steps_are_equal(keys, mesh):
  keys = keys | mesh_keys(mesh)
  plain = build(config_of(**keys))
  permuted = build(config_of(**keys, gather_by_permutes=True))
  state = jax.device_get(plain.init(0))
  batches = [uneven_batch(0), uneven_batch(1)]
  assert_same_steps(take_steps(permuted, state, batches), take_steps(plain, state, batches))
