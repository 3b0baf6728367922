"""Attention over the context axis equals that of one device, and its work is balanced."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.slow_cases import slow

from maxlite.config.schema import ModelConfig
from maxlite.kernels.attention import chunked
from maxlite.kernels.attention.reference import AttentionMask, ScoreOptions, attention
from maxlite.layers import ring_attention
from maxlite.layers.sharded_attention import attend
from maxlite.planning.hlo import parse
from maxlite.planning.hlo_cost import matmul_flops
from maxlite.sharding.collectives import zigzag_chunks

NUM_POSITIONS = 48
NUM_HEADS = 8
MESHES = ({"context": 8}, {"context": 4, "tensor": 2}, {"context": 2, "data": 2, "tensor": 2})
EVERYTHING = {"window": 11, "soft_cap": 0.9, "sinks": True}


class Operands(NamedTuple):
  """The operands of attention that have gradients."""

  q: np.ndarray
  k: np.ndarray
  v: np.ndarray
  sink_H: np.ndarray


def draw(seed, shape):
  return np.random.default_rng(seed).normal(size=shape)


def make_operands(num_groups):
  lead = (2, NUM_POSITIONS)
  operands = Operands(
    q=draw(0, (*lead, NUM_HEADS, 4)),
    k=draw(1, (*lead, num_groups, 4)),
    v=draw(2, (*lead, num_groups, 6)),
    sink_H=draw(4, (NUM_HEADS,)),
  )
  do = draw(3, (*lead, NUM_HEADS, 6))
  # Documents that begin and end within shards, and padding; one document in the second row.
  segments = np.repeat([1, 2, 3, 0], [13, 22, 8, 5]), np.ones(NUM_POSITIONS)
  return np.stack(segments).astype(np.int32), do, operands


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradients(function, do, operands):
  o, vjp = jax.vjp(function, operands)
  (gradients,) = vjp(do)
  return o, *gradients


def reference_results(num_groups, window=0, soft_cap=0.0, sinks=False):
  segment_BT, do, operands = make_operands(num_groups)

  def run(operands):
    q, k, v, sink_H = operands
    if not sinks:
      sink_H = None
    mask = AttentionMask(segment_BT, segment_BT, 0, window or None)
    score = ScoreOptions(scale=0.7, block_q=1, soft_cap=soft_cap, sink_H=sink_H)
    return attention(q, k, v, mask, score)

  return value_and_gradients(run, do, operands)


def sharded_results(
  sharder,
  num_groups,
  *,
  strategy,
  backend="chunked",
  is_local=None,
  window=0,
  soft_cap=0.0,
  sinks=False,
):
  segment_BT, do, operands = make_operands(num_groups)
  cfg = dataclasses.replace(
    ModelConfig(),
    attention=backend,
    attention_block_q=4,
    context_parallel_strategy=strategy,
  )

  def run(operands):
    q, k, v, sink_H = operands
    options = {"scale": 0.7, "soft_cap": soft_cap, "window": window, "sink_H": None}
    if sinks:
      options["sink_H"] = sink_H
    if is_local is not None:
      options["is_local"] = jnp.bool_(is_local)
    return attend(cfg, sharder, q, k, v, segment_BT, **options)

  return value_and_gradients(run, do, operands)


def assert_equal(got, want):
  for x, y in zip(got, want, strict=True):
    np.testing.assert_allclose(x, y, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
  ("strategy", "mesh", "num_groups", "options"),
  [
    slow("all_gather", 2, 2, {"window": 11}),
    slow("ring", 0, 2, EVERYTHING),
    ("ring", 1, 4, EVERYTHING),
    slow("ulysses", 0, 2, EVERYTHING),
    slow("all_gather", 0, 2, EVERYTHING),
    slow("ring", 0, 8, {}),
    slow("ring", 2, 2, {"window": 11}),
    slow("ulysses", 0, 8, {}),
    slow("ulysses", 1, 4, EVERYTHING),
    slow("ulysses", 2, 2, {"window": 11}),
  ],
)
def test_values_and_gradients_equal_those_of_one_device(
  build_sharder, strategy, mesh, num_groups, options
):
  with jax.enable_x64(True):
    sharder = build_sharder(MESHES[mesh])
    got = sharded_results(sharder, num_groups, strategy=strategy, **options)
    assert_equal(got, reference_results(num_groups, **options))


@pytest.mark.slow
@pytest.mark.parametrize(
  ("strategy", "is_local", "window"), [("ring", True, 11), ("ulysses", False, 0)]
)
def test_a_traced_choice_of_the_window_applies(build_sharder, strategy, is_local, window):
  with jax.enable_x64(True):
    sharder = build_sharder({"context": 4})
    got = sharded_results(sharder, 4, is_local=is_local, strategy=strategy, window=11)
    assert_equal(got, reference_results(4, window=window))


@pytest.mark.parametrize("num_shards", [2, 3, 8])
@pytest.mark.parametrize("window", [None, 100, 1])
def test_every_shard_of_the_ring_computes_as_many_pairs_of_chunks(num_shards, window):
  size = 64
  row = np.arange(size)
  every_chunk = set()
  for shard in range(num_shards):
    num_pairs = 0
    chunks = zigzag_chunks(shard, num_shards)
    every_chunk.update(chunks)
    for q in chunks:
      for k in range(2 * num_shards):
        is_computed = ring_attention._is_visible(q, k, size, window)
        num_pairs += is_computed
        # Exactly the pairs with a visible score.
        distance = (q * size + row)[:, None] - (k * size + row)[None]
        visible = (distance >= 0) & (distance < (window or np.inf))
        assert is_computed == visible.any()
    if window is None:
      assert num_pairs == 2 * num_shards + 1
  assert every_chunk == set(range(2 * num_shards))


@pytest.mark.slow
def test_gathered_keys_in_the_future_are_skipped(build_sharder):
  sharder = build_sharder({"context": 4})
  shape = (1, 1024, 4, 8)
  x = jax.ShapeDtypeStruct(shape, jnp.float32)
  segment_BT = np.ones(shape[:2], np.int32)

  def flops(strategy):
    keys = {"attention": "chunked", "context_parallel_strategy": strategy, "attention_block_q": 64}
    cfg = dataclasses.replace(ModelConfig(), **keys)

    def loss(q, k, v):
      return attend(cfg, sharder, q, k, v, segment_BT, scale=1.0, soft_cap=0.0).sum()

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(x, x, x).compile()
    return matmul_flops(parse(compiled.as_text())).total

  every_score = 7 * 2 * 1024**2 * 4 * 8 / 4  # 2 products forward, 5 backward; of one shard
  got = flops("all_gather")
  assert got < 0.6 * every_score
  np.testing.assert_allclose(got, flops("ulysses"), rtol=0.05)


@pytest.mark.parametrize("num_shards", [2, 3, 4, 8])
def test_shards_attend_equally_many_gathered_keys(num_shards):
  size = 64
  block = 16
  options = chunked._Options(1.0, 0.0, block, is_aligned=False, window=None)
  num_keys = 2 * num_shards * size
  zeros = np.zeros((1, 1, num_keys, 1), np.float32)
  keys = chunked._Keys(zeros, zeros, np.zeros((1, num_keys), np.int32), None)

  def count(options, keys, first, carry, block):
    return (carry + keys.segment_BS.shape[1], None)

  span = chunked._Span(0, size, 0, num_keys)
  body = chunked._with_keys_in_reach(count, options, span, keys)

  def num_attended(chunk):
    rows = chunk * size + np.arange(size, dtype=np.int32).reshape(-1, 1, block)
    blocks = [chunked._ForwardBlock(chunked._Queries(None, None, row_BT)) for row_BT in rows]
    return sum(int(body(0, block)[0]) for block in blocks)

  counts = []
  for shard in range(num_shards):
    counts.append(sum(map(num_attended, zigzag_chunks(shard, num_shards))))
  assert max(counts) <= 1.05 * min(counts)
  assert max(counts) <= 0.65 * 2 * size // block * num_keys


def test_a_strategy_that_does_not_fit_is_an_error(build_sharder):
  sharder = build_sharder({"context": 4})
  with pytest.raises(ValueError, match="ring does not support attention=dot_product; write"):
    sharded_results(sharder, 4, strategy="ring", backend="dot_product")
  with pytest.raises(ValueError, match="ulysses: 3 context shards do not divide 8 query heads"):
    sharded_results(build_sharder({"context": 3}), 8, strategy="ulysses")
