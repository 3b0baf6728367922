"""What the backward pass recomputes under each remat_policy, counted in matmuls."""

import jax
import jax.numpy as jnp
import pytest
from flax.linen import meta

from maxlite.config.model_families import MODELS
from maxlite.config.schema import DEFAULTS, Config, build
from maxlite.models import Decoder
from maxlite.models.decoder import MATMUL_OUTPUTS
from maxlite.sharding import Sharder, build_mesh


def num_matmuls(family, policy, *saved):
  """Matmuls in the program of a gradient; those in a loop's body count once."""
  changes = {"decoder_block": family, "remat_policy": policy, "remat_saved_names": saved}
  sharder = Sharder(build_mesh((1,) * 6, (1,) * 6, jax.devices()[:1]))
  model = Decoder(build(Config, DEFAULTS | changes).model, sharder)
  tokens_BT = jnp.zeros((1, 8), jnp.int32)
  params = meta.unbox(jax.eval_shape(model.init, jax.random.key(0), tokens_BT))["params"]
  total = jax.grad(lambda params: jnp.sum(model.apply({"params": params}, tokens_BT)))
  return str(jax.make_jaxpr(total)(params)).count("dot_general[")


@pytest.mark.parametrize("family", MODELS)
def test_more_is_recomputed_the_less_is_kept(family):
  none, full = num_matmuls(family, "none"), num_matmuls(family, "full")
  minimal = num_matmuls(family, "minimal")
  some = num_matmuls(family, "custom", "query_proj", "out_proj")
  assert none <= minimal < some < full
  assert num_matmuls(family, "custom") == full
  assert num_matmuls(family, "custom", *MATMUL_OUTPUTS) == minimal
