"""Properties of every family in the MODELS table; a registered family is tested automatically."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import meta
from support.slow_cases import fast_only, slow
from tiny_families import (
  BATCH,
  NUM_POSITIONS,
  POSITION_BT,
  SEGMENT_BT,
  SHAPE_BT,
  TINY,
  TOKENS_BT,
  draw,
  jit,
  model_of,
  sharder_of,
)

from maxlite.config.model_families import MODELS
from maxlite.models.decoder_layer import LAYER_SCALE
from maxlite.optim.labels import decay_mask, path_of

# Together these have every kind of layer; the other families differ in fields of their parts.
STRUCTURES = (
  "deepseek",
  "gemma2",
  "gemma4",
  "gpt_oss",
  "qwen3_next",
  "bamba",
  "lfm2",
  "nemotron_h",
  "falcon_h1",
)
STACKS = ("dense_layers", "layers", "kv_shared_layers")
every_family = pytest.mark.parametrize("family", MODELS)
every_structure = pytest.mark.parametrize("family", fast_only(STRUCTURES, "gemma2"))


def loss(model, params, batch):
  """A random linear function of the logits and the sums returned by blocks."""
  x_BTD, sums, w_DV = model.apply({"params": params}, *batch, method=model.hidden_and_unembedding)
  logits_BTV = jnp.einsum("btd,dv->btv", x_BTD.astype(jnp.float32), w_DV.astype(jnp.float32))
  total = 0.0
  for i, part in enumerate([logits_BTV, *jax.tree.leaves(sums)]):
    total += jnp.vdot(draw(part.shape, i), part)
  return total / x_BTD.size


def compile_gradients(family, **changes):
  """The jitted run(params, batch) -> (loss, gradients) on one device."""
  model = model_of(family, **changes)
  return jit(jax.value_and_grad(functools.partial(loss, model)))


@pytest.fixture(scope="module")
def compiled():
  """`compile_gradients`, which compiles once."""
  return functools.cache(compile_gradients)


@pytest.fixture(scope="module")
def base_results(compiled, params_of):
  """family -> (loss, gradients) with the keys of TINY."""

  def results(family):
    return jax.device_get(compiled(family)(params_of(family), BATCH))

  return functools.cache(results)


def assert_trees_close(got, want, rtol):
  """Assert that each leaf differs by at most `rtol` times its norm.

  Where keys have no rotary embedding, the gradient of their bias is zero but for rounding.
  """
  largest = max(np.linalg.norm(leaf) for leaf in jax.tree.leaves(want))

  def check(path, a, b):
    norm = np.linalg.norm(b)
    if norm < 1e-6 * largest:
      norm = largest
    assert np.linalg.norm(a - b) <= rtol * norm, path

  jax.tree_util.tree_map_with_path(check, got, want)


# By the last name of a parameter's path: what multiplies and adds channels decays, what scales,
# shifts or sets a rate of each channel or head does not.
DECAYED = {"kernel", "embedding", "wi_0", "wi_1", "wo", "query_conv", "key_conv", "value_conv"}
NOT_DECAYED = {
  "bias",
  "scale",
  "layer_scale",
  "expert_scale",
  "logits_bias",
  "sinks_bias",
  "wi_0_bias",
  "wi_1_bias",
  "wo_bias",
  "decay_bias",
  "decay_rate",
  "step_bias",
  "skip_scale",
  "query_conv_bias",
  "key_conv_bias",
  "value_conv_bias",
}


@every_family
def test_weight_decay_applies_to_the_matrices_and_to_nothing_else(family, abstract_params):
  for path, decays in jax.tree.leaves_with_path(decay_mask(meta.unbox(abstract_params(family)))):
    name = path_of(path).split("/")[-1]
    assert name in DECAYED | NOT_DECAYED, f"add {path_of(path)} to one of the sets"
    assert decays == (name in DECAYED), path_of(path)


@every_family
def test_every_parameter_has_logical_axes_of_the_sharding_table(family, abstract_params):
  sharder = sharder_of(fsdp=2, expert=2, tensor=2)
  boxed = abstract_params(family)
  for path, leaf in jax.tree_util.tree_leaves_with_path(boxed, is_leaf=is_box):
    assert is_box(leaf), path
    assert len(leaf.names) == leaf.value.ndim, path
    sharder.spec(leaf.names)
    assert leaf.names.count("layers") == ("layers" in str(path)), path


def is_box(leaf):
  return isinstance(leaf, meta.Partitioned)


@pytest.mark.parametrize("family", fast_only(MODELS, "gemma2"))
def test_every_parameter_gets_a_gradient(family, base_results):
  _, gradients = base_results(family)
  for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
    is_constant = LAYER_SCALE in str(path)
    assert np.isfinite(leaf).all(), path
    assert (leaf != 0).any() == (not is_constant), path


@pytest.mark.slow
def test_layers_are_initialized_differently():
  key = jax.random.key(0, impl="unsafe_rbg")  # compiles fastest
  variables = jit(model_of("mixtral").init)(key, *BATCH)
  params = jax.device_get(meta.unbox(variables["params"]))
  for path, leaf in jax.tree_util.tree_leaves_with_path(params["layers"]):
    is_constant = "scale" in str(path) or "bias" in str(path)
    assert is_constant or (leaf[0] != leaf[1]).any(), path


@pytest.mark.parametrize(
  ("family", "remat"),
  [
    slow("deepseek", "custom"),
    ("gemma2", "minimal"),
    slow("gpt_oss", "custom"),
    slow("gemma4", "minimal"),
    slow("gemma4_moe", "full"),
  ],
)
def test_separate_layers_remat_and_a_tied_embedding_give_the_same_gradients(
  family, remat, compiled, params_of
):
  """All three in one program, since each program takes seconds to compile.

  The gradient of a tied embedding is the sum of the gradients of separate table and projection.
  """
  saved_names = ()
  if remat == "custom":
    saved_names = ("attention_out", "mlpwo")
  run = compiled(
    family,
    scan_layers=False,
    logits_via_embedding=True,
    remat_policy=remat,
    remat_saved_names=saved_names,
  )
  params = params_of(family, logits_via_embedding=True)
  assert "unembed" not in params
  got, gradients = run(unstacked(params), BATCH)

  untied = params | {"unembed": {"kernel": params["embed"]["embedding"].T}}
  value, expected = jax.device_get(compiled(family)(untied, BATCH))
  unembed = expected.pop("unembed")
  expected["embed"]["embedding"] = expected["embed"]["embedding"] + unembed["kernel"].T
  assert got == pytest.approx(value, rel=1e-5)
  assert_trees_close(gradients, unstacked(expected), 1e-5)


def unstacked(params):
  """The parameters in the tree of a model without scanned layers."""
  apart = {}
  for name, tree in params.items():
    if name not in STACKS:
      apart[name] = tree
      continue
    length = len(jax.tree.leaves(tree)[0])
    for i in range(length):
      apart[f"{name}_{i}"] = layer_of(tree, i)
  return apart


def layer_of(stack, i):
  return jax.tree.map(lambda leaf: leaf[i], stack)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma2", "deepseek", "gpt_oss"])
def test_bfloat16_is_close_to_float32(family, compiled, params_of):
  keys = {}
  if MODELS[family].is_moe:
    # With all experts chosen, rounding cannot choose another one.
    keys["num_experts_per_tok"] = 4
  exact = compiled(family, **keys)
  params = params_of(family)
  value, gradients = jax.device_get(exact(params, BATCH))
  rounding = compiled(family, dtype="bfloat16", **keys)
  got, rounded = rounding(params, BATCH)
  assert got == pytest.approx(value, abs=0.01)
  assert {leaf.dtype for leaf in jax.tree.leaves(rounded)} == {np.dtype(np.float32)}
  # Rounding the parameters alone changes the gradients of an ill-conditioned model as much.
  params_in_bfloat16 = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
  nearby_params = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params_in_bfloat16)
  _, nearby = exact(nearby_params, BATCH)

  def check(path, got, exact, nearby):
    assert np.linalg.norm(got - exact) < 3 * np.linalg.norm(nearby - exact), path  # measured: 2.6

  jax.tree_util.tree_map_with_path(check, rounded, gradients, nearby)


# test_moe_net.py has deepseek on meshes; sinks and biases of experts, which only gpt_oss has, are
# on meshes in test_sharded_attention.py and test_moe_block.py.
@pytest.mark.slow
@pytest.mark.smoke
@pytest.mark.parametrize("family", MODELS)
def test_mesh_and_remat_change_no_gradient_and_avoid_involuntary_rematerialization(
  family, capfd, abstract_params, params_of, base_results
):
  """XLA reports an "Involuntary full rematerialization" on stderr when it compiles."""
  sharder = sharder_of(fsdp=2, context=2, tensor=2)
  model = model_of(family, sharder, remat_policy="full", sparse_matmul=True)
  params = params_of(family)
  boxed = abstract_params(family)
  shardings = jax.tree.map(lambda box: sharder.sharding(box.names), boxed, is_leaf=is_box)
  rows = sharder.sharding(("activation_batch", "activation_length"))
  run = jax.value_and_grad(functools.partial(loss, model))
  got, sharded = jit(run, in_shardings=(shardings, rows))(params, BATCH)
  assert "rematerialization" not in capfd.readouterr().err
  value, gradients = base_results(family)
  assert got == pytest.approx(value, rel=1e-5)
  assert_trees_close(sharded, gradients, 3e-5)  # gemma3 has 7 layers; measured: 1.2e-5 at most


@pytest.fixture(scope="module")
def forward(params_of):
  """The results of `compile_forward` for each family."""

  def compile_family(family):
    return compile_forward(model_of(family), params_of(family))

  return functools.cache(compile_family)


def compile_forward(model, params):
  """The jitted run(batch) -> (x_BTD, sums returned by blocks, reach_TV) on one device.

  reach_TV[t, v] is the largest derivative of the first row's t-th logits by token v's embedding.
  """
  cotangent_V = draw(TINY["vocab_size"], 1)

  def run(batch):
    def logits(table_VD):
      variables = {"params": params | {"embed": {"embedding": table_VD}}}
      x_BTD, sums, w_DV = model.apply(variables, *batch, method=model.hidden_and_unembedding)
      return x_BTD[0] @ w_DV, (x_BTD, sums)

    _, pull_back, (x_BTD, sums) = jax.vjp(logits, params["embed"]["embedding"], has_aux=True)
    probe_TTV = jnp.eye(NUM_POSITIONS)[:, :, None] * cotangent_V[None, None]
    (gradient_TVD,) = jax.vmap(pull_back)(probe_TTV)
    return x_BTD, sums, jnp.abs(gradient_TVD).max(-1)

  return jit(run)


@every_structure
def test_attention_is_causal_within_the_document(family, forward):
  _, _, reach_TV = forward(family)(BATCH)
  reached_TV = np.asarray(reach_TV) > 0
  same_TS = SEGMENT_BT[0][:, None] == SEGMENT_BT[0][None]
  np.testing.assert_array_equal(reached_TV[:, TOKENS_BT[0]], np.tril(same_TS))
  assert not reached_TV[:, TOKENS_BT[1:]].any()


@every_structure
def test_hidden_states_do_not_depend_on_other_packed_documents(family, forward):
  run = forward(family)
  packed_BTD, _, _ = run(BATCH)
  second = slice(5, 9)  # document of the first row
  tokens_BT = np.zeros(SHAPE_BT, np.int32)
  segment_BT = np.zeros(SHAPE_BT, np.int32)
  position_BT = np.zeros(SHAPE_BT, np.int32)
  tokens_BT[:, :4] = TOKENS_BT[0, second]
  segment_BT[:, :4] = 1
  position_BT[:, :4] = POSITION_BT[0, second]
  alone_BTD, _, _ = run((tokens_BT, segment_BT, position_BT))
  np.testing.assert_allclose(alone_BTD[0, :4], packed_BTD[0, second], atol=1e-5)


@every_structure
def test_padding_tokens_do_not_affect_others(family, forward):
  run = forward(family)
  is_real_BT = SEGMENT_BT > 0
  other_BT = np.where(is_real_BT, TOKENS_BT, 7)
  got_BTD, got_sums, _ = run((other_BT, SEGMENT_BT, POSITION_BT))
  want_BTD, want_sums, _ = run(BATCH)
  jax.tree.map(np.testing.assert_array_equal, got_sums, want_sums)
  np.testing.assert_allclose(got_BTD[is_real_BT], want_BTD[is_real_BT], atol=1e-6)
  assert (got_BTD != want_BTD).any()
