"""The cross-entropy over chunks of tokens: value, gradients, memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.slow_cases import slow

from maxlite.sharding import MESH_AXES, Sharder, build_mesh
from maxlite.training.cross_entropy import (
  PredictionHead,
  Unembedding,
  cross_entropy_sums,
  sequence_sums,
  token_log_probs,
)

B = 8
T = 12
D = 8
V = 40
ONE = {}
VOCAB_SHARDED = {"tensor": 4, "data": 2}
TOKENS_SHARDED = {"data": 2, "fsdp": 2, "context": 2}
ALL_SHARDED = {"expert": 2, "context": 2, "tensor": 2}
# The vocabulary, too, is sharded over an axis that shards rows.
SHARED_AXIS = {"fsdp": 2, "context": 2, "tensor": 2}
SHARED_RULES = {"vocab": ("tensor", "fsdp"), "embed": ("context", "expert")}


def sharder_on(degrees):
  sizes = [degrees.get(mesh_axis, 1) for mesh_axis in MESH_AXES]
  rules = SHARED_RULES if degrees == SHARED_AXIS else {}
  return Sharder(build_mesh(sizes, [1] * 6, jax.devices()[: np.prod(sizes)]), rules)


def draw_inputs(num_real=B):
  """(x, w, targets, weights); some weights are 0, and rows from `num_real` on are padding."""
  draw = np.random.default_rng(0)
  x_BTD = draw.standard_normal((B, T, D))
  w_DV = draw.standard_normal((D, V))
  targets_BT = draw.integers(V, size=(B, T))
  weight_BT = draw.uniform(0, 2, (B, T)) * (draw.random((B, T)) < 0.7)
  weight_BT[num_real:] = 0
  return (
    x_BTD.astype(np.float32),
    w_DV.astype(np.float32),
    targets_BT.astype(np.int32),
    weight_BT.astype(np.float32),
  )


def exact(x_BTD, w_DV, targets_BT, weight_BT, factors, soft_cap=0):
  """Both sums, and the gradients by x and w of their weighted sum, in float64."""
  x_BTD = np.asarray(x_BTD, np.float64)
  w_DV = np.asarray(w_DV, np.float64)
  weight_BT = np.asarray(weight_BT, np.float64)
  logits_BTV = x_BTD @ w_DV
  if soft_cap:
    logits_BTV = soft_cap * np.tanh(logits_BTV / soft_cap)
  partition_BT = np.log(np.sum(np.exp(logits_BTV), axis=-1))
  onehot_BTV = np.eye(V)[targets_BT]
  nll_BT = partition_BT - np.sum(onehot_BTV * logits_BTV, axis=-1)
  nll = np.sum(weight_BT * nll_BT)
  logits_z = np.sum(weight_BT * partition_BT**2)
  # Of each sum by the logits.
  partition_BT1 = partition_BT[..., None]
  p_BTV = np.exp(logits_BTV - partition_BT1)
  nll_slope_BTV = p_BTV - onehot_BTV
  z_slope_BTV = 2 * partition_BT1 * p_BTV
  slope_BTV = factors[0] * nll_slope_BTV + factors[1] * z_slope_BTV
  slope_BTV *= weight_BT[..., None]
  if soft_cap:
    slope_BTV *= 1 - (logits_BTV / soft_cap) ** 2
  dx_BTD = slope_BTV @ w_DV.T
  dw_DV = np.einsum("btd,btv->dv", x_BTD, slope_BTV)
  return (nll, logits_z), (dx_BTD, dw_DV)


@pytest.mark.parametrize(
  ("degrees", "chunk_tokens", "soft_cap", "one_pass"),
  [
    (ONE, 24, 0, False),
    (ONE, 36, 0, False),
    (ONE, 1, 0, False),
    (ONE, 500, 0, False),
    (VOCAB_SHARDED, 10, 0, False),
    (TOKENS_SHARDED, 6, 0, False),
    (ALL_SHARDED, 5, 2.0, False),
    (SHARED_AXIS, 5, 0, False),
    (ONE, 24, 0, True),
    slow(ONE, 36, 0, True),
    slow(ONE, 1, 0, True),
    slow(ONE, 500, 0, True),
    slow(VOCAB_SHARDED, 10, 0, True),
    slow(TOKENS_SHARDED, 6, 0, True),
    (ALL_SHARDED, 5, 2.0, True),
    slow(SHARED_AXIS, 5, 0, True),
  ],
  ids=str,
)
def test_value_and_gradients_are_exact(degrees, chunk_tokens, soft_cap, one_pass):
  sharder = sharder_on(degrees)
  x_BTD, w_DV, targets_BT, weight_BT = draw_inputs(num_real=6)
  factors = (0.7, 0.0 if one_pass else 0.3)

  def loss(x_BTD, w_DV, targets_BT, weight_BT):
    sums = cross_entropy_sums(
      x_BTD, w_DV, targets_BT, weight_BT, chunk_tokens, sharder, soft_cap, one_pass=one_pass
    )
    nll, logits_z = sums
    return factors[0] * nll + factors[1] * logits_z, sums

  gradient = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
  gradients, sums = gradient(x_BTD, w_DV, targets_BT, weight_BT)
  expected_sums, expected_gradients = exact(x_BTD, w_DV, targets_BT, weight_BT, factors, soft_cap)
  np.testing.assert_allclose(sums, expected_sums, rtol=1e-6)
  for gradient, expected in zip(gradients, expected_gradients, strict=True):
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("degrees", [ONE, TOKENS_SHARDED, ALL_SHARDED, SHARED_AXIS], ids=str)
def test_sequences_are_summed_over_all_shards(degrees):
  """Their gradients too: of log-probabilities, over sequences that cross the shards' borders."""
  x_BTD, w_DV, targets_BT, weight_BT = draw_inputs()
  segment_BT = np.sort(np.random.default_rng(1).integers(0, 4, (B, T)).astype(np.int32), axis=1)
  factor_BS = np.random.default_rng(2).standard_normal((B, 3)).astype(np.float32)
  sharder = sharder_on(degrees)

  @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
  @functools.partial(jax.grad, has_aux=True)
  def gradient(x_BTD):
    head = PredictionHead(x_BTD, Unembedding(w_DV, 0.0))
    tokens = token_log_probs(head, targets_BT, 24, sharder)
    sums_BS = sequence_sums(weight_BT * tokens.log_prob_BT, segment_BT, 3, sharder)
    return jnp.sum(factor_BS * sums_BS), (sums_BS, tokens)

  dx_BTD, (sums_BS, tokens) = gradient(x_BTD)
  logits_BTV = np.asarray(x_BTD, np.float64) @ w_DV
  partition_BT = np.log(np.sum(np.exp(logits_BTV), axis=-1))
  target_BT = np.take_along_axis(logits_BTV, targets_BT[..., None], axis=-1)[..., 0]
  np.testing.assert_allclose(tokens.log_prob_BT, target_BT - partition_BT, rtol=1e-5)
  np.testing.assert_allclose(tokens.logits_z_BT, partition_BT**2, rtol=1e-5)
  is_in_BTS = segment_BT[..., None] == 1 + np.arange(3)
  wanted_BS = np.einsum("bt,bts->bs", weight_BT * (target_BT - partition_BT), is_in_BTS)
  np.testing.assert_allclose(sums_BS, wanted_BS, rtol=1e-5, atol=1e-5)
  # The gradient of a weighted sum of negative log-likelihoods, by token.
  factor_BT = np.einsum("bs,bts->bt", factor_BS, is_in_BTS)
  _, (wanted_BTD, _) = exact(x_BTD, w_DV, targets_BT, -weight_BT * factor_BT, (1, 0))
  np.testing.assert_allclose(dx_BTD, wanted_BTD, rtol=1e-4, atol=1e-5)


def test_large_logits_do_not_overflow():
  x_BTD, w_DV, targets_BT, weight_BT = draw_inputs()
  sums = functools.partial(cross_entropy_sums, chunk_tokens=24, sharder=sharder_on(ONE))
  nll, _ = jax.jit(sums)(x_BTD * 1e4, w_DV, targets_BT, weight_BT)
  (expected, _), _ = exact(x_BTD, w_DV, targets_BT, weight_BT, (0, 0))
  assert np.isfinite(nll)
  assert nll > expected


def test_bfloat16_hidden_states_have_float32_logits():
  x_BTD, w_DV, targets_BT, weight_BT = draw_inputs()
  x_BTD = jnp.asarray(x_BTD, jnp.bfloat16)
  sums = functools.partial(cross_entropy_sums, chunk_tokens=24, sharder=sharder_on(ONE))
  nll, logits_z = jax.jit(sums)(x_BTD, w_DV, targets_BT, weight_BT)
  rounded_DV = jnp.asarray(w_DV, jnp.bfloat16)
  (expected, expected_z), _ = exact(x_BTD, rounded_DV, targets_BT, weight_BT, (0, 0))
  assert nll.dtype == jnp.float32
  np.testing.assert_allclose((nll, logits_z), (expected, expected_z), rtol=1e-6)


def test_only_one_chunk_of_logits_is_in_memory():
  num_rows = 8
  length = 64
  vocab = 4096
  x_BTD = jax.ShapeDtypeStruct((num_rows, length, 8), jnp.float32)
  w_DV = jax.ShapeDtypeStruct((8, vocab), jnp.float32)
  targets_BT = jax.ShapeDtypeStruct((num_rows, length), jnp.int32)
  weight_BT = jax.ShapeDtypeStruct((num_rows, length), jnp.float32)
  sharder = sharder_on(ONE)

  def temporary_bytes(chunk_tokens):
    def loss(x_BTD, w_DV, targets_BT, weight_BT):
      nll, logits_z = cross_entropy_sums(x_BTD, w_DV, targets_BT, weight_BT, chunk_tokens, sharder)
      return nll + logits_z

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
    compiled = gradient.lower(x_BTD, w_DV, targets_BT, weight_BT).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  all_logits = num_rows * length * vocab * 4
  wide = temporary_bytes(64)
  narrow = temporary_bytes(16)
  assert wide < 5 * all_logits * 64 / (num_rows * length)
  assert narrow < wide / 2 < all_logits / 4
  # Without chunks all logits exist, so the bounds above are meaningful.
  assert temporary_bytes(num_rows * length) > all_logits / 2
