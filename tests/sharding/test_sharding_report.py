"""What may not lie on a mesh, and how much may lie whole."""

import jax
import jax.numpy as jnp
import pytest

from maxlite.sharding import Sharder, build_mesh
from maxlite.sharding.sharding_report import check_sharded, parameter_sharding


@pytest.fixture(scope="module")
def sharder():
  return Sharder(build_mesh((1, 1, 2, 1, 2, 2), (1,) * 6))


def placed(sharder, path, shape, names, dtype=jnp.float32):
  return parameter_sharding(path, jax.ShapeDtypeStruct(shape, dtype), names, sharder)


def test_a_placement_counts_bytes_as_a_device_holds_them(sharder):
  names = ("embed", "mlp")
  placement = placed(sharder, "mlp/wi_0/kernel", (8, 6), names, jnp.bfloat16)
  assert placement.num_shards == 8
  assert placement.num_bytes == 96
  held = jax.device_put(jnp.ones((8, 6), jnp.bfloat16), sharder.sharding(names))
  assert placement.bytes_per_device == held.addressable_shards[0].data.nbytes == 12


@pytest.mark.parametrize(
  ("names", "shape", "message"),
  [
    (("embed", "mlp"), (8, 5), r"'mlp' of 5 .* by tensor=2: change ici_tensor_parallelism, or"),
    (
      ("embed", "mlp"),
      (6, 8),
      r"'embed' of 6 .*fsdp=2 x expert=2: change ici_fsdp_parallelism or ici_expert_parallelism,",
    ),
    (("exp", "norm"), (3, 8), r"'exp' of 3 .* by expert=2: change ici_expert_parallelism, or"),
  ],
)
def test_an_axis_that_does_not_divide_is_named_with_its_key(sharder, names, shape, message):
  with pytest.raises(ValueError, match=r"parameter layers/moe/wo of shape \(.*" + message):
    placed(sharder, "layers/moe/wo", shape, names)


def test_parameters_may_lie_whole_up_to_the_tolerance(sharder):
  names = ("embed", "mlp")
  cut = [placed(sharder, "kernel", (8, 6), names), placed(sharder, "in_two", (48,), ("mlp",))]
  whole = [placed(sharder, "small", (1,), ("norm",)), placed(sharder, "big", (3,), ("norm",))]
  check_sharded([*cut, *whole], sharder, 0.04)
  with pytest.raises(ValueError, match=r"^4\.0% .* largest big \(3,\); .* allows 3\.9%"):
    check_sharded([*cut, *whole], sharder, 0.039)


def test_a_mesh_that_cuts_no_parameter_has_nothing_to_check():
  sharder = Sharder(build_mesh((2, 4, 1, 1, 1, 1), (1,) * 6))
  check_sharded([placed(sharder, "kernel", (8, 8), ("embed", "mlp"))], sharder, 0.0)
