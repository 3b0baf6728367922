"""The collectives of a compiled training step."""

import pytest
from support.tiny import mesh_keys

from maxlite.planning.hlo_collectives import collectives
from maxlite.planning.memory_estimate import bytes_per_device
from maxlite.planning.plan_run import compile_step


@pytest.mark.slow
@pytest.mark.parametrize("decoder_block", ["mixtral", "llama"])
def test_slices_reduce_accumulated_gradients_once(program_of, decoder_block):
  program = program_of(
    decoder_block=decoder_block,
    gradient_accumulation_steps=4,
    **mesh_keys("data=2 fsdp=2 tensor=2"),
  )
  found = collectives(compile_step(program).module, dict(program.mesh.shape))
  shard_bytes = bytes_per_device(program.abstract_state.params)
  across = 0.0
  for collective in found:
    if "data" in collective.mesh_axes:
      across += collective.payload_bytes
  assert shard_bytes <= across < 1.2 * shard_bytes  # the gradient once, plus scalars
