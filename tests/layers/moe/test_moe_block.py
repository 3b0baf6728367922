"""The MoE block against a dense reference in float64: every expert on every token, then masked.

Compares output, router sums, and the gradients of the input and of every parameter, with random
cotangents, for all dispatches, meshes and routings.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import meta
from slow_cases import slow

from maxlite.config.schema import DEFAULTS, ModelConfig, MoeConfig, build
from maxlite.layers.moe import receive_buffer
from maxlite.layers.moe.moe_block import MoeBlock
from maxlite.layers.moe.router import RouterSums

NUM_SEQS = 8
NUM_POSITIONS = 6
DIM = 8
HIDDEN = 4
NUM_EXPERTS = 8
NUM_CHOSEN = 3
SEGMENT_BT = np.array(
  [[1, 1, 1, 2, 2, 2], [1, 1, 1, 1, 0, 0], [1, 2, 3, 3, 0, 0], [1] * 6] * 2, np.int32
)
SEGMENT_BT[6] = 0
# Added to each expert's logit for every token.
ROUTINGS = {
  "uniform": (0, 0, 0, 0, 0, 0, 0, 0),
  "skewed": (2, 1, 0, -1, 0, 0, 1, -1),
  "hot": (0, 0, 0, 30, 0, 28, 0, 26),
  "empty": (-30, 0, 0, -30, 0, -30, 0, 0),
  "a shard without rows": (-30, -30, 0, 0, 0, 0, -30, 0),
}
EMPTY_EXPERTS = {"uniform": [], "skewed": [], "hot": [0, 1, 2, 4, 6], "empty": [0, 3, 5]}
EMPTY_EXPERTS["a shard without rows"] = [0, 1, 6]
DISPATCHES = {
  "ragged": {},
  "ragged buffer": {
    "ragged_buffer_factor": 8.0,
    "ragged_overflow": "drop",
  },  # large enough, and larger than the worst case
  "all_gather": {"use_ring_of_experts": True},
  "dense": {"sparse_matmul": False},
  "capacity": {"sparse_matmul": False, "capacity_factor": 8.0},
}
MESHES = {"one device": {}} | {
  name: {axis: int(degree) for axis, degree in (part.split("=") for part in name.split())}
  for name in (
    "data=2 fsdp=2 tensor=2",
    "context=2 expert=2 fsdp=2",
    "expert=8",
    "expert=4 tensor=2",
  )
}
# tests/contracts covers every dispatch on every mesh; here each runs on meshes that matter for it.
CASES = [("ragged", "expert=4 tensor=2"), ("ragged buffer", "expert=8")]
CASES += [("all_gather", "context=2 expert=2 fsdp=2"), ("dense", "data=2 fsdp=2 tensor=2")]
CASES += [("capacity", "context=2 expert=2 fsdp=2")]
SLOW_CASES = [("ragged", mesh) for mesh in MESHES if mesh != "expert=4 tensor=2"]
SLOW_CASES += [("ragged buffer", "expert=4 tensor=2")]


def block_of(sharder, dtype="float32", activations=("silu", "linear"), **changes):
  sizes = {"num_experts": NUM_EXPERTS, "num_experts_per_tok": NUM_CHOSEN}
  moe = build(MoeConfig, DEFAULTS | sizes | {"base_moe_mlp_dim": HIDDEN} | changes)
  cfg = ModelConfig(weight_dtype=dtype, mlp_activations=activations, moe=moe)
  return MoeBlock(cfg, sharder)


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
  zero = np.float64(0.0)
  sums = RouterSums(
    zero, np.zeros(NUM_EXPERTS), draw(NUM_EXPERTS, 5), zero + 0.3, zero, zero + 0.7, zero
  )
  return params, x_BTD, (draw(x_BTD.shape, 6), sums)


def dense_oracle(params, x_BTD):
  logits_BTE = jnp.einsum("btd,de->bte", x_BTD, params["router"]["kernel"])
  e_BTE = jnp.exp(logits_BTE)
  p_BTE = e_BTE / e_BTE.sum(-1, keepdims=True)
  chosen_BTE = p_BTE >= jnp.sort(p_BTE, axis=-1)[..., -NUM_CHOSEN, None]
  weight_BTE = jnp.where(chosen_BTE, p_BTE, 0)
  real_BT1 = jnp.asarray(SEGMENT_BT[..., None] > 0)
  weight_BTE = jnp.where(real_BT1, weight_BTE / weight_BTE.sum(-1, keepdims=True), 0)
  bias = {name: params.get(f"{name}_bias", np.zeros((1, 1))) for name in ("wi_0", "wi_1", "wo")}
  gate_BTEF, up_BTEF = (
    jnp.einsum("btd,edf->btef", x_BTD, params[name]) + bias[name][None, None]
    for name in ("wi_0", "wi_1")
  )
  h_BTEF = gate_BTEF / (1 + jnp.exp(-gate_BTEF)) * up_BTEF
  y_BTED = jnp.einsum("btef,efd->bted", h_BTEF, params["wo"]) + bias["wo"][None, None]
  y_BTD = jnp.einsum("bted,bte->btd", y_BTED, weight_BTE)
  z_BT1 = jnp.log(e_BTE.sum(-1, keepdims=True)) ** 2
  count_BE = jnp.where(real_BT1, chosen_BTE, False).sum(1).astype(jnp.float64)
  prob_BE = jnp.where(real_BT1, p_BTE, 0).sum(1)
  length_B = jnp.maximum(1.0, real_BT1.sum((1, 2)).astype(jnp.float64))
  balance_B = NUM_EXPERTS * (count_BE * prob_BE).sum(-1) / length_B**2 / NUM_CHOSEN
  return y_BTD, RouterSums(
    tokens=jnp.float64(real_BT1.sum()),
    count_E=count_BE.sum(0),
    prob_E=prob_BE.sum(0),
    z=jnp.where(real_BT1, z_BT1, 0).sum(),
    rows=jnp.float64(NUM_SEQS - 1),
    row_balance=balance_B.sum(),
    dropped=jnp.float64(0.0),
  )


def value_and_gradients(function, params, x_BTD, cotangents):
  """((y_BTD, sums), gradient of params, of x_BTD)"""
  results, pull_back = jax.vjp(function, params, x_BTD)
  return results, *pull_back(cotangents)


oracle = jax.jit(functools.partial(value_and_gradients, dense_oracle))


@pytest.fixture(scope="module")
def expected():
  """The oracle's results for each routing."""
  with jax.enable_x64(True):
    return {routing: jax.tree.map(np.asarray, oracle(*make_case(routing))) for routing in ROUTINGS}


def runner(sharder, **changes):
  """The block's value_and_gradients on a mesh, sharded as in training."""
  with jax.enable_x64(True):
    block = block_of(sharder, "float64", **changes)
    boxed = jax.eval_shape(block.init, jax.random.key(0), *make_case("uniform")[1:2], SEGMENT_BT)
    shardings = jax.tree.map(
      lambda box: sharder.sharding(box.names),
      boxed["params"],
      is_leaf=lambda leaf: isinstance(leaf, meta.Partitioned),
    )
  rows = sharder.sharding(("activation_batch", "activation_length", None))

  def apply(params, x_BTD):
    y_BTD, sums = block.apply({"params": params}, x_BTD, SEGMENT_BT)
    return y_BTD, sums.replace(overfull_F=None)  # only with bounded buffers

  run = functools.partial(value_and_gradients, apply)
  return jax.jit(run, in_shardings=(shardings, rows, None))


@pytest.fixture(
  scope="module",
  params=[*CASES, *map(slow, SLOW_CASES)],
  ids=lambda case: f"{case[0]}, {case[1]}",
)
def run(request, build_sharder):
  dispatch, mesh = request.param
  return runner(build_sharder(MESHES[mesh]), **DISPATCHES[dispatch])


@pytest.mark.parametrize("routing", ROUTINGS)
def test_equals_the_dense_reference_in_float64(run, expected, routing):
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


def test_bfloat16_is_close_and_weight_gradients_stay_float32(sharders, expected):
  block = block_of(sharders["one device"])
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


def test_ungated_experts_and_initial_weights(sharders):
  block = block_of(sharders["one device"], activations=("relu",))
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


def drop_by_capacity(params, x_BTD, capacity_factor):
  """(y_BTD with a limited number of tokens per expert and row, earlier first; number dropped)"""
  num_slots = int(np.ceil(capacity_factor * NUM_POSITIONS * NUM_CHOSEN / NUM_EXPERTS))
  y_BTD = np.zeros_like(x_BTD)
  num_dropped = 0
  for b, t in np.argwhere(SEGMENT_BT > 0):
    if t == 0 or not (SEGMENT_BT[b, :t] > 0).any():
      served_E = np.zeros(NUM_EXPERTS, int)
    p_E = np.exp(x_BTD[b, t] @ params["router"]["kernel"])
    best_K = np.argsort(-p_E)[:NUM_CHOSEN]
    for e in best_K:
      served_E[e] += 1
      if served_E[e] > num_slots:
        num_dropped += 1
        continue
      gate_F = x_BTD[b, t] @ params["wi_0"][e]
      up_F = x_BTD[b, t] @ params["wi_1"][e]
      h_F = gate_F / (1 + np.exp(-gate_F)) * up_F
      y_BTD[b, t] += p_E[e] / p_E[best_K].sum() * h_F @ params["wo"][e]
  return y_BTD, num_dropped


def test_capacity_drops_the_excess_and_reports_it(build_sharder):
  keys = {"sparse_matmul": False, "capacity_factor": 1.0}
  params, x_BTD, cotangents = make_case("skewed")
  with jax.enable_x64(True):
    run = runner(build_sharder(MESHES["context=2 expert=2 fsdp=2"]), **keys)
    (y_BTD, sums), _, _ = run(params, x_BTD, cotangents)
  want_BTD, num_dropped = drop_by_capacity(params, x_BTD, 1.0)
  np.testing.assert_allclose(y_BTD, want_BTD, atol=1e-12)
  assert float(sums.dropped) == num_dropped > 10


def test_a_bounded_buffer_drops_whole_rows_and_reports_them(build_sharder, expected, monkeypatch):
  """A token loses the outputs of some of its experts; gradients are those of the remaining ones."""
  monkeypatch.setattr(receive_buffer, "ROW_MULTIPLE", 1)
  monkeypatch.setattr(receive_buffer, "NUM_SPARE_ROWS", 0)
  params, x_BTD, cotangents = make_case("hot")
  sharder = build_sharder({"expert": 4})
  with jax.enable_x64(True):
    run = runner(sharder, ragged_buffer_factor=0.6, ragged_overflow="drop")
    (y_BTD, sums), dparams, dx_BTD = run(params, x_BTD, cotangents)
  num_buffer = int(0.6 * NUM_SEQS * NUM_POSITIONS * NUM_CHOSEN / 4)
  count_e = expected["hot"][0][1].count_E.reshape(4, 2).sum(1)
  num_dropped = float(sums.dropped)
  assert num_dropped == np.maximum(count_e - num_buffer, 0).sum() > 10
  (want_BTD, _), want_params, _ = expected["hot"]
  assert np.isfinite(dx_BTD).all()
  close_BT = np.isclose(y_BTD, want_BTD, atol=1e-12).all(-1)
  assert 0 < (~close_BT).sum() <= num_dropped
  # Experts that drop rows have gradients from the remaining ones only.
  same_E = np.isclose(dparams["wo"], want_params["wo"], atol=1e-11).all((1, 2))
  assert same_E[EMPTY_EXPERTS["hot"]].all()
  assert not same_E[[3, 5, 7]].any()


def test_shared_experts_process_every_token(build_sharder):
  params, x_BTD, _ = make_case("uniform")
  shapes = {"wi_0": (DIM, 2 * HIDDEN), "wi_1": (DIM, 2 * HIDDEN), "wo": (2 * HIDDEN, DIM)}
  shared = {name: {"kernel": draw(shape, i)} for i, (name, shape) in enumerate(shapes.items())}
  sharder = build_sharder({"expert": 2, "fsdp": 2, "tensor": 2})

  def output(params, **changes):
    keys = {"mlp_activations_limit": 0.5, "sparse_matmul": False}
    block = block_of(sharder, "float64", **keys, **changes)
    return jax.jit(block.apply)({"params": params}, x_BTD, SEGMENT_BT)[0]

  with jax.enable_x64(True):
    with_shared = output(params | {"shared_experts": shared}, shared_experts=2)
    without = output(params)
  gate_BTF, up_BTF = (x_BTD @ shared[name]["kernel"] for name in ("wi_0", "wi_1"))
  gate_BTF = np.minimum(gate_BTF, 0.5)
  up_BTF = np.clip(up_BTF, -0.5, 0.5)
  want_BTD = gate_BTF / (1 + np.exp(-gate_BTF)) * up_BTF @ shared["wo"]["kernel"]
  np.testing.assert_allclose(with_shared - without, want_BTD, atol=1e-12)


def test_the_block_counts_the_buffers_that_overflow_by_factor(build_sharder, expected, monkeypatch):
  """For all factors, whatever the size of its buffers."""
  monkeypatch.setattr(receive_buffer, "ROW_MULTIPLE", 1)
  monkeypatch.setattr(receive_buffer, "NUM_SPARE_ROWS", 0)
  params, x_BTD, _ = make_case("hot")
  keys = {"ragged_buffer_factor": 0.6}
  with jax.enable_x64(True):
    sums = []
    for overflow in ("drop", "replay"):
      block = block_of(build_sharder({"expert": 4}), "float64", **keys, ragged_overflow=overflow)
      _, own = jax.jit(block.apply)({"params": params}, x_BTD, SEGMENT_BT)
      sums.append(own)
  even_load = NUM_SEQS * NUM_POSITIONS * NUM_CHOSEN / 4
  received_p = expected["hot"][0][1].count_E.reshape(4, 2).sum(1)
  overfull_F = [(received_p > int(n / 8 * even_load)).sum() for n in range(1, 65)]
  for own in sums:
    np.testing.assert_array_equal(own.overfull_F, overfull_F)
  assert float(sums[1].dropped) == 0 < float(sums[0].dropped)
  required = receive_buffer.required_factor(np.stack([overfull_F, overfull_F]))
  assert int((required - 1 / 8) * even_load) < received_p.max() <= int(required * even_load)


@pytest.mark.parametrize("dispatch", ["ragged", "dense", slow("all_gather"), slow("capacity")])
def test_expert_biases_equal_the_reference(build_sharder, dispatch):
  """A bias after a sharded hidden axis is added once."""
  keys = {"expert_bias": True, **DISPATCHES[dispatch]}
  params, x_BTD, cotangents = make_case("empty")
  shapes = {"wi_0_bias": HIDDEN, "wi_1_bias": HIDDEN, "wo_bias": DIM}
  params |= {name: draw((NUM_EXPERTS, n), 7 + i) for i, (name, n) in enumerate(shapes.items())}
  with jax.enable_x64(True):
    run = runner(build_sharder(MESHES["expert=4 tensor=2"]), **keys)
    got = run(params, x_BTD, cotangents)
    want = oracle(params, x_BTD, cotangents)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-11), got, want)
