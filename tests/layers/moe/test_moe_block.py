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
from support.slow_cases import slow

from maxlite.config.model_families import MoeForm
from maxlite.config.schema import DEFAULTS, ModelConfig, MoeConfig, build
from maxlite.layers.layer_specs import MoeSpec
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
  [
    [1, 1, 1, 2, 2, 2],
    [1, 1, 1, 1, 0, 0],
    [1, 2, 3, 3, 0, 0],
    [1, 1, 1, 1, 1, 1],
    [1, 1, 1, 2, 2, 2],
    [1, 1, 1, 1, 0, 0],
    [0, 0, 0, 0, 0, 0],
    [1, 1, 1, 1, 1, 1],
  ],
  np.int32,
)
# Added to each expert's logit for every token.
ROUTINGS = {
  "uniform": (0, 0, 0, 0, 0, 0, 0, 0),
  "skewed": (2, 1, 0, -1, 0, 0, 1, -1),
  "hot": (0, 0, 0, 30, 0, 28, 0, 26),
  "empty": (-30, 0, 0, -30, 0, -30, 0, 0),
  "a shard without rows": (-30, -30, 0, 0, 0, 0, -30, 0),
}
EMPTY_EXPERTS = {
  "uniform": [],
  "skewed": [],
  "hot": [0, 1, 2, 4, 6],
  "empty": [0, 3, 5],
  "a shard without rows": [0, 1, 6],
}
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
MESHES = {
  "one device": {},
  "data=2 fsdp=2 tensor=2": {"data": 2, "fsdp": 2, "tensor": 2},
  "context=2 expert=2 fsdp=2": {"context": 2, "expert": 2, "fsdp": 2},
  "expert=8": {"expert": 8},
  "expert=4 tensor=2": {"expert": 4, "tensor": 2},
}
# tests/contracts covers every dispatch on every mesh; here each runs on meshes that matter for it.
CASES = [
  slow(("ragged", "expert=4 tensor=2")),
  slow(("ragged buffer", "expert=8")),
  ("all_gather", "context=2 expert=2 fsdp=2"),
  ("dense", "data=2 fsdp=2 tensor=2"),
  slow(("capacity", "context=2 expert=2 fsdp=2")),
  slow(("ragged", "one device")),
  slow(("ragged", "data=2 fsdp=2 tensor=2")),
  slow(("ragged", "context=2 expert=2 fsdp=2")),
  slow(("ragged", "expert=8")),
  slow(("ragged buffer", "expert=4 tensor=2")),
]


def block_of(sharder, dtype="float32", activations=("silu", "linear"), **changes):
  keys = {
    "num_experts": NUM_EXPERTS,
    "num_experts_per_tok": NUM_CHOSEN,
    "base_moe_mlp_dim": HIDDEN,
  }
  moe = build(MoeConfig, DEFAULTS | keys | changes)
  cfg = ModelConfig(base_emb_dim=DIM, weight_dtype=dtype, mlp_activations=activations, moe=moe)
  return MoeBlock(cfg, sharder, MoeSpec(MoeForm()))


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
  dy_BTD = draw(x_BTD.shape, 6)
  dsums = RouterSums(  # counts have no gradient
    tokens=np.float64(0.0),
    count_E=np.zeros(NUM_EXPERTS),
    prob_E=draw(NUM_EXPERTS, 5),
    z=np.float64(0.3),
    rows=np.float64(0.0),
    row_balance=np.float64(0.7),
    dropped=np.float64(0.0),
  )
  return params, x_BTD, (dy_BTD, dsums)


def dense_experts(params, x_BTD):
  """The output y_BTED of every expert for every token."""

  def add_bias(y, name):
    if f"{name}_bias" not in params:
      return y
    return y + params[f"{name}_bias"][None, None]

  if "latent_down" in params:
    x_BTD = x_BTD @ params["latent_down"]["kernel"]
  gate_BTEF = jnp.einsum("btd,edf->btef", x_BTD, params["wi_0"])
  gate_BTEF = add_bias(gate_BTEF, "wi_0")
  up_BTEF = jnp.einsum("btd,edf->btef", x_BTD, params["wi_1"])
  up_BTEF = add_bias(up_BTEF, "wi_1")
  h_BTEF = silu(gate_BTEF) * up_BTEF
  y_BTED = add_bias(jnp.einsum("btef,efd->bted", h_BTEF, params["wo"]), "wo")
  if "latent_up" in params:
    y_BTED = y_BTED @ params["latent_up"]["kernel"]
  return y_BTED


def dense_oracle(params, x_BTD):
  """(y_BTD, sums) of the block."""
  logits_BTE = jnp.einsum("btd,de->bte", x_BTD, params["router"]["kernel"])
  e_BTE = jnp.exp(logits_BTE)
  total_BT1 = e_BTE.sum(-1, keepdims=True)
  p_BTE = e_BTE / total_BT1
  least_BT1 = jnp.sort(p_BTE, axis=-1)[..., -NUM_CHOSEN, None]
  chosen_BTE = p_BTE >= least_BT1
  real_BT1 = jnp.asarray(SEGMENT_BT[..., None] > 0)
  weight_BTE = jnp.where(chosen_BTE, p_BTE, 0)
  weight_BTE = weight_BTE / weight_BTE.sum(-1, keepdims=True)
  weight_BTE = jnp.where(real_BT1, weight_BTE, 0)
  y_BTD = jnp.einsum("bted,bte->btd", dense_experts(params, x_BTD), weight_BTE)

  z_BT1 = jnp.log(total_BT1) ** 2
  count_BE = jnp.where(real_BT1, chosen_BTE, False).sum(1).astype(jnp.float64)
  prob_BE = jnp.where(real_BT1, p_BTE, 0).sum(1)
  length_B = real_BT1.sum((1, 2)).astype(jnp.float64)
  length_B = jnp.maximum(1.0, length_B)
  share_BE = count_BE / (NUM_CHOSEN * length_B[:, None])
  mean_prob_BE = prob_BE / length_B[:, None]
  balance_B = NUM_EXPERTS * (share_BE * mean_prob_BE).sum(-1)
  return y_BTD, RouterSums(
    tokens=jnp.float64(real_BT1.sum()),
    count_E=count_BE.sum(0),
    prob_E=prob_BE.sum(0),
    z=jnp.where(real_BT1, z_BT1, 0).sum(),
    rows=jnp.float64(NUM_SEQS - 1),
    row_balance=balance_B.sum(),
    dropped=jnp.float64(0.0),
  )


def silu(x):
  return x / (1 + jnp.exp(-x))


def value_and_gradients(function, params, x_BTD, cotangents):
  """((y_BTD, sums), gradient of params, of x_BTD)"""
  results, pull_back = jax.vjp(function, params, x_BTD)
  return results, *pull_back(cotangents)


oracle = jax.jit(functools.partial(value_and_gradients, dense_oracle))


@pytest.fixture(scope="module")
def expected():
  """The oracle's results for each routing."""
  results = {}
  with jax.enable_x64(True):
    for routing in ROUTINGS:
      params, x_BTD, cotangents = make_case(routing)
      results[routing] = jax.device_get(oracle(params, x_BTD, cotangents))
  return results


def runner(sharder, **changes):
  """The block's value_and_gradients on a mesh, sharded as in training."""
  with jax.enable_x64(True):
    block = block_of(sharder, "float64", **changes)
    _, x_BTD, _ = make_case("uniform")
    boxed = jax.eval_shape(block.init, jax.random.key(0), x_BTD, SEGMENT_BT)
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


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}, {case[1]}")
def run(request, build_sharder):
  dispatch, mesh = request.param
  return runner(build_sharder(MESHES[mesh]), **DISPATCHES[dispatch])


def assert_close(path, got, want):
  np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-11, err_msg=str(path))


@pytest.mark.parametrize("routing", ROUTINGS)
def test_equals_the_dense_reference_in_float64(run, expected, routing):
  params, x_BTD, cotangents = make_case(routing)
  with jax.enable_x64(True):
    got = run(params, x_BTD, cotangents)
  jax.tree_util.tree_map_with_path(assert_close, got, expected[routing])
  _, dparams, _ = got
  for name in ("wi_0", "wi_1", "wo"):
    largest_E = np.abs(dparams[name]).max((1, 2))
    assert np.flatnonzero(largest_E == 0).tolist() == EMPTY_EXPERTS[routing]


@pytest.mark.slow
def test_bfloat16_is_close_and_weight_gradients_stay_float32(sharders, expected):
  block = block_of(sharders["one device"])
  params, x_BTD, (dy_BTD, _) = make_case("skewed")
  params = jax.tree.map(lambda leaf: leaf.astype(np.float32), params)

  def value(params, x_BTD):
    y_BTD, _ = block.apply({"params": params}, x_BTD, SEGMENT_BT)
    return y_BTD

  run = jax.jit(functools.partial(value_and_gradients, value))
  y_BTD, dparams, dx_BTD = run(params, x_BTD.astype(jnp.bfloat16), dy_BTD.astype(jnp.bfloat16))
  assert y_BTD.dtype == jnp.bfloat16
  assert dx_BTD.dtype == jnp.bfloat16
  assert {leaf.dtype for leaf in jax.tree.leaves(dparams)} == {np.dtype(np.float32)}
  (want_BTD, _), want_params, _ = expected["skewed"]
  for got, want in ((y_BTD, want_BTD), (dparams["wo"], want_params["wo"])):
    error = np.abs(np.float64(got) - want)
    assert error.max() < 0.03 * np.abs(want).max()


@pytest.mark.slow
def test_ungated_experts_and_initial_weights(sharders):
  block = block_of(sharders["one device"], activations=("relu",))
  x_BTD = draw((1, 3, 64), 0).astype(np.float32)
  segment_BT = np.ones((1, 3), np.int32)
  boxed = jax.jit(block.init)(jax.random.key(0), x_BTD, segment_BT)
  params = meta.unbox(boxed)["params"]
  assert sorted(params) == ["router", "wi_0", "wo"]
  assert np.std(params["wi_0"]) == pytest.approx(64**-0.5, rel=0.05)
  assert np.std(params["wo"]) == pytest.approx(HIDDEN**-0.5, rel=0.05)

  y_BTD, _ = jax.jit(block.apply)({"params": params}, x_BTD, segment_BT)
  for t in range(3):
    weights = choose(params, x_BTD[0, t])
    expected_D = np.zeros(64)
    for e, weight in weights.items():
      h_F = np.maximum(x_BTD[0, t] @ params["wi_0"][e], 0)
      expected_D += weight * h_F @ params["wo"][e]
    np.testing.assert_allclose(y_BTD[0, t], expected_D, atol=1e-5)


def choose(params, x_D):
  """{expert: weight} of one token, the largest weight first."""
  p_E = np.exp(x_D @ params["router"]["kernel"])
  best_K = np.argsort(-p_E)[:NUM_CHOSEN]
  weight_K = p_E[best_K] / p_E[best_K].sum()
  return dict(zip(best_K, weight_K, strict=True))


def drop_by_capacity(params, x_BTD, capacity_factor):
  """(y_BTD with a limited number of tokens per expert and row, earlier first; number dropped)"""
  num_slots = int(np.ceil(capacity_factor * NUM_POSITIONS * NUM_CHOSEN / NUM_EXPERTS))
  y_BTD = np.zeros_like(x_BTD)
  num_dropped = 0
  served_BE = np.zeros((NUM_SEQS, NUM_EXPERTS), int)
  for b, t in np.argwhere(SEGMENT_BT > 0):
    x_D = x_BTD[b, t]
    for e, weight in choose(params, x_D).items():
      served_BE[b, e] += 1
      if served_BE[b, e] > num_slots:
        num_dropped += 1
        continue
      gate_F = x_D @ params["wi_0"][e]
      up_F = x_D @ params["wi_1"][e]
      h_F = silu(gate_F) * up_F
      y_BTD[b, t] += weight * h_F @ params["wo"][e]
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


# Rows per shard if four shards get equally many.
EVEN_LOAD = NUM_SEQS * NUM_POSITIONS * NUM_CHOSEN / 4


def received_by_shard(sums):
  """The number of rows for each of four shards with two experts."""
  return sums.count_E.reshape(4, 2).sum(1)


def test_a_bounded_buffer_drops_whole_rows_and_reports_them(build_sharder, expected, monkeypatch):
  """A token loses the outputs of some of its experts; gradients are those of the remaining ones."""
  monkeypatch.setattr(receive_buffer, "ROW_MULTIPLE", 1)
  monkeypatch.setattr(receive_buffer, "NUM_SPARE_ROWS", 0)
  params, x_BTD, cotangents = make_case("hot")
  sharder = build_sharder({"expert": 4})
  with jax.enable_x64(True):
    run = runner(sharder, ragged_buffer_factor=0.6, ragged_overflow="drop")
    (y_BTD, sums), dparams, dx_BTD = run(params, x_BTD, cotangents)
  (want_BTD, want_sums), want_params, _ = expected["hot"]
  num_buffer = int(0.6 * EVEN_LOAD)
  excess_p = np.maximum(received_by_shard(want_sums) - num_buffer, 0)
  num_dropped = float(sums.dropped)
  assert num_dropped == excess_p.sum() > 10
  assert np.isfinite(dx_BTD).all()
  close_BT = np.isclose(y_BTD, want_BTD, atol=1e-12).all(-1)
  assert 0 < (~close_BT).sum() <= num_dropped
  # Experts that drop rows have gradients from the remaining ones only.
  same_E = np.isclose(dparams["wo"], want_params["wo"], atol=1e-11).all((1, 2))
  assert same_E[EMPTY_EXPERTS["hot"]].all()
  assert not same_E[[3, 5, 7]].any()


def latent_params(num_latent):
  """Of experts that read and write a projection."""
  return {
    "latent_down": {"kernel": draw((DIM, num_latent), 7)},
    "latent_up": {"kernel": draw((num_latent, DIM), 8)},
    "wi_0": draw((NUM_EXPERTS, num_latent, HIDDEN), 2),
    "wi_1": draw((NUM_EXPERTS, num_latent, HIDDEN), 3),
    "wo": draw((NUM_EXPERTS, HIDDEN, num_latent), 4),
  }


@pytest.mark.parametrize("num_latent", [0, 4])
def test_shared_experts_process_every_token(build_sharder, num_latent):
  """Not a projection of it, if the routed experts read one."""
  params, x_BTD, _ = make_case("uniform")
  if num_latent:
    params |= latent_params(num_latent)
  shared = {
    "wi_0": {"kernel": draw((DIM, 2 * HIDDEN), 0)},
    "wi_1": {"kernel": draw((DIM, 2 * HIDDEN), 1)},
    "wo": {"kernel": draw((2 * HIDDEN, DIM), 2)},
  }
  sharder = build_sharder({"expert": 2, "fsdp": 2, "tensor": 2})

  def output(params, **changes):
    keys = {"mlp_activations_limit": 0.5, "sparse_matmul": False, "moe_latent_size": num_latent}
    block = block_of(sharder, "float64", **keys, **changes)
    y_BTD, _ = jax.jit(block.apply)({"params": params}, x_BTD, SEGMENT_BT)
    return y_BTD

  with jax.enable_x64(True):
    with_shared = output(params | {"shared_experts": shared}, shared_experts=2)
    without = output(params)
    gate_BTF = np.minimum(x_BTD @ shared["wi_0"]["kernel"], 0.5)
    up_BTF = np.clip(x_BTD @ shared["wi_1"]["kernel"], -0.5, 0.5)
    h_BTF = silu(gate_BTF) * up_BTF
    want_BTD = h_BTF @ shared["wo"]["kernel"]
  np.testing.assert_allclose(with_shared - without, want_BTD, atol=1e-12)


@pytest.mark.slow
def test_the_block_counts_the_buffers_that_overflow_by_factor(build_sharder, expected, monkeypatch):
  """For all factors, whatever the size of its buffers."""
  monkeypatch.setattr(receive_buffer, "ROW_MULTIPLE", 1)
  monkeypatch.setattr(receive_buffer, "NUM_SPARE_ROWS", 0)
  params, x_BTD, _ = make_case("hot")
  sharder = build_sharder({"expert": 4})

  def sums_of(overflow):
    keys = {"ragged_buffer_factor": 0.6, "ragged_overflow": overflow}
    block = block_of(sharder, "float64", **keys)
    _, sums = jax.jit(block.apply)({"params": params}, x_BTD, SEGMENT_BT)
    return sums

  with jax.enable_x64(True):
    dropping = sums_of("drop")
    replaying = sums_of("replay")
  (_, want_sums), _, _ = expected["hot"]
  received_p = received_by_shard(want_sums)
  overfull_F = []
  for eighths in range(1, 65):
    num_buffer = int(eighths / 8 * EVEN_LOAD)
    overfull_F.append((received_p > num_buffer).sum())
  np.testing.assert_array_equal(dropping.overfull_F, overfull_F)
  np.testing.assert_array_equal(replaying.overfull_F, overfull_F)
  assert float(dropping.dropped) > 0
  assert float(replaying.dropped) == 0
  required = receive_buffer.required_factor(np.stack([overfull_F, overfull_F]))
  assert received_p.max() <= int(required * EVEN_LOAD)
  assert received_p.max() > int((required - 1 / 8) * EVEN_LOAD)


@pytest.mark.parametrize(
  ("dispatch", "mesh"),
  [
    ("all_gather", "context=2 expert=2 fsdp=2"),
    slow("ragged", "expert=4 tensor=2"),
    slow("dense", "data=2 fsdp=2 tensor=2"),
  ],
)
def test_experts_of_a_projection_equal_the_reference(build_sharder, dispatch, mesh):
  num_latent = 4
  params, x_BTD, cotangents = make_case("skewed")
  params |= latent_params(num_latent)
  with jax.enable_x64(True):
    run = runner(build_sharder(MESHES[mesh]), moe_latent_size=num_latent, **DISPATCHES[dispatch])
    got = run(params, x_BTD, cotangents)
    want = oracle(params, x_BTD, cotangents)
  jax.tree_util.tree_map_with_path(assert_close, got, want)


@pytest.mark.slow
@pytest.mark.parametrize("dispatch", ["ragged", "dense", "all_gather", "capacity"])
def test_expert_biases_equal_the_reference(build_sharder, dispatch):
  """A bias after a sharded hidden axis is added once."""
  keys = {"expert_bias": True, **DISPATCHES[dispatch]}
  params, x_BTD, cotangents = make_case("empty")
  params["wi_0_bias"] = draw((NUM_EXPERTS, HIDDEN), 7)
  params["wi_1_bias"] = draw((NUM_EXPERTS, HIDDEN), 8)
  params["wo_bias"] = draw((NUM_EXPERTS, DIM), 9)
  with jax.enable_x64(True):
    run = runner(build_sharder(MESHES["expert=4 tensor=2"]), **keys)
    got = run(params, x_BTD, cotangents)
    want = oracle(params, x_BTD, cotangents)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-11), got, want)
