"""Properties of every family in the MODELS table; a registered family is tested automatically."""

import functools
import math
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import meta
from slow_cases import fast_only, slow

from maxlite.config.model_families import MODELS
from maxlite.config.schema import DEFAULTS, Config, build
from maxlite.inference.inference_params import STACKS
from maxlite.models import Decoder
from maxlite.models.decoder_layer import LAYER_SCALE
from maxlite.sharding import MESH_AXES, Sharder, build_mesh

NUM_POSITIONS = 12
SHAPE_BT = (4, NUM_POSITIONS)
TINY = {
  "vocab_size": 48,
  "base_emb_dim": 16,
  "base_num_decoder_layers": 2,
  "base_num_query_heads": 4,
  "base_num_kv_heads": 2,
  "head_dim": 4,
  "base_mlp_dim": 8,
  "num_experts": 4,
  "base_moe_mlp_dim": 8,
  "sparse_matmul": False,  # compiles fastest
  "scan_unroll": 1,
  "q_lora_rank": 4,
  "kv_lora_rank": 8,
  "qk_nope_head_dim": 4,
  "qk_rope_head_dim": 2,
  "v_head_dim": 6,
  "inhomogeneous_layer_cycle_interval": 2,
  "gdn_num_key_heads": 2,
  "gdn_num_value_heads": 4,
  "gdn_key_head_dim": 4,
  "gdn_value_head_dim": 6,
  "gdn_chunk_size": 4,
}
# Changes to TINY per family.
FAMILY_KEYS = {
  "smollm3": {"base_num_decoder_layers": 5},
  "olmo3": {
    "base_num_decoder_layers": 4,
    "sliding_window_size": 3,
    "local_rope_max_timescale": 50.0,
  },
  "exaone4": {"base_num_decoder_layers": 5, "sliding_window_size": 3},
  "gemma": {"mlp_activations": ("gelu", "linear")},
  "gemma2": {
    "base_num_decoder_layers": 2,
    "mlp_activations": ("gelu", "linear"),
    "sliding_window_size": 3,
    "attn_logits_soft_cap": 8.0,
  },
  "gemma3": {
    "base_num_decoder_layers": 7,
    "sliding_window_size": 3,
    "local_rope_max_timescale": 50.0,
    "rope_type": "linear",
    "rope_factor": 8.0,
  },
  "gemma4": {
    "base_num_decoder_layers": 6,
    "normalization_layer_epsilon": 0.4,  # a small one amplifies rounding
    "mlp_activations": ("gelu", "linear"),
    "sliding_window_size": 3,
    "query_pre_attn_scalar": 1.0,
    "local_rope_max_timescale": 50.0,
    "rope_type": "proportional",
    "partial_rotary_factor": 0.5,
    "global_head_dim": 8,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 4,
  },
  "gemma4_moe": {
    "mlp_activations": ("gelu", "linear"),
    "sliding_window_size": 3,
    "query_pre_attn_scalar": 1.0,
    "global_head_dim": 8,
    "global_num_kv_heads": 4,
    "share_kv_projections": True,
    "router": "topk_softmax",
    "norm_topk_prob": True,
  },
  "gpt_oss": {
    "base_num_decoder_layers": 3,
    "first_num_dense_layers": 1,
    "expert_bias": True,
    "mlp_activations": ("quick_gelu", "linear_plus_one"),
    "mlp_activations_limit": 1.0,
    "sliding_window_size": 3,
    "local_rope_max_timescale": 50.0,
  },
  "glm4_moe": {
    "base_num_decoder_layers": 3,
    "first_num_dense_layers": 1,
    "shared_experts": 1,
    "router": "sigmoid_group_topk",
    "partial_rotary_factor": 0.5,
  },
  "qwen2_moe": {"shared_experts": 2},
  "qwen3_5": {"partial_rotary_factor": 0.5},
  "qwen3_next": {"partial_rotary_factor": 0.5, "shared_experts": 1},
  "deepseek": {
    "base_num_decoder_layers": 3,
    "first_num_dense_layers": 1,
    "shared_experts": 1,
    "rope_type": "yarn",
    "mscale": 0.7,
    "query_scaling_beta": 0.5,
    "original_max_position_embeddings": 4,
  },
}
# Each token occurs once, so the gradient of an embedding row is that of one position.
TOKENS_BT = np.random.default_rng(0).permutation(48).reshape(SHAPE_BT).astype(np.int32)
# Two documents and padding in the first row, one document in each of the others.
SEGMENT_BT = np.ones(SHAPE_BT, np.int32)
SEGMENT_BT[0] = np.repeat([1, 2, 0], [5, 4, 3])
POSITION_BT = np.tile(np.arange(NUM_POSITIONS, dtype=np.int32), (4, 1))
POSITION_BT[0] = np.r_[0:5, 0:4, 0, 0, 0]
BATCH = (TOKENS_BT, SEGMENT_BT, POSITION_BT)

# Programs here run once: LLVM's optimizations would take longer than they save.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})

# Together these have every kind of layer; the other families differ in fields of their parts.
STRUCTURES = ("deepseek", "gemma2", "gemma4", "gpt_oss", "qwen3_next")
every_family = pytest.mark.parametrize("family", MODELS)
some_families = pytest.mark.parametrize("family", fast_only(MODELS, *STRUCTURES))
every_structure = pytest.mark.parametrize("family", STRUCTURES)


def draw(shape, seed):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@functools.cache
def sharder_of(**degrees):
  ici = [degrees.get(mesh_axis, 1) for mesh_axis in MESH_AXES]
  mesh = build_mesh(ici, (1,) * len(ici), jax.devices()[: math.prod(ici)])
  return Sharder(mesh)


def model_of(family, sharder=None, **changes):
  own = FAMILY_KEYS.get(family, {}) | changes
  cfg = build(Config, DEFAULTS | TINY | {"decoder_block": family} | own).model
  return Decoder(cfg, sharder or sharder_of())


@functools.cache
def abstract_params(family, **changes):
  """Shapes of the parameters, boxed with their logical axis names."""
  model = model_of(family, **changes)
  return jax.eval_shape(model.init, jax.random.key(0), *BATCH)["params"]


@functools.cache
def params_of(family, **changes):
  """Random parameters of about the scale of initialized ones."""
  centre = 0 if MODELS[family].zero_centred_norms else 1

  def fill(path, leaf):
    noise = draw(leaf.shape, zlib.crc32(str(path).encode()))
    return centre + noise / 4 if "scale" in str(path) else noise / 3

  return jax.tree_util.tree_map_with_path(fill, meta.unbox(abstract_params(family, **changes)))


def loss(model, params, batch):
  """A random linear function of the logits and the sums returned by blocks."""
  x_BTD, sums, w_DV = model.apply({"params": params}, *batch, method=model.hidden_and_unembedding)
  logits_BTV = jnp.einsum("btd,dv->btv", x_BTD.astype(jnp.float32), w_DV.astype(jnp.float32))
  parts = [logits_BTV, *jax.tree.leaves(sums)]
  return sum(jnp.vdot(draw(part.shape, i), part) for i, part in enumerate(parts)) / x_BTD.size


@functools.cache
def compiled(family, **changes):
  """The jitted run(params, batch) -> (loss, gradients) on one device."""
  return jit(jax.value_and_grad(functools.partial(loss, model_of(family, **changes))))


@functools.cache
def base_results(family):
  """(loss, gradients) of the family with the keys of TINY."""
  return jax.tree.map(np.asarray, compiled(family)(params_of(family), BATCH))


def assert_trees_close(got, want, rtol):
  """Assert that each leaf differs by at most `rtol` times its norm."""

  def check(path, a, b):
    assert np.linalg.norm(a - b) <= rtol * np.linalg.norm(b), path

  jax.tree_util.tree_map_with_path(check, got, want)


@every_family
def test_every_parameter_has_logical_axes_of_the_sharding_table(family):
  boxed = abstract_params(family)
  for path, leaf in jax.tree_util.tree_leaves_with_path(
    boxed, is_leaf=lambda leaf: isinstance(leaf, meta.Partitioned)
  ):
    assert isinstance(leaf, meta.Partitioned), path
    assert len(leaf.names) == leaf.value.ndim, path
    sharder_of(fsdp=2, expert=2, tensor=2).spec(leaf.names)
    assert leaf.names.count("layers") == ("layers" in str(path)), path


@some_families
def test_every_parameter_gets_a_gradient(family):
  _, gradients = base_results(family)
  for path, leaf in jax.tree_util.tree_leaves_with_path(gradients):
    is_constant = LAYER_SCALE in str(path)
    assert np.isfinite(leaf).all(), path
    assert (leaf != 0).any() == (not is_constant), path


def test_layers_are_initialized_differently():
  key = jax.random.key(0, impl="unsafe_rbg")  # compiles fastest
  params = jax.device_get(meta.unbox(jit(model_of("mixtral").init)(key, *BATCH)["params"]))
  for path, leaf in jax.tree_util.tree_leaves_with_path(params["layers"]):
    equal = "scale" in str(path) or "bias" in str(path)
    assert equal or (leaf[0] != leaf[1]).any(), path


@pytest.mark.parametrize(
  ("family", "remat"),
  [
    ("deepseek", "custom"),
    ("gemma2", "minimal"),
    slow("gpt_oss", "custom"),
    slow("gemma4", "minimal"),
    slow("gemma4_moe", "full"),
  ],
)
def test_separate_layers_remat_and_a_tied_embedding_give_the_same_gradients(family, remat):
  """All three in one program, since each program takes seconds to compile.

  The gradient of a tied embedding is the sum of the gradients of separate table and projection.
  """
  changes = {
    "scan_layers": False,
    "logits_via_embedding": True,
    "remat_policy": remat,
    "remat_saved_names": ("attention_out", "mlpwo") if remat == "custom" else (),
  }
  params = params_of(family, logits_via_embedding=True)
  assert "unembed" not in params
  got, gradients = compiled(family, **changes)(unstacked(params), BATCH)

  untied = params | {"unembed": {"kernel": params["embed"]["embedding"].T}}
  value, expected = jax.tree.map(np.asarray, compiled(family)(untied, BATCH))
  unembed = expected.pop("unembed")
  expected["embed"]["embedding"] = expected["embed"]["embedding"] + unembed["kernel"].T
  assert got == pytest.approx(value, rel=1e-5)
  assert_trees_close(gradients, unstacked(expected), 1e-5)


def unstacked(params):
  """The parameters in the tree of a model without scanned layers."""
  apart = {}
  for name, tree in params.items():
    if name in STACKS:

      def take(i, tree=tree):
        return jax.tree.map(lambda leaf: leaf[i], tree)

      length = len(jax.tree.leaves(tree)[0])
      apart |= {f"{name}_{i}": take(i) for i in range(length)}
    else:
      apart[name] = tree
  return apart


@pytest.mark.parametrize("family", ["gemma2", slow("deepseek"), slow("gpt_oss")])
def test_bfloat16_is_close_to_float32(family):
  # With all experts chosen, rounding cannot choose another one.
  every = {"num_experts_per_tok": 4} if MODELS[family].is_moe else {}
  value, gradients = jax.tree.map(np.asarray, compiled(family, **every)(params_of(family), BATCH))
  got, rounded = compiled(family, dtype="bfloat16", **every)(params_of(family), BATCH)
  assert got == pytest.approx(value, abs=0.01)
  assert {leaf.dtype for leaf in jax.tree.leaves(rounded)} == {np.dtype(np.float32)}
  assert_trees_close(rounded, gradients, 0.08)


# test_moe_net.py has deepseek on meshes; sinks and biases of experts, which only gpt_oss has, are
# on meshes in test_sharded_attention.py and test_moe_block.py.
@pytest.mark.smoke
@pytest.mark.parametrize("family", fast_only(MODELS, "gemma2"))
def test_mesh_and_remat_change_no_gradient_and_avoid_involuntary_rematerialization(family, capfd):
  """XLA reports an "Involuntary full rematerialization" on stderr when it compiles."""
  sharder = sharder_of(fsdp=2, context=2, tensor=2)
  model = model_of(family, sharder, remat_policy="full", sparse_matmul=True)
  params = params_of(family)
  shardings = jax.tree.map(
    lambda box: sharder.sharding(box.names),
    abstract_params(family),
    is_leaf=lambda leaf: isinstance(leaf, meta.Partitioned),
  )
  rows = sharder.sharding(("activation_batch", "activation_length"))
  run = jax.value_and_grad(functools.partial(loss, model))
  got, sharded = jit(run, in_shardings=(shardings, rows))(params, BATCH)
  assert "rematerialization" not in capfd.readouterr().err
  value, gradients = base_results(family)
  assert got == pytest.approx(value, rel=1e-5)
  assert_trees_close(sharded, gradients, 3e-5)  # gemma3 has 7 layers; measured: 1.2e-5 at most


@functools.cache
def forward(family):
  """The jitted run(batch) -> (x_BTD, sums returned by blocks, reach_TV) on one device.

  reach_TV[t, v] is the largest derivative of the first row's t-th logits by token v's embedding.
  """
  model = model_of(family)
  params = params_of(family)
  cotangent_V = draw(TINY["vocab_size"], 1)

  def run(batch):
    def logits(table_VD):
      variables = {"params": params | {"embed": {"embedding": table_VD}}}
      x_BTD, sums, w_DV = model.apply(variables, *batch, method=model.hidden_and_unembedding)
      return x_BTD[0] @ w_DV, (x_BTD, sums)

    _, pull_back, (x_BTD, sums) = jax.vjp(logits, params["embed"]["embedding"], has_aux=True)
    probe_TTV = jnp.eye(NUM_POSITIONS)[:, :, None] * cotangent_V[None, None]
    return x_BTD, sums, jnp.abs(jax.vmap(pull_back)(probe_TTV)[0]).max(-1)

  return jit(run)


@every_structure
def test_attention_is_causal_within_the_document(family):
  reached_TV = np.asarray(forward(family)(BATCH)[2]) > 0
  same_TS = SEGMENT_BT[0][:, None] == SEGMENT_BT[0][None]
  np.testing.assert_array_equal(reached_TV[:, TOKENS_BT[0]], np.tril(same_TS))
  assert not reached_TV[:, TOKENS_BT[1:]].any()


@every_structure
def test_hidden_states_do_not_depend_on_other_packed_documents(family):
  packed_BTD, *_ = forward(family)(BATCH)
  alone = tuple(np.zeros(SHAPE_BT, np.int32) for _ in BATCH)
  for ours, theirs in zip(alone, BATCH, strict=True):
    ours[:, :4] = theirs[0, 5:9]
  alone[1][:, :4] = 1
  alone_BTD, *_ = forward(family)(alone)
  np.testing.assert_allclose(alone_BTD[0, :4], packed_BTD[0, 5:9], atol=1e-5)


@every_structure
def test_padding_tokens_do_not_affect_others(family):
  tokens_BT = np.where(SEGMENT_BT > 0, TOKENS_BT, 7)
  (got_BTD, got, _), (want_BTD, want, _) = (
    forward(family)((t, *BATCH[1:])) for t in (tokens_BT, TOKENS_BT)
  )
  jax.tree.map(np.testing.assert_array_equal, got, want)
  np.testing.assert_allclose(got_BTD[SEGMENT_BT > 0], want_BTD[SEGMENT_BT > 0], atol=1e-6)
  assert (got_BTD != want_BTD).any()
