"""pvary: the gradient of a weight shared by all shards is the sum over shards. Gathered weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from maxlite.layers.linear import matmul
from maxlite.sharding import build_mesh
from maxlite.sharding.collectives import gather_weight, pvary

MESH_DEGREES = (1, 2, 2, 1, 1, 2)
ROWS = P(("data", "fsdp"), None)


def test_gradients_inside_shard_map_equal_those_without_it():
  draw = np.random.default_rng(0).normal
  x_TD = draw(size=(8, 5)).astype(np.float32)
  w_DF = draw(size=(5, 6)).astype(np.float32)
  dy_TF = draw(size=(8, 6)).astype(np.float32)

  def multiply(x_tD, w_Df):
    # `matmul` has a custom gradient rule, which does not sum over mesh axes.
    x_tD, w_Df = pvary(x_tD, w_Df)
    return matmul(x_tD, w_Df)

  sharded = jax.shard_map(
    multiply,
    mesh=build_mesh(MESH_DEGREES, (1,) * 6),
    in_specs=(ROWS, P(None, "tensor")),
    out_specs=P(("data", "fsdp"), "tensor"),
  )
  y_TF, pull_back = jax.vjp(jax.jit(sharded), x_TD, w_DF)
  dx_TD, dw_DF = pull_back(dy_TF)
  np.testing.assert_allclose(y_TF, x_TD @ w_DF, atol=1e-5)
  np.testing.assert_allclose(dx_TD, dy_TF @ w_DF.T, atol=1e-5)
  np.testing.assert_allclose(dw_DF, x_TD.T @ dy_TF, atol=1e-5)


def test_all_operands_vary_over_the_union_of_their_axes():
  def local(x_t, w, z_d):
    marked = pvary(x_t, w, z_d)
    kinds = {jax.typeof(array).manual_axis_type.varying for array in marked}
    assert kinds == {frozenset({"data", "fsdp", "tensor"})}
    return sum(marked)

  sharded = jax.shard_map(
    local,
    mesh=build_mesh(MESH_DEGREES, (1,) * 6),
    in_specs=(P(("data", "fsdp")), P(), P("tensor")),
    out_specs=P(("data", "fsdp", "tensor")),
  )
  y = jax.jit(sharded)(np.arange(4.0), np.full(1, 10.0), np.array([100.0, 200.0]))
  np.testing.assert_array_equal(y, [110, 210, 111, 211, 112, 212, 113, 213])


@pytest.mark.parametrize("mesh_axes", [("fsdp",), ("fsdp", "context")])
@pytest.mark.parametrize("axis", [0, 1])
def test_weights_gathered_by_permutes_and_their_gradients(axis, mesh_axes):
  """By pairs of shards that exchange what they have: over 8 shards, and over 4 and then 2."""
  draw = np.random.default_rng(0).normal
  w_DF = draw(size=(16, 24)).astype(np.float32)
  dy_NDF = draw(size=(8, 16, 24)).astype(np.float32)
  sizes = {"fsdp": 8 // 2 ** (len(mesh_axes) - 1), "context": len(mesh_axes)}
  mesh = jax.make_mesh(
    tuple(sizes.values()), tuple(sizes), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )
  spec = [None, None]
  spec[axis] = mesh_axes
  shards = ("fsdp", "context")

  def gather(w, by_permutes):
    w = jax.lax.pcast(w, tuple({*shards} - {*mesh_axes}), to="varying")
    return gather_weight(w, jnp.bfloat16, mesh_axes, axis, by_permutes)[None]

  def run(by_permutes):
    sharded = jax.shard_map(
      lambda w: gather(w, by_permutes), mesh=mesh, in_specs=P(*spec), out_specs=P(shards)
    )
    y_NDF, pull_back = jax.vjp(jax.jit(sharded), w_DF)
    return y_NDF, *pull_back(dy_NDF)

  y_NDF, dw_DF = run(by_permutes=True)
  expected_NDF, expected_DF = run(by_permutes=False)
  np.testing.assert_array_equal(y_NDF, expected_NDF)
  np.testing.assert_allclose(dw_DF, expected_DF, atol=1e-5)
