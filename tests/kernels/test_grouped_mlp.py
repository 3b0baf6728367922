"""grouped_mlp against one dense network per group, values and gradients."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grouped_cases import INTERPRETED, ROUTINGS, XLA_PROGRAMS, assert_close
from jax.ad_checkpoint import print_saved_residuals
from jax.extend.core import Literal
from jax.sharding import PartitionSpec as P
from support import trees
from support.slow_cases import fast_only, slow

from maxlite.kernels.grouped_matmul import backend as entries
from maxlite.kernels.grouped_mlp import megablox_mlp, mosaic_gpu_mlp
from maxlite.kernels.grouped_mlp.api import grouped_mlp
from maxlite.kernels.grouped_mlp.biases import Adapter, Adapters, Biases
from maxlite.layers.mlp import build_activation
from maxlite.registry import GROUPED_MATMUL_BACKENDS

HERE = [name for name in GROUPED_MATMUL_BACKENDS if name not in INTERPRETED]
IN_FLOAT64 = [*HERE, "mosaic_gpu"]  # the latter by XLA's operations
NUM_ROWS = 200
DIM = 6
HIDDEN = 10
NUM_GROUPS = 4
GATED = build_activation(("silu", "linear"))


@pytest.fixture(autouse=True)
def on_cpus(monkeypatch):
  """The kernels for TPUs are interpreted, those for GPUs replaced by XLA's operations."""
  kernel = functools.partial(megablox_mlp.grouped_mlp, interpret=True)
  interpreted = dataclasses.replace(entries.MEGABLOX, network=kernel)
  monkeypatch.setitem(GROUPED_MATMUL_BACKENDS, "megablox", interpreted)
  kernel = functools.partial(mosaic_gpu_mlp.grouped_mlp, programs=XLA_PROGRAMS)
  replaced = dataclasses.replace(
    entries.MOSAIC_GPU, implementation=INTERPRETED["mosaic_gpu"], network=kernel
  )
  monkeypatch.setitem(GROUPED_MATMUL_BACKENDS, "mosaic_gpu", replaced)


def make_params(rng, *, biased, num_in=2, dtype=np.float64):
  """((wi, ...), wo, biases)"""

  def draw(*shape):
    return rng.normal(size=(NUM_GROUPS, *shape)).astype(dtype)

  wi = tuple(draw(DIM, HIDDEN) for _ in range(num_in))
  biases = None
  if biased:
    biases = Biases(tuple(draw(HIDDEN) for _ in wi), draw(DIM))
  return wi, draw(HIDDEN, DIM), biases


def make_rows(rng, sizes, dtype=np.float64):
  """(x_MD, weight_M, dy_MD) with NaN in rows that must not be read."""
  x_MD = rng.normal(size=(NUM_ROWS, DIM))
  weight_M = rng.normal(size=NUM_ROWS)
  dy_MD = rng.normal(size=(NUM_ROWS, DIM))
  for array in (x_MD, weight_M, dy_MD):
    array[sum(sizes) :] = np.nan
  return x_MD.astype(dtype), weight_M, dy_MD.astype(dtype)


def network(backend, sizes_G, x_MD, weight_M, params, activation=GATED):
  wi, wo, biases = params
  options = {"activation": activation, "biases": biases, "backend": backend}
  return grouped_mlp(x_MD, weight_M, wi, wo, sizes_G, **options)


@functools.partial(jax.jit, static_argnums=(0, 6))
def run(backend, sizes_G, x_MD, weight_M, params, dy_MD, activation=GATED):
  """(y_MD, dx_MD, dweight_M, gradients of params)"""

  def apply(x_MD, weight_M, params):
    return network(backend, sizes_G, x_MD, weight_M, params, activation)

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
  dx_MD, dweight_M, dparams = vjp(dy_MD[:used])
  dead_rows = (0, NUM_ROWS - used)
  return (
    jnp.pad(y_MD, (dead_rows, (0, 0))),
    jnp.pad(dx_MD, (dead_rows, (0, 0))),
    jnp.pad(dweight_M, dead_rows),
    dparams,
  )


def without_dead_rows(results, sizes):
  """The results of `run` with zeros in the rows past the last group, which are undefined."""
  y_MD, dx_MD, dweight_M, dparams = jax.tree.map(np.array, results)
  for array in (y_MD, dx_MD, dweight_M):
    array[sum(sizes) :] = 0
  return y_MD, dx_MD, dweight_M, dparams


def assert_equal_trees(actual, expected, unit):
  actual_leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(actual)]
  expected_leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(expected)]
  assert_close(actual_leaves, expected_leaves, unit)


@pytest.mark.parametrize("biased", [slow(False), True])
@pytest.mark.parametrize("backend", fast_only(IN_FLOAT64, "tiled", "mosaic_gpu"))
@pytest.mark.parametrize(
  "routing", [slow("skewed"), slow("one_hot"), "tail", slow("aligned"), "no_rows_used"]
)
def test_agrees_with_one_dense_network_per_group_in_float64(routing, backend, biased):
  sizes = ROUTINGS[routing]
  rng = np.random.default_rng(0)
  params = make_params(rng, biased=biased)
  x_MD, weight_M, dy_MD = make_rows(rng, sizes)
  with jax.enable_x64(True):
    results = run(backend, np.array(sizes), x_MD, weight_M, params, dy_MD)
    expected = oracle(sizes, x_MD, weight_M, params, dy_MD)  # compiles once for each routing
    assert_equal_trees(without_dead_rows(results, sizes), expected, unit=1e-12)


@pytest.mark.parametrize("backend", fast_only(HERE, "ragged_dot"))
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
    changed = []
    for w, own in zip(wi, adapters.wi, strict=True):
      changed.append(w + own.a_GDR @ own.b_GRF)
    changed_wo = wo + adapters.wo.a_GDR @ adapters.wo.b_GRF
    params = tuple(changed), changed_wo, biases
    return network(backend, np.array(sizes), x_MD, weight_M, params)

  @functools.partial(jax.jit, static_argnums=0)
  def solve(function):
    y_MD, vjp = jax.vjp(function, x_MD, weight_M, wi, wo, adapters)
    dx_MD, dweight_M, *dparams = vjp(dy_MD)
    return y_MD, dx_MD, dweight_M, dparams

  with jax.enable_x64(True):
    results = without_dead_rows(solve(with_factors), sizes)
    expected = without_dead_rows(solve(with_sums), sizes)
    assert_equal_trees(results, expected, unit=1e-12)


@pytest.mark.parametrize("backend", fast_only(IN_FLOAT64, "reference"))
def test_without_a_gate(backend):
  sizes = ROUTINGS["tail"]
  rng = np.random.default_rng(1)
  params = make_params(rng, biased=False, num_in=1)
  x_MD, weight_M, dy_MD = make_rows(rng, sizes)
  with jax.enable_x64(True):
    results = run(backend, np.array(sizes), x_MD, weight_M, params, dy_MD, jnp.sin)
    expected = oracle(sizes, x_MD, weight_M, params, dy_MD, jnp.sin)
    assert_equal_trees(without_dead_rows(results, sizes), expected, unit=1e-12)


@pytest.mark.parametrize("biased", [slow(False), True])
@pytest.mark.parametrize("backend", fast_only(HERE, "ragged_dot"))
def test_bfloat16_rows_keep_the_precision_of_weight_gradients(backend, biased):
  sizes = ROUTINGS["skewed"]
  rng = np.random.default_rng(2)
  params = make_params(rng, biased=biased, dtype=np.float32)
  x_MD, weight_M, dy_MD = make_rows(rng, sizes, jnp.bfloat16)
  weight_M = weight_M.astype(np.float32)
  results = run(backend, np.array(sizes), x_MD, weight_M, params, dy_MD)
  y_MD, dx_MD, dweight_M, dparams = results
  assert y_MD.dtype == jnp.bfloat16
  assert dx_MD.dtype == jnp.bfloat16
  assert dweight_M.dtype == np.float32
  for gradient in jax.tree.leaves(dparams):
    assert gradient.dtype == np.float32
    if backend != "ragged_dot":  # XLA's gradient rule rounds to x's type
      assert (gradient != gradient.astype(jnp.bfloat16).astype(np.float32)).any()
  with jax.enable_x64(True):
    expected = oracle(sizes, wide(x_MD), wide(weight_M), wide(params), wide(dy_MD))
  # Operands, hidden rows and their gradients are each rounded to 8 bits.
  assert_equal_trees(results, expected, unit=2.0**-6)


def wide(tree):
  """The same numbers in float64."""
  return jax.tree.map(lambda array: array.astype(np.float64), tree)


@functools.partial(jax.jit, static_argnums=0)
def run_for_tpu(activation, sizes_G, x_M, weight_M, params, dy_M):
  """As `run`, by the interpreted kernels for TPUs."""
  options = {"activation": activation, "backend": "megablox"}

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
    slow("bfloat16", (1024,), ("gelu",), 0.0, False),
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

  biases = None
  if biased:
    biases = Biases(tuple(draw(hidden) for _ in names), draw(dim))
  params = tuple(draw(dim, hidden) for _ in names), draw(hidden, dim), biases
  x_MD = rng.normal(size=(NUM_ROWS, dim)).astype(dtype)
  dy_MD = rng.normal(size=(NUM_ROWS, dim)).astype(dtype)
  weight_M = rng.normal(size=NUM_ROWS).astype(np.float32)
  unit = {"float32": 2e-5, "bfloat16": 2.0**-6}[dtype]
  shape = (x_MD.size // math.prod(row_shape), *row_shape)
  for sizes in (ROUTINGS["tail"], ROUTINGS["no_rows_used"]):
    for array in (x_MD, dy_MD, weight_M):
      array[sum(sizes) :] = np.nan
    y_M, dx_M, dweight_M, dparams = run_for_tpu(
      activation, np.array(sizes), x_MD.reshape(shape), weight_M, params, dy_MD.reshape(shape)
    )
    assert y_M.shape == shape
    assert dx_M.shape == shape
    results = (y_M.reshape(x_MD.shape), dx_M.reshape(x_MD.shape), dweight_M, dparams)
    with jax.enable_x64(True):
      expected = oracle(sizes, wide(x_MD), wide(weight_M), wide(params), wide(dy_MD), activation)
    assert_equal_trees(without_dead_rows(results, sizes), expected, unit)


def test_on_tpus_the_gradient_of_wo_frees_its_rows_before_those_of_x_are_computed():
  def floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)

  x_MD = floats(NUM_ROWS, 1024)
  weight_M = floats(NUM_ROWS)
  wi_GDF = floats(NUM_GROUPS, 1024, 24)
  wo_GFD = floats(NUM_GROUPS, 24, 1024)
  params = ((wi_GDF, wi_GDF), wo_GFD, None)
  sizes_G = jax.ShapeDtypeStruct((NUM_GROUPS,), jnp.int32)

  def gradient_of_x(sizes_G, x_MD, weight_M, params, dy_MD):
    _, dx_MD, _, _ = run_for_tpu(GATED, sizes_G, x_MD, weight_M, params, dy_MD)
    return dx_MD

  jaxpr = jax.make_jaxpr(gradient_of_x)(sizes_G, x_MD, weight_M, params, x_MD).jaxpr
  (call,) = jaxpr.eqns
  program = call.params["jaxpr"].jaxpr
  needed = {program.outvars[call.outvars.index(jaxpr.outvars[0])]}
  kernels = []
  for equation in reversed(program.eqns):
    if needed.intersection(equation.outvars):
      needed.update(v for v in equation.invars if not isinstance(v, Literal))
      kernels.append(equation.params.get("name"))
  assert kernels.count("tgmm") == 1


@pytest.mark.parametrize("backend", IN_FLOAT64)
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
  num_saved = 0
  for line in capsys.readouterr().out.splitlines():
    is_one = f"[{NUM_ROWS},{HIDDEN}]" in line
    are_both = f"[{NUM_ROWS},{2 * HIDDEN}]" in line  # concatenated
    if is_one or are_both:
      assert "named 'mlpwi'" in line
      num_saved += 1 + are_both
  assert num_saved == 2


@pytest.mark.parametrize("backend", ["reference", slow("tiled")])
def test_full_remat_recomputes_only_the_products_with_wi(backend):
  """Two more than the 9 products of forward and backward pass."""
  num_layers = 3
  num_rows = 20
  dim = 64

  x_MD = jax.ShapeDtypeStruct((num_rows, dim), jnp.float32)
  w_NGDD = jax.ShapeDtypeStruct((num_layers, 1, dim, dim), jnp.float32)
  sizes_G = jax.ShapeDtypeStruct((1,), jnp.int32)

  def flops(remake):
    def loss(x_MD, w_NGDD, sizes_G):
      def layer(x_MD, w_GDD):
        options = {"activation": GATED, "backend": backend}
        wi = (w_GDD, w_GDD + 1)
        return grouped_mlp(x_MD, x_MD[:, 0], wi, w_GDD, sizes_G, **options), None

      y_MD, _ = jax.lax.scan(remake(layer), x_MD, w_NGDD)
      return jnp.sum(y_MD)

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
    compiled = gradient.lower(x_MD, w_NGDD, sizes_G).compile()
    return compiled.cost_analysis()["flops"]

  remade = flops(functools.partial(jax.checkpoint, prevent_cse=False))
  saved = flops(lambda layer: layer)
  np.testing.assert_allclose(remade / saved, 11 / 9, atol=0.04)


def two_members():
  """The operands of `run` for two seeds and routings."""
  members = []
  for seed, routing in enumerate(("tail", "skewed")):
    rng = np.random.default_rng(seed)
    params = make_params(rng, biased=False, dtype=np.float32)
    x_MD, weight_M, dy_MD = make_rows(rng, ROUTINGS[routing], np.float32)
    sizes_G = np.array(ROUTINGS[routing], np.int32)
    members.append((sizes_G, x_MD, weight_M.astype(np.float32), params, dy_MD))
  return members


@pytest.mark.parametrize("backend", fast_only(HERE, "ragged_dot"))
def test_vmap_equals_separate_calls(backend):
  def run_member(member):
    sizes_G, x_MD, weight_M, params, dy_MD = member
    return run(backend, sizes_G, x_MD, weight_M, params, dy_MD)

  members = two_members()
  together = jax.vmap(run_member)(trees.stack(members))
  for number, member in enumerate(members):
    mine = jax.tree.map(lambda leaf, number=number: leaf[number], together)
    assert_equal_trees(mine, run_member(member), unit=1e-5)


@pytest.mark.parametrize("backend", fast_only(HERE, "reference"))
def test_shards_have_separate_experts_inside_shard_map(backend):
  mesh = jax.make_mesh((2,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))
  shards = two_members()
  whole = trees.concatenate(shards)
  local = jax.shard_map(
    functools.partial(network, backend), mesh=mesh, in_specs=P("expert"), out_specs=P("expert")
  )

  @jax.jit
  def together(operands):
    sizes_G, x_MD, weight_M, params, dy_MD = operands
    y_MD, vjp = jax.vjp(functools.partial(local, sizes_G), x_MD, weight_M, params)
    return y_MD, *vjp(dy_MD)

  parts = together(whole)
  for number, (sizes_G, x_MD, weight_M, params, dy_MD) in enumerate(shards):
    mine = jax.tree.map(lambda leaf, number=number: np.split(leaf, 2)[number], parts)
    alone = run(backend, sizes_G, x_MD, weight_M, params, dy_MD)
    assert_equal_trees(mine, alone, unit=1e-5)
