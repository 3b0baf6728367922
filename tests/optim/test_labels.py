"""Labels, weight decay, matrix axes, and the sharding of optimizer state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import struct
from flax.linen import meta
from support.slow_cases import fast_only

from maxlite.config.model_families import MODELS
from maxlite.config.schema import DEFAULTS, Config, ModelConfig, build
from maxlite.models import Decoder
from maxlite.optim import build_optimizer
from maxlite.optim.labels import (
  STACKED,
  decay_mask,
  frozen_paths,
  labels_of,
  logical_names,
  matrix_axes,
  merge,
  partitioned,
  path_of,
  paths_in,
  split,
  state_names,
  trained_paths,
  union,
)
from maxlite.registry import OPTIMIZERS
from maxlite.sharding import Sharder, build_mesh

# (input axes, output axes) of every parameter; None for others than hidden matrices. Axis 0 stacks
# layers.
ATTENTION = {
  "embed/embedding": None,
  "final_norm/scale": None,
  "unembed/kernel": None,
  "layers/attention_norm/scale": None,
  "layers/attention/query/kernel": ((1,), (2, 3)),
  "layers/attention/key/kernel": ((1,), (2, 3)),
  "layers/attention/value/kernel": ((1,), (2, 3)),
  "layers/attention/out/kernel": ((1, 2), (3,)),
}
MATRICES = {
  "llama": ATTENTION
  | {
    "layers/mlp_norm/scale": None,
    "layers/mlp/wi_0/kernel": ((1,), (2,)),
    "layers/mlp/wi_1/kernel": ((1,), (2,)),
    "layers/mlp/wo/kernel": ((1,), (2,)),
  },
  "mixtral": ATTENTION
  | {
    "layers/moe_norm/scale": None,
    "layers/moe/router/kernel": ((1,), (2,)),
    "layers/moe/wi_0": ((2,), (3,)),
    "layers/moe/wi_1": ((2,), (3,)),
    "layers/moe/wo": ((2,), (3,)),
  },
}
# Latent attention: down-projections of the residual stream, up-projections of the latents.
LATENT = {
  "query_down/kernel": ((0,), (1,)),
  "query_norm/scale": None,
  "query/kernel": ((0,), (1, 2)),
  "kv_down/kernel": ((0,), (1,)),
  "kv_norm/scale": None,
  "kv_up/kernel": ((0,), (1, 2)),
  "out/kernel": ((0, 1), (2,)),
}
# The ends of the paths of parameters with several axes, beside stacked ones, that are no matrices.
NO_MATRIX = ("embedding", "unembed/kernel", "bias", "scale", "_conv")


@pytest.fixture(scope="module", params=MATRICES)
def family(request):
  return request.param


@pytest.fixture(scope="module")
def boxed_params(family):
  """Parameters of the family as shapes with logical names."""
  mesh = build_mesh((1,) * 6, (1,) * 6, jax.devices()[:1])
  model = Decoder(build(Config, DEFAULTS | {"decoder_block": family}).model, Sharder(mesh))
  tokens_BT = jnp.zeros((1, 4), jnp.int32)
  return jax.eval_shape(model.init, jax.random.key(0), tokens_BT)["params"]


def by_path(tree):
  return {path_of(key_path): leaf for key_path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def test_matrix_axes_of_every_parameter(family, boxed_params):
  names = by_path(logical_names(boxed_params))
  assert {path: matrix_axes(leaf) for path, leaf in names.items()} == MATRICES[family]


def names_of(**keys):
  """The logical axes of every parameter, by path, of a small model that does not scan layers."""
  small = {"scan_layers": False, "base_num_decoder_layers": 4, "num_experts": 4}
  cfg = build(Config, DEFAULTS | small | keys).model
  model = Decoder(cfg, Sharder(build_mesh((1,) * 6, (1,) * 6, jax.devices()[:1])))
  tokens_BT = jnp.zeros((1, 4), jnp.int32)
  params = jax.eval_shape(model.init, jax.random.key(0), tokens_BT)["params"]
  return by_path(logical_names(params))


def test_matrix_axes_of_latent_attention():
  names = names_of(decoder_block="deepseek", q_lora_rank=8)
  prefix = "layers_0/attention/"
  found = {}
  for path, axes in names.items():
    if path.startswith(prefix):
      found[path.removeprefix(prefix)] = matrix_axes(axes)
  assert found == LATENT


KINDS = ("llama", "olmo2", "gemma4", "mixtral", "deepseek", "qwen3_next", "gpt_oss")


@pytest.mark.parametrize("decoder_block", fast_only(MODELS, *KINDS))
def test_every_hidden_kernel_is_a_matrix(decoder_block):
  for path, axes in names_of(decoder_block=decoder_block, q_lora_rank=8).items():
    unstacked = [axis for axis in axes if axis not in STACKED]
    is_hidden = len(unstacked) > 1 and not path.endswith(NO_MATRIX)
    assert (matrix_axes(axes) is not None) == is_hidden, path


def test_matrix_axes_do_not_depend_on_scan():
  assert matrix_axes(jax.P("embed", "q_heads", "kv")) == ((0,), (1, 2))
  assert matrix_axes(jax.P("q_heads", "kv", "embed")) == ((0, 1), (2,))
  assert matrix_axes(jax.P("ensemble", "layers", "embed", "mlp")) == ((2,), (3,))


def test_all_parameters_except_norms_and_biases_decay(family, boxed_params):
  decays = by_path(decay_mask(meta.unbox(boxed_params)))
  assert {path for path, decay in decays.items() if not decay} == {
    path for path in MATRICES[family] if path.endswith("/scale")
  }


def test_only_true_biases_do_not_decay():
  params = {"layers": {"bias": 0, "rescale": 0}, "scale": 0, "bias_table": {"kernel": 0}}
  assert decay_mask(params) == {
    "layers": {"bias": False, "rescale": True},
    "scale": False,
    "bias_table": {"kernel": True},
  }


def test_decay_rates_and_their_biases_in_a_gated_delta_net_do_not_decay():
  """Kernels of its short convolutions do, and so do embeddings and experts."""
  decays = by_path(decay_mask(names_of(decoder_block="qwen3_next")))
  kept = {path.rsplit("/", 1)[-1] for path, decay in decays.items() if not decay}
  assert kept == {"scale", "decay_bias", "decay_rate"}
  decayed = {path.rsplit("/", 1)[-1] for path, decay in decays.items() if decay}
  convolutions = {"query_conv", "key_conv", "value_conv"}
  assert decayed == {"embedding", "kernel", "wi_0", "wi_1", "wo"} | convolutions


# No two shapes are equal, so a moment's shape identifies its parameter.
STATE_SHAPES = {
  "embed": {"embedding": (7, 16)},
  "layers": {"norm": {"scale": (2, 16)}, "wi": (2, 4, 160, 150), "out": {"kernel": (2, 5, 6, 16)}},
}
STATE_NAMES = {
  "embed": {"embedding": jax.P("vocab", "embed")},
  "layers": {
    "norm": {"scale": jax.P("layers", "norm")},
    "wi": jax.P("layers", "exp", "embed_no_exp", "mlp"),
    "out": {"kernel": jax.P("layers", "q_heads", "kv", "embed")},
  },
}
# How many leaves of an optimizer's state have the shape of each parameter.
NUM_MOMENTS = {
  "adamw": {"embedding": 2, "scale": 2, "wi": 2, "kernel": 2},
  "lion": {"embedding": 1, "scale": 1, "wi": 1, "kernel": 1},
  "adafactor": {"embedding": 1, "scale": 1, "wi": 0, "kernel": 1},  # factored for wi
  "muon": {"embedding": 2, "scale": 2, "wi": 1, "kernel": 1},
}


def shapes_of(shapes):
  return jax.tree.map(
    lambda shape: jax.ShapeDtypeStruct(shape, np.float32),
    shapes,
    is_leaf=lambda leaf: isinstance(leaf, tuple),
  )


@pytest.mark.parametrize("opt_type", OPTIMIZERS)
def test_moments_are_sharded_like_parameters_and_the_rest_replicated(opt_type):
  cfg = build(
    Config, DEFAULTS | {"opt_type": opt_type, "learning_rate_schedule_steps": 10}
  ).optimizer
  params = shapes_of(STATE_SHAPES)
  state = jax.eval_shape(build_optimizer(cfg, STATE_NAMES, ModelConfig()).init, params)
  names = state_names(state, params, STATE_NAMES)
  assert jax.tree.structure(names) == jax.tree.structure(state)

  owners = {leaf.shape: path for path, leaf in by_path(params).items()}
  wanted = by_path(STATE_NAMES)
  found = dict.fromkeys(NUM_MOMENTS[opt_type], 0)
  for leaf, leaf_names in zip(jax.tree.leaves(state), jax.tree.leaves(names), strict=True):
    owner = owners.get(leaf.shape)
    assert leaf_names == (wanted[owner] if owner else jax.P(*(None,) * leaf.ndim))
    if owner:
      found[owner.split("/")[-1]] += 1
  assert found == NUM_MOMENTS[opt_type]


NESTED = {
  "a": {"kernel": np.ones((2, 3)), "bias": np.ones(3)},
  "b": [np.ones(4)],
  "none": None,
}


def test_merge_inverts_split():
  trained, frozen = split(NESTED, labels_of(NESTED, ["a/.*l", "b/.*"]))
  assert paths_in(trained) == ["a/kernel", "b/0"]
  assert paths_in(frozen) == ["a/bias"]
  assert jax.tree.structure(merge(trained, frozen)) == jax.tree.structure(NESTED)
  for part in ((trained, frozen), (frozen, trained)):
    merged = jax.tree.leaves(merge(*part))
    assert all(x is y for x, y in zip(merged, jax.tree.leaves(NESTED), strict=True))


def test_without_labels_all_parameters_are_trained():
  trained, frozen = split(NESTED, None)
  assert paths_in(trained) == paths_in(NESTED)
  assert paths_in(frozen) == []
  assert frozen_paths(None) == []
  tx = optax.sgd(0.1)
  assert partitioned(tx, None) is tx


def test_frozen_paths_are_those_that_no_phase_trains():
  kernels = labels_of(NESTED, ["a/kernel"])
  lists = labels_of(NESTED, ["b/.*"])
  assert trained_paths(kernels) == ["a/kernel"]
  assert frozen_paths(kernels) == ["a/bias", "b/0"]
  assert frozen_paths(kernels, lists) == ["a/bias"]
  assert frozen_paths(kernels, None) == []
  assert trained_paths(union([kernels, lists])) == ["a/kernel", "b/0"]


def test_a_regex_matches_whole_paths_and_the_error_names_the_nearest():
  with pytest.raises(ValueError, match=r"^'a/kern' matches no .* nearest are a/kernel") as error:
    labels_of(NESTED, ["b/.*", "a/kern"])
  assert "\n" not in str(error.value)


def test_an_optimizer_keeps_state_for_the_trained_leaves_only():
  labels = labels_of(NESTED, ["a/kernel", "b/.*"])
  state = partitioned(optax.adam(1e-3), labels).init(NESTED)
  assert sum(leaf.size for leaf in jax.tree.leaves(state) if leaf.ndim) == 2 * (6 + 4)


@pytest.mark.parametrize("opt_type", OPTIMIZERS)
def test_moments_of_a_phase_are_sharded_like_its_parameters(opt_type):
  """Below the states of `optax.partition`, and only for what the phase trains."""
  keys = {"opt_type": opt_type, "learning_rate_schedule_steps": 10}
  cfg = build(Config, DEFAULTS | keys).optimizer
  params = shapes_of(STATE_SHAPES)
  labels = labels_of(params, ["embed/.*", "layers/out/.*"])
  trained_names, _ = split(STATE_NAMES, labels)
  tx = partitioned(build_optimizer(cfg, trained_names, ModelConfig()), labels)
  state = jax.eval_shape(tx.init, params)
  names = jax.tree.leaves(state_names(state, params, STATE_NAMES))
  found = {"embedding": 0, "scale": 0, "wi": 0, "kernel": 0}
  for leaf, leaf_names in zip(jax.tree.leaves(state), names, strict=True):
    for path, param in by_path(params).items():
      if leaf.shape == param.shape:
        assert leaf_names == by_path(STATE_NAMES)[path]
        found[path.split("/")[-1]] += 1
  assert found == NUM_MOMENTS[opt_type] | {"scale": 0, "wi": 0}


def test_names_may_contain_slashes_and_lists_have_numbers():
  """A regex matches the path as text, and no leaf is confused with another one."""
  params = {"a": {"b/c": 0.0, "d": [1.0, 2.0]}, "a/b": {"c": 3.0}}
  assert paths_in(params) == ["a/b/c", "a/d/0", "a/d/1", "a/b/c"]
  trained, frozen = split(params, labels_of(params, ["a/d/1"]))
  assert merge(trained, frozen) == params
  assert jax.tree.leaves(trained) == [2.0]
  both, _ = split(params, labels_of(params, ["a/b/.*"]))
  assert jax.tree.leaves(both) == [0.0, 3.0]


class CallableModel(struct.PyTreeNode):
  """A model that is its own tree of parameters, as in Equinox."""

  layers: list

  def __call__(self, x):
    return x * self.layers[0] + self.layers[1]


def test_a_model_that_can_be_called_is_a_tree_of_labels():
  model = CallableModel([jnp.array(1.0), jnp.array(2.0)])
  labels = labels_of(model, ["layers/1"])
  tx = partitioned(optax.sgd(1.0), labels)
  updates, _ = tx.update(jax.tree.map(jnp.ones_like, model), tx.init(model), model)
  assert updates == CallableModel([jnp.array(0.0), jnp.array(-1.0)])
