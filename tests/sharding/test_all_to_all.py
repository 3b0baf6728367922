"""Dispatch and combine: destination of every row, gradients, and dropped rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from maxlite.sharding import all_to_all
from maxlite.sharding.all_to_all import check_all_to_all, combine, dispatch, plan_dispatch

NUM_SHARDS = 4
NUM_EXPERTS = 8
NUM_ROWS = 12
DIM = 3
MESH = Mesh(np.array(jax.devices()).reshape(2, NUM_SHARDS), ("data", "expert"))
WHOLE = NUM_ROWS * NUM_SHARDS


def counts(name):
  """counts_PE of both data shards, [2, P, E]; no shard has more than NUM_ROWS rows."""
  rng = np.random.default_rng(0)
  shares_E = {
    "uniform": np.ones(NUM_EXPERTS),
    "skewed": 2.0 ** -np.arange(NUM_EXPERTS),
    "one hot": np.eye(NUM_EXPERTS)[5],
    "empty experts": np.array([0, 1, 0, 0, 2, 0, 1, 0]),
    "a shard that gets nothing": np.array([1, 2, 0, 0, 1, 1, 3, 1]),
  }[name]
  rows_ZP = rng.integers(0, NUM_ROWS + 1, (2, NUM_SHARDS))
  rows_ZP[0, 1] = 0  # one shard without rows
  rows_ZP[1, 2] = NUM_ROWS  # one with a full buffer
  pvals_E = shares_E / shares_E.sum()
  counts_ZPE = np.zeros((2, NUM_SHARDS, NUM_EXPERTS), np.int32)
  for z in range(2):
    for p in range(NUM_SHARDS):
      counts_ZPE[z, p] = rng.multinomial(rows_ZP[z, p], pvals_E)
  return counts_ZPE


ROUTINGS = ("uniform", "skewed", "one hot", "empty experts", "a shard that gets nothing")


EXPERTS_OF_SHARDS = np.arange(NUM_EXPERTS).reshape(NUM_SHARDS, -1)


def expected_rows(counts_PE, num_received):
  """(for each shard the (sender, row in its buffer) of every received row, kept counts_PE)"""
  kept_PE = np.zeros_like(counts_PE)
  for experts in EXPERTS_OF_SHARDS:
    total_e = counts_PE[:, experts].sum(0)
    fits = [n for n in range(WHOLE + 1) if np.minimum(total_e, n).sum() <= num_received]
    for expert in experts:
      senders = np.repeat(np.arange(NUM_SHARDS), counts_PE[:, expert])
      kept = senders[: max(fits)]
      kept_PE[:, expert] = np.bincount(kept, minlength=NUM_SHARDS)
  starts_PE = np.cumsum(counts_PE, axis=1) - counts_PE
  landed = []
  for experts in EXPERTS_OF_SHARDS:
    rows = []
    for expert in experts:
      for sender in range(NUM_SHARDS):
        start = starts_PE[sender, expert]
        for row in range(start, start + kept_PE[sender, expert]):
          rows.append((sender, row))
    landed.append(rows)
  return landed, kept_PE


def on_shards(function, num_received):
  """`function(plan, rows)` on all eight shards; arrays of rows and results are [2, P, rows, D]."""

  def on_shard(counts_dpE, rows):
    plan = plan_dispatch(
      counts_dpE[0, 0], ("expert",), num_sent=NUM_ROWS, num_received=num_received
    )
    own_rows = jax.tree.map(lambda array: array[0, 0], rows)
    results = function(plan, own_rows)
    return jax.tree.map(lambda result: result[None, None], results)

  spec = jax.P("data", "expert")
  return jax.jit(jax.shard_map(on_shard, mesh=MESH, in_specs=spec, out_specs=spec))


def draw(num_rows, seed):
  shape = (2, NUM_SHARDS, num_rows, DIM)
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.fixture(scope="module", params=[WHOLE, 10])
def round_trip(request):
  """(rows of a receive buffer, function that runs dispatch, combine and both gradients)"""

  def both(plan, rows):
    x, y, dx, dy = rows
    received, dispatch_vjp = jax.vjp(lambda x: dispatch(x, plan), x)
    returned, combine_vjp = jax.vjp(lambda y: combine(y, plan), y)
    (dx_of_dispatch,) = dispatch_vjp(dy)
    (dy_of_combine,) = combine_vjp(dx)
    counts = plan.group_sizes_e, plan.num_dropped
    return received, dx_of_dispatch, returned, dy_of_combine, counts

  return request.param, on_shards(both, request.param)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_rows_arrive_sorted_by_expert_and_return(round_trip, routing):
  num_received, run = round_trip
  counts_ZPE = counts(routing)
  x = draw(NUM_ROWS, 0)
  dx = draw(NUM_ROWS, 1)
  y = draw(num_received, 2)
  dy = draw(num_received, 3)
  received, dx_of_dispatch, returned, dy_of_combine, (sizes, dropped) = run(
    counts_ZPE, (x, y, dx, dy)
  )
  for z in range(2):
    landed, kept_PE = expected_rows(counts_ZPE[z], num_received)
    back = np.zeros_like(x[z])
    dback = np.zeros_like(x[z])
    for p, rows in enumerate(landed):
      there = np.full_like(y[z, p], np.nan)  # the emulation's undefined rows
      dthere = np.full_like(y[z, p], np.nan)
      for row, (sender, source) in enumerate(rows):
        there[row] = x[z, sender, source]
        dthere[row] = dx[z, sender, source]
        back[sender, source] = y[z, p, row]
        dback[sender, source] = dy[z, p, row]
      np.testing.assert_array_equal(received[z, p], there)
      np.testing.assert_array_equal(dy_of_combine[z, p], dthere)
      kept_PF = kept_PE[:, EXPERTS_OF_SHARDS[p]]
      np.testing.assert_array_equal(sizes[z, p], kept_PF.sum(0))
    np.testing.assert_array_equal(returned[z], back)
    np.testing.assert_array_equal(dx_of_dispatch[z], dback)
    dropped_PE = counts_ZPE[z] - kept_PE
    np.testing.assert_array_equal(dropped[z], dropped_PE.sum(1))
  assert (num_received < WHOLE) or not np.any(dropped)


def test_a_full_buffer_drops_rows_of_the_largest_experts():
  counts_ZPE = np.zeros((2, NUM_SHARDS, NUM_EXPERTS), np.int32)
  counts_ZPE[:, :, 0] = 8
  counts_ZPE[:, :, 1] = 1
  run = on_shards(lambda plan, x: (plan.group_sizes_e, plan.num_dropped), 10)
  sizes, dropped = run(counts_ZPE, draw(NUM_ROWS, 0))
  assert sizes[0, 0].tolist() == [6, 4]
  assert dropped[0].tolist() == [2, 8, 8, 8]


def test_the_check_before_a_run_passes_on_cpu():
  check_all_to_all(MESH, ("expert",))


def test_the_check_before_a_run_finds_misplaced_rows(monkeypatch):
  """As on a platform whose collective is wrong in `combine`."""
  exchange = all_to_all._exchange

  def wrong(x, num_rows, chunks, mesh_axes, zeros):
    y = exchange(x, num_rows, chunks, mesh_axes, zeros)
    if num_rows > NUM_ROWS * NUM_SHARDS + 16:
      return y
    return jnp.roll(y, 1, axis=0)

  monkeypatch.setattr(all_to_all, "_exchange", wrong)
  with pytest.raises(ValueError, match="write use_ring_of_experts=true"):
    check_all_to_all(MESH, ("expert",))
