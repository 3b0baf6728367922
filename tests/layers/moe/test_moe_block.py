"""The MoE block against a dense oracle in float64: every expert on every token, then masked.

Value, router sums, and the gradient of the input and of every parameter, with random cotangents,
on every mesh and for every kind of routing.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import meta

from maxlite.config.schema import DEFAULTS, MoeConfig, build
from maxlite.layers.moe.block import MoeBlock
from maxlite.layers.moe.router import RouterSums

NUM_SEQS, NUM_POSITIONS, DIM, HIDDEN, NUM_EXPERTS, NUM_CHOSEN = 4, 6, 8, 4, 6, 2
SEGMENT_BT = np.array(
  [[1, 1, 1, 2, 2, 2], [1, 1, 1, 1, 0, 0], [1, 2, 3, 3, 0, 0], [1] * 6], np.int32
)
# What each expert's logit gains for every token.
ROUTINGS = {
  "uniform": (0, 0, 0, 0, 0, 0),
  "skewed": (2, 1, 0, -1, 0, 0),
  "one hot": (0, 0, 0, 30, 0, 28),
  "empty": (-30, 0, 0, -30, 0, -30),
}
EMPTY_EXPERTS = {"uniform": [], "skewed": [], "one hot": [0, 1, 2, 4], "empty": [0, 3, 5]}
CFG = build(
  MoeConfig,
  DEFAULTS
  | {"num_experts": NUM_EXPERTS, "num_experts_per_tok": NUM_CHOSEN, "base_moe_mlp_dim": HIDDEN},
)


def draw(shape, seed, scale=1.0):
  return scale * np.random.default_rng(seed).normal(size=shape)


def make_case(routing):
  """(params, x_BTD, cotangents); the first channel of x is 1 and carries the routing's bias."""
  x_BTD = draw((NUM_SEQS, NUM_POSITIONS, DIM), 0)
  x_BTD[..., 0] = 1
  router_DE = draw((DIM, NUM_EXPERTS), 1, 0.5)
  router_DE[0] = ROUTINGS[routing]
  params = {
    "router": {"kernel": router_DE},
    "wi_0": draw((NUM_EXPERTS, DIM, HIDDEN), 2),
    "wi_1": draw((NUM_EXPERTS, DIM, HIDDEN), 3),
    "wo": draw((NUM_EXPERTS, HIDDEN, DIM), 4),
  }
  sums = RouterSums(np.float64(0.0), np.zeros(NUM_EXPERTS), draw(NUM_EXPERTS, 5), np.float64(0.3))
  return params, x_BTD, (draw(x_BTD.shape, 6), sums)


def dense_oracle(params, x_BTD):
  logits_BTE = jnp.einsum("btd,de->bte", x_BTD, params["router"]["kernel"])
  e_BTE = jnp.exp(logits_BTE)
  p_BTE = e_BTE / e_BTE.sum(-1, keepdims=True)
  chosen_BTE = p_BTE >= jnp.sort(p_BTE, axis=-1)[..., -NUM_CHOSEN, None]
  weight_BTE = jnp.where(chosen_BTE, p_BTE, 0)
  weight_BTE /= weight_BTE.sum(-1, keepdims=True)
  gate_BTEF, up_BTEF = (
    jnp.einsum("btd,edf->btef", x_BTD, params[name]) for name in ("wi_0", "wi_1")
  )
  h_BTEF = gate_BTEF / (1 + jnp.exp(-gate_BTEF)) * up_BTEF
  y_BTD = jnp.einsum("btef,efd,bte->btd", h_BTEF, params["wo"], weight_BTE)
  real_BT1 = SEGMENT_BT[..., None] > 0
  z_BT1 = jnp.log(e_BTE.sum(-1, keepdims=True)) ** 2
  return y_BTD, RouterSums(
    tokens=jnp.float64((SEGMENT_BT > 0).sum()),
    count_E=jnp.where(real_BT1, chosen_BTE, False).sum((0, 1)).astype(jnp.float64),
    prob_E=jnp.where(real_BT1, p_BTE, 0).sum((0, 1)),
    z=jnp.where(real_BT1, z_BT1, 0).sum(),
  )


def value_and_gradients(function, params, x_BTD, cotangents):
  """((y_BTD, sums), gradient of params, of x_BTD)"""
  results, pull_back = jax.vjp(function, params, x_BTD)
  return results, *pull_back(cotangents)


@pytest.fixture(scope="module")
def expected():
  """What the oracle says of each routing."""
  with jax.enable_x64(True):
    oracle = jax.jit(functools.partial(value_and_gradients, dense_oracle))
    return {routing: jax.tree.map(np.asarray, oracle(*make_case(routing))) for routing in ROUTINGS}


@pytest.fixture(scope="module", params=["one device", "data fsdp tensor", "context expert fsdp"])
def run(request, sharders):
  """The block's value_and_gradients on a mesh, on which everything lies as in training."""
  sharder = sharders[request.param]
  with jax.enable_x64(True):
    block = MoeBlock(CFG, ("silu", "linear"), jnp.dtype(jnp.float64), sharder)
    boxed = jax.eval_shape(block.init, jax.random.key(0), *make_case("uniform")[1:2], SEGMENT_BT)
    shardings = jax.tree.map(
      lambda box: sharder.sharding(box.names),
      boxed["params"],
      is_leaf=lambda leaf: isinstance(leaf, meta.Partitioned),
    )
  rows = sharder.sharding(("activation_batch", "activation_length", None))
  apply = lambda params, x_BTD: block.apply({"params": params}, x_BTD, SEGMENT_BT)
  run = functools.partial(value_and_gradients, apply)
  return jax.jit(run, in_shardings=(shardings, rows, None))


@pytest.mark.parametrize("routing", ROUTINGS)
def test_agrees_with_the_dense_oracle_in_float64(run, expected, routing):
  with jax.enable_x64(True):
    got = run(*make_case(routing))
  jax.tree_util.tree_map_with_path(
    lambda path, a, b: np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-11, err_msg=str(path)),
    got,
    expected[routing],
  )
  for name in ("wi_0", "wi_1", "wo"):
    reached_E = np.abs(got[1][name]).max((1, 2)) > 0
    assert np.flatnonzero(~reached_E).tolist() == EMPTY_EXPERTS[routing]


def test_bfloat16_is_close_and_its_weights_keep_their_gradient_type(sharders, expected):
  block = MoeBlock(CFG, ("silu", "linear"), jnp.dtype(jnp.float32), sharders["one device"])
  params, x_BTD, (dy_BTD, _) = make_case("skewed")
  params = jax.tree.map(lambda leaf: leaf.astype(np.float32), params)

  def value(params, x_BTD):
    return block.apply({"params": params}, x_BTD, SEGMENT_BT)[0]

  run = jax.jit(functools.partial(value_and_gradients, value))
  y_BTD, dparams, dx_BTD = run(params, *(a.astype(jnp.bfloat16) for a in (x_BTD, dy_BTD)))
  assert y_BTD.dtype == dx_BTD.dtype == jnp.bfloat16
  assert {leaf.dtype for leaf in jax.tree.leaves(dparams)} == {np.dtype(np.float32)}
  (want_BTD, _), want_params, _ = expected["skewed"]
  for got, want in ((y_BTD, want_BTD), (dparams["wo"], want_params["wo"])):
    assert np.abs(np.float64(got) - want).max() < 0.03 * np.abs(want).max()


def test_ungated_experts_and_fresh_weights(sharders):
  block = MoeBlock(CFG, ("relu",), jnp.dtype(jnp.float32), sharders["one device"])
  x_BTD = draw((1, 3, 64), 0).astype(np.float32)
  segment_BT = np.ones((1, 3), np.int32)
  params = meta.unbox(jax.jit(block.init)(jax.random.key(0), x_BTD, segment_BT))["params"]
  assert sorted(params) == ["router", "wi_0", "wo"]
  assert np.std(params["wi_0"]) == pytest.approx(64**-0.5, rel=0.05)
  assert np.std(params["wo"]) == pytest.approx(HIDDEN**-0.5, rel=0.05)

  y_BTD, _ = jax.jit(block.apply)({"params": params}, x_BTD, segment_BT)
  for t in range(3):
    p_E = np.exp(x_BTD[0, t] @ params["router"]["kernel"])
    best_K = np.argsort(-p_E)[:NUM_CHOSEN]
    expected_D = sum(
      p_E[e] / p_E[best_K].sum() * np.maximum(x_BTD[0, t] @ params["wi_0"][e], 0) @ params["wo"][e]
      for e in best_K
    )
    np.testing.assert_allclose(y_BTD[0, t], expected_D, atol=1e-5)
