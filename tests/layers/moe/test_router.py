"""Routers against NumPy implementations of their papers: experts, weights, sums and gradients."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from slow_cases import slow

from maxlite.config.registry import PLAIN_ROUTERS
from maxlite.config.schema import DEFAULTS, MoeConfig, build
from maxlite.layers.moe.router import ROUTERS, Router

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
  params = {"kernel": kernel_DE} | ({} if bias_E is None else {"bias": bias_E})
  rngs = None if rng is None else {"jitter": jax.random.key(rng)}
  return apply(params, x_BTD, segment_BT, cfg, rngs)


def softmax(logits):
  e = np.exp(logits - max(logits))
  return e / e.sum()


def best(scores, number, among):
  """The `number` experts with the highest scores, best first."""
  return sorted(among, key=lambda e: -scores[e])[:number]


def groups_best(scores, num_best):
  """Experts of the groups with the highest sums of their `num_best` best scores."""
  size = NUM_EXPERTS // NUM_GROUPS
  groups = [range(g * size, (g + 1) * size) for g in range(NUM_GROUPS)]
  groups.sort(key=lambda group: -sum(sorted(scores[e] for e in group)[-num_best:]))
  return [e for group in groups[:NUM_KEPT] for e in group]


def expected_token(router, logits, bias, norm_topk_prob):
  """(probabilities of all experts, chosen experts, their weights) of one token, in float64."""
  every = range(NUM_EXPERTS)
  if router == "softmax_topk":
    chosen = best(logits + bias, NUM_CHOSEN, every)
    return softmax(logits), chosen, softmax(logits[chosen])
  score = 1 / (1 + np.exp(-logits)) if router == "sigmoid_group_topk" else softmax(logits)
  choice = score + bias
  among = {
    "topk_softmax": lambda: every,
    "group_limited_greedy": lambda: groups_best(choice, 1),
    "sigmoid_group_topk": lambda: groups_best(choice, 2),
  }[router]()
  chosen = best(choice, NUM_CHOSEN, among)
  weights = score[chosen] / sum(score[chosen]) if norm_topk_prob else score[chosen]
  return score / score.sum(), chosen, weights


def expected(router, x_BTD=X_BTD, bias_E=0.0, norm_topk_prob=True):
  """The same for all tokens: probability_TE, expert_TK, weight_TK."""
  logits_TE = (np.float64(x_BTD) @ np.float64(KERNEL_DE)).reshape(-1, NUM_EXPERTS)
  tokens = [expected_token(router, logits, bias_E, norm_topk_prob) for logits in logits_TE]
  return tuple(np.stack(parts) for parts in zip(*tokens, strict=True))


@every_router
@pytest.mark.parametrize(
  ("bias_E", "norm_topk_prob"),
  [(None, True), (BIAS_E, False), slow(None, False), slow(BIAS_E, True)],
  ids=["unbiased-True", "biased-False", "unbiased-False", "biased-True"],
)
def test_choice_and_weights_equal_the_paper(router, norm_topk_prob, bias_E):
  got = route(router=router, norm_topk_prob=norm_topk_prob, bias_E=bias_E)
  _, expert_TK, weight_TK = expected(
    router, bias_E=0.0 if bias_E is None else bias_E, norm_topk_prob=norm_topk_prob
  )
  assert (got.expert_BTK.dtype, got.weight_BTK.dtype) == (jnp.int32, jnp.float32)
  np.testing.assert_array_equal(got.expert_BTK.reshape(expert_TK.shape), expert_TK)
  np.testing.assert_allclose(got.weight_BTK.reshape(weight_TK.shape), weight_TK, rtol=1e-5)
  if norm_topk_prob:
    np.testing.assert_allclose(got.weight_BTK.sum(-1), 1, rtol=1e-6)


def test_the_routers_differ_on_these_tokens():
  """So that the test above distinguishes them."""
  choices = {
    name: expected(name, bias_E=bias_E)[1].tobytes()
    for bias_E in (0.0, BIAS_E)
    for name in ("topk_softmax", "group_limited_greedy", "sigmoid_group_topk")
  }
  assert len(set(choices.values())) == len(choices)
  biased, plain = (expected("sigmoid_group_topk", bias_E=b)[1] for b in (BIAS_E, 0.0))
  assert (biased != plain).any()


@every_router
def test_the_bias_affects_the_choice_but_not_the_weights(router):
  """A bias that is equal for all, or that raises the chosen experts, changes nothing."""
  one = {"x_BTD": X_BTD[:1, :1], "segment_BT": SEGMENT_BT[:1, :1], "router": router}
  plain = route(**one)
  lifted_E = np.zeros(NUM_EXPERTS, np.float32)
  lifted_E[np.asarray(plain.expert_BTK).ravel()] = 5
  for bias_E in (np.full(NUM_EXPERTS, 2, np.float32), lifted_E):
    jax.tree.map(np.testing.assert_array_equal, route(**one, bias_E=bias_E), plain)
  moved = route(**one, bias_E=-lifted_E)
  assert not set(np.asarray(moved.expert_BTK).flat) & set(np.asarray(plain.expert_BTK).flat)
  np.testing.assert_array_equal(moved.sums.prob_E, plain.sums.prob_E)


@every_router
def test_the_scaling_factor_scales_only_the_weights(router):
  plain = route(router=router)
  scaled = route(router=router, routed_scaling_factor=16.0)
  np.testing.assert_array_equal(scaled.weight_BTK, 16 * plain.weight_BTK)
  jax.tree.map(np.testing.assert_array_equal, scaled.sums, plain.sums)


@pytest.mark.parametrize("router", ["group_limited_greedy", "sigmoid_group_topk"])
def test_tokens_stay_in_their_groups_and_a_single_group_is_unlimited(router):
  group_BTK = np.asarray(route(router=router).expert_BTK) // (NUM_EXPERTS // NUM_GROUPS)
  assert max(len(set(groups)) for groups in group_BTK.reshape(-1, NUM_CHOSEN)) == NUM_KEPT
  free = route(router=router, n_routing_groups=1, topk_routing_group=1)
  every = route(router=router, topk_routing_group=NUM_GROUPS)
  jax.tree.map(np.testing.assert_array_equal, every, free)
  assert (free.expert_BTK != route(router=router).expert_BTK).any()


def test_negative_biases_do_not_route_a_token_out_of_its_groups():
  got = route(router="sigmoid_group_topk", bias_E=BIAS_E - 5)
  np.testing.assert_array_equal(
    got.expert_BTK, route(router="sigmoid_group_topk", bias_E=BIAS_E).expert_BTK
  )


@every_router
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
      return sum(jnp.vdot(np.float64(draw(part.shape, i)), part) for i, part in enumerate(parts))

    arrays = {"x": np.float64(X_BTD), "kernel": np.float64(KERNEL_DE)}
    gradient = jax.jit(jax.grad(value))(arrays)
    for name, array in arrays.items():
      direction = np.float64(draw(array.shape, 9))
      up, down = (value(arrays | {name: array + h * direction}) for h in (1e-6, -1e-6))
      np.testing.assert_allclose(np.vdot(gradient[name], direction), (up - down) / 2e-6, rtol=1e-7)


def test_a_bias_of_the_logits_affects_choice_and_weights():
  router = Router(CFG, jnp.dtype(jnp.float32), use_bias=True)
  got = router.apply({"params": {"kernel": KERNEL_DE, "logits_bias": BIAS_E}}, X_BTD, SEGMENT_BT)
  # Equivalent to an additional channel that is 1 for every token.
  x_BTD = np.concatenate([X_BTD, np.ones_like(X_BTD[..., :1])], axis=-1)
  want = route(x_BTD, kernel_DE=np.concatenate([KERNEL_DE, BIAS_E[None]]))
  np.testing.assert_array_equal(got.expert_BTK, want.expert_BTK)
  np.testing.assert_allclose(got.weight_BTK, want.weight_BTK, rtol=1e-5)
  np.testing.assert_allclose(got.sums.prob_E, want.sums.prob_E, rtol=1e-5)


@every_router
def test_the_bias_has_no_gradient(router):
  cfg = dataclasses.replace(CFG, router=router, routed_bias=True)

  def value(params):
    chosen = Router(cfg, jnp.dtype(jnp.float32)).apply({"params": params}, X_BTD, SEGMENT_BT)
    return jnp.sum(chosen.weight_BTK**2) + sum(jax.tree.leaves(jax.tree.map(jnp.sum, chosen.sums)))

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
  jax.tree.map(np.testing.assert_array_equal, zero, plain)


@every_router
def test_sums_exclude_padding(router):
  sums = route(router=router).sums
  p_TE, expert_TK, _ = expected(router)
  shape = (*REAL_BT.shape, -1)
  p_BTE = p_TE.reshape(shape)
  expert_BTK = expert_TK.reshape(shape)
  z_T = np.log(np.exp(X_BTD[REAL_BT] @ KERNEL_DE).sum(-1)) ** 2
  count_BE = [
    np.bincount(expert_BTK[b][REAL_BT[b]].ravel(), minlength=NUM_EXPERTS) for b in range(4)
  ]
  balance = sum(
    NUM_EXPERTS * np.sum(count_BE[b] / count_BE[b].sum() * p_BTE[b][REAL_BT[b]].mean(0))
    for b in range(3)
  )
  assert (float(sums.tokens), float(sums.rows), float(sums.dropped)) == (REAL_BT.sum(), 3, 0)
  np.testing.assert_array_equal(sums.count_E, np.sum(count_BE, axis=0))
  np.testing.assert_allclose(sums.prob_E, p_BTE[REAL_BT].sum(0), rtol=1e-5)
  np.testing.assert_allclose(sums.prob_E.sum(), REAL_BT.sum(), rtol=1e-6)
  np.testing.assert_allclose(sums.z, z_T.sum(), rtol=1e-5)
  np.testing.assert_allclose(sums.row_balance, balance, rtol=1e-5)
  assert {leaf.dtype for leaf in jax.tree.leaves(sums)} == {np.dtype(np.float32)}

  other = np.where(REAL_BT[..., None], X_BTD, np.nan)
  jax.tree.map(np.testing.assert_array_equal, sums, route(other, router=router).sums)


def test_sums_of_batch_parts_add_up():
  rows = [slice(0, 1), slice(1, 3), slice(3, 4)]
  parts = [route(X_BTD[r], SEGMENT_BT[r]).sums for r in rows]
  total = jax.tree.map(lambda *leaves: sum(leaves), *parts)
  jax.tree.map(
    lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-6), total, route().sums
  )


@every_router
def test_random_routing_is_even_and_has_gradients(router):
  num_tokens = 2 * NUM_EXPERTS
  x_BTD = draw((2, NUM_EXPERTS, DIM), 3)
  segment_BT = np.ones((2, NUM_EXPERTS), np.int32)
  even = functools.partial(route, segment_BT=segment_BT, router=router, use_random_routing=True)
  got = even(x_BTD)
  other = even(draw(x_BTD.shape, 4))
  assert set(np.asarray(got.sums.count_E)) == {num_tokens * NUM_CHOSEN / NUM_EXPERTS}
  expert_TK = np.asarray(got.expert_BTK).reshape(num_tokens, NUM_CHOSEN)
  assert all(len(set(experts)) == NUM_CHOSEN for experts in expert_TK)
  np.testing.assert_array_equal(got.expert_BTK, other.expert_BTK)
  assert (got.weight_BTK != other.weight_BTK).any()

  def weight(kernel_DE):
    return even(x_BTD, kernel_DE=kernel_DE).weight_BTK[..., 0].sum()

  assert (jax.grad(weight)(KERNEL_DE) != 0).any()


def test_routes_in_float32_for_any_input_type():
  x_BTD = X_BTD.astype(jnp.bfloat16)
  jax.tree.map(np.testing.assert_array_equal, route(x_BTD), route(x_BTD.astype(np.float32)))
  assert route(x_BTD).weight_BTK.dtype == jnp.float32


def test_routes_in_the_input_s_type_without_float32_gate_logits():
  """Operands are rounded to it, products are not; the softmax stays in float32."""
  rounded = KERNEL_DE.astype(jnp.bfloat16).astype(np.float32)
  coarse = route(X_BTD.astype(jnp.bfloat16), float32_gate_logits=False)
  fine = route(X_BTD.astype(jnp.bfloat16).astype(np.float32), kernel_DE=rounded)
  np.testing.assert_array_equal(coarse.expert_BTK, fine.expert_BTK)
  np.testing.assert_allclose(coarse.weight_BTK, fine.weight_BTK, rtol=1e-5)
  assert (coarse.weight_BTK != route(X_BTD.astype(jnp.bfloat16)).weight_BTK).any()

  def weight(k):
    return route(X_BTD.astype(jnp.bfloat16), kernel_DE=k, float32_gate_logits=False)

  assert jax.grad(lambda k: weight(k).sums.z)(KERNEL_DE).dtype == jnp.float32


def test_jitter_requires_an_rng():
  plain = route()
  noisy = route(router_jitter=0.1, rng=0)
  jax.tree.map(np.testing.assert_array_equal, route(router_jitter=0.1), plain)
  jax.tree.map(np.testing.assert_array_equal, route(router_jitter=0.0, rng=0), plain)
  moved = np.abs(noisy.sums.prob_E - plain.sums.prob_E)
  assert 0 < moved.max() < 0.1 * REAL_BT.sum()
  assert (route(router_jitter=0.1, rng=1).sums.prob_E != noisy.sums.prob_E).any()


@pytest.mark.parametrize(("kept", "num_choices"), [((), 2), (("moe_route",), 1)])
def test_a_saved_routing_is_not_recomputed_in_the_backward_pass(kept, num_choices):
  policy = jax.checkpoint_policies.save_only_these_names(*kept)

  @functools.partial(jax.checkpoint, policy=policy)
  def value(x_BTD):
    chosen = Router(CFG, jnp.dtype(jnp.float32)).apply(
      {"params": {"kernel": KERNEL_DE}}, x_BTD, SEGMENT_BT
    )
    return jnp.sum(chosen.weight_BTK**2) + chosen.sums.row_balance

  assert str(jax.make_jaxpr(jax.grad(value))(X_BTD)).count(" top_k[") == num_choices
