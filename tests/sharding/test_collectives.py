"""pvary: the gradient of a weight shared by all shards is the sum over shards."""

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from maxlite.layers.linear import matmul
from maxlite.sharding import build_mesh
from maxlite.sharding.collectives import pvary

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
