"""Latent attention against a naive float64 implementation of its formulas."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import trees
from support.slow_cases import slow

from maxlite.config.schema import LatentAttentionConfig, ModelConfig
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
SCALE = (NOPE + ROPE) ** -0.5
# Two documents and padding in the first row, one document in each of the others.
SEGMENT_BT = np.ones((NUM_SEQS, NUM_POSITIONS), np.int32)
SEGMENT_BT[0] = np.repeat([1, 2, 0], [3, 4, 1])
ANGLE_BTR = np.random.default_rng(0).normal(size=(NUM_SEQS, NUM_POSITIONS, ROPE // 2))


def draw(shape, seed):
  return np.random.default_rng(seed).normal(size=shape)


def make_params(q_lora_rank):
  query = {"query": {"kernel": (DIM, NUM_HEADS, NOPE + ROPE)}}
  if q_lora_rank:
    query = {
      "query_down": {"kernel": (DIM, q_lora_rank)},
      "query_norm": {"scale": (q_lora_rank,)},
      "query": {"kernel": (q_lora_rank, NUM_HEADS, NOPE + ROPE)},
    }
  shapes = query | {
    "kv_down": {"kernel": (DIM, LATENT + ROPE)},
    "kv_norm": {"scale": (LATENT,)},
    "kv_up": {"kernel": (LATENT, NUM_HEADS, NOPE + VALUE)},
    "out": {"kernel": (NUM_HEADS, VALUE, DIM)},
  }
  leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda leaf: isinstance(leaf, tuple))
  return tree.unflatten([draw(shape, i) for i, shape in enumerate(leaves)])


def make_input(dtype=np.float64):
  # Small, so that the epsilon of the latents' norms matters.
  return (1e-3 * draw((NUM_SEQS, NUM_POSITIONS, DIM), 7)).astype(dtype)


def layer(sharder, q_lora_rank, params, x_BTD):
  mla = LatentAttentionConfig(q_lora_rank, LATENT, NOPE, ROPE, VALUE)
  cfg = ModelConfig(
    decoder_block="deepseek", base_num_query_heads=NUM_HEADS, attention_block_q=4, mla=mla
  )
  module = LatentAttention(cfg, sharder, layer_specs(cfg)[0].mixer)
  rope = RopeTables(jnp.cos(ANGLE_BTR), jnp.sin(ANGLE_BTR))
  y_BTD, _ = module.apply({"params": params}, x_BTD, LayerInputs(SEGMENT_BT, {"main": rope}))
  return y_BTD


def formula(params, x_BTD):
  """Row by row, head by head. Source: DeepSeek-V2 (2024), equations 37 to 47."""
  w = {name: leaf["kernel"] for name, leaf in params.items() if "kernel" in leaf}
  rows = []
  for x_TD, segment_T, angle_TR in zip(x_BTD, SEGMENT_BT, ANGLE_BTR, strict=True):
    query_TQ = x_TD
    if "query_down" in w:
      query_TQ = rms(x_TD @ w["query_down"], params["query_norm"])
    down_TL = x_TD @ w["kv_down"]
    latent_TL = rms(down_TL[:, :LATENT], params["kv_norm"])
    shared_TR = down_TL[:, LATENT:]
    seen_TS = jnp.tril(segment_T[:, None] == segment_T[None])
    y_TD = jnp.zeros_like(x_TD)
    for h in range(NUM_HEADS):
      q_TC = query_TQ @ w["query"][:, h]
      kv_TC = latent_TL @ w["kv_up"][:, h]
      score_TS = q_TC[:, :NOPE] @ kv_TC[:, :NOPE].T
      turned_q = turn(q_TC[:, NOPE:], angle_TR)
      turned_k = turn(shared_TR, angle_TR)
      score_TS += (turned_q @ turned_k.conj().T).real
      p_TS = jax.nn.softmax(jnp.where(seen_TS, SCALE * score_TS, -jnp.inf))
      y_TD += p_TS @ kv_TC[:, NOPE:] @ w["out"][h]
    rows.append(y_TD)
  return jnp.stack(rows)


def rms(x_TL, norm):
  return x_TL / jnp.sqrt((x_TL**2).mean(-1, keepdims=True) + 1e-6) * norm["scale"][None]


def turn(x_TR, angle_TR):
  """Adjacent channels as complex numbers, rotated."""
  by = jax.lax.complex(jnp.cos(angle_TR), jnp.sin(angle_TR))
  return jax.lax.complex(x_TR[:, 0::2], x_TR[:, 1::2]) * by


def value_and_gradients(function, params, x_BTD):
  """(y_BTD, gradients of parameters, gradient of x) for a random cotangent."""
  y_BTD, pull_back = jax.vjp(function, params, x_BTD)
  return y_BTD, *pull_back(jnp.asarray(draw(y_BTD.shape, 9), y_BTD.dtype))


@pytest.mark.parametrize(
  ("q_lora_rank", "mesh"),
  [
    (0, "one device"),
    slow(4, "data fsdp tensor"),
    slow(4, "context expert fsdp"),
    slow(0, "context tensor"),
  ],
)
def test_values_and_gradients_equal_the_formulas(sharders, q_lora_rank, mesh):
  with jax.enable_x64(True):
    function = functools.partial(layer, sharders[mesh], q_lora_rank)
    run = jax.jit(functools.partial(value_and_gradients, function))
    params = make_params(q_lora_rank)
    x_BTD = make_input()
    expected = jax.device_get(oracle(params, x_BTD))
    for leaf, expected_leaf in trees.leaf_pairs(run(params, x_BTD), expected):
      assert_close(leaf, expected_leaf, 1e-11)


@jax.jit
def oracle(params, x_BTD):
  """The results of the formulas; compiles once for each structure of the parameters."""
  return value_and_gradients(formula, params, x_BTD)


def assert_close(a, b, rtol):
  """Within `rtol` of the largest entry."""
  np.testing.assert_allclose(a, b, rtol=0, atol=rtol * np.abs(b).max())


def test_bfloat16_is_close_and_stays_bfloat16(sharders):
  params = jax.tree.map(np.float32, make_params(4))
  run = jax.jit(functools.partial(layer, sharders["one device"], 4))
  y_BTD = run(params, make_input(jnp.bfloat16))
  assert y_BTD.dtype == jnp.bfloat16
  assert_close(np.float32(y_BTD), np.asarray(run(params, make_input(np.float32))), 0.05)
