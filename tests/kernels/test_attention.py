"""Attention backends against the reference, and properties of the reference."""

import dataclasses
import functools
import re
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.slow_cases import fast_only, slow

from maxlite.kernels import tokamax_library
from maxlite.kernels.attention import api, splash, tokamax
from maxlite.kernels.attention import backend as entries
from maxlite.kernels.attention.backend import AttentionFeatures
from maxlite.kernels.hardware import Hardware
from maxlite.planning.hlo import parse
from maxlite.planning.hlo_cost import matmul_flops
from maxlite.registry import ATTENTION_BACKENDS
from maxlite.sharding.collectives import pvary

NUM_SEQS = 2
NUM_POSITIONS = 40
NUM_QUERY_HEADS = 4
NUM_CHANNELS = 8
BACKENDS = [name for name in ATTENTION_BACKENDS if name != "cudnn"]  # it needs an NVIDIA GPU
OTHERS = [name for name in BACKENDS if name != "reference"]


# Three documents and padding in the first row, one document in the second.
SEGMENT_BT = np.stack([np.repeat([1, 2, 3, 0], [7, 20, 6, 7]), np.ones(40)]).astype(np.int32)


@pytest.fixture(autouse=True)
def on_cpus(monkeypatch, request):
  """Kernels for TPUs are interpreted; tokamax, which has no interpreter, uses XLA's operations."""
  kernel = functools.partial(splash.attention, interpret=True)
  interpreted = dataclasses.replace(entries.SPLASH, implementation=kernel)
  monkeypatch.setitem(ATTENTION_BACKENDS, "splash", interpreted)
  emulated = functools.partial(tokamax.attention, implementation="xla")
  by_xla = dataclasses.replace(entries.TOKAMAX, implementation=emulated)
  monkeypatch.setitem(ATTENTION_BACKENDS, "tokamax", by_xla)
  callspec = getattr(request.node, "callspec", None)
  if callspec is None or callspec.params.get("backend") != "tokamax":
    yield
    return
  if not tokamax_library.is_installed():
    pytest.skip("tokamax, which needs Python 3.12, is not installed")
  with (
    warnings.catch_warnings(),
    jax.numpy_dtype_promotion("standard"),
    jax.numpy_rank_promotion("allow"),
  ):
    # tokamax's gradient without kernels builds a program in a way that JAX deprecates.
    warnings.filterwarnings("ignore", "core.Jaxpr is missing a DebugInfo", DeprecationWarning)
    yield


class Case(NamedTuple):
  q_BTHC: np.ndarray
  k_BSGC: np.ndarray
  v_BSGC: np.ndarray
  sink_H: np.ndarray


def make_case(num_kv_heads=2, num_value_channels=6, dtype=np.float64, num_positions=NUM_POSITIONS):
  draw = np.random.default_rng(0).normal
  lead = (NUM_SEQS, num_positions)
  return Case(
    q_BTHC=draw(size=(*lead, NUM_QUERY_HEADS, NUM_CHANNELS)).astype(dtype),
    k_BSGC=draw(size=(*lead, num_kv_heads, NUM_CHANNELS)).astype(dtype),
    v_BSGC=draw(size=(*lead, num_kv_heads, num_value_channels)).astype(dtype),
    sink_H=SINK_H.astype(dtype),
  )


def make_cotangent(case):
  shape = (*case.q_BTHC.shape[:-1], case.v_BSGC.shape[-1])
  return np.random.default_rng(1).normal(size=shape).astype(case.q_BTHC.dtype)


# All optional features, with values that matter for keys and scores of this size.
EVERYTHING = {"window": 9, "soft_cap": 0.8, "sinks": True}
# Those of backends that do not support all.
SUPPORTED = {"dot_product": {}, "tokamax": {"window": 9, "soft_cap": 0.8}}
SINK_H = np.array([-1.5, 0.5, 2, 0])


def attend(
  backend,
  case,
  *,
  block_q=16,
  segment_BT=SEGMENT_BT,
  q_segment_BT=None,
  q_start=0,
  sinks=False,
  **options,
):
  if q_segment_BT is None:
    q_segment_BT = segment_BT
  sink_H = None
  if sinks:
    sink_H = case.sink_H
  return api.attention(
    case.q_BTHC,
    case.k_BSGC,
    case.v_BSGC,
    q_segment_BT=q_segment_BT,
    kv_segment_BS=segment_BT,
    scale=0.3,
    q_start=q_start,
    backend=backend,
    block_q=block_q,
    sink_H=sink_H,
    **options,
  )


def value_and_gradients(function, case, do_BTHC):
  o_BTHC, vjp = jax.vjp(function, case)
  (gradients,) = vjp(do_BTHC)
  return [o_BTHC, *gradients]


# The keyword arguments of `attend` that a compiled program depends on.
OPTIONS = ("block_q", "window", "soft_cap", "sinks")


@functools.partial(jax.jit, static_argnums=0, static_argnames=OPTIONS)
def compiled_run(backend, case, do_BTHC, segment_BT, **options):
  function = functools.partial(attend, backend, segment_BT=segment_BT, **options)
  return value_and_gradients(function, case, do_BTHC)


def run(backend, case, do_BTHC=None, segment_BT=SEGMENT_BT, **options):
  """[o_BTHC, dq_BTHC, dk_BSGC, dv_BSGC, dsink_H]"""
  if do_BTHC is None:
    do_BTHC = make_cotangent(case)
  results = compiled_run(backend, case, do_BTHC, segment_BT, **options)
  return [np.asarray(array) for array in results]


def assert_all_close(actual, expected, atol):
  for got, want in zip(actual, expected, strict=True):
    np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=0, atol=atol)


@pytest.mark.parametrize(
  ("num_kv_heads", "block_q", "num_value_channels", "options"),
  [
    slow(1, 16, 8, {}),
    slow(2, 2, 11, EVERYTHING),
    slow(4, 64, 5, {"window": 9, "sinks": True}),
    # Three spans of queries, of which the last is not full.
    (2, 16, 5, EVERYTHING),
  ],
)
def test_chunked_is_exact_for_any_block_size(num_kv_heads, block_q, num_value_channels, options):
  with jax.enable_x64(True):
    case = make_case(num_kv_heads, num_value_channels)
    expected = run("reference", case, **options)
    assert_all_close(run("chunked", case, block_q=block_q, **options), expected, atol=1e-12)


def test_values_may_have_more_channels_than_keys():
  case = make_case(num_value_channels=11, dtype=np.float32)
  expected = run("reference", case, window=9)
  assert_all_close(run("dot_product", case, window=9), expected, atol=1e-5)


# By default one gradient of each backend, except of `chunked`, which has float64 cases above.
NARROW_CASES = []
for name in OTHERS:
  case = (name, jnp.float32, 1e-5)
  NARROW_CASES.append(slow(*case) if name == "chunked" else case)
  NARROW_CASES.append(slow(name, jnp.bfloat16, 0.06))


@pytest.mark.parametrize(("backend", "dtype", "atol"), NARROW_CASES)
def test_backends_agree_with_the_reference_in_narrow_types(backend, dtype, atol):
  case = make_case(dtype=dtype)
  options = SUPPORTED.get(backend, EVERYTHING)
  promotion = "strict"
  if backend in SUPPORTED:  # JAX's and tokamax's functions mix types
    promotion = "standard"
  with jax.numpy_dtype_promotion(promotion):
    results = run(backend, case, **options)
  assert [array.dtype for array in results] == [dtype] * 5
  with jax.enable_x64(True):
    wide = jax.tree.map(lambda array: array.astype(np.float64), case)
    wide_BTHC = make_cotangent(case).astype(np.float64)
    assert_all_close(results, run("reference", wide, wide_BTHC, **options), atol)


@pytest.mark.parametrize("backend", fast_only(BACKENDS, "reference", "chunked", "splash"))
def test_a_token_depends_on_earlier_tokens_of_its_document_only(backend):
  case = make_case(dtype=np.float32)
  query = 20  # of the second document, which is rows 7 to 26

  probe_BTHC = np.zeros_like(make_cotangent(case))
  probe_BTHC[0, query] = 1
  position_S = np.arange(40)
  visible_S = (position_S >= 7) & (position_S <= query)
  _, _, dk_BSGC, dv_BSGC, _ = run(backend, case, probe_BTHC)
  for gradient in (dk_BSGC, dv_BSGC):
    reached_S = np.abs(gradient[0]).max(axis=(1, 2)) > 0
    np.testing.assert_array_equal(reached_S, visible_S)
    assert not gradient[1].any()


@pytest.mark.parametrize("options", [{}, EVERYTHING], ids=["plain", "everything"])
def test_the_reference_is_a_softmax_over_the_visible_keys(options):
  """Source of sinks: gpt-oss model card (2025), section 2.2, of caps: Gemma 2 (2024), section 2."""
  with jax.enable_x64(True):
    case = make_case()
    o_BTHC = run("reference", case, **options)[0]
    query = 20
    head = 3
    first = 7  # of the document
    if options:
      first = query + 1 - options["window"]
    k_SC = case.k_BSGC[0, first : query + 1, 1]
    v_SC = case.v_BSGC[0, first : query + 1, 1]
    score_S = 0.3 * k_SC @ case.q_BTHC[0, query, head]
    if options:
      score_S = 0.8 * np.tanh(score_S / 0.8)
    p_S = np.exp(score_S)
    total = p_S.sum()
    if options:
      total += np.exp(SINK_H[head])
    np.testing.assert_allclose(o_BTHC[0, query, head], p_S @ v_SC / total, atol=1e-13)


@pytest.mark.parametrize(
  ("backend", "options"),
  [
    ("dot_product", {"soft_cap": 30.0}),
    ("dot_product", {"sinks": True}),
    ("cudnn", {"soft_cap": 30.0}),
    ("cudnn", {"sinks": True}),
    ("tokamax", {"sinks": True}),
  ],
)
def test_an_unsupported_feature_is_an_error(backend, options):
  with pytest.raises(
    ValueError, match=rf"attention={backend} does not support .*; write attention="
  ):
    attend(backend, make_case(dtype=np.float32), **options)


def test_cudnn_needs_a_narrow_type():
  with pytest.raises(ValueError, match="cudnn does not support float32; write dtype=bfloat16"):
    attend("cudnn", make_case(dtype=np.float32))


@pytest.mark.parametrize("backend", fast_only(BACKENDS, "chunked", "splash"))
def test_large_scores_and_padding_stay_finite(backend):
  case = make_case(dtype=np.float32)
  case = case._replace(q_BTHC=case.q_BTHC * 1e4)
  assert all(np.isfinite(a).all() for a in run(backend, case))
  unseeing = functools.partial(attend, backend, q_segment_BT=np.full_like(SEGMENT_BT, 9))
  o_BTHC = np.asarray(jax.jit(unseeing)(case))
  assert np.isfinite(o_BTHC).all(), "queries that see no key at all"


@pytest.mark.parametrize("backend", fast_only(BACKENDS, "chunked"))
def test_sharded_queries_get_their_slice_of_the_result(backend):
  """Under shard_map as the layers call it: queries sharded, keys whole, gradients summed."""
  segment_BT = SEGMENT_BT
  num_shards = 8
  if backend == "splash":  # its shards have a multiple of 128 queries
    segment_BT = np.repeat(SEGMENT_BT, 8, axis=1)[:, :256]
    num_shards = 2
  case = make_case(dtype=np.float32, num_positions=segment_BT.shape[1])
  axis_types = (jax.sharding.AxisType.Auto,)
  mesh = jax.make_mesh((num_shards,), ("context",), axis_types=axis_types)
  options = dict(SUPPORTED.get(backend, EVERYTHING))
  has_sinks = options.pop("sinks", False)
  attend = functools.partial(api.attention, scale=0.3, backend=backend, block_q=2, **options)

  def shard(q_BtHC, k_BSGC, v_BSGC, sink_H, q_segment_Bt):
    _, k_BSGC, v_BSGC, segment_BS, sink_H = pvary(q_BtHC, k_BSGC, v_BSGC, segment_BT, sink_H)
    if not has_sinks:
      sink_H = None
    return attend(
      q_BtHC,
      k_BSGC,
      v_BSGC,
      q_segment_BT=q_segment_Bt,
      kv_segment_BS=segment_BS,
      q_start=jax.lax.axis_index("context") * q_BtHC.shape[1],
      sink_H=sink_H,
    )

  split = P(None, "context")
  sharded = jax.shard_map(
    shard,
    mesh=mesh,
    in_specs=(split, P(), P(), P(), split),
    out_specs=split,
    check_vma=ATTENTION_BACKENDS[backend].supports_vma,
  )

  def attend_sharded(case):
    return sharded(case.q_BTHC, case.k_BSGC, case.v_BSGC, case.sink_H, segment_BT)

  differentiate = jax.jit(functools.partial(value_and_gradients, attend_sharded))
  together = [np.asarray(array) for array in differentiate(case, make_cotangent(case))]
  expected = run("reference", case, segment_BT=segment_BT, sinks=has_sinks, **options)
  assert_all_close(together, expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_vmap_and_checkpoint_change_nothing(backend):
  case = make_case(dtype=np.float32)
  stacked = jax.tree.map(lambda a: np.stack([a, 2 * a]), case)
  cotangent = make_cotangent(case)
  options = SUPPORTED.get(backend, EVERYTHING)
  function = jax.checkpoint(functools.partial(attend, backend, **options))
  member = functools.partial(value_and_gradients, function)
  together = jax.jit(jax.vmap(member, in_axes=(0, None)))(stacked, cotangent)
  of_first = [np.asarray(array[0]) for array in together]
  assert_all_close(of_first, run(backend, case, **options), atol=1e-5)


def compile_gradients(backend, num_positions, **options):
  """The compiled program of the gradients of operands, for one row."""
  x_BTHC = jax.ShapeDtypeStruct((1, num_positions, 2, 8), jnp.float32)
  segment_BT = jax.ShapeDtypeStruct((1, num_positions), jnp.int32)

  def total(q_BTHC, k_BSGC, v_BSGC, segment_BT):
    segments = {"q_segment_BT": segment_BT, "kv_segment_BS": segment_BT}
    keys = {"scale": 1.0, "backend": backend, "block_q": 32}
    return api.attention(q_BTHC, k_BSGC, v_BSGC, **segments, **keys, **options).sum()

  gradients = jax.jit(jax.grad(total, argnums=(0, 1, 2)))
  return gradients.lower(x_BTHC, x_BTHC, x_BTHC, segment_BT).compile()


def temporary_bytes(backend, num_positions):
  compiled = compile_gradients(backend, num_positions)
  return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_memory_of_chunked_grows_linearly_with_length():
  assert temporary_bytes("chunked", 2048) < 2.5 * temporary_bytes("chunked", 1024)
  assert temporary_bytes("chunked", 2048) < temporary_bytes("reference", 2048) / 8


def multiplications(window):
  """FLOPs of the gradient's program at 1,024 positions."""
  compiled = compile_gradients("chunked", 1024, window=window)
  return matmul_flops(parse(compiled.as_text())).total


@pytest.mark.slow
def test_chunked_does_not_multiply_keys_before_the_window():
  # Each of the 8 spans of 128 queries attends at most 128 + 63 keys, of up to 1,024 without window.
  assert multiplications(64) < 1.01 * multiplications(None) * (128 + 7 * 191) / (36 * 128)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["chunked", "splash"])
def test_a_saved_output_is_not_computed_again(backend):
  case = make_case(dtype=np.float32)
  function = functools.partial(attend, backend)
  policy = jax.checkpoint_policies.save_only_these_names("attention_out")

  def num_products(function):
    # Over two cases in a loop, since XLA would merge a second forward pass with the first.
    def total(case):
      two_cases = jax.tree.map(lambda x: jnp.stack([x, x]), case)
      return jax.lax.map(function, two_cases).sum()

    compiled = jax.jit(jax.value_and_grad(total)).lower(case).compile()
    return len(re.findall(r" dot\(|__onednn\$matmul", compiled.as_text()))

  plain = num_products(function)
  assert num_products(jax.checkpoint(function, policy=policy)) == plain
  assert num_products(jax.checkpoint(function)) > plain


HOPPER = Hardware("gpu", compute_capability=9.0)
NARROW = AttentionFeatures(dtype="bfloat16")


@pytest.mark.parametrize(
  ("hardware", "features", "is_installed", "backend"),
  [
    (Hardware("cpu"), NARROW, True, "chunked"),
    (Hardware("tpu"), NARROW._replace(has_sinks=True), True, "splash"),
    (Hardware("tpu"), NARROW._replace(dtype="float32", num_channels=192), True, "splash"),
    (Hardware("tpu"), NARROW._replace(merges_keys=True), True, "chunked"),
    (HOPPER, NARROW, True, "tokamax"),
    (HOPPER, NARROW._replace(has_soft_cap=True, num_channels=192), True, "tokamax"),
    (Hardware("gpu", 10.3), NARROW, True, "tokamax"),
    (Hardware("gpu", 12.0), NARROW, True, "cudnn"),
    (HOPPER, NARROW._replace(has_sinks=True), True, "chunked"),
    (HOPPER, NARROW._replace(merges_keys=True), True, "chunked"),
    (HOPPER, NARROW._replace(dtype="float32"), True, "chunked"),
    (HOPPER, NARROW, False, "cudnn"),
    (HOPPER, NARROW._replace(has_soft_cap=True), False, "chunked"),
    (HOPPER, NARROW._replace(num_channels=192), False, "chunked"),
    (dataclasses.replace(HOPPER, is_attached=False), NARROW, False, "chunked"),
    (Hardware("gpu", 8.0), NARROW, True, "cudnn"),
    (Hardware("gpu", 7.0), NARROW, True, "chunked"),
    (Hardware("gpu"), NARROW, True, "chunked"),  # of another maker
  ],
)
def test_auto_chooses_by_hardware_and_features(
  monkeypatch, hardware, features, is_installed, backend
):
  modules = None
  if is_installed:
    modules = tokamax_library.AttentionModules(api, api)
  monkeypatch.setattr(entries, "find_attention", lambda: modules)
  assert api.resolve_backend("auto", hardware, features) == backend


def test_a_named_backend_is_used_and_an_unknown_name_is_an_error():
  for name in ATTENTION_BACKENDS:
    assert api.resolve_backend(name, Hardware("cpu"), NARROW) == name
  with pytest.raises(
    ValueError, match="'flush' is not a backend; choose auto or one of: reference"
  ):
    api.resolve_backend("flush", Hardware("cpu"), NARROW)
