"""LoRA adapters: zero before training, exact on a mesh, and mergeable into the kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import meta

from maxlite.config.schema import DEFAULTS, Config, LoraConfig, ModelConfig, build
from maxlite.layers.lora import LoraLinear, merge_lora
from maxlite.models import Decoder
from maxlite.optim.labels import path_of
from maxlite.sharding import Sharder, build_mesh

ALPHA = 3.0
TINY = {
  "vocab_size": 24,
  "base_emb_dim": 8,
  "base_num_decoder_layers": 2,
  "base_num_query_heads": 2,
  "base_num_kv_heads": 2,
  "head_dim": 4,
  "base_mlp_dim": 8,
  "num_experts": 4,
  "base_moe_mlp_dim": 8,
  "sparse_matmul": False,
  "kv_lora_rank": 8,
  "q_lora_rank": 8,
  "qk_nope_head_dim": 2,
  "qk_rope_head_dim": 4,
  "v_head_dim": 4,
  "lora_alpha": ALPHA,
  "scan_unroll": 1,
}
FAMILIES = {
  "llama": {"decoder_block": "llama"},
  "deepseek": {"decoder_block": "deepseek", "shared_experts": 2, "first_num_dense_layers": 1},
  "falcon_h1": {
    "decoder_block": "falcon_h1",
    "mamba_num_heads": 4,
    "mamba_head_dim": 4,
    "mamba_state_dim": 6,
    "key_multiplier": 0.5,
    "ssm_multipliers": (0.75, 1.25, 0.5, 1.5, 0.875),
    "mlp_multipliers": (0.875, 1.125),
  },
}
NUM_LINEARS = {
  "llama": 7,
  "deepseek": 2 * 5 + 3 + 3,
  "falcon_h1": 4 + 6 + 3,
}  # in all stacks together
TOKENS_BT = np.random.default_rng(0).permutation(24).reshape(2, 12).astype(np.int32)


def draw(shape, seed):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def sharder_of(ici, num_devices):
  return Sharder(build_mesh(ici, (1,) * 6, jax.devices()[:num_devices]))


def build_decoder(lora_rank, family):
  cfg = build(Config, DEFAULTS | TINY | FAMILIES[family] | {"lora_rank": lora_rank}).model
  return Decoder(cfg, sharder_of((1,) * 6, 1))


def by_path(tree):
  return {path_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_projection_has_two_adapter_matrices(family):
  base, model = (build_decoder(rank, family) for rank in (0, 2))
  shapes, base_shapes = (
    by_path(meta.unbox(jax.eval_shape(of.init, jax.random.key(0), TOKENS_BT))["params"])
    for of in (model, base)
  )
  adapters = {path for path in shapes if "/lora_" in path}
  assert len(adapters) == 2 * NUM_LINEARS[family]
  assert shapes.keys() - adapters == base_shapes.keys()
  assert {2} == {leaf.shape[-1] for path, leaf in shapes.items() if "/lora_a/" in path}


@pytest.fixture
def fast_to_compile():
  before = jax.config.values["jax_disable_most_optimizations"]
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", before)


@pytest.mark.slow
@pytest.mark.usefixtures("fast_to_compile")
@pytest.mark.parametrize("family", ["llama", "deepseek"])
def test_initial_adapters_change_nothing_and_merged_ones_are_equivalent(family):
  base, model = (build_decoder(rank, family) for rank in (0, 2))
  key = jax.random.key(0, impl="unsafe_rbg")  # compiles fastest
  base_params, params = (
    jax.device_get(meta.unbox(jax.jit(of.init)(key, TOKENS_BT))["params"]) for of in (base, model)
  )
  logits, base_logits = (jax.jit(of.apply) for of in (model, base))
  leaves = by_path(params)
  for path, leaf in by_path(base_params).items():
    np.testing.assert_array_equal(leaves[path], leaf, err_msg=path)
  at_start = base_logits({"params": base_params}, TOKENS_BT)
  np.testing.assert_array_equal(logits({"params": params}, TOKENS_BT), at_start)

  def fill(leaf):
    return leaf if leaf.any() else draw(leaf.shape, leaf.size) / 3

  params = jax.tree.map(fill, params)
  moved = logits({"params": params}, TOKENS_BT)
  scale = np.abs(moved).max()
  assert np.abs(moved - at_start).max() > scale / 10
  merged = merge_lora(params, ALPHA)
  assert by_path(merged).keys() == by_path(base_params).keys()
  np.testing.assert_allclose(base_logits({"params": merged}, TOKENS_BT), moved, atol=1e-5 * scale)


# (features, logical axes of the kernel, contracted axes, shape of x, the einsums of x and adapters)
CASES = {
  "into heads": ((2, 4), ("embed", "q_heads", "kv"), 1, (2, 8, 8), "btd,dhc->bthc", "dr,rhc->dhc"),
  "out of heads": (
    (8,),
    ("q_heads", "kv", "embed"),
    2,
    (2, 8, 2, 4),
    "bthc,hcd->btd",
    "hcr,rd->hcd",
  ),
}


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_on_a_mesh_match_the_formula(case):
  features, names, num_in, shape, of_x, of_adapter = CASES[case]
  rank = 2
  sharder = sharder_of((1, 1, 2, 2, 1, 2), 8)
  lora = LoraConfig(lora_rank=rank, lora_alpha=ALPHA)
  linear = LoraLinear(ModelConfig(lora=lora), sharder, features, names, num_in=num_in)
  x = draw(shape, 0)
  boxed = jax.eval_shape(linear.init, jax.random.key(0), x)["params"]

  def is_box(leaf):
    return isinstance(leaf, meta.AxisMetadata)

  params = jax.tree.map(lambda box: draw(box.value.shape, box.value.size), boxed, is_leaf=is_box)

  def formula(x, params):
    a, b = (params[name]["kernel"] for name in ("lora_a", "lora_b"))
    change = jnp.einsum(of_adapter, a, b) * (ALPHA / rank)
    return jnp.einsum(of_x, x, params["kernel"] + change)

  expected, pull_back = jax.vjp(formula, x, params)
  dy = draw(expected.shape, 9)

  @jax.jit
  def run(x, params):
    x = sharder.constrain(x, ("activation_batch", "activation_length", *(None,) * num_in))

    def place(box, leaf):
      return sharder.constrain(leaf, box.names)

    params = jax.tree.map(place, boxed, params, is_leaf=is_box)
    y, pull_back = jax.vjp(lambda x, params: linear.apply({"params": params}, x), x, params)
    return y, pull_back(dy)

  def close(got, want):
    return np.testing.assert_allclose(got, want, atol=2e-6 * np.abs(want).max())

  jax.tree.map(close, run(x, params), (expected, pull_back(dy)))
