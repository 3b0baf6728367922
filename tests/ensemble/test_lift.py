"""N copies of a module as one: values, logical axes and gradients, also of MoE on a mesh."""

import functools
import re
import runpy
import textwrap
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import meta
from jax.sharding import Mesh
from support import trees

from maxlite.config import load_config
from maxlite.ensemble import lift
from maxlite.errors import UserError
from maxlite.models import Decoder
from maxlite.sharding import DEFAULT_RULES, MESH_AXES, Sharder

ROOT = Path(__file__).resolve().parents[2]
NUM_MEMBERS = 2


class Net(nn.Module):
  """A module with a list field, statistics, random numbers, a sown value and a named parameter."""

  widths: list

  @nn.compact
  def __call__(self, x_BD, train=True):
    for width in self.widths:
      x_BD = nn.tanh(nn.Dense(width)(x_BD))
    x_BD = nn.BatchNorm(use_running_average=not train)(x_BD)
    x_BD = nn.Dropout(0.5, deterministic=not train)(x_BD)
    self.sow("losses", "sum", jnp.sum(x_BD))
    scale = nn.with_logical_partitioning(nn.initializers.ones, ("embed",))
    return x_BD * self.param("scale", scale, x_BD.shape[-1:])[None]


def member_of(variables, z):
  return jax.tree.map(lambda leaf: leaf[z], nn.unbox(variables))


def partition_spec_of(module):
  return nn.get_partition_spec(jax.eval_shape(module.init, jax.random.key(0), np.ones((2, 5))))


def test_every_copy_computes_what_its_module_does():
  module = Net([4, 3])
  members = lift(module, 3)
  x_BD = np.sin(np.arange(10, dtype=np.float32)).reshape(2, 5)
  keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}

  @jax.jit
  def run():
    variables = members.init(keys, x_BD)
    outputs = members.apply(variables, x_BD, train=False)
    updated = members.apply(variables, x_BD, mutable=["batch_stats", "losses"], rngs=keys)
    return variables, outputs, updated

  @jax.jit
  def run_alone(variables):
    return module.apply(variables, x_BD, train=False)

  variables, outputs, (trained, updated) = jax.device_get(run())
  assert len({float(jnp.sum(own)) for own in trained}) == 3  # random numbers differ
  for z in range(3):
    own = member_of(variables, z)
    expected = jax.eval_shape(module.init, keys, x_BD)
    assert jax.tree.map(jnp.shape, own) == jax.tree.map(jnp.shape, nn.unbox(expected))
    alone = run_alone(own)
    # Not bitwise: a product with a leading axis rounds differently on some processors.
    np.testing.assert_allclose(outputs[z], alone, rtol=1e-6)
    assert jax.tree.map(jnp.shape, member_of(updated, z)["batch_stats"]) == jax.tree.map(
      jnp.shape, own["batch_stats"]
    )
  kernels = nn.unbox(variables)["params"]["Dense_0"]["kernel"]
  assert len({float(jnp.sum(own)) for own in kernels}) == 3  # initial values differ


def test_parameters_have_the_logical_axis_ensemble():
  names = partition_spec_of(lift(Net([4]), 2))
  assert names["params"]["scale"] == jax.P("ensemble", "embed")
  assert names["params"]["Dense_0"]["kernel"] == jax.P("ensemble", None, None)


def test_statistics_have_the_logical_axis_ensemble():
  names = partition_spec_of(lift(Net([4]), 2))
  assert names["batch_stats"]["BatchNorm_0"]["mean"] == jax.P("ensemble", None)


@pytest.mark.parametrize(
  ("module", "count", "message"),
  [
    (nn.Dense, 3, r"lift takes an instance of nn.Module, and not Dense: call it, Dense\("),
    (nn.Dense(3), 0, "a number of members of at least 1, and not 0"),
    (nn.Dense(3), 2.5, "and not 2.5"),
  ],
)
def test_what_cannot_be_lifted_is_one_line(module, count, message):
  with pytest.raises(UserError, match=message):
    lift(module, count)


def decoder(mesh_shape, family):
  keys = (
    "base_emb_dim=16 base_mlp_dim=32 base_moe_mlp_dim=16 num_experts=4 vocab_size=32 scan_unroll=1"
  )
  keys += " base_num_decoder_layers=1 base_num_query_heads=2 base_num_kv_heads=2 head_dim=8"
  cfg = load_config([f"decoder_block={family}", "dataset_type=synthetic", *keys.split()])
  devices = np.array(jax.devices()[: int(np.prod(mesh_shape))]).reshape(mesh_shape)
  return Decoder(cfg.model, Sharder(Mesh(devices, MESH_AXES)))


@pytest.mark.slow
@pytest.mark.parametrize(
  "mesh_shape", [(1,) * 6, pytest.param((2, 1, 2, 1, 2, 1), marks=pytest.mark.slow)]
)
def test_moe_decoders_are_lifted_with_their_gradients(mesh_shape):
  module = decoder(mesh_shape, "mixtral")
  tokens_BT = np.arange(32, dtype=np.int32).reshape(4, 8)
  segment_BT = np.ones_like(tokens_BT)
  position_BT = np.tile(np.arange(8, dtype=np.int32), (4, 1))
  members = lift(module, NUM_MEMBERS)
  key = jax.random.key(0)
  init = functools.partial(members.init, key, tokens_BT, segment_BT, position_BT)
  mesh = module.sharder.mesh
  specs = nn.get_partition_spec(jax.eval_shape(init))
  shardings = nn.logical_to_mesh_sharding(specs, mesh, [*DEFAULT_RULES.items()])
  params = meta.unbox(jax.jit(init, out_shardings=shardings)())["params"]
  assert all(leaf.sharding.spec[0] == "ensemble" for leaf in jax.tree.leaves(params))

  @functools.partial(jax.jit, static_argnums=0)
  def gradients(model, params):
    def total(params):
      logits_BTV = model.apply({"params": params}, tokens_BT, segment_BT, position_BT)
      return jnp.sum(jnp.sin(logits_BTV))

    return jax.value_and_grad(total)(params)

  value, together = gradients(members, params)
  alone = [gradients(module, member_of(params, z)) for z in range(NUM_MEMBERS)]
  np.testing.assert_allclose(value, sum(value for value, _ in alone), rtol=1e-5)
  for z, (_, expected) in enumerate(alone):
    for got, want in trees.leaf_pairs(member_of(together, z), expected):
      np.testing.assert_allclose(got, want, atol=1e-5 * float(jnp.max(jnp.abs(want))))


def test_the_documented_lines_run(tmp_path):
  text = (ROOT / "docs" / "ensembles.md").read_text("utf-8")
  block = re.search(r"(?:^    .*\n|^\n)*^    members = lift\((?:.*\n)(?:    .*\n|\n)*", text, re.M)
  script = tmp_path / "example.py"
  script.write_text(textwrap.dedent(block.group()))
  inputs = {"module": nn.Dense(3), "key": jax.random.key(0), "x": np.ones((2, 4), np.float32)}
  names = runpy.run_path(str(script), inputs)
  np.testing.assert_array_equal(names["outputs"][3], names["output"])
  assert len(jax.tree.leaves(names["variables"])[0].sharding.device_set) == 8
