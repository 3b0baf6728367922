"""The forms of the exchange in tools/bench/accelerator_exchange.py receive the same rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tools.bench import accelerator_exchange
from tools.bench.accelerator_exchange import FORMS, ExchangeSize

NUM_SHARDS = 4
NUM_LOCAL = 2
SIZE = ExchangeSize(num_rows=40, width=8, num_experts=NUM_SHARDS * NUM_LOCAL)


@pytest.fixture(scope="module")
def exchanged():
  """{form: rows [P, ...] that each shard receives}, and the number that arrive at each."""
  mesh = jax.make_mesh((NUM_SHARDS,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
  counts_PE = accelerator_exchange.draw_counts(SIZE, NUM_SHARDS, skew=4.0)
  x = jnp.arange(NUM_SHARDS * SIZE.num_rows * SIZE.width, dtype=jnp.float32)
  x = x.reshape(-1, SIZE.width)
  rows = {}
  for name, form in FORMS.items():
    exchange = accelerator_exchange.build_exchange(mesh, form, SIZE)
    rows[name] = np.asarray(exchange(x, counts_PE)).reshape(NUM_SHARDS, -1, SIZE.width)
  return rows, counts_PE.sum(axis=0).reshape(NUM_SHARDS, -1).sum(axis=1)


@pytest.mark.parametrize("form", [form for form in FORMS if form not in ("ragged", "all_gather")])
def test_forms_receive_the_same_rows(exchanged, form):
  rows, num_arrived_P = exchanged
  assert num_arrived_P.sum() > 100
  for shard, num_arrived in enumerate(num_arrived_P):
    got = rows[form][shard, :num_arrived]
    np.testing.assert_array_equal(got, rows["ragged"][shard, :num_arrived])


def test_an_all_gather_receives_all_rows(exchanged):
  rows, num_arrived_P = exchanged
  for shard, num_arrived in enumerate(num_arrived_P):
    arrived = {tuple(row) for row in rows["ragged"][shard, :num_arrived]}
    assert len(arrived) == num_arrived
    assert arrived <= {tuple(row) for row in rows["all_gather"][shard]}
