"""Attention over the context axis equals that of one device, and its work is balanced."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from slow_cases import slow

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


def draw(seed, *shape):
  return np.random.default_rng(seed).normal(size=shape)


def make_operands(num_groups):
  shapes = ((NUM_HEADS, 4), (num_groups, 4), (num_groups, 6), (NUM_HEADS, 6))
  q, k, v, do = (draw(i, 2, NUM_POSITIONS, *shape) for i, shape in enumerate(shapes))
  # Documents that begin and end within shards, and padding; one document in the second row.
  segments = np.repeat([1, 2, 3, 0], [13, 22, 8, 5]), np.ones(NUM_POSITIONS)
  return np.stack(segments).astype(np.int32), do, (q, k, v, draw(4, NUM_HEADS))


def value_and_gradients(function, do, operands):
  o, vjp = jax.vjp(function, *operands)
  return o, *vjp(do)


@functools.cache
def reference_results(num_groups, window=0, soft_cap=0.0, sinks=False):
  segment_BT, do, operands = make_operands(num_groups)

  def run(q, k, v, sink_H):
    mask = AttentionMask(segment_BT, segment_BT, 0, window or None)
    score = ScoreOptions(scale=0.7, block_q=1, soft_cap=soft_cap, sink_H=sink_H if sinks else None)
    return attention(q, k, v, mask, score)

  return jax.jit(functools.partial(value_and_gradients, run))(do, operands)


def sharded_results(sharder, num_groups, is_local=None, sinks=False, **keys):
  segment_BT, do, operands = make_operands(num_groups)
  cfg = dataclasses.replace(
    ModelConfig(), attention=keys.pop("backend", "chunked"), attention_block_q=4
  )
  cfg = dataclasses.replace(cfg, context_parallel_strategy=keys.pop("strategy"))

  def run(q, k, v, sink_H):
    sink_H = sink_H if sinks else None
    local = None if is_local is None else jnp.bool_(is_local)
    soft_cap = keys.get("soft_cap", 0.0)
    rest = {"sink_H": sink_H, "is_local": local, "window": keys.get("window", 0)}
    return attend(cfg, sharder, q, k, v, segment_BT, scale=0.7, soft_cap=soft_cap, **rest)

  return jax.jit(functools.partial(value_and_gradients, run))(do, operands)


def assert_equal(got, want):
  for x, y in zip(got, want, strict=True):
    np.testing.assert_allclose(x, y, rtol=0, atol=1e-12)


CASES = [(0, 8, {}), (0, 2, EVERYTHING), (1, 4, EVERYTHING), (2, 2, {"window": 11})]
SLOW_CASES = [("all_gather", *CASES[1]), ("ring", *CASES[0]), ("ring", *CASES[3])]
SLOW_CASES += [("ulysses", *CASES[n]) for n in (0, 2, 3)]


@pytest.mark.parametrize(
  ("strategy", "mesh", "num_groups", "options"),
  [("all_gather", *CASES[3]), ("ring", *CASES[1]), ("ring", *CASES[2]), ("ulysses", *CASES[1])]
  + [slow(*case) for case in SLOW_CASES],
)
def test_values_and_gradients_equal_those_of_one_device(
  build_sharder, strategy, mesh, num_groups, options
):
  with jax.enable_x64(True):
    sharder = build_sharder(MESHES[mesh])
    got = sharded_results(sharder, num_groups, strategy=strategy, **options)
    assert_equal(got, reference_results(num_groups, **options))


@pytest.mark.parametrize(("strategy", "is_local"), [("ring", True), slow("ulysses", False)])
def test_a_traced_choice_of_the_window_applies(build_sharder, strategy, is_local):
  with jax.enable_x64(True):
    sharder = build_sharder({"context": 4})
    got = sharded_results(sharder, 4, is_local, strategy=strategy, window=11)
    assert_equal(got, reference_results(4, window=11 if is_local else 0))


@pytest.mark.parametrize("num_shards", [2, 3, 8])
@pytest.mark.parametrize("window", [None, 100, 1])
def test_every_shard_of_the_ring_computes_as_many_pairs_of_chunks(num_shards, window):
  size = 64
  counts = []
  for shard in range(num_shards):
    pairs = [
      (q, k)
      for q in zigzag_chunks(shard, num_shards)
      for other in range(num_shards)
      for k in zigzag_chunks(other, num_shards)
      if ring_attention._is_visible(q, k, size, window)
    ]
    counts.append(len(pairs))
    # Exactly the pairs with a visible score.
    row = np.arange(size)
    for q in zigzag_chunks(shard, num_shards):
      for k in range(2 * num_shards):
        distance = (q * size + row)[:, None] - (k * size + row)[None]
        visible = (distance >= 0) & (distance < (window or np.inf))
        assert ((q, k) in pairs) == visible.any()
  assert window is not None or counts == [2 * num_shards + 1] * num_shards


def test_gathered_keys_in_the_future_are_skipped(build_sharder):
  sharder = build_sharder({"context": 4})
  shape = (1, 1024, 4, 8)
  x = jax.ShapeDtypeStruct(shape, jnp.float32)
  segment_BT = np.ones(shape[:2], np.int32)

  def flops(strategy):
    keys = {"attention": "chunked", "context_parallel_strategy": strategy, "attention_block_q": 64}
    cfg = dataclasses.replace(ModelConfig(), **keys)

    def run(q, k, v):
      return attend(cfg, sharder, q, k, v, segment_BT, scale=1.0, soft_cap=0.0)

    def loss(q, k, v):
      return run(q, k, v).sum()

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

  counts = [sum(map(num_attended, zigzag_chunks(shard, num_shards))) for shard in range(num_shards)]
  assert max(counts) <= 1.05 * min(counts)
  assert max(counts) <= 0.65 * 2 * size // block * num_keys


def test_a_strategy_that_does_not_fit_is_an_error(build_sharder):
  sharder = build_sharder({"context": 4})
  with pytest.raises(ValueError, match="ring does not support attention=dot_product; write"):
    sharded_results(sharder, 4, strategy="ring", backend="dot_product")
  with pytest.raises(ValueError, match="ulysses: 3 context shards do not divide 8 query heads"):
    sharded_results(build_sharder({"context": 3}), 8, strategy="ulysses")
