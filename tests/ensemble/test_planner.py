"""The planner's estimates and its choice."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxlite.ensemble import Ensemble, Member
from maxlite.ensemble.engines.engine_base import EngineRequest
from maxlite.ensemble.engines.stacked import VmapEngine
from maxlite.ensemble.engines.step_cost import program_cost
from maxlite.ensemble.engines.submesh import SubmeshEngine, assign_lpt, split_devices
from maxlite.ensemble.member_program import MemberProgram

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
  members = [Member(model, optax.sgd(0.1)) for model in models]
  loss = lambda model, batch: jnp.mean(model(batch))
  ensemble = Ensemble(members, loss, devices=jax.devices()[:num_devices], **keywords)
  ensemble.init(BATCH)
  return ensemble.plan


def of(plan, strategy):
  return next(e for e in plan.estimates if e.strategy == strategy)


def test_flops_are_of_matrix_products_including_loops():
  def step(x, w):
    y, _ = jax.lax.scan(lambda y, _: (jnp.sin(y @ w), None), x, None, length=5)
    return y @ w

  shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
  cost = program_cost(jax.make_jaxpr(step)(shape(4, 3), shape(3, 3)))
  assert cost.flops == 6 * 2 * 4 * 3 * 3
  assert cost.operations == 11
  assert cost.bytes == 11 * 4 * 3 * 4


def test_cost_on_a_mesh_is_of_all_its_devices():
  """With explicit shard_map, and with sharding by the compiler."""
  mesh = jax.sharding.Mesh(np.reshape(jax.devices(), (1, 8)), ("ensemble", "data"))
  home = jax.NamedSharding(mesh, jax.P("data"))
  by_compiler = lambda state, batch: (state, {"loss": jnp.sum(batch @ state)})
  product = jax.shard_map(
    jnp.dot, mesh=mesh, in_specs=(jax.P("data"), jax.P()), out_specs=home.spec
  )
  by_shard_map = lambda state, batch: (state, {"loss": jnp.sum(product(batch, state))})
  init = lambda seed: jnp.full((3, 2), seed, jnp.float32)
  for step in (by_compiler, by_shard_map):
    place = {"shardings": jax.NamedSharding(mesh, jax.P()), "batch_sharding": home}
    program = MemberProgram("m", 0, init, step, step, **place)
    batch = jax.ShapeDtypeStruct((16, 3), jnp.float32)
    request = EngineRequest(1, lambda z, _, program=program: program, batch, jax.devices())
    cost = VmapEngine(request, [program], [[0]]).step_cost()
    assert cost.total.flops == 2 * 16 * 3 * 2
    assert cost.on_device.flops == cost.total.flops / 8
    assert cost.total.operations == 8 * cost.on_device.operations > 0


def test_a_sub_mesh_builds_each_member_once_on_its_own_devices():
  step = lambda state, batch: (state, {"loss": jnp.sum(batch @ state)})
  program = MemberProgram("m", 0, lambda seed: jnp.zeros((3, 2)), step, step)
  built = []

  def build(z, devices):
    built.append((z, tuple(devices)))
    return program

  request = EngineRequest(4, build, jax.ShapeDtypeStruct((16, 3), jnp.float32), jax.devices())
  assert len(request.costs) == 4
  built.clear()
  SubmeshEngine(request)
  members, parts = zip(*built, strict=True)
  assert members == (0, 1, 2, 3)
  assert len(set(parts)) == 4
  assert sum(map(len, parts)) == len(set().union(*parts))


def test_many_small_members_of_one_shape_are_stacked():
  plan = planned([MLP(4)] * 32, 1)
  assert plan.strategy == "stacked"
  assert of(plan, "stacked").step_seconds < of(plan, "submesh").step_seconds


def test_members_of_different_structure_are_fused_on_one_device():
  plan = planned([MLP(4), MLP(4, 2), MLP(8, 3)], 1)
  assert plan.strategy == "fused"
  assert "cannot" not in of(plan, "fused").why_not
  assert of(plan, "stacked").why_not == "params/Dense_1/bias is only in m1"


def test_of_strategies_with_equal_steps_and_compilation_the_simplest_is_chosen():
  plan = planned([MLP(1024, 4), MLP(2048, 2)], 1)
  fused, submesh = of(plan, "fused"), of(plan, "submesh")
  assert fused.step_seconds == pytest.approx(submesh.step_seconds, rel=0.05)
  assert fused.compile_seconds == pytest.approx(submesh.compile_seconds, rel=0.05)
  assert plan.strategy == "fused"
  assert plan.reason == "simpler than submesh, and as fast"


def test_a_removed_strategy_is_replaced_and_the_plan_reports_it():
  models = [MLP(4), MLP(5)]
  with pytest.warns(FutureWarning, match="strategy padded was removed: use auto"):
    plan = planned(models, 1, strategy="padded")
  assert plan.strategy == planned(models, 1).strategy == "fused"
  assert "padded was removed, auto replaces it" in str(plan.table())


def test_state_bytes_are_of_the_fullest_device():
  alone, shared = (of(planned([MLP(4)] * 4, n), "stacked") for n in (1, 4))
  assert alone.state_bytes == 4 * shared.state_bytes
  params = 4 * (3 * 4 + 4)
  assert shared.state_bytes == pytest.approx(params, abs=32)  # step, key, whether it diverged


def test_a_strategy_that_does_not_fit_is_not_chosen():
  models, smallest = [MLP(4), MLP(64)], 4
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


def test_the_most_expensive_members_are_assigned_first():
  assert assign_lpt([1, 5, 4, 3, 3], 2) == [1, 0, 1, 1, 0]
  costs, places = [7, 1, 3, 2, 5, 4], assign_lpt([7, 1, 3, 2, 5, 4], 3)
  loads = [sum(c for c, p in zip(costs, places, strict=True) if p == part) for part in range(3)]
  assert max(loads) <= 8


@pytest.mark.parametrize(("members", "parts"), [(1, 1), (2, 2), (3, 2), (7, 4), (9, 8)])
def test_devices_are_split_evenly(members, parts):
  cut = split_devices(list(range(8)), members)
  assert len(cut) == parts
  assert [device for part in cut for device in part] == list(range(8))
