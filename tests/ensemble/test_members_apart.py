"""A member that is not finite does not reach the others of its stack."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.linen import meta
from fuzz_operations import OPERATIONS
from layer_operations import SHAPE, all_operations
from support import trees
from support.slow_cases import slow
from support.tiny import config_of, mesh_keys

from maxlite.config.model_families import MODELS
from maxlite.ensemble import Ensemble, Member
from maxlite.kernels.vmapped_convolution import keep_members_apart
from maxlite.models import Decoder
from maxlite.sharding import Sharder, build_mesh

IMAGES = np.random.default_rng(0).normal(size=(4, 6, 6, 8)).astype(np.float32)
MEMBERS = 3
SWEPT = all_operations(OPERATIONS)


class Grouped(nn.Module):
  """Grouped convolutions, in the kernel's gradient of which XLA:CPU multiplies all groups."""

  strides: int = 1

  @nn.compact
  def __call__(self, x_BHWC):
    for _ in range(2):
      x_BHWC = nn.Conv(8, (3, 3), strides=self.strides, feature_group_count=4)(x_BHWC)
    return x_BHWC


def mean_square(model, x_BHWC):
  return jnp.mean((model(x_BHWC) - 1) ** 2)


def trained(strategy, rates, x_ZBHWC, num_devices=1, strides=1):
  """(losses, whether members diverged) in the fourth step on one batch or one per member."""
  members = []
  for seed, rate in enumerate(rates):
    hyperparameters = {"learning_rate": rate}
    model = Grouped(strides)
    members.append(Member(model, optax.sgd, seed=seed, hyperparameters=hyperparameters))
  ensemble = Ensemble(
    members,
    mean_square,
    strategy=strategy,
    own_batches=x_ZBHWC.ndim == 5,
    devices=jax.devices()[:num_devices],
  )
  state = ensemble.init(x_ZBHWC)
  for _ in range(4):
    state, metrics = ensemble.step(state, x_ZBHWC)
  return np.asarray(metrics["loss"]), np.asarray(metrics["diverged"])


@pytest.mark.parametrize("strategy", ["stacked", slow("fused")])
def test_a_diverged_member_does_not_reach_others_through_grouped_convolutions(strategy):
  losses, diverged = trained(strategy, (1e30, 0.01, 0.01), IMAGES)
  np.testing.assert_array_equal(diverged, [True, False, False])
  alone, _ = trained("submesh", (1e30, 0.01, 0.01), IMAGES)
  assert not np.isfinite(losses[0])
  np.testing.assert_allclose(losses[1:], alone[1:], rtol=1e-5)
  beside_a_finite_one, _ = trained(strategy, (0.02, 0.01, 0.01), IMAGES)
  np.testing.assert_array_equal(losses[1:], beside_a_finite_one[1:])


@pytest.mark.parametrize(
  ("num_devices", "strides"), [(1, 2), (2, 1)], ids=["strided", "two_on_each_device"]
)
def test_a_batch_with_a_nan_does_not_reach_other_members(num_devices, strides):
  rates = (0.01, 0.02, 0.03, 0.04)
  own_ZBHWC = np.stack([IMAGES] * len(rates))
  own_ZBHWC[0, 0, 0, 0, 0] = np.nan
  losses, diverged = trained("stacked", rates, own_ZBHWC, num_devices, strides)
  np.testing.assert_array_equal(diverged, [True, False, False, False])
  alone, _ = trained("submesh", rates, own_ZBHWC, 1, strides)
  np.testing.assert_allclose(losses, alone, rtol=1e-5)


class Operation(nn.Module):
  """A dense layer and an operation."""

  operation: Callable

  @nn.compact
  def __call__(self, x_BHWC):
    y_BHWC = nn.Dense(x_BHWC.shape[-1])(x_BHWC)
    return self.operation(self, y_BHWC)


@pytest.mark.slow
@jax.numpy_dtype_promotion("standard")  # the operations of vectors mix types and ranks
@jax.numpy_rank_promotion("allow")
@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("name", SWEPT)
def test_no_operation_mixes_members(name, poison):
  """Values and gradients of the others have the bits that they have beside a finite member."""
  keep_members_apart()
  model = Operation(SWEPT[name])
  rngs = {"params": jax.random.key(1), "dropout": jax.random.key(2)}
  draw = np.random.default_rng(0).normal
  x_ZBHWC = draw(size=(MEMBERS, *SHAPE)).astype(np.float32)
  variables = jax.jit(jax.vmap(model.init, in_axes=(None, 0)))(rngs, x_ZBHWC)

  def run(params, rest, x_BHWC):
    def total(params, x_BHWC):
      y, updated = model.apply({"params": params, **rest}, x_BHWC, rngs=rngs, mutable=list(rest))
      return jnp.sum(jnp.sin(y)), (y, updated)

    return jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(params, x_BHWC)

  rest = dict(variables)
  params = rest.pop("params")
  for x_axis in (0, None):
    run_all = jax.jit(jax.vmap(run, in_axes=(0, 0, x_axis)))
    x = x_ZBHWC if x_axis == 0 else x_ZBHWC[0]
    poisoned = jax.tree.map(lambda leaf: leaf.at[1].set(poison), params)
    cases = [(poisoned, x)]
    if x_axis == 0:
      poisoned_x = x.copy()
      poisoned_x[1] = poison
      cases.append((params, poisoned_x))
    expected = run_all(params, rest, x)
    for case_params, case_x in cases:
      assert_others_have_the_bits(run_all(case_params, rest, case_x), expected)


def assert_others_have_the_bits(found, expected):
  """Of all members but member 1; the expected values are finite."""
  for got, want in trees.leaf_pairs(jax.device_get(found), jax.device_get(expected)):
    others = np.delete(want, 1, axis=0)
    assert np.isfinite(others).all()
    np.testing.assert_array_equal(np.delete(got, 1, axis=0), others)


@pytest.mark.slow
@pytest.mark.parametrize("decoder_block", MODELS)
def test_no_decoder_mixes_members(decoder_block):
  keys = {"decoder_block": decoder_block, "base_num_decoder_layers": 4, "sparse_matmul": True}
  if decoder_block.startswith("gemma4"):
    keys["sliding_window_size"] = 8
  cfg = config_of(**keys, **mesh_keys("fsdp=1")).model
  model = Decoder(cfg, Sharder(build_mesh((1,) * 6, (1,) * 6, jax.devices()[:1])))
  tokens_BT = np.random.default_rng(0).integers(cfg.vocab_size, size=(2, 16), dtype=np.int32)
  key_Z = jax.random.split(jax.random.key(0), MEMBERS)
  variables = jax.jit(jax.vmap(model.init, in_axes=(0, None)))(key_Z, tokens_BT)
  params = meta.unbox(variables["params"])

  @jax.jit
  @jax.vmap
  def run_all(params):
    def total(params):
      logits_BTV = model.apply({"params": params}, tokens_BT)
      return jnp.sum(jnp.sin(logits_BTV)), logits_BTV

    return jax.value_and_grad(total, has_aux=True)(params)

  poisoned = jax.tree.map(lambda leaf: leaf.at[1].set(np.nan), params)
  assert_others_have_the_bits(run_all(poisoned), run_all(params))
