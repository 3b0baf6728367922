"""grouped_mlp against one dense network per group, values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_cases import INTERPRETED, ROUTINGS, assert_close
from jax.ad_checkpoint import print_saved_residuals
from jax.extend.core import Literal
from jax.sharding import PartitionSpec as P
from slow_cases import slow

from maxlite.config.registry import GROUPED_MATMUL_BACKENDS
from maxlite.kernels.grouped_mlp.api import grouped_mlp
from maxlite.kernels.grouped_mlp.biases import Adapter, Adapters, Biases
from maxlite.layers.mlp import build_activation

HERE = [name for name in GROUPED_MATMUL_BACKENDS if name not in INTERPRETED]
NUM_ROWS = 200
DIM = 6
HIDDEN = 10
NUM_GROUPS = 4
GATED = build_activation(("silu", "linear"))


def make_params(rng, *, biased, num_in=2, dtype=np.float64):
  """((wi, ...), wo, biases)"""

  def draw(*shape):
    return rng.normal(size=(NUM_GROUPS, *shape)).astype(dtype)

  wi = tuple(draw(DIM, HIDDEN) for _ in range(num_in))
  biases = Biases(tuple(draw(HIDDEN) for _ in wi), draw(DIM)) if biased else None
  return wi, draw(HIDDEN, DIM), biases


def make_rows(rng, sizes, dtype=np.float64):
  """(x_MD, weight_M, dy_MD) with NaN in rows that must not be read."""
  rows = [rng.normal(size=(NUM_ROWS, *shape)) for shape in ((DIM,), (), (DIM,))]
  for array in rows:
    array[sum(sizes) :] = np.nan
  return rows[0].astype(dtype), rows[1].astype(np.float64), rows[2].astype(dtype)


def network(backend, sizes_G, x_MD, weight_M, params, activation=GATED):
  wi, wo, biases = params
  options = {"activation": activation, "biases": biases, "backend": backend}
  return grouped_mlp(x_MD, weight_M, wi, wo, sizes_G, **options)


@functools.partial(jax.jit, static_argnums=(0, 6))
def run(backend, sizes_G, x_MD, weight_M, params, dy_MD, activation=GATED):
  """(y_MD, dx_MD, dweight_M, gradients of params)"""

  def apply(*operands):
    return network(backend, sizes_G, *operands, activation=activation)

  y_MD, vjp = jax.vjp(apply, x_MD, weight_M, params)
  return y_MD, *vjp(dy_MD)


@functools.partial(jax.jit, static_argnums=(0, 5))
def oracle(sizes, x_MD, weight_M, params, dy_MD, activation=GATED):
  """The same results from one dense network per group, on the rows of the groups only."""

  def apply(x_MD, weight_M, params):
    wi, wo, biases = params
    ends = np.cumsum(sizes)
    outputs = [x_MD[:0]]
    for group, end in enumerate(ends):
      rows = slice(end - sizes[group], end)
      up = [x_MD[rows] @ w[group] for w in wi]
      if biases is not None:
        up = [u + b[group][None] for u, b in zip(up, biases.bi_GF, strict=True)]
      y_mD = activation(*up) @ wo[group]
      if biases is not None:
        y_mD += biases.bo_GD[group][None]
      outputs.append(weight_M[rows, None] * y_mD)
    return jnp.concatenate(outputs)

  used = sum(sizes)
  y_MD, vjp = jax.vjp(apply, x_MD[:used], weight_M[:used], params)
  *rows, dparams = y_MD, *vjp(dy_MD[:used])

  def pad(a):
    return jnp.pad(a, ((0, NUM_ROWS - used), *((0, 0),) * (a.ndim - 1)))

  return *map(pad, rows), dparams


def without_dead_rows(results, sizes):
  """The results of `run` with zeros in the rows past the last group, which are undefined."""
  *rows, dparams = results
  live_M = np.arange(NUM_ROWS) < sum(sizes)

  def mask(a):
    return np.where(live_M.reshape(-1, *[1] * (a.ndim - 1)), a, np.zeros_like(a))

  return *(mask(np.asarray(a)) for a in rows), dparams


def assert_equal_trees(actual, expected, unit):
  actual, expected = (map(np.asarray, jax.tree.leaves(tree)) for tree in (actual, expected))
  assert_close(list(actual), list(expected), unit)


@functools.cache  # the reference compiles separately for every routing
def solved_case(routing, biased):
  """((sizes_G, x_MD, weight_M, params, dy_MD), expected results of `run`)"""
  rng = np.random.default_rng(0)
  sizes = ROUTINGS[routing]
  params = make_params(rng, biased=biased)
  x_MD, weight_M, dy_MD = make_rows(rng, sizes)
  expected = oracle(sizes, x_MD, weight_M, params, dy_MD)
  return (np.array(sizes), x_MD, weight_M, params, dy_MD), expected


@pytest.mark.parametrize("biased", [slow(False), True])
@pytest.mark.parametrize("backend", HERE)
def test_agrees_with_one_dense_network_per_group_in_float64(backend, biased):
  with jax.enable_x64(True):
    for routing in ("skewed", "one_hot", "tail", "aligned", "no_rows_used"):
      arrays, expected = solved_case(routing, biased)
      results = without_dead_rows(run(backend, *arrays), ROUTINGS[routing])
      assert_equal_trees(results, expected, unit=1e-12)


@pytest.mark.parametrize("backend", HERE)
def test_adapters_are_low_rank_changes_of_the_matrices(backend):
  """In values, and in the gradients of rows, matrices and both factors."""
  sizes = ROUTINGS["tail"]
  rng = np.random.default_rng(6)
  wi, wo, biases = make_params(rng, biased=True)
  x_MD, weight_M, dy_MD = make_rows(rng, sizes)

  def adapter(w_GDF):
    rank = 3
    a_GDR = rng.normal(size=(NUM_GROUPS, w_GDF.shape[1], rank))
    return Adapter(a_GDR, rng.normal(size=(NUM_GROUPS, rank, w_GDF.shape[2])))

  adapters = Adapters(tuple(adapter(w) for w in wi), adapter(wo))

  def with_factors(x_MD, weight_M, wi, wo, adapters):
    options = {"activation": GATED, "biases": biases, "adapters": adapters, "backend": backend}
    return grouped_mlp(x_MD, weight_M, wi, wo, np.array(sizes), **options)

  def with_sums(x_MD, weight_M, wi, wo, adapters):
    changed = [
      w + adapter.a_GDR @ adapter.b_GRF for w, adapter in zip(wi, adapters.wi, strict=True)
    ]
    changed_wo = wo + adapters.wo.a_GDR @ adapters.wo.b_GRF
    params = tuple(changed), changed_wo, biases
    return network(backend, np.array(sizes), x_MD, weight_M, params)

  @functools.partial(jax.jit, static_argnums=0)
  def solve(function, dy_MD, *operands):
    y_MD, vjp = jax.vjp(function, *operands)
    dx_MD, dweight_M, *dparams = vjp(dy_MD)
    return y_MD, dx_MD, dweight_M, dparams

  with jax.enable_x64(True):
    operands = (dy_MD, x_MD, weight_M, wi, wo, adapters)
    results = without_dead_rows(solve(with_factors, *operands), sizes)
    expected = without_dead_rows(solve(with_sums, *operands), sizes)
    assert_equal_trees(results, expected, unit=1e-12)


@pytest.mark.parametrize("backend", HERE)
def test_without_a_gate(backend):
  sizes = ROUTINGS["tail"]
  rng = np.random.default_rng(1)
  params = make_params(rng, biased=False, num_in=1)
  x_MD, weight_M, dy_MD = make_rows(rng, sizes)
  with jax.enable_x64(True):
    results = run(backend, np.array(sizes), x_MD, weight_M, params, dy_MD, jnp.sin)
    assert_equal_trees(results, oracle(sizes, x_MD, weight_M, params, dy_MD, jnp.sin), unit=1e-12)


@pytest.mark.parametrize("biased", [slow(False), True])
@pytest.mark.parametrize("backend", HERE)
def test_bfloat16_rows_keep_the_precision_of_weight_gradients(backend, biased):
  sizes = ROUTINGS["skewed"]
  rng = np.random.default_rng(2)
  params = make_params(rng, biased=biased, dtype=np.float32)
  x_MD, weight_M, dy_MD = make_rows(rng, sizes, jnp.bfloat16)
  weight_M = weight_M.astype(np.float32)
  results = run(backend, np.array(sizes), x_MD, weight_M, params, dy_MD)
  types = [jnp.bfloat16, jnp.bfloat16, *[np.float32] * (1 + len(jax.tree.leaves(params)))]
  assert [leaf.dtype for leaf in jax.tree.leaves(results)] == types
  if backend != "ragged_dot":  # XLA's gradient rule rounds to x's type
    for gradient in jax.tree.leaves(results[3]):
      assert (gradient != gradient.astype(jnp.bfloat16).astype(np.float32)).any()
  with jax.enable_x64(True):
    wide = jax.tree.map(lambda a: a.astype(np.float64), (x_MD, weight_M, params, dy_MD))
    expected = oracle(sizes, *wide)
  # Operands, hidden rows and their gradients are each rounded to 8 bits.
  assert_equal_trees(results, expected, unit=2.0**-6)


@functools.partial(jax.jit, static_argnums=0)
def run_for_tpu(activation, sizes_G, x_M, weight_M, params, dy_M):
  """As `run`, by the interpreted kernels for TPUs."""
  options = {"activation": activation, "backend": "megablox", "interpret": True}

  def apply(x_M, weight_M, params):
    wi, wo, biases = params
    return grouped_mlp(x_M, weight_M, wi, wo, sizes_G, biases=biases, **options)

  y_M, vjp = jax.vjp(apply, x_M, weight_M, params)
  return y_M, *vjp(dy_M)


@pytest.mark.parametrize(
  ("dtype", "row_shape", "names", "limit", "biased"),
  [
    slow("bfloat16", (8, 128), ("silu", "linear"), 0.0, False),
    ("float32", (8, 128), ("quick_gelu", "linear_plus_one"), 0.5, True),
    ("bfloat16", (1024,), ("gelu",), 0.0, False),
    slow("float32", (1024,), ("gelu",), 0.0, False),
    slow("bfloat16", (1024,), ("silu", "linear"), 0.0, True),
  ],
)
def test_kernels_for_tpus_touch_only_live_rows(dtype, row_shape, names, limit, biased):
  """Undefined rows are NaN, and reach neither another row nor a weight."""
  activation = build_activation(names, limit)
  rng = np.random.default_rng(5)
  dim = 1024
  hidden = 24

  def draw(*dims):
    return rng.normal(size=(NUM_GROUPS, *dims)).astype(np.float32) / 8

  biases = Biases(tuple(draw(hidden) for _ in names), draw(dim)) if biased else None
  params = tuple(draw(dim, hidden) for _ in names), draw(hidden, dim), biases
  x_MD, dy_MD = (rng.normal(size=(NUM_ROWS, dim)).astype(dtype) for _ in range(2))
  weight_M = rng.normal(size=NUM_ROWS).astype(np.float32)
  for sizes in (ROUTINGS["tail"], ROUTINGS["no_rows_used"]):
    for array in (x_MD, dy_MD, weight_M):
      array[sum(sizes) :] = np.nan
    x_M, dy_M = (array.reshape(-1, *row_shape) for array in (x_MD, dy_MD))
    results = run_for_tpu(activation, np.array(sizes), x_M, weight_M, params, dy_M)
    assert results[0].shape == results[1].shape == x_M.shape
    flat = (array.reshape(x_MD.shape) for array in results[:2])
    with jax.enable_x64(True):
      wide = jax.tree.map(lambda a: a.astype(np.float64), (x_MD, weight_M, params, dy_MD))
      expected = oracle(sizes, *wide, activation)
    got = without_dead_rows((*flat, *results[2:]), sizes)
    assert_equal_trees(got, expected, unit=2e-5 if dtype == "float32" else 2.0**-6)


def test_on_tpus_the_gradient_of_wo_frees_its_rows_before_those_of_x_are_computed():
  rows = (NUM_ROWS, 1024), (NUM_ROWS,), (NUM_ROWS, 1024)
  weights = (NUM_GROUPS, 1024, 24), (NUM_GROUPS, 1024, 24), (NUM_GROUPS, 24, 1024)
  x_MD, weight_M, dy_MD, *wi, wo = (jax.ShapeDtypeStruct(s, jnp.float32) for s in (*rows, *weights))
  sizes_G = jax.ShapeDtypeStruct((NUM_GROUPS,), jnp.int32)

  def of_x(*operands):
    return run_for_tpu(GATED, *operands)[1]

  jaxpr = jax.make_jaxpr(of_x)(sizes_G, x_MD, weight_M, (tuple(wi), wo, None), dy_MD).jaxpr
  (call,) = jaxpr.eqns
  program = call.params["jaxpr"].jaxpr
  needed = {program.outvars[call.outvars.index(jaxpr.outvars[0])]}
  kernels = []
  for equation in reversed(program.eqns):
    if needed.intersection(equation.outvars):
      needed.update(v for v in equation.invars if not isinstance(v, Literal))
      kernels.append(equation.params.get("name"))
  assert kernels.count("tgmm") == 1


@pytest.mark.parametrize("backend", HERE)
def test_no_rows(backend):
  params = make_params(np.random.default_rng(3), biased=False, dtype=np.float32)
  x_MD = np.zeros((0, DIM), np.float32)
  weight_M = np.zeros(0, np.float32)
  results = run(backend, np.zeros(NUM_GROUPS, np.int32), x_MD, weight_M, params, x_MD)
  assert results[0].shape == (0, DIM)
  assert not any(leaf.any() for leaf in jax.tree.leaves(results[3]))


@pytest.mark.parametrize("backend", ["reference", "tiled"])  # `ragged_dot` also saves masks
def test_of_hidden_rows_only_the_activations_operands_are_saved(backend, capsys):
  rng = np.random.default_rng(4)
  params = make_params(rng, biased=False, dtype=np.float32)
  x_MD, weight_M, _ = make_rows(rng, ROUTINGS["uniform"], np.float32)
  apply = functools.partial(network, backend, np.array(ROUTINGS["uniform"]))
  print_saved_residuals(apply, x_MD, weight_M.astype(np.float32), params)
  hidden = (f"[{NUM_ROWS},{HIDDEN}]", f"[{NUM_ROWS},{2 * HIDDEN}]")  # separate or concatenated
  lines = capsys.readouterr().out.splitlines()
  kept = [line for line in lines if any(shape in line for shape in hidden)]
  assert all("named 'mlpwi'" in line for line in kept)
  assert sum(1 + (hidden[1] in line) for line in kept) == 2


@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_full_remat_recomputes_only_the_products_with_wi(backend):
  """Two more than the 9 products of forward and backward pass."""
  num_layers = 3
  num_rows = 20
  dim = 64

  def flops(remake):
    def loss(x_MD, w_NGDD, sizes_G):
      def layer(x_MD, w_GDD):
        options = {"activation": GATED, "backend": backend}
        return grouped_mlp(x_MD, x_MD[:, 0], (w_GDD, w_GDD + 1), w_GDD, sizes_G, **options), None

      return jnp.sum(jax.lax.scan(remake(layer), x_MD, w_NGDD)[0])

    shapes = (num_rows, dim), (num_layers, 1, dim, dim), (1,)
    operands = map(jax.ShapeDtypeStruct, shapes, (jnp.float32, jnp.float32, jnp.int32))
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*operands).compile()
    return compiled.cost_analysis()["flops"]

  remade = flops(functools.partial(jax.checkpoint, prevent_cse=False))
  np.testing.assert_allclose(remade / flops(lambda layer: layer), 11 / 9, atol=0.04)


@pytest.mark.parametrize("backend", HERE)
def test_vmap_equals_separate_calls(backend):
  members = []
  for seed, routing in enumerate(("tail", "skewed")):
    rng = np.random.default_rng(seed)
    params = make_params(rng, biased=False, dtype=np.float32)
    x_MD, weight_M, dy_MD = make_rows(rng, ROUTINGS[routing], np.float32)
    sizes_G = np.array(ROUTINGS[routing], np.int32)
    members.append((sizes_G, x_MD, weight_M.astype(np.float32), params, dy_MD))
  stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *members)
  together = jax.vmap(functools.partial(run, backend))(*stacked)
  for number, member in enumerate(members):
    mine = jax.tree.map(lambda leaf, number=number: leaf[number], together)
    assert_equal_trees(mine, run(backend, *member), unit=1e-5)


@pytest.mark.parametrize("backend", HERE)
def test_shards_have_separate_experts_inside_shard_map(backend):
  mesh = jax.make_mesh((2,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
  shards = []
  for seed, routing in enumerate(("tail", "skewed")):
    rng = np.random.default_rng(seed)
    params = make_params(rng, biased=False, dtype=np.float32)
    x_MD, weight_M, dy_MD = make_rows(rng, ROUTINGS[routing], np.float32)
    sizes_G = np.array(ROUTINGS[routing], np.int32)
    shards.append((sizes_G, x_MD, weight_M.astype(np.float32), params, dy_MD))
  whole = jax.tree.map(lambda *leaves: np.concatenate(leaves), *shards)
  local = jax.shard_map(
    functools.partial(network, backend), mesh=mesh, in_specs=P("expert"), out_specs=P("expert")
  )

  @jax.jit
  def together(sizes_G, x_MD, weight_M, params, dy_MD):
    y_MD, vjp = jax.vjp(functools.partial(local, sizes_G), x_MD, weight_M, params)
    return y_MD, *vjp(dy_MD)

  parts = together(*whole)
  for number, shard in enumerate(shards):
    mine = jax.tree.map(lambda leaf, number=number: np.split(leaf, 2)[number], parts)
    assert_equal_trees(mine, run(backend, *shard), unit=1e-5)
