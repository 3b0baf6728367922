"""The attention layer: dependencies of a position, grouped heads, and its formula."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.slow_cases import slow

from maxlite.config.model_families import AttentionForm
from maxlite.config.schema import ModelConfig, RopeConfig
from maxlite.layers.attention import Attention
from maxlite.layers.layer_inputs import LayerInputs
from maxlite.layers.layer_specs import AttentionSpec, RopeSpec
from maxlite.layers.rope import rope_tables

NUM_POSITIONS = 12
DIM = 8
NUM_HEADS = 4
HEAD_DIM = 4
SCALE = 0.4
EPSILON = 0.3
WINDOW = 3
SOFT_CAP = 1.5
LIMIT = 0.8
# Two documents and padding in the first row, one document in the second.
SEGMENT_BT = np.stack([np.repeat([1, 2, 0], [5, 4, 3]), np.ones(NUM_POSITIONS)]).astype(np.int32)
POSITION_BT = np.stack([np.r_[0:5, 0:4, 0, 0, 0], np.r_[0:NUM_POSITIONS]]).astype(np.int32)


def draw(shape, seed):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def make_params(num_kv_heads):
  shapes = {
    "query": (DIM, NUM_HEADS, HEAD_DIM),
    "key": (DIM, num_kv_heads, HEAD_DIM),
    "value": (DIM, num_kv_heads, HEAD_DIM),
    "out": (NUM_HEADS, HEAD_DIM, DIM),
  }
  params = {}
  for seed, (name, shape) in enumerate(shapes.items()):
    params[name] = {"kernel": draw(shape, seed)}
  return params


@functools.partial(
  jax.jit, static_argnums=(0, 1), static_argnames=("qk_norm", "everything", "after")
)
def attend(sharder, num_kv_heads, params, x_BTD, qk_norm="", everything=False, after=False):
  limits = {}
  if everything:
    limits = {"attn_logits_soft_cap": SOFT_CAP, "clip_qkv": LIMIT}
  cfg = dataclasses.replace(
    ModelConfig(),
    query_pre_attn_scalar=SCALE**-2,
    normalization_layer_epsilon=EPSILON,
    attention="chunked",
    attention_block_q=4,
    **limits,
  )
  rope = RopeSpec("main", HEAD_DIM, RopeConfig(rope_max_timescale=100.0))
  spec = AttentionSpec(
    AttentionForm(qk_norm, after, qkv_bias=everything, out_bias=everything, sinks=everything),
    num_heads=NUM_HEADS,
    num_kv_heads=num_kv_heads,
    head_dim=HEAD_DIM,
    rope=rope,
  )
  # As in a scan over local and global layers.
  spec = dataclasses.replace(spec, window=WINDOW, otherwise=spec)
  inputs = LayerInputs(
    jnp.asarray(SEGMENT_BT),
    {"main": rope_tables(POSITION_BT, HEAD_DIM, rope.config)},
    is_first=jnp.bool_(everything),
  )
  y_BTD, _ = Attention(cfg, sharder, spec).apply({"params": params}, x_BTD, inputs)
  return y_BTD


@pytest.mark.parametrize("mesh", ["one device", slow("context tensor")])
def test_a_position_depends_on_earlier_positions_of_its_document_only(sharders, mesh):
  params = make_params(2)
  x_BTD = draw((2, NUM_POSITIONS, DIM), 7)
  cotangent_D = draw(DIM, 8)

  @jax.jit
  def reach(x_BTD):
    """[t, b, s]: the largest derivative of the first row's t-th output by input [b, s]."""
    y_BTD, pull_back = jax.vjp(functools.partial(attend, sharders[mesh], 2, params), x_BTD)
    probe_TBTD = jnp.zeros((NUM_POSITIONS, *y_BTD.shape))
    every = jnp.arange(NUM_POSITIONS)
    probe_TBTD = probe_TBTD.at[every, 0, every].set(jnp.tile(cotangent_D, (NUM_POSITIONS, 1)))
    (derivative_TBSD,) = jax.vmap(pull_back)(probe_TBTD)
    return jnp.abs(derivative_TBSD).max(-1)

  reached_TBS = np.asarray(reach(x_BTD)) > 0
  same_TS = SEGMENT_BT[0][:, None] == SEGMENT_BT[0][None]
  np.testing.assert_array_equal(reached_TBS[:, 0], np.tril(same_TS))
  assert not reached_TBS[:, 1].any()


@pytest.mark.parametrize("num_kv_heads", [slow(1), 2])
def test_grouped_queries_equal_multi_head_attention_with_repeated_keys(sharders, num_kv_heads):
  params = make_params(num_kv_heads)
  x_BTD = draw((2, NUM_POSITIONS, DIM), 7)
  repeated = dict(params)
  for name in ("key", "value"):
    kernel = params[name]["kernel"]
    repeated[name] = {"kernel": np.repeat(kernel, NUM_HEADS // num_kv_heads, axis=1)}
  sharder = sharders["one device"]
  got_BTD = attend(sharder, num_kv_heads, params, x_BTD)
  want_BTD = attend(sharder, NUM_HEADS, repeated, x_BTD)
  np.testing.assert_allclose(got_BTD, want_BTD, atol=1e-4)


@pytest.mark.parametrize(
  ("qk_norm", "normed_shape", "mesh", "everything"),
  [
    ("", None, "one device", False),
    ("head", (HEAD_DIM,), "context tensor", True),
    ("projection", (NUM_HEADS * HEAD_DIM,), "context tensor", False),
  ],
)
def test_multi_head_attention_equals_its_formula(sharders, qk_norm, normed_shape, mesh, everything):
  """Source: Vaswani et al., Attention Is All You Need (2017), section 3.2.

  `everything` is biases, clipping, a window, a soft cap and sinks.
  """
  params = make_params(NUM_HEADS)
  x_BTD = draw((2, NUM_POSITIONS, DIM), 7)
  if everything:
    for name in ("query", "key", "value"):
      params[name]["bias"] = draw((NUM_HEADS, HEAD_DIM), 20)
    params["out"]["bias"] = draw(DIM, 21)
    params["sinks_bias"] = draw(NUM_HEADS, 22)
  if qk_norm:
    params["query_norm"] = {"scale": draw(normed_shape, 0)}
    params["key_norm"] = {"scale": draw(normed_shape, 1)}
  y_BTD = attend(sharders[mesh], NUM_HEADS, params, x_BTD, qk_norm=qk_norm, everything=everything)
  expected_TD = formula(params, x_BTD[1], everything)
  np.testing.assert_allclose(y_BTD[1], expected_TD, atol=1e-3)


@pytest.mark.parametrize("mesh", ["one device", slow("context tensor")])
def test_a_norm_after_the_rotary_embedding_equals_its_formula(sharders, mesh):
  params = make_params(NUM_HEADS)
  params["query_norm"] = {"scale": draw(HEAD_DIM, 0)}
  params["key_norm"] = {"scale": draw(HEAD_DIM, 1)}
  x_BTD = draw((2, NUM_POSITIONS, DIM), 7)
  y_BTD = attend(sharders[mesh], NUM_HEADS, params, x_BTD, qk_norm="head", after=True)
  np.testing.assert_allclose(y_BTD[1], formula(params, x_BTD[1], after=True), atol=1e-3)


def formula(params, x_TD, everything=False, after=False):
  """The layer's output for a row of one document, in float64."""
  q_HTC = project(params, "query", x_TD, has_norm=not after)
  k_HTC = project(params, "key", x_TD, has_norm=not after)
  v_HTC = project(params, "value", x_TD)
  if everything:
    q_HTC = np.clip(q_HTC, -LIMIT, LIMIT)
    k_HTC = np.clip(k_HTC, -LIMIT, LIMIT)
    v_HTC = np.clip(v_HTC, -LIMIT, LIMIT)
  q_HTC = rotate(q_HTC)
  k_HTC = rotate(k_HTC)
  if after:
    q_HTC = normed_pairs(q_HTC, params["query_norm"]["scale"])
    k_HTC = normed_pairs(k_HTC, params["key_norm"]["scale"])
  score_HTS = np.einsum("htc,hsc->hts", q_HTC, k_HTC.conj()).real * SCALE
  if everything:
    score_HTS = SOFT_CAP * np.tanh(score_HTS / SOFT_CAP)
  p_HTS = np.tril(np.exp(score_HTS))
  if everything:
    p_HTS = np.triu(p_HTS, 1 - WINDOW)
  total_HT1 = p_HTS.sum(-1, keepdims=True)
  if everything:
    total_HT1 += np.exp(params["sinks_bias"])[:, None, None]
  y_TD = np.einsum("hts,hsc,hcd->td", p_HTS / total_HT1, v_HTC, params["out"]["kernel"])
  if everything:
    y_TD += params["out"]["bias"]
  return y_TD


def project(params, name, x_TD, has_norm=True):
  """The projection with its bias and norm, if it has them."""
  x_HTC = np.einsum("td,dhc->htc", x_TD, np.float64(params[name]["kernel"]))
  if "bias" in params[name]:
    x_HTC += params[name]["bias"][:, None]
  if has_norm and f"{name}_norm" in params:
    x_HTC = normed(x_HTC, params[f"{name}_norm"]["scale"])
  return x_HTC


def rotate(x_HTC):
  """Pairs of channels as complex numbers, turned by the position."""
  frequency_C = 100.0 ** -np.array([0, 0.5])
  turn_TC = np.exp(1j * POSITION_BT[1][:, None] * frequency_C)
  return (x_HTC[..., :2] + 1j * x_HTC[..., 2:]) * turn_TC


def normed_pairs(pair_HTC, scale):
  """RMSNorm of the channels of a head, given its pairs as complex numbers."""
  x_HTC = normed(np.concatenate([pair_HTC.real, pair_HTC.imag], axis=-1), scale)
  return x_HTC[..., :2] + 1j * x_HTC[..., 2:]


def normed(x_HTC, scale):
  """RMSNorm over groups of a position's channels, each of the size of `scale`."""
  x_THC = x_HTC.swapaxes(0, 1)
  x = x_THC.reshape(NUM_POSITIONS, -1, scale.size)
  x = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * scale
  return x.reshape(x_THC.shape).swapaxes(0, 1)
