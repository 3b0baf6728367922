"""The decoder applies its layers in the order of the layer plan."""

import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import meta
from support import trees
from support.slow_cases import fast_only, slow

from maxlite.config.model_families import MODELS
from maxlite.config.schema import DEFAULTS, Config, build
from maxlite.layers.layer_inputs import LayerInputs
from maxlite.layers.norm import RMSNorm
from maxlite.layers.rope import rope_tables
from maxlite.models import Decoder
from maxlite.models.decoder_layer import DecoderLayer
from maxlite.models.layer_stacks import layer_specs
from maxlite.sharding import Sharder, build_mesh

TINY = {
  "decoder_block": "mixtral",
  "vocab_size": 24,
  "base_emb_dim": 8,
  "base_num_decoder_layers": 5,
  "base_num_query_heads": 2,
  "base_num_kv_heads": 2,
  "head_dim": 4,
  "base_mlp_dim": 8,
  "num_experts": 4,
  "base_moe_mlp_dim": 8,
  "sparse_matmul": False,
  "kv_lora_rank": 8,
  "qk_nope_head_dim": 2,
  "qk_rope_head_dim": 4,
  "v_head_dim": 4,
}
TOKENS_BT = np.random.default_rng(0).permutation(24).reshape(2, 12).astype(np.int32)
SEGMENT_BT = np.ones_like(TOKENS_BT)
POSITION_BT = np.tile(np.arange(12, dtype=np.int32), (2, 1))
# Layer plan, or the dense layers -> of each layer: whether it is MoE, the path of its parameters,
# its row in the stack.
PLANS = {
  (0, 1): [
    (True, "layers", 0),
    (True, "layers", 1),
    (True, "layers", 2),
    (True, "layers", 3),
    (True, "layers", 4),
  ],
  (2, 1): [
    (False, "dense_layers", 0),
    (False, "dense_layers", 1),
    (True, "layers", 0),
    (True, "layers", 1),
    (True, "layers", 2),
  ],
  (1, 2): [
    (False, "dense_layers", 0),
    (False, "layers/dense_0", 0),
    (True, "layers/mixture", 0),
    (False, "layers/dense_0", 1),
    (True, "layers/mixture", 1),
  ],
  (1, 3, 4): [
    (True, "layers_from_0", 0),
    (False, "layers_from_1", 0),
    (True, "layers_from_2", 0),
    (False, "layers_from_3", 0),
    (False, "layers_from_3", 1),
  ],
}


def model_of(**changes):
  sharder = Sharder(build_mesh((1,) * 6, (1,) * 6, jax.devices()[:1]))
  return Decoder(build(Config, DEFAULTS | TINY | changes).model, sharder)


def params_of(model):
  def fill(path, leaf):
    draw = np.random.default_rng(zlib.crc32(str(path).encode())).normal
    return draw(size=leaf.shape).astype(np.float32) / 2

  abstract = meta.unbox(jax.eval_shape(model.init, jax.random.key(0), TOKENS_BT))["params"]
  return jax.tree_util.tree_map_with_path(fill, abstract)


def hidden(model, params, tokens_BT=TOKENS_BT):
  run = functools.partial(model.apply, {"params": params}, method=model.hidden)
  return jax.jit(run)(tokens_BT, SEGMENT_BT, POSITION_BT)


@pytest.mark.parametrize("plan", fast_only(PLANS, (1, 2), (1, 3, 4)), ids=str)
def test_layers_run_in_order(plan):
  keys = {"mlp_only_layers": plan}
  if len(plan) == 2:
    keys = dict(zip(("first_num_dense_layers", "interleave_moe_layer_step"), plan, strict=True))
  model = model_of(**keys, scan_unroll=2)
  params = params_of(model)
  x_BTD = jnp.asarray(params["embed"]["embedding"][TOKENS_BT])
  sums = []
  inputs = LayerInputs(SEGMENT_BT, {"main": rope_tables(POSITION_BT, 4, model.cfg.rope)})

  @functools.cache
  def compiled(spec):
    return jax.jit(DecoderLayer(model.cfg, model.sharder, spec).apply)

  for spec, (is_moe, place, row) in zip(layer_specs(model.cfg), PLANS[plan], strict=True):
    stack = params
    for name in place.split("/"):
      stack = stack[name]
    variables = {"params": jax.tree.map(lambda leaf, row=row: leaf[row], stack)}
    x_BTD, outputs = compiled(spec)(variables, x_BTD, inputs)
    assert bool(outputs.sums) == is_moe
    if is_moe:
      sums.append(outputs.sums)
  norm = RMSNorm(model.cfg.normalization_layer_epsilon, jnp.float32)
  expected_BTD = norm.apply({"params": params["final_norm"]}, x_BTD)
  got_BTD, got = hidden(model, params)
  np.testing.assert_allclose(got_BTD, expected_BTD, atol=1e-4)
  for leaf, expected in trees.leaf_pairs(got, trees.stack(sums)):
    np.testing.assert_allclose(leaf, expected, rtol=1e-4)


@pytest.mark.parametrize(
  ("family", "num_layers", "plan"),
  [
    ("gemma2", 4, {"global_layers": (0, 3)}),
    slow("gemma2", 2, {}),
    slow("gemma3", 6, {}),
    slow("gpt_oss", 4, {"interleave_moe_layer_step": 2}),
    slow("gpt_oss", 4, {"interleave_moe_layer_step": 2, "global_layers": (0, 3)}),
  ],
)
def test_every_nth_or_listed_layer_attends_beyond_the_window(family, num_layers, plan):
  """One layer at a time has a non-zero attention output; local layers attend one row."""
  options = {"sliding_window_size": 1, "base_num_decoder_layers": num_layers} | plan
  model = model_of(decoder_block=family, **options)
  params = params_of(model)
  step = plan.get("interleave_moe_layer_step", 1)
  every = MODELS[family].global_layer_every
  attending_globally = plan.get("global_layers", range(every - 1, num_layers, every))

  @jax.jit
  def run(params, tokens_BT):
    x_BTD, _ = model.apply(
      {"params": params}, tokens_BT, SEGMENT_BT, POSITION_BT, method=model.hidden
    )
    return x_BTD

  def only(layer):
    """The parameters, with zeros in the attention outputs of the other layers."""

    def mute(path, leaf):
      path = jax.tree_util.keystr(path, simple=True, separator="/")
      if not path.endswith("attention/out/kernel"):
        return leaf
      place = step - 1
      if "dense_0" in path:
        place = 0
      number_N = np.arange(len(leaf)) * step + place
      is_layer_N = (number_N == layer).astype(np.float32)
      return leaf * is_layer_N[:, None, None, None]

    return jax.tree_util.tree_map_with_path(mute, params)

  changed_BT = np.where(np.arange(12) == 3, 23 - TOKENS_BT, TOKENS_BT)
  for layer in range(num_layers):
    own_params = only(layer)
    moved_BTD = run(own_params, TOKENS_BT) != run(own_params, changed_BT)
    is_global = layer in attending_globally
    reached_T = np.asarray(moved_BTD).any(axis=(0, 2))
    np.testing.assert_array_equal(reached_T[[2, 3, 11]], [False, True, is_global])


def test_dense_family_ignores_the_layer_plan():
  plan = {"first_num_dense_layers": 1, "interleave_moe_layer_step": 2}
  dense = params_of(model_of(decoder_block="llama", **plan))
  without_plan = params_of(model_of(decoder_block="llama"))
  assert jax.tree.map(np.shape, dense) == jax.tree.map(np.shape, without_plan)


@pytest.mark.parametrize("family", ["llama", slow("deepseek")])
def test_mscale_scales_all_channels_of_scores(family):
  """Equivalent to scaling the queries."""
  base = {"decoder_block": family, "base_num_decoder_layers": 1, "rope_type": "yarn"}
  scaled = model_of(mscale=1.0, **base)
  unscaled = model_of(mscale=1e-12, **base)
  params = params_of(scaled)
  expected_BTD, _ = hidden(scaled, params)
  query = params["layers"]["attention"]["query"]
  query["kernel"] *= (0.1 * np.log(scaled.cfg.rope.rope_factor) + 1) ** 2
  got_BTD, _ = hidden(unscaled, params)
  np.testing.assert_allclose(got_BTD, expected_BTD, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", slow("deepseek")])
def test_queries_are_scaled_by_the_contexts_before_them(family):
  base = {"decoder_block": family, "base_num_decoder_layers": 1, "rope_type": "yarn"}
  base |= {"original_max_position_embeddings": 4}
  scaled = model_of(query_scaling_beta=0.5, **base)
  unscaled = model_of(**base)
  params = params_of(scaled)
  got_BTD, _ = hidden(scaled, params)
  query = params["layers"]["attention"]["query"]
  kernel = query["kernel"]
  for num_contexts in range(3):
    query["kernel"] = kernel * (1 + 0.5 * np.log(1 + num_contexts))
    expected_BTD, _ = hidden(unscaled, params)
    part = np.s_[:, 4 * num_contexts : 4 * (num_contexts + 1)]
    np.testing.assert_allclose(got_BTD[part], expected_BTD[part], atol=1e-4)
