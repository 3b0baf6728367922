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
  x_TD, w_DF, dy_TF = (draw(size=s).astype(np.float32) for s in ((8, 5), (5, 6), (8, 6)))

  # `matmul` has a custom gradient rule, which does not sum over mesh axes.
  sharded = jax.shard_map(
    lambda x_tD, w_Df: matmul(*pvary(x_tD, w_Df)),
    mesh=build_mesh(MESH_DEGREES, (1,) * 6),
    in_specs=(ROWS, P(None, "tensor")),
    out_specs=P(("data", "fsdp"), "tensor"),
  )
  y_TF, pull_back = jax.vjp(jax.jit(sharded), x_TD, w_DF)
  dx_TD, dw_DF = pull_back(dy_TF)
  for got, want in ((y_TF, x_TD @ w_DF), (dx_TD, dy_TF @ w_DF.T), (dw_DF, x_TD.T @ dy_TF)):
    np.testing.assert_allclose(got, want, atol=1e-5)


def test_all_operands_vary_over_the_union_of_their_axes():
  def local(x_t, w, z_d):
    marked = pvary(x_t, w, z_d)
    kinds = {jax.typeof(array).manual_axis_type.varying for array in marked}
    assert kinds == {frozenset({"data", "fsdp", "tensor"})}
    return sum(marked)

  y = jax.jit(
    jax.shard_map(
      local,
      mesh=build_mesh(MESH_DEGREES, (1,) * 6),
      in_specs=(P(("data", "fsdp")), P(), P("tensor")),
      out_specs=P(("data", "fsdp", "tensor")),
    )
  )(np.arange(4.0), np.full(1, 10.0), np.array([100.0, 200.0]))
  np.testing.assert_array_equal(y, [x + z + 10 for x in range(4) for z in (100, 200)])
