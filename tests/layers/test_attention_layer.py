"""The attention layer: dependencies of a position, grouped heads, and its formula."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxlite.config.model_families import MODELS, ModelFamily
from maxlite.config.schema import ModelConfig, RopeConfig
from maxlite.layers.attention import Attention
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
  return {name: {"kernel": draw(shape, i)} for i, (name, shape) in enumerate(shapes.items())}


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames=("qk_norm", "everything"))
def attend(sharder, num_kv_heads, params, x_BTD, qk_norm="", everything=False):
  cfg = dataclasses.replace(
    ModelConfig(),
    decoder_block="toy",
    base_num_query_heads=NUM_HEADS,
    base_num_kv_heads=num_kv_heads,
    head_dim=HEAD_DIM,
    query_pre_attn_scalar=SCALE**-2,
    normalization_layer_epsilon=EPSILON,
    attention="chunked",
    attention_block_q=4,
    attn_logits_soft_cap=SOFT_CAP if everything else 0.0,
    sliding_window_size=WINDOW,
    clip_qkv=LIMIT if everything else 0.0,
  )
  family = ModelFamily(qk_norm=qk_norm, qkv_bias=everything, out_bias=everything, sinks=everything)
  rope = rope_tables(POSITION_BT, HEAD_DIM, RopeConfig(rope_max_timescale=100.0))
  is_local = jnp.bool_(everything)  # traced, as in a scan over local and global layers
  with pytest.MonkeyPatch.context() as patch:
    patch.setitem(MODELS, "toy", family)
    layer = Attention(cfg, sharder)
    y_BTD, _ = layer.apply({"params": params}, x_BTD, SEGMENT_BT, rope, is_local)
    return y_BTD


@pytest.mark.parametrize("mesh", ["one device", "context tensor"])
def test_a_position_depends_on_earlier_positions_of_its_document_only(sharders, mesh):
  params = make_params(2)
  x_BTD = draw((2, NUM_POSITIONS, DIM), 7)
  cotangent_D = draw(DIM, 8)

  @jax.jit
  def reach(x_BTD):
    """[t, b, s]: the largest derivative of the first row's t-th output by input [b, s]."""
    y_BTD, pull_back = jax.vjp(functools.partial(attend, sharders[mesh], 2, params), x_BTD)
    probe = jnp.zeros((NUM_POSITIONS, *y_BTD.shape))
    every = jnp.arange(NUM_POSITIONS)
    probe = probe.at[every, 0, every].set(jnp.tile(cotangent_D, (NUM_POSITIONS, 1)))
    return jnp.abs(jax.vmap(pull_back)(probe)[0]).max(-1)

  reached_TBS = np.asarray(reach(x_BTD)) > 0
  same_TS = SEGMENT_BT[0][:, None] == SEGMENT_BT[0][None]
  np.testing.assert_array_equal(reached_TBS[:, 0], np.tril(same_TS))
  assert not reached_TBS[:, 1].any()


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_grouped_queries_equal_multi_head_attention_with_repeated_keys(sharders, num_kv_heads):
  params = make_params(num_kv_heads)
  x_BTD = draw((2, NUM_POSITIONS, DIM), 7)
  repeated = {
    name: {"kernel": np.repeat(leaf["kernel"], NUM_HEADS // num_kv_heads, axis=1)}
    if name in ("key", "value")
    else leaf
    for name, leaf in params.items()
  }
  sharder = sharders["one device"]
  np.testing.assert_allclose(
    attend(sharder, num_kv_heads, params, x_BTD),
    attend(sharder, NUM_HEADS, repeated, x_BTD),
    atol=1e-4,
  )


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
  biases = {name: draw(leaf["kernel"].shape[1:], 20) for name, leaf in params.items()}
  biases["out"], sink_H = draw(DIM, 21), draw(NUM_HEADS, 22)
  if everything:
    params = {name: leaf | {"bias": biases[name]} for name, leaf in params.items()}
    params["sinks_bias"] = sink_H
  if qk_norm:
    params |= {
      f"{n}_norm": {"scale": draw(normed_shape, i)} for i, n in enumerate(("query", "key"))
    }
  y_BTD = attend(sharders[mesh], NUM_HEADS, params, x_BTD, qk_norm=qk_norm, everything=everything)
  scales = {n: leaf["scale"] for n, leaf in params.items() if n.endswith("norm")}
  kernels = {n: np.float64(params[n]["kernel"]) for n in biases}
  q, k, v = (
    np.einsum("td,dhc->htc", x_BTD[1], kernels[n]) + everything * biases[n][:, None]
    for n in ("query", "key", "value")
  )
  if qk_norm:
    q, k = (normed(x, scales[f"{n}_norm"]) for n, x in (("query", q), ("key", k)))
  if everything:
    q, k, v = (np.clip(x, -LIMIT, LIMIT) for x in (q, k, v))
  frequency_C = 100.0 ** -np.array([0, 0.5])
  turn_TC = np.exp(1j * POSITION_BT[1][:, None] * frequency_C)
  q, k = ((x[..., :2] + 1j * x[..., 2:]) * turn_TC for x in (q, k))
  score_HTS = np.einsum("htc,hsc->hts", q, k.conj()).real * SCALE
  if everything:
    score_HTS = SOFT_CAP * np.tanh(score_HTS / SOFT_CAP)
  p_HTS = np.tril(np.exp(score_HTS))
  p_HTS = np.triu(p_HTS, 1 - WINDOW) if everything else p_HTS
  p_HTS /= p_HTS.sum(-1, keepdims=True) + everything * np.exp(sink_H)[:, None, None]
  expected_TD = np.einsum("hts,hsc,hcd->td", p_HTS, v, kernels["out"])
  expected_TD += everything * biases["out"]
  np.testing.assert_allclose(y_BTD[1], expected_TD, atol=1e-3)


def normed(x_HTC, scale):
  """RMSNorm over groups of a position's channels, each of the size of `scale`."""
  x_THC = x_HTC.swapaxes(0, 1)
  x = x_THC.reshape(NUM_POSITIONS, -1, scale.size)
  x = x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * scale
  return x.reshape(x_THC.shape).swapaxes(0, 1)
