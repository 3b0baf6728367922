"""Attention with an indexer against a naive float64 implementation, and the limits of training."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import trees
from support.slow_cases import slow

from maxlite.config.schema import LatentAttentionConfig, ModelConfig
from maxlite.kernels.attention import indexed
from maxlite.layers.indexed_attention import IndexedAttention
from maxlite.layers.layer_inputs import LayerInputs
from maxlite.layers.mla import LatentAttention
from maxlite.layers.rope import RopeTables
from maxlite.models.layer_stacks import layer_specs

NUM_SEQS = 4
NUM_POSITIONS = 8
DIM = 8
NUM_HEADS = 4
NOPE = 3
ROPE = 4
VALUE = 5
LATENT = 8
QUERY = 4
INDEX_HEADS = 3
INDEX = 6
TOPK = 2
MESHES = [
  "one device",
  slow("data fsdp tensor"),
  slow("context tensor"),
  slow("context expert fsdp"),
]
# Two documents and padding in the first row, one document in each of the others.
SEGMENT_BT = np.ones((NUM_SEQS, NUM_POSITIONS), np.int32)
SEGMENT_BT[0] = np.repeat([1, 2, 0], [3, 4, 1])
ANGLE_BTR = np.random.default_rng(0).normal(size=(NUM_SEQS, NUM_POSITIONS, ROPE // 2))
SHAPES = {
  "query_down": {"kernel": (DIM, QUERY)},
  "query_norm": {"scale": (QUERY,)},
  "query": {"kernel": (QUERY, NUM_HEADS, NOPE + ROPE)},
  "kv_down": {"kernel": (DIM, LATENT + ROPE)},
  "kv_norm": {"scale": (LATENT,)},
  "kv_up": {"kernel": (LATENT, NUM_HEADS, NOPE + VALUE)},
  "out": {"kernel": (NUM_HEADS, VALUE, DIM)},
  "indexer": {
    "query": {"kernel": (QUERY, INDEX_HEADS, INDEX)},
    "key": {"kernel": (DIM, INDEX)},
    "key_norm": {"scale": (INDEX,), "bias": (INDEX,)},
    "head_weights": {"kernel": (DIM, INDEX_HEADS)},
  },
}


def draw(shape, seed):
  return np.random.default_rng(seed).normal(size=shape)


@pytest.fixture(autouse=True)
def _float64():
  with jax.enable_x64(True):  # float64 leaves of NumPy keep their type
    yield


def make_params():
  leaves, tree = jax.tree.flatten(SHAPES, is_leaf=lambda leaf: isinstance(leaf, tuple))
  return tree.unflatten([draw(shape, i) for i, shape in enumerate(leaves)])


X_BTD = draw((NUM_SEQS, NUM_POSITIONS, DIM), 7)


def config(**changes):
  keys = {"use_indexer": True, "indexer_n_heads": INDEX_HEADS, "indexer_head_dim": INDEX}
  keys |= {"indexer_topk": TOPK} | changes
  mla = LatentAttentionConfig(QUERY, LATENT, NOPE, ROPE, VALUE, **keys)
  return ModelConfig(
    decoder_block="deepseek", base_num_query_heads=NUM_HEADS, attention_block_q=4, mla=mla
  )


def inputs():
  rope = RopeTables(jnp.cos(ANGLE_BTR), jnp.sin(ANGLE_BTR))
  return LayerInputs(SEGMENT_BT, {"main": rope})


def layer(sharder, params, x_BTD, **changes):
  """(y_BTD, the sum of the indexer's divergences)"""
  cfg = config(**changes)
  module = IndexedAttention(cfg, sharder, layer_specs(cfg)[0].mixer)
  (y_BTD, sums), _ = module.apply({"params": params}, x_BTD, inputs())
  return y_BTD, sums.divergence


def formula(params, x_BTD, *, topk=TOPK, interleaved=False):
  """(y_BTD, divergence), query by query. Source: DeepSeek-V3.2 (2025), equations 1 to 4."""
  of_row = functools.partial(formula_of_row, params, topk, interleaved)
  y_BTD, divergence_B = jax.vmap(of_row)(x_BTD, SEGMENT_BT, ANGLE_BTR)
  return y_BTD, jnp.sum(divergence_B)


def formula_of_row(params, topk, interleaved, x_TD, segment_T, angle_TR):
  w = {name: leaf["kernel"] for name, leaf in params.items() if "kernel" in leaf}
  query_TQ = rms(x_TD @ w["query_down"], params["query_norm"])
  down_TL = x_TD @ w["kv_down"]
  latent_TL = rms(down_TL[:, :LATENT], params["kv_norm"])
  turned_k = turn_pairs(down_TL[:, LATENT:], angle_TR)
  seen_TS = jnp.tril(segment_T[:, None] == segment_T[None])
  # Both of the indexer's inputs are data to it.
  fixed_TD, fixed_TQ = jax.lax.stop_gradient((x_TD, query_TQ))
  index_TS = index_formula(params["indexer"], fixed_TD, fixed_TQ, angle_TR, interleaved)
  attended_TS = best(index_TS, seen_TS, topk)
  y_TD = jnp.zeros_like(x_TD)
  mass_TS = jnp.zeros((NUM_POSITIONS, NUM_POSITIONS))
  for h in range(NUM_HEADS):
    q_TC = query_TQ @ w["query"][:, h]
    kv_TC = latent_TL @ w["kv_up"][:, h]
    score_TS = q_TC[:, :NOPE] @ kv_TC[:, :NOPE].T
    score_TS += (turn_pairs(q_TC[:, NOPE:], angle_TR) @ turned_k.conj().T).real
    score_TS *= (NOPE + ROPE) ** -0.5
    p_TS = jax.nn.softmax(jnp.where(attended_TS, score_TS, -jnp.inf))
    mass_TS += jax.lax.stop_gradient(p_TS)
    y_TD += p_TS @ kv_TC[:, NOPE:] @ w["out"][h]
  target_TS = mass_TS / NUM_HEADS
  q_TS = jax.nn.softmax(jnp.where(attended_TS, index_TS, -jnp.inf))
  log_ratio_TS = jnp.log(jnp.where(attended_TS, target_TS, 1) / jnp.where(attended_TS, q_TS, 1))
  is_real_T1 = segment_T[:, None] > 0
  return y_TD, jnp.sum(jnp.where(is_real_T1, target_TS * log_ratio_TS, 0))


def index_formula(params, x_TD, query_TQ, angle_TR, interleaved):
  k_TC = x_TD @ params["key"]["kernel"]
  k_TC -= k_TC.mean(-1, keepdims=True)
  k_TC /= jnp.sqrt((k_TC**2).mean(-1, keepdims=True) + 1e-6)
  k_TC = k_TC * params["key_norm"]["scale"][None] + params["key_norm"]["bias"][None]
  weight_TI = x_TD @ params["head_weights"]["kernel"]
  turn = turn_pairs if interleaved else turn_halves
  score_TS = jnp.zeros((NUM_POSITIONS, NUM_POSITIONS))
  for i in range(INDEX_HEADS):
    q_TC = query_TQ @ params["query"]["kernel"][:, i]
    turned = turn(q_TC[:, :ROPE], angle_TR) @ turn(k_TC[:, :ROPE], angle_TR).conj().T
    product_TS = turned.real + q_TC[:, ROPE:] @ k_TC[:, ROPE:].T
    score_TS += weight_TI[:, i, None] * jnp.maximum(product_TS, 0)
  return score_TS / np.sqrt(INDEX_HEADS * INDEX)


def best(index_TS, seen_TS, topk):
  """The keys that each query attends: fewer than `topk` others are better, or as good before it."""
  ahead_TSS = index_TS[:, None] > index_TS[..., None]
  before_SS = np.tri(index_TS.shape[1], k=-1, dtype=bool)
  ahead_TSS |= (index_TS[:, None] == index_TS[..., None]) & before_SS[None]
  rank_TS = jnp.sum(ahead_TSS & seen_TS[:, None], axis=-1)
  return seen_TS & (rank_TS < (topk or index_TS.shape[1]))


def rms(x_TL, norm):
  return x_TL / jnp.sqrt((x_TL**2).mean(-1, keepdims=True) + 1e-6) * norm["scale"][None]


def turn_pairs(x_TR, angle_TR):
  """Adjacent channels as complex numbers, rotated."""
  by = jax.lax.complex(jnp.cos(angle_TR), jnp.sin(angle_TR))
  return jax.lax.complex(x_TR[:, 0::2], x_TR[:, 1::2]) * by


def turn_halves(x_TR, angle_TR):
  by = jax.lax.complex(jnp.cos(angle_TR), jnp.sin(angle_TR))
  return jax.lax.complex(x_TR[:, : ROPE // 2], x_TR[:, ROPE // 2 :]) * by


def value_and_gradients(function, params, x_BTD):
  """The results, and the gradients of parameters and input for random cotangents."""

  def loss(params, x_BTD):
    y_BTD, divergence = function(params, x_BTD)
    return jnp.sum(y_BTD * draw(y_BTD.shape, 9)) + 0.7 * divergence, (y_BTD, divergence)

  gradients, results = jax.grad(loss, argnums=(0, 1), has_aux=True)(params, x_BTD)
  return results, gradients


def assert_all_close(ours, theirs, tolerance):
  for leaf, other in trees.leaf_pairs(ours, theirs):
    expected = np.asarray(other)
    bound = tolerance * np.abs(expected).max()
    np.testing.assert_allclose(np.asarray(leaf), expected, rtol=0, atol=bound)


@functools.cache
def expected_results(**changes):
  function = functools.partial(formula, **changes)
  return jax.jit(functools.partial(value_and_gradients, function))(make_params(), X_BTD)


@pytest.mark.parametrize("mesh", MESHES)
def test_values_divergence_and_gradients_equal_the_formulas(sharders, mesh):
  function = functools.partial(layer, sharders[mesh])
  ours = jax.jit(functools.partial(value_and_gradients, function))(make_params(), X_BTD)
  assert_all_close(ours, expected_results(), 1e-12)


def test_dense_warm_up_attends_and_learns_from_all_keys(sharders):
  function = functools.partial(layer, sharders["one device"], indexer_sparse_training=False)
  ours = jax.jit(functools.partial(value_and_gradients, function))(make_params(), X_BTD)
  assert_all_close(ours, expected_results(topk=0), 1e-12)


def test_the_indexer_rotates_pairs_or_halves(sharders):
  function = functools.partial(layer, sharders["one device"], indexer_rope_interleave=True)
  expected = jax.jit(functools.partial(formula, interleaved=True))(make_params(), X_BTD)
  assert_all_close(jax.jit(function)(make_params(), X_BTD), expected, 1e-12)


@pytest.mark.parametrize("mesh", ["one device", slow("context tensor")])
def test_up_to_topk_positions_equal_dense_attention(sharders, mesh):
  """Also in gradients: the indexer's part of the model gets none from the output."""
  params = make_params()
  cfg = config(use_indexer=False)
  dense = LatentAttention(cfg, sharders[mesh], layer_specs(cfg)[0].mixer)
  without_indexer = {name: leaf for name, leaf in params.items() if name != "indexer"}

  def run_dense(params, x_BTD):
    return dense.apply({"params": params}, x_BTD, inputs())[0], 0.0

  sparse = functools.partial(layer, sharders[mesh], indexer_topk=NUM_POSITIONS)
  expected = jax.jit(functools.partial(value_and_gradients, run_dense))(without_indexer, X_BTD)
  (y_BTD, _), (gradients, dx_BTD) = jax.jit(functools.partial(value_and_gradients, sparse))(
    params, X_BTD
  )
  del gradients["indexer"]
  assert_all_close((y_BTD, gradients, dx_BTD), (expected[0][0], *expected[1]), 1e-14)


def test_the_divergence_has_gradients_in_the_indexer_only(sharders):
  def divergence(params, x_BTD):
    return layer(sharders["one device"], params, x_BTD)[1]

  def output(params, x_BTD):
    return jnp.sum(layer(sharders["one device"], params, x_BTD)[0] ** 2)

  of_divergence, dx_BTD = jax.jit(jax.grad(divergence, argnums=(0, 1)))(make_params(), X_BTD)
  indexer = of_divergence.pop("indexer")
  assert all(np.any(leaf) for leaf in jax.tree.leaves(indexer))
  assert not any(np.any(leaf) for leaf in jax.tree.leaves((of_divergence, dx_BTD)))
  of_output = jax.jit(jax.grad(output))(make_params(), X_BTD)
  assert not any(np.any(leaf) for leaf in jax.tree.leaves(of_output["indexer"]))


@pytest.mark.parametrize("topk", [1, 3, 5, 8])
def test_of_equal_scores_the_first_keys_are_selected(topk):
  """Scores are often equal: relu of all heads may be 0."""
  score_BTS = np.floor(3 * draw((2, 6, 7), 3)) / 2
  visible_BTS = draw((2, 6, 7), 4) > -0.7
  expected = [
    best(score_TS, seen_TS, topk) for score_TS, seen_TS in zip(score_BTS, visible_BTS, strict=True)
  ]
  selected = indexed.select(jnp.asarray(score_BTS), jnp.asarray(visible_BTS), topk)
  np.testing.assert_array_equal(selected, np.stack(expected))


def test_bfloat16_is_close_and_stays_bfloat16(sharders):
  """With all keys: between near-equal scores rounding decides."""
  params = jax.tree.map(np.float32, make_params())
  run = jax.jit(functools.partial(layer, sharders["one device"], indexer_topk=NUM_POSITIONS))
  y_BTD, divergence = run(params, X_BTD.astype(jnp.bfloat16))
  assert y_BTD.dtype == jnp.bfloat16
  expected = run(params, X_BTD.astype(np.float32))
  assert_all_close((np.float32(y_BTD), divergence), expected, 0.05)
