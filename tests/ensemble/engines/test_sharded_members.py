"""Members that are each sharded over a part of the mesh: the gradients of every member are those of
one device, although JAX cannot check the varying axes of a `shard_map` under such a `vmap`."""

import jax
import numpy as np
import pytest
from families import largest_error
from support.tiny import KEYS, mesh_keys, uneven_batch

from maxlite.config import load_config
from maxlite.config.members import members_of
from maxlite.ensemble.engines.engine_base import Placement
from maxlite.ensemble.engines.member_group import MemberGroup
from maxlite.ensemble.run.from_config import ConfigPrograms
from maxlite.step.gradients import GradientResult
from maxlite.step.train_state import TrainState
from maxlite.step.train_step import step_key

TOLERANCE = 2e-5  # relative to the largest gradient of an array
MEMBERS = "[{init_weights_seed: 0, learning_rate: 1e-3}, {init_weights_seed: 1}]"
MOE = {"decoder_block": "mixtral"}
RAGGED = MOE | {"sparse_matmul": True}
# Keys and mesh of every kind of shard_map: dispatches, attention over shards, gathered weights.
CASES = {
  "ragged": (RAGGED, "ensemble=2 fsdp=2 expert=2"),
  "all_gather": (RAGGED | {"use_ring_of_experts": True}, "ensemble=2 fsdp=2 expert=2"),
  "dense": (MOE, "ensemble=2 expert=2 tensor=2"),
  "capacity": (MOE | {"capacity_factor": 2.0}, "ensemble=2 fsdp=2 expert=2"),
  "context": ({"decoder_block": "llama"}, "ensemble=2 context=2 tensor=2"),
  "data": ({"decoder_block": "llama"}, "ensemble=2 data=2 fsdp=2"),
}
SLOW = {"all_gather", "dense", "capacity", "context", "data"}


def programs_of(keys: dict, mesh: str) -> list:
  """The programs of the members on all devices."""
  keys = KEYS | keys | mesh_keys(mesh) | {"per_device_batch_size": 2, "members": MEMBERS}
  cfg = load_config([f"{name}={value}" for name, value in keys.items()])
  builder = ConfigPrograms(jax.devices(), 16, np.ones(cfg.model.vocab_size))
  placement = Placement(tuple(jax.devices()))
  return [builder.build(member, placement) for member in members_of(cfg)]


@pytest.mark.slow
@pytest.mark.parametrize(
  "case", [pytest.param(c, marks=[pytest.mark.slow] if c in SLOW else []) for c in CASES]
)
def test_gradients_of_sharded_members_are_those_of_one_device(case):
  keys, mesh = CASES[case]
  programs = programs_of(keys, mesh)
  group = MemberGroup(programs, own_batches=False)
  assert group.axis == "ensemble"
  state = jax.jit(group.init, out_shardings=group.shardings())()
  batch = uneven_batch(0)
  placed = jax.device_put(batch, group.functions.batch_sharding)
  sharded = jax.device_get(jax.jit(group.gradients)(state, placed))
  solo_keys = keys | {"per_device_batch_size": 2}
  (alone, _) = programs_of(solo_keys, "ensemble=1 data=8")
  parts = alone.functions.phases[0]
  init = jax.jit(alone.functions.init, out_shardings=alone.functions.shardings)

  @jax.jit
  def compute(own: TrainState) -> GradientResult:
    return parts.gradients(own.params, None, batch, step_key(own))

  for z, program in enumerate(programs):
    expected = jax.device_get(compute(init(program.seed_array)))
    np.testing.assert_allclose(sharded.loss[z], expected.loss, rtol=1e-6)
    got = jax.tree.map(lambda leaf, z=z: leaf[z], sharded.gradients)
    assert largest_error(got, expected.gradients) <= TOLERANCE
