"""Checks of the sharding report: divisible axes, and the share of unsharded bytes."""

import jax
import jax.numpy as jnp
import pytest

from maxlite.sharding import Sharder, build_mesh
from maxlite.sharding.sharding_report import check_sharded, parameter_sharding


@pytest.fixture(scope="module")
def sharder():
  return Sharder(build_mesh((1, 1, 2, 1, 2, 2), (1,) * 6))


def sharded(sharder, path, shape, names, dtype=jnp.float32):
  return parameter_sharding(path, jax.ShapeDtypeStruct(shape, dtype), names, sharder)


def test_bytes_per_device_are_those_of_a_shard(sharder):
  names = ("embed", "mlp")
  parameter = sharded(sharder, "mlp/wi_0/kernel", (8, 6), names, jnp.bfloat16)
  assert parameter.num_shards == 8
  assert parameter.num_bytes == 96
  held = jax.device_put(jnp.ones((8, 6), jnp.bfloat16), sharder.sharding(names))
  assert parameter.bytes_per_device == held.addressable_shards[0].data.nbytes == 12


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
def test_an_indivisible_axis_is_an_error_that_names_its_keys(sharder, names, shape, message):
  with pytest.raises(ValueError, match=r"parameter layers/moe/wo of shape \(.*" + message):
    sharded(sharder, "layers/moe/wo", shape, names)


def test_unsharded_parameters_are_allowed_up_to_the_tolerance(sharder):
  names = ("embed", "mlp")
  split = [sharded(sharder, "kernel", (8, 6), names), sharded(sharder, "in_two", (48,), ("mlp",))]
  whole = [sharded(sharder, "small", (1,), ("norm",)), sharded(sharder, "big", (3,), ("norm",))]
  check_sharded([*split, *whole], sharder, 0.04)
  with pytest.raises(ValueError, match=r"^4\.0% .* largest big \(3,\); .* allows 3\.9%"):
    check_sharded([*split, *whole], sharder, 0.039)


def test_a_mesh_that_shards_no_parameter_is_not_checked():
  sharder = Sharder(build_mesh((2, 4, 1, 1, 1, 1), (1,) * 6))
  check_sharded([sharded(sharder, "kernel", (8, 8), ("embed", "mlp"))], sharder, 0.0)
