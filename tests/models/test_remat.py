"""The number of matmuls that the backward pass recomputes under each remat_policy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import meta
from support.slow_cases import fast_only

from maxlite.config.model_families import MODELS
from maxlite.config.schema import DEFAULTS, Config, build
from maxlite.models import Decoder
from maxlite.models.remat import MATMUL_OUTPUTS
from maxlite.sharding import Sharder, build_mesh

TOKENS_BT = np.zeros((1, 8), np.int32)
FAST = ("gemma2",)  # with windows and norms after each part


def model_of(family, policy, saved=()):
  changes = {"decoder_block": family, "remat_policy": policy, "remat_saved_names": saved}
  sharder = Sharder(build_mesh((1,) * 6, (1,) * 6, jax.devices()[:1]))
  return Decoder(build(Config, DEFAULTS | changes).model, sharder)


def abstract_params(family):
  shapes = jax.eval_shape(model_of(family, "none").init, jax.random.key(0), TOKENS_BT)
  return meta.unbox(shapes)["params"]


def gradient_jaxpr(params, family, policy, saved=()):
  """The jaxpr of a gradient; a loop body is printed once."""
  model = model_of(family, policy, saved)

  def total(params):
    return jnp.sum(model.apply({"params": params}, TOKENS_BT))

  return str(jax.make_jaxpr(jax.grad(total))(params))


@pytest.mark.parametrize("family", fast_only(MODELS, *FAST))
def test_saving_less_recomputes_more(family):
  params = abstract_params(family)

  def num_matmuls(policy, saved=()):
    return gradient_jaxpr(params, family, policy, saved).count("dot_general[")

  none = num_matmuls("none")
  full = num_matmuls("full")
  minimal = num_matmuls("minimal")
  some = num_matmuls("custom", saved=("query_proj", "out_proj"))
  assert none <= minimal < some < full
  assert num_matmuls("custom") == full
  assert num_matmuls("custom", saved=MATMUL_OUTPUTS) == minimal


def test_offload_moves_what_minimal_saves_to_the_host_and_back():
  params = abstract_params("llama")
  offload = gradient_jaxpr(params, "llama", "offload")
  minimal = gradient_jaxpr(params, "llama", "minimal")
  assert offload.count("dot_general[") == minimal.count("dot_general[")
  to_host = offload.count("MemorySpace.Host")
  to_device = offload.count("MemorySpace.Device")
  assert to_host == to_device > 6
  assert "MemorySpace" not in minimal
