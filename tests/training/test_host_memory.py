"""Optimizer state and saved activations in the host's memory change placement, not numbers."""

import jax
import pytest
from support import trees
from support.slow_cases import slow
from support.tiny import mesh_keys, place, uneven_batch

from maxlite.checkpoint.manager import Checkpoints
from maxlite.checkpoint.replicas import ReplicaCheck
from maxlite.config.schema import CheckpointConfig
from maxlite.planning.memory_estimate import estimate_memory
from maxlite.sharding.host_memory import is_on_host

KEYS = {"decoder_block": "llama"} | mesh_keys("fsdp=8")


@pytest.fixture(scope="module")
def program_with(program_of):
  """A function from offload and other keys to a program."""

  def build(offload, **keys):
    return program_of(**KEYS, **keys, optimizer_memory_host_offload=str(offload).lower())

  return build


def train(program, state, seeds):
  for seed in seeds:
    state, metrics = program.step(state, place(program, uneven_batch(seed)))
  return state, metrics


@pytest.mark.parametrize("saved_offloaded", [True, slow(False)])
def test_training_resumes_across_the_switch_bit_for_bit(program_with, tmp_path, saved_offloaded):
  program = program_with(saved_offloaded)
  other = program_with(not saved_offloaded)
  state, _ = train(program, program.init(0), (0, 1))
  checkpoints = Checkpoints(CheckpointConfig(), tmp_path, pytest.fail)
  checkpoints.save(2, state, {})
  checkpoints.wait()
  restored = checkpoints.restore(other.abstract_state)[0]
  checkpoints.close()
  assert ReplicaCheck(program.abstract_state).difference(state) == ""
  for each, offloaded in ((state, saved_offloaded), (restored, not saved_offloaded)):
    assert {is_on_host(leaf) for leaf in jax.tree.leaves(each.opt_state)} == {offloaded}
    assert not any(map(is_on_host, jax.tree.leaves(each.params)))
  resumed = train(other, restored, (2,))
  expected = train(program, state, (2,))
  trees.assert_equal_leaves(resumed, expected)


@pytest.mark.slow
def test_each_phase_moves_its_own_state(program_with):
  phases = "[{name: all, train: .*, steps: 1}, {name: out, train: unembed/.*, steps: 1}]"
  results = []
  for offload in (False, True):
    program = program_with(offload, phases=phases)
    results.append(train(program, program.init(0), (0, 1)))
  on_device, on_host = results
  trees.assert_equal_leaves(on_host, on_device)
  offloaded_state, _ = on_host
  assert all(map(is_on_host, jax.tree.leaves(offloaded_state.opt_state)))


@pytest.mark.slow
def test_the_estimate_has_what_the_host_holds(program_with):
  on_device = estimate_memory(program_with(False, remat_policy="minimal"))
  on_host = estimate_memory(program_with(True, remat_policy="offload"))
  assert on_host.parameters == on_device.parameters
  # Counters of the steps, in the state, stay on the device.
  assert on_host.host_optimizer == pytest.approx(on_device.optimizer, abs=64)
  assert 0 < on_host.host_activations < on_device.saved_activations
  full = estimate_memory(program_with(False, remat_policy="full"))
  assert on_host.saved_activations == full.saved_activations
