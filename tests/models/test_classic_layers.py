"""LayerNorm, biases, positions, parallel layers and chunks on meshes, in float64."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import meta
from support.slow_cases import slow

from maxlite.config.schema import DEFAULTS, ModelConfig, build
from maxlite.errors import UserError
from maxlite.models import Decoder
from maxlite.sharding import MESH_AXES, Sharder, build_mesh

SHAPE_BT = (2, 8)
TINY = {
  "vocab_size": 24,
  "base_emb_dim": 8,
  "base_num_decoder_layers": 2,
  "base_num_query_heads": 4,
  "base_num_kv_heads": 4,
  "head_dim": 4,
  "base_mlp_dim": 8,
  "mlp_activations": ("exact_gelu",),
  "dtype": "float64",
  "weight_dtype": "float64",
  "attention": "chunked",
  "attention_block_q": 4,
  "scan_unroll": 1,
}
LEARNED = {"trainable_position_size": 8}
CHUNKED = {
  "base_num_decoder_layers": 4,
  "base_num_kv_heads": 2,
  "interleave_moe_layer_step": 2,
  "mlp_activations": ("silu", "linear"),
  "num_experts": 4,
  "num_experts_per_tok": 1,
  "base_moe_mlp_dim": 8,
  "shared_experts": 1,
  "router": "topk_sigmoid",
  "norm_topk_prob": False,
  "sliding_window_size": 3,
  "query_scaling_beta": 0.5,
  "original_max_position_embeddings": 2,
  "normalization_layer_epsilon": 0.1,
}
XIELU = {"mlp_activations": ("xielu",)}
CHANGES = {"opt": LEARNED, "gpt2": LEARNED, "llama4": CHUNKED, "phi": XIELU, "qwen3": XIELU}
# Layers that are not scanned compile fastest; the slow cases are scanned.
FEW_LAYERS = {"base_num_decoder_layers": 1, "scan_layers": False}
FEWEST = {"llama4": FEW_LAYERS | {"base_num_decoder_layers": 2}}  # a dense layer and one of experts
RNG = np.random.default_rng(0)
TOKENS_BT = RNG.integers(24, size=SHAPE_BT).astype(np.int32)
SEGMENT_BT = np.array([[1] * 5 + [2] * 3, [1] * 8], np.int32)
POSITION_BT = np.array([[*range(5), *range(3)], [*range(8)]], np.int32)
BATCH = (TOKENS_BT, SEGMENT_BT, POSITION_BT)
# Compiles fastest.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def model_of(family, mesh, **changes):
  cfg = build(ModelConfig, DEFAULTS | TINY | {"decoder_block": family} | changes)
  degrees = [mesh.get(axis, 1) for axis in MESH_AXES]
  devices = jax.devices()[: math.prod(degrees)]
  return Decoder(cfg, Sharder(build_mesh(degrees, (1,) * len(degrees), devices)))


def random_params(model):
  boxed = jax.eval_shape(model.init, jax.random.key(0), *BATCH)["params"]

  def fill(path, leaf):
    rng = np.random.default_rng(sum(map(ord, str(path))))
    return ("scale" in str(path)) + rng.normal(size=leaf.shape) / 3

  return jax.tree_util.tree_map_with_path(fill, meta.unbox(boxed))


def loss(model, params):
  x_BTD, _, w_DV = model.apply({"params": params}, *BATCH, method=model.hidden_and_unembedding)
  logits_BTV = jnp.einsum("btd,dv->btv", x_BTD, w_DV)
  return jnp.vdot(np.random.default_rng(1).normal(size=logits_BTV.shape), logits_BTV)


@functools.cache
def on_one_device(family, **changes):
  with jax.enable_x64(True):
    model = model_of(family, {}, **changes)
    params = random_params(model)
    return params, *jit(jax.value_and_grad(functools.partial(loss, model)))(params)


def scanned(family, mesh, strategy):
  return slow(family, mesh, strategy, {})


def unscanned(family, mesh, strategy):
  return family, mesh, strategy, FEWEST.get(family, FEW_LAYERS)


@pytest.mark.parametrize(
  ("family", "mesh", "strategy", "layers"),
  [
    unscanned("opt", {"fsdp": 2, "context": 2, "tensor": 2}, "ring"),
    unscanned("falcon_alibi", {"context": 2, "tensor": 2}, "all_gather"),
    unscanned("phi", {"fsdp": 2, "context": 2, "tensor": 2}, "all_gather"),  # with xIELU
    unscanned("llama4", {"expert": 2, "context": 2, "tensor": 2}, "all_gather"),
    unscanned("cohere_qk_norm", {"fsdp": 2, "tensor": 2}, "all_gather"),
    scanned("llama4", {"expert": 2, "context": 2, "tensor": 2}, "all_gather"),
    scanned("llama4", {"fsdp": 2, "context": 4}, "ring"),
    scanned("llama4", {"context": 2, "tensor": 2}, "ulysses"),
    scanned("falcon_alibi", {"context": 2, "tensor": 2}, "all_gather"),
    scanned("falcon_alibi", {"context": 2, "tensor": 2}, "ring"),
    scanned("falcon_alibi", {"context": 2, "tensor": 2}, "ulysses"),
    scanned("opt", {"fsdp": 2, "context": 2, "tensor": 2}, "ring"),
    scanned("opt", {"expert": 2, "tensor": 4}, "all_gather"),
    scanned("gpt2", {"fsdp": 2, "context": 2, "tensor": 2}, "ulysses"),
    scanned("gpt_neox", {"fsdp": 2, "context": 2, "tensor": 2}, "ring"),
    scanned("falcon", {"fsdp": 2, "tensor": 4}, "all_gather"),
    scanned("cohere_qk_norm", {"fsdp": 2, "tensor": 2}, "all_gather"),
    scanned("nanochat", {"fsdp": 2, "context": 2, "tensor": 2}, "ring"),
    scanned("phi", {"fsdp": 2, "context": 2, "tensor": 2}, "all_gather"),
    scanned("qwen3", {"fsdp": 2, "context": 2, "tensor": 2}, "all_gather"),  # with xIELU
    scanned("cohere2", {"fsdp": 2, "context": 2, "tensor": 2}, "ring"),
  ],
)
def test_a_mesh_changes_neither_loss_nor_gradients(family, mesh, strategy, layers):
  changes = CHANGES.get(family, {}) | layers
  params, value, gradients = on_one_device(family, **changes)
  with jax.enable_x64(True):
    model = model_of(family, mesh, context_parallel_strategy=strategy, **changes)
    boxed = jax.eval_shape(model.init, jax.random.key(0), *BATCH)["params"]
    shardings = jax.tree.map(
      lambda box: model.sharder.sharding(box.names),
      boxed,
      is_leaf=lambda leaf: isinstance(leaf, meta.Partitioned),
    )
    run = jit(jax.value_and_grad(functools.partial(loss, model)), in_shardings=(shardings,))
    got, sharded = run(params)
  np.testing.assert_allclose(got, value, rtol=1e-11)
  largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(gradients))

  def check(path, got, want):
    np.testing.assert_allclose(got, want, atol=1e-11 * largest, err_msg=str(path))

  jax.tree_util.tree_map_with_path(check, sharded, gradients)


def test_logits_are_the_products_that_losses_use_with_a_bias():
  with jax.enable_x64(True):
    model = model_of("phi", {})
    params = random_params(model)

    @jit
    def run(params):
      x_BTD, _, w_DV = model.apply({"params": params}, *BATCH, method=model.hidden_and_unembedding)
      return x_BTD @ w_DV, model.apply({"params": params}, *BATCH)

    expected_BTV, logits_BTV = run(params)
    np.testing.assert_allclose(logits_BTV, expected_BTV, rtol=1e-6)
    shifted = params | {"unembed_bias": {"bias": params["unembed_bias"]["bias"] + np.arange(24)}}
    _, more_BTV = run(shifted)
  np.testing.assert_allclose(more_BTV - logits_BTV, np.tile(np.arange(24), (2, 8, 1)), atol=1e-5)


def layers_output(model):
  """The jitted function from parameters to what the layer adds to the embeddings."""

  @jit
  def run(params):
    _, seen = model.apply(
      {"params": params},
      *BATCH,
      capture_intermediates=lambda module, _: module.name == "layers_0",
    )
    y_BTD, _ = seen["intermediates"]["layers_0"]["__call__"][0]
    return y_BTD - params["embed"]["embedding"][TOKENS_BT]

  return run


@pytest.mark.parametrize("family", ["gpt_neox", "falcon"])
def test_a_parallel_layer_adds_what_attention_and_mlp_make_of_its_input(family):
  with jax.enable_x64(True):
    model = model_of(family, {}, **FEW_LAYERS)
    params = random_params(model)
    output = layers_output(model)

    def without(name, out):
      layer = params["layers_0"]
      zeros = jax.tree.map(np.zeros_like, layer[name][out])
      return params | {"layers_0": layer | {name: layer[name] | {out: zeros}}}

    both_BTD = output(params)
    attention_BTD = output(without("mlp", "wo"))
    mlp_BTD = output(without("attention", "out"))
  np.testing.assert_allclose(attention_BTD + mlp_BTD, both_BTD, rtol=1e-9)
  assert np.abs(mlp_BTD).max() > 0.01
  assert np.abs(attention_BTD).max() > 0.01


def test_rows_that_are_longer_than_the_table_of_positions_are_refused():
  types = {"dtype": "float32", "weight_dtype": "float32"}
  model = model_of("gpt2", {}, trainable_position_size=7, **types)
  with pytest.raises(UserError, match="trainable_position_size=7"):
    jax.eval_shape(model.init, jax.random.key(0), *BATCH)


def test_the_embedding_of_the_first_position_follows_the_offset():
  _, _, gradients = on_one_device("opt", **LEARNED, **FEW_LAYERS)
  used_P = np.abs(gradients["position_embed"]["embedding"]).max(-1) > 0
  np.testing.assert_array_equal(used_P, [False] * 2 + [True] * 8)


def test_rematerialization_changes_no_gradient_of_the_numbers_of_xielu():
  params, value, gradients = on_one_device("phi", **XIELU, **FEW_LAYERS)
  with jax.enable_x64(True):
    model = model_of("phi", {}, **XIELU, **FEW_LAYERS, remat_policy="full")
    got, recomputed = jit(jax.value_and_grad(functools.partial(loss, model)))(params)
  np.testing.assert_allclose(got, value, rtol=1e-12)
  for name in ("positive_scale", "negative_scale"):
    want_1 = gradients["layers_0"]["mlp"]["xielu"][name]
    assert (np.abs(want_1) > 1e-3).all()
    np.testing.assert_allclose(recomputed["layers_0"]["mlp"]["xielu"][name], want_1, rtol=1e-9)
