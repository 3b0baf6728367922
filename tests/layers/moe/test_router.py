"""Routers against NumPy implementations of their papers: experts, weights, sums and gradients."""

import dataclasses
import functools
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.slow_cases import fast_only, slow

from maxlite.config.schema import DEFAULTS, MoeConfig, build
from maxlite.layers.moe.router import ROUTERS, Router
from maxlite.registry import PLAIN_ROUTERS

NUM_EXPERTS = 12
NUM_CHOSEN = 3
NUM_GROUPS = 4
NUM_KEPT = 2
DIM = 5
SEGMENT_BT = np.array([[1, 1, 1, 2, 2, 0], [1, 1, 0, 0, 0, 0], [1] * 6, [0] * 6], np.int32)
REAL_BT = SEGMENT_BT > 0
CFG = build(
  MoeConfig,
  DEFAULTS
  | {
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": NUM_CHOSEN,
    "n_routing_groups": NUM_GROUPS,
    "topk_routing_group": NUM_KEPT,
  },
)
every_router = pytest.mark.parametrize("router", ROUTERS)
# The other routers in slow tests.
two_routers = pytest.mark.parametrize(
  "router", fast_only(ROUTERS, "softmax_topk", "sigmoid_group_topk")
)
one_router = pytest.mark.parametrize("router", fast_only(ROUTERS, "sigmoid_group_topk"))


def draw(shape, seed):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


X_BTD = draw((*SEGMENT_BT.shape, DIM), 0)
KERNEL_DE = draw((DIM, NUM_EXPERTS), 1)
BIAS_E = 0.3 * draw(NUM_EXPERTS, 2)


@functools.partial(jax.jit, static_argnames=("cfg",))
def apply(params, x_BTD, segment_BT, cfg, rngs=None):
  return Router(cfg, jnp.dtype(jnp.float32)).apply({"params": params}, x_BTD, segment_BT, rngs=rngs)


def route(x_BTD=X_BTD, segment_BT=SEGMENT_BT, kernel_DE=KERNEL_DE, bias_E=None, rng=None, **keys):
  if keys.get("router") in PLAIN_ROUTERS:
    keys |= {"n_routing_groups": 1, "topk_routing_group": 1}
  cfg = dataclasses.replace(CFG, **keys, routed_bias=bias_E is not None)
  params = {"kernel": kernel_DE}
  if bias_E is not None:
    params["bias"] = bias_E
  rngs = None
  if rng is not None:
    rngs = {"jitter": jax.random.key(rng)}
  return apply(params, x_BTD, segment_BT, cfg, rngs)


def assert_equal(got, want):
  """Assert that two results, or their sums, are equal bit for bit."""
  jax.tree.map(np.testing.assert_array_equal, got, want)


def softmax(logits):
  e = np.exp(logits - max(logits))
  return e / e.sum()


def sigmoid(logits):
  return 1 / (1 + np.exp(-logits))


def best(scores, number, among):
  """The `number` experts with the highest scores, best first."""
  return sorted(among, key=lambda e: -scores[e])[:number]


def groups_best(scores, num_best):
  """Experts of the groups with the highest sums of their `num_best` best scores."""
  size = NUM_EXPERTS // NUM_GROUPS
  groups = [range(g * size, (g + 1) * size) for g in range(NUM_GROUPS)]

  def group_score(group):
    in_order = sorted(scores[e] for e in group)
    return sum(in_order[-num_best:])

  groups.sort(key=group_score, reverse=True)
  return list(itertools.chain.from_iterable(groups[:NUM_KEPT]))


class Routing(NamedTuple):
  """Probabilities of all experts, chosen experts, and their weights, of one token or of all."""

  p_TE: np.ndarray
  expert_TK: np.ndarray
  weight_TK: np.ndarray


def expected_token(router, logits, bias, norm_topk_prob):
  """The routing of one token, in float64."""
  every = range(NUM_EXPERTS)
  if router == "softmax_topk":
    chosen = best(logits + bias, NUM_CHOSEN, every)
    return Routing(softmax(logits), chosen, softmax(logits[chosen]))
  score = softmax(logits)
  if "sigmoid" in router:
    score = sigmoid(logits)
  choice = score + bias
  if router == "topk_sigmoid":
    choice = logits + bias
  among = every
  if router == "group_limited_greedy":
    among = groups_best(choice, 1)
  elif router == "sigmoid_group_topk":
    among = groups_best(choice, 2)
  chosen = best(choice, NUM_CHOSEN, among)
  weights = score[chosen]
  if norm_topk_prob:
    weights = weights / weights.sum()
  return Routing(score / score.sum(), chosen, weights)


def expected(router, x_BTD=X_BTD, bias_E=0.0, norm_topk_prob=True):
  """The routing of all tokens."""
  logits_BTE = np.float64(x_BTD) @ np.float64(KERNEL_DE)
  tokens = []
  for logits in logits_BTE.reshape(-1, NUM_EXPERTS):
    tokens.append(expected_token(router, logits, bias_E, norm_topk_prob))
  return Routing(
    p_TE=np.stack([token.p_TE for token in tokens]),
    expert_TK=np.stack([token.expert_TK for token in tokens]),
    weight_TK=np.stack([token.weight_TK for token in tokens]),
  )


@every_router
@pytest.mark.parametrize(
  ("bias_E", "norm_topk_prob"),
  [(None, True), (BIAS_E, False), slow(None, False), slow(BIAS_E, True)],
  ids=["unbiased-True", "biased-False", "unbiased-False", "biased-True"],
)
def test_choice_and_weights_equal_the_paper(router, norm_topk_prob, bias_E):
  got = route(router=router, norm_topk_prob=norm_topk_prob, bias_E=bias_E)
  if bias_E is None:
    bias_E = 0.0
  want = expected(router, bias_E=bias_E, norm_topk_prob=norm_topk_prob)
  assert got.expert_BTK.dtype == jnp.int32
  assert got.weight_BTK.dtype == jnp.float32
  np.testing.assert_array_equal(got.expert_BTK.reshape(want.expert_TK.shape), want.expert_TK)
  weight_TK = got.weight_BTK.reshape(want.weight_TK.shape)
  np.testing.assert_allclose(weight_TK, want.weight_TK, rtol=1e-5)
  if norm_topk_prob:
    np.testing.assert_allclose(got.weight_BTK.sum(-1), 1, rtol=1e-6)


def test_the_routers_differ_on_these_tokens():
  """So that the test above distinguishes them."""
  choices = set()
  for name in ("topk_softmax", "group_limited_greedy", "sigmoid_group_topk"):
    plain = expected(name, bias_E=0.0)
    biased = expected(name, bias_E=BIAS_E)
    choices |= {plain.expert_TK.tobytes(), biased.expert_TK.tobytes()}
  assert len(choices) == 6


@two_routers
def test_the_bias_affects_the_choice_but_not_the_weights(router):
  """A bias that is equal for all, or that raises the chosen experts, changes nothing."""
  one = {"x_BTD": X_BTD[:1, :1], "segment_BT": SEGMENT_BT[:1, :1], "router": router}
  plain = route(**one)
  chosen = np.asarray(plain.expert_BTK).ravel()
  lifted_E = np.zeros(NUM_EXPERTS, np.float32)
  lifted_E[chosen] = 5
  equal_E = np.full(NUM_EXPERTS, 2, np.float32)
  assert_equal(route(**one, bias_E=equal_E), plain)
  assert_equal(route(**one, bias_E=lifted_E), plain)
  moved = route(**one, bias_E=-lifted_E)
  assert not np.isin(moved.expert_BTK, chosen).any()
  np.testing.assert_array_equal(moved.sums.prob_E, plain.sums.prob_E)


@every_router
def test_the_scaling_factor_scales_only_the_weights(router):
  plain = route(router=router)
  scaled = route(router=router, routed_scaling_factor=16.0)
  np.testing.assert_array_equal(scaled.weight_BTK, 16 * plain.weight_BTK)
  assert_equal(scaled.sums, plain.sums)


@pytest.mark.parametrize("router", ["group_limited_greedy", "sigmoid_group_topk"])
def test_tokens_stay_in_their_groups_and_a_single_group_is_unlimited(router):
  limited = route(router=router)
  group_BTK = np.asarray(limited.expert_BTK) // (NUM_EXPERTS // NUM_GROUPS)
  numbers = [len(set(groups)) for groups in group_BTK.reshape(-1, NUM_CHOSEN)]
  assert max(numbers) == NUM_KEPT
  free = route(router=router, n_routing_groups=1, topk_routing_group=1)
  every = route(router=router, topk_routing_group=NUM_GROUPS)
  assert_equal(every, free)
  assert (free.expert_BTK != limited.expert_BTK).any()


def test_negative_biases_do_not_route_a_token_out_of_its_groups():
  got = route(router="sigmoid_group_topk", bias_E=BIAS_E - 5)
  want = route(router="sigmoid_group_topk", bias_E=BIAS_E)
  np.testing.assert_array_equal(got.expert_BTK, want.expert_BTK)


@one_router
def test_gradients_equal_central_differences_in_float64(router):
  """Gradients of weights and sums with respect to the router's input and kernel."""
  cfg = dataclasses.replace(
    CFG, router=router, routed_bias=True, routed_scaling_factor=2.5, norm_topk_prob=False
  )
  with jax.enable_x64(True):
    module = Router(cfg, jnp.dtype(jnp.float64))

    @jax.jit
    def value(arrays):
      params = {"kernel": arrays["kernel"], "bias": BIAS_E}
      chosen = module.apply({"params": params}, arrays["x"], SEGMENT_BT)
      sums = chosen.sums
      parts = [chosen.weight_BTK, sums.prob_E, sums.z, sums.row_balance]
      total = 0.0
      for seed, part in enumerate(parts):
        factors = np.float64(draw(part.shape, seed))
        total += jnp.vdot(factors, part)
      return total

    arrays = {"x": np.float64(X_BTD), "kernel": np.float64(KERNEL_DE)}
    gradient = jax.jit(jax.grad(value))(arrays)
    for name, array in arrays.items():
      direction = np.float64(draw(array.shape, 9))
      up = value(arrays | {name: array + 1e-6 * direction})
      down = value(arrays | {name: array - 1e-6 * direction})
      slope = np.vdot(gradient[name], direction)
      np.testing.assert_allclose(slope, (up - down) / 2e-6, rtol=1e-7)


def test_a_bias_of_the_logits_affects_choice_and_weights():
  router = Router(CFG, jnp.dtype(jnp.float32), use_bias=True)
  params = {"kernel": KERNEL_DE, "logits_bias": BIAS_E}
  got = jax.jit(router.apply)({"params": params}, X_BTD, SEGMENT_BT)
  # Equivalent to an additional channel that is 1 for every token.
  one_BT1 = np.ones_like(X_BTD[..., :1])
  x_BTD = np.concatenate([X_BTD, one_BT1], axis=-1)
  kernel_DE = np.concatenate([KERNEL_DE, BIAS_E[None]])
  want = route(x_BTD, kernel_DE=kernel_DE)
  np.testing.assert_array_equal(got.expert_BTK, want.expert_BTK)
  np.testing.assert_allclose(got.weight_BTK, want.weight_BTK, rtol=1e-5)
  np.testing.assert_allclose(got.sums.prob_E, want.sums.prob_E, rtol=1e-5)


@two_routers
def test_the_bias_has_no_gradient(router):
  cfg = dataclasses.replace(CFG, router=router, routed_bias=True)
  module = Router(cfg, jnp.dtype(jnp.float32))

  def value(params):
    chosen = module.apply({"params": params}, X_BTD, SEGMENT_BT)
    total = jnp.sum(chosen.weight_BTK**2)
    for leaf in jax.tree.leaves(chosen.sums):
      total += jnp.sum(leaf)
    return total

  gradient = jax.jit(jax.grad(value))({"kernel": KERNEL_DE, "bias": BIAS_E})
  np.testing.assert_array_equal(gradient["bias"], 0)
  assert (gradient["kernel"] != 0).all()


def test_the_initial_bias_is_zero_and_float32_for_any_weight_type():
  cfg = dataclasses.replace(CFG, routed_bias=True)
  router = Router(cfg, jnp.dtype(jnp.bfloat16))
  params = jax.eval_shape(router.init, jax.random.key(0), X_BTD, SEGMENT_BT)["params"]
  types = {name: leaf.value.dtype for name, leaf in params.items()}
  assert types == {"kernel": jnp.bfloat16, "bias": jnp.float32}
  plain = route()
  zero = route(bias_E=np.zeros(NUM_EXPERTS, np.float32))
  assert_equal(zero, plain)


@two_routers
def test_sums_exclude_padding(router):
  sums = route(router=router).sums
  want = expected(router)
  shape = (*REAL_BT.shape, -1)
  p_BTE = want.p_TE.reshape(shape)
  expert_BTK = want.expert_TK.reshape(shape)
  e_TE = np.exp(X_BTD[REAL_BT] @ KERNEL_DE)
  z_T = np.log(e_TE.sum(-1)) ** 2
  count_E = np.zeros(NUM_EXPERTS)
  balance = 0.0
  for real_T, expert_TK, p_TE in zip(REAL_BT[:3], expert_BTK[:3], p_BTE[:3], strict=True):
    row_count_E = np.bincount(expert_TK[real_T].ravel(), minlength=NUM_EXPERTS)
    share_E = row_count_E / row_count_E.sum()
    balance += NUM_EXPERTS * np.sum(share_E * p_TE[real_T].mean(0))
    count_E += row_count_E
  assert float(sums.tokens) == REAL_BT.sum()
  assert float(sums.rows) == 3
  assert float(sums.dropped) == 0
  np.testing.assert_array_equal(sums.count_E, count_E)
  np.testing.assert_allclose(sums.prob_E, p_BTE[REAL_BT].sum(0), rtol=1e-5)
  np.testing.assert_allclose(sums.prob_E.sum(), REAL_BT.sum(), rtol=1e-6)
  np.testing.assert_allclose(sums.z, z_T.sum(), rtol=1e-5)
  np.testing.assert_allclose(sums.row_balance, balance, rtol=1e-5)
  assert {leaf.dtype for leaf in jax.tree.leaves(sums)} == {np.dtype(np.float32)}

  other_BTD = np.where(REAL_BT[..., None], X_BTD, np.nan)
  assert_equal(sums, route(other_BTD, router=router).sums)


def test_sums_of_batch_parts_add_up():
  first = route(X_BTD[:1], SEGMENT_BT[:1]).sums
  second = route(X_BTD[1:3], SEGMENT_BT[1:3]).sums
  third = route(X_BTD[3:], SEGMENT_BT[3:]).sums

  def assert_adds_up(first, second, third, whole):
    np.testing.assert_allclose(first + second + third, whole, rtol=1e-6)

  jax.tree.map(assert_adds_up, first, second, third, route().sums)


@one_router
def test_random_routing_is_even_and_has_gradients(router):
  num_tokens = 2 * NUM_EXPERTS
  x_BTD = draw((2, NUM_EXPERTS, DIM), 3)
  segment_BT = np.ones((2, NUM_EXPERTS), np.int32)
  even = functools.partial(route, segment_BT=segment_BT, router=router, use_random_routing=True)
  got = even(x_BTD)
  other = even(draw(x_BTD.shape, 4))
  assert set(np.asarray(got.sums.count_E)) == {num_tokens * NUM_CHOSEN / NUM_EXPERTS}
  expert_TK = np.asarray(got.expert_BTK).reshape(num_tokens, NUM_CHOSEN)
  for experts in expert_TK:
    assert len(set(experts)) == NUM_CHOSEN
  np.testing.assert_array_equal(got.expert_BTK, other.expert_BTK)
  assert (got.weight_BTK != other.weight_BTK).any()

  def weight(kernel_DE):
    return even(x_BTD, kernel_DE=kernel_DE).weight_BTK[..., 0].sum()

  assert (jax.grad(weight)(KERNEL_DE) != 0).any()


def test_routes_in_float32_for_any_input_type():
  x_BTD = X_BTD.astype(jnp.bfloat16)
  got = route(x_BTD)
  assert_equal(got, route(x_BTD.astype(np.float32)))
  assert got.weight_BTK.dtype == jnp.float32


def test_routes_in_the_input_s_type_without_float32_gate_logits():
  """Operands are rounded to it, products are not; the softmax stays in float32."""
  x_BTD = X_BTD.astype(jnp.bfloat16)
  coarse = route(x_BTD, float32_gate_logits=False)
  rounded_DE = KERNEL_DE.astype(jnp.bfloat16).astype(np.float32)
  fine = route(x_BTD.astype(np.float32), kernel_DE=rounded_DE)
  np.testing.assert_array_equal(coarse.expert_BTK, fine.expert_BTK)
  np.testing.assert_allclose(coarse.weight_BTK, fine.weight_BTK, rtol=1e-5)
  assert (coarse.weight_BTK != route(x_BTD).weight_BTK).any()

  def z_sum(kernel_DE):
    return route(x_BTD, kernel_DE=kernel_DE, float32_gate_logits=False).sums.z

  assert jax.grad(z_sum)(KERNEL_DE).dtype == jnp.float32


def test_jitter_requires_an_rng():
  plain = route()
  noisy = route(router_jitter=0.1, rng=0)
  assert_equal(route(router_jitter=0.1), plain)
  assert_equal(route(router_jitter=0.0, rng=0), plain)
  moved = np.abs(noisy.sums.prob_E - plain.sums.prob_E)
  assert 0 < moved.max() < 0.1 * REAL_BT.sum()
  other = route(router_jitter=0.1, rng=1)
  assert (other.sums.prob_E != noisy.sums.prob_E).any()


SAVE_NOTHING = jax.checkpoint_policies.nothing_saveable
SAVE_ROUTING = jax.checkpoint_policies.save_only_these_names("moe_route")


@pytest.mark.parametrize(
  ("policy", "num_choices"), [(SAVE_NOTHING, 2), (SAVE_ROUTING, 1)], ids=["nothing", "routing"]
)
def test_a_saved_routing_is_not_recomputed_in_the_backward_pass(policy, num_choices):
  router = Router(CFG, jnp.dtype(jnp.float32))

  @functools.partial(jax.checkpoint, policy=policy)
  def value(x_BTD):
    chosen = router.apply({"params": {"kernel": KERNEL_DE}}, x_BTD, SEGMENT_BT)
    return jnp.sum(chosen.weight_BTK**2) + chosen.sums.row_balance

  jaxpr = str(jax.make_jaxpr(jax.grad(value))(X_BTD))
  assert jaxpr.count(" top_k[") == num_choices
