"""The planner's estimates and its choice."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxlite.ensemble import Ensemble, Member

BATCH = np.ones((4, 3), np.float32)


class MLP(nn.Module):
  width: int
  depth: int = 1

  @nn.compact
  def __call__(self, x_BD):
    for _ in range(self.depth):
      x_BD = nn.relu(nn.Dense(self.width)(x_BD))
    return x_BD


def planned(models, num_devices, **keywords):
  optimizer = optax.sgd(0.1)
  members = [Member(model, optimizer) for model in models]

  def loss(model, batch):
    return jnp.mean(model(batch))

  ensemble = Ensemble(members, loss, devices=jax.devices()[:num_devices], **keywords)
  ensemble.init(BATCH)
  return ensemble.plan


def of(plan, strategy):
  return next(e for e in plan.estimates if e.strategy == strategy)


def test_costs_come_from_shapes():
  """Six FLOPs per parameter and row; a stack has the FLOPs of all and the operations of one."""
  plan = planned([MLP(4)] * 8, 1)
  engines = {name: of(plan, name) for name in ("stacked", "submesh")}
  assert engines["stacked"].useful_share == engines["submesh"].useful_share == 1
  assert engines["submesh"].compile_seconds == 8 * engines["stacked"].compile_seconds
  assert engines["submesh"].num_programs == 8


def test_a_stack_over_devices_has_its_share_of_the_members_on_each():
  one, eight = (of(planned([MLP(512, 3)] * 8, n), "stacked") for n in (1, 8))
  assert one.state_bytes == 8 * eight.state_bytes


def test_many_small_members_of_one_shape_are_stacked():
  plan = planned([MLP(4)] * 32, 1)
  assert plan.strategy == "stacked"
  assert of(plan, "stacked").step_seconds < of(plan, "submesh").step_seconds


def test_members_of_different_structure_are_fused_on_one_device():
  plan = planned([MLP(4), MLP(4, 2), MLP(8, 3)], 1)
  assert plan.strategy == "fused"
  assert of(plan, "fused").why_not is None
  assert of(plan, "stacked").why_not == "depth is 1 in m0, and 2 in m1"


@pytest.mark.slow
def test_of_strategies_with_equal_steps_and_compilation_the_simplest_is_chosen():
  plan = planned([MLP(1024, 4), MLP(2048, 2)], 1)
  fused = of(plan, "fused")
  submesh = of(plan, "submesh")
  assert fused.step_seconds == pytest.approx(submesh.step_seconds, rel=0.05)
  assert fused.compile_seconds == pytest.approx(submesh.compile_seconds, rel=0.05)
  assert plan.strategy == "fused"
  assert plan.reason == "simpler than submesh, and as fast"


@pytest.mark.slow
def test_padded_is_only_chosen_by_name():
  models = [MLP(4), MLP(5)]
  assert planned(models, 1).strategy == "fused"
  assert "padded" not in [each.strategy for each in planned(models, 1).estimates]
  assert planned(models, 1, strategy="padded").strategy == "padded"


@pytest.mark.slow
def test_state_bytes_are_of_the_fullest_device():
  alone, shared = (of(planned([MLP(4)] * 4, n), "stacked") for n in (1, 4))
  assert alone.state_bytes == 4 * shared.state_bytes
  params = 4 * (3 * 4 + 4)
  assert shared.state_bytes == pytest.approx(params, abs=32)  # step, key, whether it diverged


def test_a_strategy_that_does_not_fit_is_not_chosen():
  models = [MLP(4), MLP(64)]
  smallest = 4
  free = planned(models, smallest)
  submesh = of(free, "submesh")
  assert submesh.state_bytes < of(free, "fused").state_bytes
  bound = (submesh.state_bytes + 1) / 1e9
  held = planned(models, smallest, memory_gb=bound)
  chosen = of(held, held.strategy)
  assert chosen.state_bytes <= 1e9 * bound


def test_the_table_shows_every_strategy_and_why_one_is_unsupported():
  plan = planned([MLP(4), MLP(4, 2)], 1)
  text = str(plan.table())  # what `print` writes
  assert f"> {plan.strategy}" in text
  assert plan.reason in text
  assert all(e.strategy in text for e in plan.estimates)
  assert "it takes a device per member" in text
