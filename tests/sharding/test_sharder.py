"""The sharding table and the Sharder: specs, constraints and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from maxlite.sharding import DEFAULT_RULES, MESH_AXES, Sharder, build_mesh


@pytest.fixture(scope="module")
def mesh():
  return build_mesh((1, 1, 2, 1, 2, 2), (1,) * 6)


def test_every_row_of_the_table_names_mesh_axes():
  for row in DEFAULT_RULES.values():
    assert set(row) <= set(MESH_AXES)


def test_spec_follows_the_table(mesh):
  sharder = Sharder(mesh)
  assert sharder.spec(("vocab", "embed")) == P("tensor", ("fsdp", "expert"))  # context=1
  assert sharder.spec(("layers", "norm", None)) == P(None, None, None)
  assert [sharder.num_shards(name) for name in ("embed", "vocab", "norm", None)] == [4, 2, 1, 1]


def test_overrides_replace_rows_and_leave_the_others(mesh):
  sharder = Sharder(mesh, {"embed": ("fsdp",), "mlp": []})
  assert sharder.spec(("embed", "mlp")) == P("fsdp", None)
  assert sharder.spec(("vocab",)) == Sharder(mesh).spec(("vocab",))


def test_constrain_shards_an_array(mesh):
  sharder = Sharder(mesh)
  names = ("activation_batch", "activation_mlp")
  x = jax.jit(lambda x: sharder.constrain(x, names))(jnp.ones((4, 6)))
  assert x.sharding.is_equivalent_to(sharder.sharding(names), 2)
  assert x.addressable_shards[0].data.shape == (1, 3)
  np.testing.assert_array_equal(x, np.ones((4, 6)))


@pytest.mark.parametrize(
  ("overrides", "message"),
  [
    ({"embd": ("fsdp",)}, "no logical axis 'embd'; known are .*embed"),
    ({"embed": ("fsdp", "tensr")}, "embed: no mesh axis 'tensr'; use .*tensor"),
  ],
)
def test_an_override_must_name_existing_axes(mesh, overrides, message):
  with pytest.raises(ValueError, match=message):
    Sharder(mesh, overrides)


def test_a_mesh_axis_shards_only_one_axis_of_an_array(mesh):
  with pytest.raises(ValueError, match="put mesh axis 'tensor' on two axes"):
    Sharder(mesh).spec(("vocab", "mlp"))
  with pytest.raises(ValueError, match="put mesh axis 'fsdp' on two axes"):
    Sharder(mesh, {"mlp": ("fsdp",)}).spec(("embed", "mlp"))
  with pytest.raises(ValueError, match="put mesh axis 'context' on two axes"):  # on any mesh
    Sharder(mesh, {"mlp": ("context",)}).spec(("embed", "mlp"))


def test_names_must_be_known_and_as_many_as_axes(mesh):
  sharder = Sharder(mesh)
  with pytest.raises(ValueError, match="no logical axis 'heads'"):
    sharder.spec(("heads",))
  with pytest.raises(ValueError, match=r"2 logical names .* for an array of shape \(4,\)"):
    sharder.constrain(jnp.ones(4), ("embed", "mlp"))
