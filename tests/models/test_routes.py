"""The experts of all layers as one array: in their order, for every kind of stack."""

import functools

import jax
import numpy as np
import pytest
from support.slow_cases import fast_only, slow
from support.tiny import config_of

from maxlite.data.batch import Batch
from maxlite.layers.moe.routes import COLLECTION
from maxlite.models import Decoder
from maxlite.models.routes import route_shape, split_routes, stack_routes
from maxlite.sharding import MESH_AXES, Sharder, build_mesh
from maxlite.training.loss import run_forward

MODELS = {
  "scanned": {"base_num_decoder_layers": 3, "scan_layers": True},
  "a list": {"base_num_decoder_layers": 11},
  "dense layers first": {
    "decoder_block": "glm4_moe",
    "router": "sigmoid_group_topk",
    "base_num_decoder_layers": 5,
    "first_num_dense_layers": 1,
    "interleave_moe_layer_step": 2,
    "scan_layers": True,
  },
  "runs": {"base_num_decoder_layers": 5, "mlp_only_layers": "[0,3]", "scan_layers": True},
  "units": {
    "decoder_block": "gemma4_moe",
    "base_num_decoder_layers": 12,
    "sliding_window_size": 3,
    "query_pre_attn_scalar": 1,
    "mlp_activations": "[gelu,linear]",
    "global_head_dim": 8,
    "router": "topk_softmax",
    "norm_topk_prob": True,
    "scan_layers": True,
  },
}
LENGTH = 12


def model_of(name):
  cfg = config_of(**{"decoder_block": "mixtral", "remat_policy": "full", **MODELS[name]}).model
  one = (1,) * len(MESH_AXES)
  return Decoder(cfg, Sharder(build_mesh(one, one, jax.devices()[:1])))


@pytest.mark.parametrize("name", fast_only(MODELS, "runs", "units"))
def test_the_collection_is_that_which_the_routers_read(name):
  """In structure and shapes, without running the model."""
  model = model_of(name)
  tokens_BT = jax.ShapeDtypeStruct((2, LENGTH), np.int32)
  variables = jax.eval_shape(model.init, jax.random.key(0), tokens_BT)
  params = {"params": variables["params"]}
  apply = functools.partial(model.apply, mutable=[COLLECTION])
  _, recorded = jax.eval_shape(apply, params, tokens_BT)
  array = jax.eval_shape(functools.partial(stack_routes, cfg=model.cfg), recorded[COLLECTION])
  assert array.shape == (2, LENGTH, *route_shape(model.cfg))
  again = jax.eval_shape(functools.partial(split_routes, cfg=model.cfg), array)
  assert again == recorded[COLLECTION]


@pytest.mark.parametrize("name", ["dense layers first", *map(slow, MODELS)])
def test_layers_are_in_order_and_each_replays_its_own_experts(name):
  """By the load of each layer, whose order the sums of a forward pass have."""
  model = model_of(name)
  draw = np.random.default_rng(0)
  tokens_BT = draw.integers(0, 264, (2, LENGTH)).astype(np.int32)
  key = jax.random.key(0, impl="unsafe_rbg")  # compiles fastest
  params = jax.jit(model.init)(key, tokens_BT)["params"]
  segment_BT = np.ones((2, LENGTH), np.int32)
  segment_BT[1, 7:] = 0
  batch = Batch.of(tokens_BT, segment_BT)
  num_layers, num_chosen = route_shape(model.cfg)
  # Another load in every layer.
  scores = draw.uniform(size=(2, LENGTH, num_layers, 4)) + draw.uniform(size=(num_layers, 4))
  other_BTNK = np.argsort(scores, axis=-1)[..., :num_chosen].astype(np.int32)

  @jax.jit
  def run(given):
    hidden = run_forward(
      model, params, batch, None, drafts=False, expert_BTNK=given, records_experts=True
    )
    return hidden.x_BTD, hidden.layers["moe"].count_E, hidden.expert_BTNK

  def load_of(expert_BTNK):
    real = np.asarray(expert_BTNK)[segment_BT > 0]
    return [np.bincount(real[:, n].ravel(), minlength=4) for n in range(num_layers)]

  live_BTD, load_NE, live_BTNK = run(None)
  np.testing.assert_array_equal(load_NE, load_of(live_BTNK))
  again_BTD, _, again_BTNK = run(live_BTNK)
  np.testing.assert_array_equal(again_BTD, live_BTD)
  np.testing.assert_array_equal(again_BTNK, live_BTNK)
  other_BTD, load_NE, found_BTNK = run(other_BTNK)
  np.testing.assert_array_equal(load_NE, load_of(other_BTNK))
  np.testing.assert_array_equal(found_BTNK, other_BTNK)
  assert np.abs(other_BTD - live_BTD)[segment_BT > 0].max() > 1e-3
