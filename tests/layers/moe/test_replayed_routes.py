"""Replayed routes of the MoE block: given experts, whose weights follow from the live logits.

Every router with every dispatch: what was recorded gives the bits of live routing, and any other
experts give what a dense reference computes for them, in values and gradients.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict
from support.slow_cases import slow

from maxlite.config.model_families import MoeForm
from maxlite.config.schema import DEFAULTS, ModelConfig, MoeConfig, build
from maxlite.errors import UserError
from maxlite.layers.layer_specs import MoeSpec
from maxlite.layers.moe import routes
from maxlite.layers.moe.expert_choice import topk_softmax
from maxlite.layers.moe.moe_block import MoeBlock
from maxlite.registry import GROUP_ROUTERS, PLAIN_ROUTERS, ROUTERS

DIM, HIDDEN, NUM_EXPERTS, NUM_CHOSEN = 8, 4, 8, 3
SEGMENT_BT = np.array([[1, 1, 1, 2, 2, 2], [1, 1, 1, 1, 0, 0], [0] * 6, [1] * 6], np.int32)
DISPATCHES = {
  "ragged": {},
  "all_gather": {"use_ring_of_experts": True},
  "dense": {"sparse_matmul": False},
  "capacity": {"sparse_matmul": False, "capacity_factor": 8.0},
}
MESHES = {"one device": {}, "expert=2 context=2": {"expert": 2, "context": 2}}
CASES = [
  ("group_limited_greedy", "capacity", "one device"),
  ("sigmoid_group_topk", "dense", "one device"),
]
for router in ROUTERS:
  for dispatch in DISPATCHES:
    for mesh in MESHES:
      if (router, dispatch, mesh) not in CASES:
        CASES.append(slow((router, dispatch, mesh)))
# Programs here run a few times: LLVM's optimizations would take longer than they save.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
every_case = pytest.mark.parametrize("case", CASES, ids=", ".join)


def draw(shape, seed):
  return np.random.default_rng(seed).normal(size=shape)


X_BTD = draw((*SEGMENT_BT.shape, DIM), 0)
DY_BTD = draw(X_BTD.shape, 1)
PARAMS = {
  "router": {"kernel": draw((DIM, NUM_EXPERTS), 2), "bias": 0.3 * draw(NUM_EXPERTS, 3)},
  "wi_0": draw((NUM_EXPERTS, DIM, HIDDEN), 4),
  "wi_1": draw((NUM_EXPERTS, DIM, HIDDEN), 5),
  "wo": draw((NUM_EXPERTS, HIDDEN, DIM), 6),
}
# Of random groups, also where a choice by groups would take two of four.
OTHERS_BTK = np.argsort(draw((*SEGMENT_BT.shape, NUM_EXPERTS), 7), axis=-1)[..., :NUM_CHOSEN]


def block_of(case, sharder):
  router, dispatch, _ = case
  keys = {
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": NUM_CHOSEN,
    "base_moe_mlp_dim": HIDDEN,
    "router": router,
    "routed_bias": True,
    "routed_scaling_factor": 1.7,
  }
  if router in GROUP_ROUTERS:
    keys |= {"n_routing_groups": 4, "topk_routing_group": 2}
  moe = build(MoeConfig, DEFAULTS | keys | DISPATCHES[dispatch])
  cfg = ModelConfig(weight_dtype="float64", moe=moe)
  return MoeBlock(cfg, sharder, MoeSpec(MoeForm()))


def collection(expert_BTK):
  return unflatten_dict({("router", routes.EXPERTS): jnp.asarray(expert_BTK, jnp.int32)})


def run_of(block, sharder):
  """The jitted (params, x_BTD, routes or None) -> (y_BTD, counts, gradients)."""

  @jit
  def run(params, x_BTD, given):
    x_BTD = sharder.constrain(x_BTD, ("activation_batch", "activation_length", None))

    def apply(params, x_BTD):
      variables = {"params": params}
      if given is not None:
        variables[routes.COLLECTION] = given
      y_BTD, sums = block.apply(variables, x_BTD, SEGMENT_BT)
      return jnp.vdot(DY_BTD, y_BTD), (y_BTD, sums.count_E)

    gradients, (y_BTD, count_E) = jax.grad(apply, (0, 1), has_aux=True)(params, x_BTD)
    return y_BTD, count_E, gradients

  return run


def reference(router, params, x_BTD, expert_BTK):
  """y_BTD of these experts, each computed for all tokens; weights as the routers' papers say."""
  logits_BTE = x_BTD @ params["router"]["kernel"]
  if router == "softmax_topk":
    score_BTE = jnp.exp(logits_BTE)
  elif router == "sigmoid_group_topk":
    score_BTE = 1 / (1 + jnp.exp(-logits_BTE))
  else:
    score_BTE = jnp.exp(logits_BTE) / jnp.exp(logits_BTE).sum(-1, keepdims=True)
  weight_BTK = jnp.take_along_axis(score_BTE, expert_BTK, axis=-1)
  weight_BTK = 1.7 * weight_BTK / weight_BTK.sum(-1, keepdims=True)
  gate_BTEF = jnp.einsum("btd,edf->btef", x_BTD, params["wi_0"])
  up_BTEF = jnp.einsum("btd,edf->btef", x_BTD, params["wi_1"])
  h_BTEF = gate_BTEF / (1 + jnp.exp(-gate_BTEF)) * up_BTEF
  y_BTED = jnp.einsum("btef,efd->bted", h_BTEF, params["wo"])
  chosen_BTKD = jnp.take_along_axis(y_BTED, expert_BTK[..., None], axis=2)
  y_BTD = jnp.einsum("btkd,btk->btd", chosen_BTKD, weight_BTK)
  return jnp.where(SEGMENT_BT[..., None] > 0, y_BTD, 0)


@every_case
def test_given_experts_are_as_in_the_reference_and_recorded_ones_as_live(case, build_sharder):
  sharder = build_sharder(MESHES[case[2]])
  with jax.enable_x64(True):
    block = block_of(case, sharder)
    run = run_of(block, sharder)
    record = functools.partial(block.apply, mutable=[routes.COLLECTION])
    _, recorded = jit(record)({"params": PARAMS}, X_BTD, SEGMENT_BT)
    live = jax.device_get(run(PARAMS, X_BTD, None))
    replayed = jax.device_get(run(PARAMS, X_BTD, recorded[routes.COLLECTION]))
    jax.tree.map(np.testing.assert_array_equal, replayed, live)

    others = jax.device_get(run(PARAMS, X_BTD, collection(OTHERS_BTK)))

    def expected(params, x_BTD):
      y_BTD = reference(case[0], params, x_BTD, OTHERS_BTK)
      return jnp.vdot(DY_BTD, y_BTD), y_BTD

    want_gradients, want_BTD = jax.grad(expected, (0, 1), has_aux=True)(PARAMS, X_BTD)
  y_BTD, count_E, gradients = others
  assert np.abs(y_BTD - live[0]).max() > 0.1
  np.testing.assert_allclose(y_BTD, want_BTD, atol=1e-12)
  real = SEGMENT_BT > 0
  np.testing.assert_array_equal(count_E, np.bincount(OTHERS_BTK[real].ravel(), minlength=8))
  jax.tree.map(
    lambda got, want: np.testing.assert_allclose(got, want, atol=1e-11), gradients, want_gradients
  )


def test_a_router_that_cannot_replay_is_one_line(build_sharder, monkeypatch):
  def old_router(logits_BTE, bias_E, cfg):
    return topk_softmax(logits_BTE, bias_E, cfg)

  monkeypatch.setitem(PLAIN_ROUTERS, "old", old_router)
  block = block_of(("old", "dense", "one device"), build_sharder({}))
  variables = {"params": PARAMS, routes.COLLECTION: collection(OTHERS_BTK)}
  error = pytest.raises(UserError, match="router=old cannot replay experts: give its function a")
  with jax.enable_x64(True), error:
    jax.eval_shape(block.apply, variables, X_BTD, SEGMENT_BT)


@pytest.mark.parametrize("router", ["sigmoid_group_topk", *map(slow, ROUTERS)])
def test_gradients_of_given_experts_equal_central_differences(router, build_sharder):
  """Along a random direction of all parameters and the input; the choice is not differentiated."""
  with jax.enable_x64(True):
    sharder = build_sharder({})
    block = block_of((router, "dense", "one device"), sharder)
    variables = {routes.COLLECTION: collection(OTHERS_BTK)}

    @jit
    def value(params, x_BTD):
      y_BTD, sums = block.apply({"params": params, **variables}, x_BTD, SEGMENT_BT)
      return jnp.vdot(DY_BTD, y_BTD) + sums.z + sums.row_balance

    point = (PARAMS, X_BTD)
    direction = jax.tree.map(lambda leaf: draw(leaf.shape, leaf.size), point)
    direction[0]["router"]["bias"] *= 0  # which affects no weight, and has no gradient
    gradients = jax.grad(value, (0, 1))(*point)
    slope = sum(map(np.vdot, jax.tree.leaves(gradients), jax.tree.leaves(direction)))

    def at(step):
      return value(*jax.tree.map(lambda leaf, d: leaf + step * d, point, direction))

    assert slope == pytest.approx(float(at(1e-6) - at(-1e-6)) / 2e-6, rel=1e-7)
