"""Members on parts of the devices: which devices each gets, and what is compiled."""

import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import largest_error
from support.tiny import compilations

from maxlite.ensemble import Member
from maxlite.ensemble.engines.engine_base import EngineRequest
from maxlite.ensemble.engines.submesh import SubmeshEngine, split_devices
from maxlite.ensemble.members.assignment import assign_lpt
from maxlite.ensemble.members.member import call_model
from maxlite.ensemble.members.model_programs import build_programs
from maxlite.ensemble.members.program import abstract_tree

BATCH = np.ones((4, 3), np.float32)
OPTIMIZER = optax.sgd(0.1)


def loss(model, batch):
  return jnp.mean(model(batch))


def programs_of(count):
  members = [Member(nn.Dense(4), OPTIMIZER, seed=z, name=f"m{z}") for z in range(count)]
  return build_programs(members, loss, call_model, BATCH)


def test_each_member_is_built_on_its_own_devices():
  programs = programs_of(4)
  built = []

  def build(z, placement):
    built.append((z, placement.devices))
    return programs[z]

  SubmeshEngine(EngineRequest(4, build, abstract_tree(BATCH), jax.devices()))
  last = built[-4:]
  assert [number for number, _ in last] == [0, 1, 2, 3]
  used = set()
  for _, devices in last:
    assert devices
    assert used.isdisjoint(devices)
    used.update(devices)


def test_members_with_one_function_and_device_share_a_program():
  programs = programs_of(3)
  request = EngineRequest(
    num_members=3,
    program=lambda z, _: programs[z],
    batch=abstract_tree(BATCH),
    devices=jax.devices()[:2],
  )
  engine = SubmeshEngine(request)
  with compilations() as compiled:
    state = engine.init()
    start = engine.unpack(state)
    state, metrics = engine.step(state, BATCH)
  assert sorted(engine.part_of) == [0, 0, 1]
  assert compiled.count("jit(init)") == 2
  assert compiled.count("jit(train_step)") == 2
  assert metrics.common["loss"].shape == (3,)
  for z, (before, own) in enumerate(zip(start, engine.unpack(state), strict=True)):
    device = jax.devices()[engine.part_of[z]]
    assert own.params["kernel"].devices() == {device}
    gradient = np.full((3, 4), 1 / 4, np.float32)
    assert largest_error(own.params["kernel"], before.params["kernel"] - 0.1 * gradient) < 1e-6


def test_the_most_expensive_members_are_assigned_first():
  assert assign_lpt([1, 5, 4, 3, 3], 2) == [1, 0, 1, 1, 0]
  costs = [7, 1, 3, 2, 5, 4]
  loads = [0, 0, 0]
  for cost, place in zip(costs, assign_lpt(costs, 3), strict=True):
    loads[place] += cost
  assert max(loads) <= 8


@pytest.mark.parametrize(("members", "parts"), [(1, 1), (2, 2), (3, 2), (7, 4), (9, 8)])
def test_devices_are_split_evenly(members, parts):
  cut = split_devices(list(range(8)), members)
  assert len(cut) == parts
  assert list(itertools.chain.from_iterable(cut)) == list(range(8))
