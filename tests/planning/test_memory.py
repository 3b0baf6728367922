"""Estimated memory against hand-counted arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.planning.memory_estimate import MemoryEstimate, activations, bytes_per_device


def test_bytes_per_device_of_sharded_and_replicated_arrays():
  mesh = jax.sharding.Mesh(np.reshape(jax.devices(), (2, 4)), ("data", "fsdp"))
  array = lambda shape, dtype, *axes: jax.ShapeDtypeStruct(
    shape, dtype, sharding=jax.NamedSharding(mesh, jax.P(*axes))
  )
  tree = {
    "replicated": array((3,), jnp.float32),
    "sharded in 2": array((4, 6), jnp.bfloat16, "data"),
    "sharded in 8": array((16, 5), jnp.float32, ("data", "fsdp")),
  }
  assert bytes_per_device(tree) == 3 * 4 + 2 * 6 * 2 + 2 * 5 * 4


def test_activations_are_the_residuals_that_grow_with_rows():
  weight = jax.ShapeDtypeStruct((1000,), jnp.float32)

  def residuals_of(rows):
    kept = jax.ShapeDtypeStruct((rows, 10), jnp.bfloat16)
    return [weight, kept, jax.ShapeDtypeStruct((7, rows), jnp.int8)]

  assert activations(residuals_of, rows=16, num_shards=4) == [
    (16, 16 * 10 * 2 / 4),
    (7, 16 * 7 / 4),
  ]


@pytest.mark.parametrize(
  ("logits", "temporaries"), [(5.0, 10 + 8 + 3 + 4 + 2 + 6), (50.0, 10 + 8 + 50)]
)
def test_the_peak_is_in_the_layers_or_the_loss(logits, temporaries):
  estimate = MemoryEstimate(
    parameters=1,
    optimizer=2,
    saved_activations=10,
    gradients=3,
    layer_activations=4,
    layer_gradient=2,
    layer_weights=6,
    unembedding=8,
    logits=logits,
  )
  assert estimate.temporaries == temporaries
  assert estimate.total == 1 + 2 + temporaries
