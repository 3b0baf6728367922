"""The decoder applies its layers in the order of the layer plan."""

import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import meta
from slow_cases import fast_only

from maxlite.config.model_families import MODELS
from maxlite.config.schema import DEFAULTS, Config, build
from maxlite.layers.norm import RMSNorm
from maxlite.layers.rope import rope_tables
from maxlite.models import Decoder
from maxlite.models.decoder_layer import DecoderLayer, Rope
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
ROWS = (np.ones_like(TOKENS_BT), np.tile(np.arange(12, dtype=np.int32), (2, 1)))
# Layer plan -> of each layer: whether it is MoE, the path of its parameters, its row in the stack.
PLANS = {
  (0, 1): [(True, "layers", i) for i in range(5)],
  (2, 1): [(False, "dense_layers", 0), (False, "dense_layers", 1)]
  + [(True, "layers", i) for i in range(3)],
  (1, 2): [(False, "dense_layers", 0)]
  + [(name == "mixture", f"layers/{name}", i) for i in range(2) for name in ("dense_0", "mixture")],
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
  return jax.jit(run)(tokens_BT, *ROWS)


@pytest.mark.parametrize("plan", fast_only(PLANS, (2, 1), (1, 2)), ids=str)
def test_layers_run_in_order(plan):
  num_dense, step = plan
  model = model_of(first_num_dense_layers=num_dense, interleave_moe_layer_step=step, scan_unroll=2)
  params = params_of(model)
  block = functools.cache(
    lambda moe: jax.jit(DecoderLayer(model.cfg, model.sharder, moe=moe).apply)
  )
  x_BTD = jnp.asarray(params["embed"]["embedding"][TOKENS_BT])
  every = []
  rope = Rope(rope_tables(ROWS[1], 4, model.cfg.rope))
  for moe, place, row in PLANS[plan]:
    layer = functools.reduce(lambda tree, name: tree[name], place.split("/"), params)
    layer = jax.tree.map(lambda leaf, row=row: leaf[row], layer)
    x_BTD, outputs = block(moe)({"params": layer}, x_BTD, ROWS[0], rope)
    every += [outputs.sums] if moe else []
  norm = RMSNorm(model.cfg.normalization_layer_epsilon, jnp.float32)
  expected_BTD = norm.apply({"params": params["final_norm"]}, x_BTD)
  got_BTD, got = hidden(model, params)
  np.testing.assert_allclose(got_BTD, expected_BTD, atol=1e-4)
  expected = jax.tree.map(lambda *leaves: np.stack(leaves), *every)
  jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4), got, expected)


@pytest.mark.parametrize(
  ("family", "num_layers", "plan"),
  [("gemma2", 2, {}), ("gemma3", 6, {}), ("gpt_oss", 4, {"interleave_moe_layer_step": 2})],
)
def test_every_nth_layer_attends_beyond_the_window(family, num_layers, plan):
  """One layer at a time has a non-zero attention output; local layers attend one row."""
  options = {"sliding_window_size": 1, "base_num_decoder_layers": num_layers} | plan
  model = model_of(decoder_block=family, **options)
  params = params_of(model)
  step = plan.get("interleave_moe_layer_step", 1)
  run = jax.jit(functools.partial(model.apply, method=model.hidden))
  changed_BT = np.where(np.arange(12) == 3, 23 - TOKENS_BT, TOKENS_BT)
  for layer in range(num_layers):

    def mute(path, leaf, layer=layer):
      path = jax.tree_util.keystr(path, simple=True, separator="/")
      if not path.endswith("attention/out/kernel"):
        return leaf
      place = 0 if "dense_0" in path else step - 1
      number_N = np.arange(len(leaf)) * step + place
      return leaf * (number_N == layer).astype(np.float32)[:, None, None, None]

    only = {"params": jax.tree_util.tree_map_with_path(mute, params)}
    moved_BTD = run(only, TOKENS_BT, *ROWS)[0] != run(only, changed_BT, *ROWS)[0]
    is_global = (layer + 1) % MODELS[family].global_layer_every == 0
    reached_T = np.asarray(moved_BTD).any(axis=(0, 2))
    np.testing.assert_array_equal(reached_T[[2, 3, 11]], [False, True, is_global])


def test_dense_family_ignores_the_layer_plan():
  plan = {"first_num_dense_layers": 1, "interleave_moe_layer_step": 2}
  dense = params_of(model_of(decoder_block="llama", **plan))
  assert jax.tree.map(np.shape, dense) == jax.tree.map(
    np.shape, params_of(model_of(decoder_block="llama"))
  )


@pytest.mark.parametrize("family", ["llama", "deepseek"])
def test_mscale_scales_all_channels_of_scores(family):
  """Equivalent to scaling the queries."""
  base = {"decoder_block": family, "base_num_decoder_layers": 1, "rope_type": "yarn"}
  scaled, unscaled = (model_of(mscale=mscale, **base) for mscale in (1.0, 1e-12))
  params = params_of(scaled)
  expected_BTD, _ = hidden(scaled, params)
  query = params["layers"]["attention"]["query"]
  query["kernel"] *= (0.1 * np.log(scaled.cfg.rope.rope_factor) + 1) ** 2
  np.testing.assert_allclose(hidden(unscaled, params)[0], expected_BTD, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "deepseek"])
def test_queries_are_scaled_by_the_contexts_before_them(family):
  base = {"decoder_block": family, "base_num_decoder_layers": 1, "rope_type": "yarn"}
  base |= {"original_max_position_embeddings": 4}
  scaled = model_of(query_scaling_beta=0.5, **base)
  unscaled = model_of(**base)
  params = params_of(scaled)
  got_BTD, _ = hidden(scaled, params)
  kernel = params["layers"]["attention"]["query"]["kernel"]
  for num_contexts in range(3):
    params["layers"]["attention"]["query"]["kernel"] = kernel * (1 + 0.5 * np.log(1 + num_contexts))
    expected_BTD, _ = hidden(unscaled, params)
    part = np.s_[:, 4 * num_contexts : 4 * (num_contexts + 1)]
    np.testing.assert_allclose(got_BTD[part], expected_BTD[part], atol=1e-4)
