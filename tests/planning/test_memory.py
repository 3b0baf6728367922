"""Estimated memory against hand-counted arrays."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.planning.memory_estimate import MemoryEstimate, activations, bytes_per_device
from maxlite.planning.plan_report import memory_lines


def test_bytes_per_device_of_sharded_and_replicated_arrays():
  mesh = jax.sharding.Mesh(np.reshape(jax.devices(), (2, 4)), ("data", "fsdp"))

  def array(shape, dtype, spec):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=jax.NamedSharding(mesh, spec))

  tree = {
    "replicated": array((3,), jnp.float32, jax.P()),
    "sharded in 2": array((4, 6), jnp.bfloat16, jax.P("data")),
    "sharded in 8": array((16, 5), jnp.float32, jax.P(("data", "fsdp"))),
  }
  assert bytes_per_device(tree) == 3 * 4 + 2 * 6 * 2 + 2 * 5 * 4


def test_activations_are_the_residuals_that_grow_with_rows():
  weight = jax.ShapeDtypeStruct((1000,), jnp.float32)

  def residuals_of(rows):
    kept = jax.ShapeDtypeStruct((rows, 10), jnp.bfloat16)
    return [weight, kept, jax.ShapeDtypeStruct((7, rows), jnp.int8)]

  assert activations(residuals_of, rows=16, num_shards=4) == [
    (16, 10, 16 * 10 * 2 / 4),
    (7, 16, 16 * 7 / 4),
  ]


def test_activations_are_counted_if_fewer_are_saved_for_one_row_per_device():
  def residuals_of(rows):
    kept = jax.ShapeDtypeStruct((rows, 10), jnp.float32)
    if rows == 4:
      return [kept]
    return [kept, jax.ShapeDtypeStruct((rows,), jnp.float32)]

  assert activations(residuals_of, rows=4, num_shards=4) == [(4, 10, 40), (4, 4, 4)]


@pytest.mark.parametrize(
  ("logits", "temporaries"), [(5.0, 10 + 3 + 4 + 2 + 6), (50.0, 10 + 8 + 50)]
)
def test_the_peak_is_in_the_layers_or_the_loss(logits, temporaries):
  estimate = MemoryEstimate(
    parameters=1,
    optimizer=2,
    saved_activations=10,
    gradients=3,
    layer_activations=4,
    layer_gradients=2,
    gathered_weights=6,
    unembedding=8,
    logits=logits,
  )
  assert estimate.temporaries == temporaries
  assert estimate.total == 1 + 2 + temporaries


def test_compiled_temporaries_are_those_in_use_at_the_peak():
  estimate = MemoryEstimate(1e9, 2e9, 1e9, 3e9, 4e9, 2e9, 1e9, 1e9, 1e9)
  stats = types.SimpleNamespace(
    argument_size_in_bytes=3e9,
    output_size_in_bytes=3e9,
    alias_size_in_bytes=3e9,
    temp_size_in_bytes=14e9,
    generated_code_size_in_bytes=1e9,
    peak_memory_in_bytes=11e9,
    host_argument_size_in_bytes=0,
    host_temp_size_in_bytes=0,
  )
  rows = {line[:26].strip(): line[26:].split() for line in memory_lines(estimate, stats)}
  assert rows["temporaries"] == ["11.000", "8.000"]
  assert rows["gaps in temporaries"] == ["6.000"]
  assert (rows["total"], rows["peak"]) == (["18.000"], ["14.000", "11.000"])
