"""Token embedding and output projection."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.linen import meta

from maxlite.config.schema import ModelConfig
from maxlite.layers.embed import Embed, Unembed


def config_of(vocab_size, emb_dim, family="llama", dtype="float32"):
  return ModelConfig(family, vocab_size=vocab_size, base_emb_dim=emb_dim, dtype=dtype)


@pytest.mark.parametrize(("family", "scale"), [("llama", 1), ("gemma2", 2)])
def test_embeddings_have_the_activation_type(sharders, family, scale):
  embed = Embed(config_of(10, 4, family, "bfloat16"), sharders["one device"])
  tokens_BT = np.array([[3, 0, 9], [3, 3, 1]], np.int32)
  table_VD = np.random.default_rng(0).normal(size=(10, 4)).astype(np.float32)
  variables = {"params": {"embedding": table_VD}}
  x_BTD = embed.apply(variables, tokens_BT)
  expected_BTD = table_VD[tokens_BT] * scale
  np.testing.assert_array_equal(x_BTD, expected_BTD.astype(jnp.bfloat16))
  w_DV = embed.apply(variables, method=embed.unembedding)
  np.testing.assert_array_equal(w_DV, table_VD.T)


@pytest.mark.parametrize("mesh", ["one device", "data fsdp tensor"])
def test_gradients_of_a_frequent_token_are_summed_in_float32(sharders, mesh):
  embed = Embed(config_of(16, 8, dtype="bfloat16"), sharders[mesh])
  tokens_BT = np.full((4, 512), 3, np.int32)
  table_VD = jnp.ones((16, 8), jnp.float32)

  def total(table_VD):
    x_BTD = embed.apply({"params": {"embedding": table_VD}}, tokens_BT)
    return jnp.sum(x_BTD.astype(jnp.float32))

  gradient_VD = jax.jit(jax.grad(total))(table_VD)
  np.testing.assert_array_equal(gradient_VD[3], 4 * 512)  # a power of two; 256 in bfloat16
  np.testing.assert_array_equal(gradient_VD[4], 0)


@pytest.mark.parametrize("mesh", ["data fsdp tensor", "context expert fsdp"])
def test_a_lookup_and_its_gradient_are_not_rematerialized_on_a_mesh(sharders, mesh, capfd):
  """XLA prints "Involuntary full rematerialization" on stderr during compilation."""
  sharder = sharders[mesh]
  embed = Embed(config_of(16, 8), sharder)
  table_names = ("vocab", "embed")
  rows = ("activation_batch", "activation_length")
  tokens_BT = np.random.default_rng(0).integers(0, 16, (4, 6), np.int32)
  table_VD, dx_BTD = (np.random.default_rng(1).normal(size=s) for s in ((16, 8), (4, 6, 8)))

  def gradient(table_VD, tokens_BT, dx_BTD):
    def lookup(table_VD):
      return embed.apply({"params": {"embedding": table_VD}}, tokens_BT)

    return jax.vjp(lookup, table_VD)[1](dx_BTD)[0]

  names = (table_names, rows, (*rows, None))
  run = jax.jit(
    gradient,
    in_shardings=tuple(sharder.sharding(n) for n in names),
    out_shardings=sharder.sharding(table_names),
  )
  got_VD = run(table_VD.astype(np.float32), tokens_BT, dx_BTD.astype(np.float32))
  assert "rematerialization" not in capfd.readouterr().err
  want_VD = np.zeros((16, 8))
  np.add.at(want_VD, tokens_BT, dx_BTD)
  np.testing.assert_allclose(got_VD, want_VD, atol=1e-5)


def test_a_lookup_inside_a_shard_map_equals_plain_indexing(build_sharder):
  """With the axes and the shard_map over `data` of accumulation, see DecoderLoss."""
  sharder = build_sharder({"data": 2, "fsdp": 2, "tensor": 2})
  embed = Embed(config_of(16, 8), sharder.inside_shard_map("data"))
  draw = np.random.default_rng(0)
  tokens_BT = draw.integers(0, 16, (8, 6), np.int32)
  table_VD = draw.normal(size=(16, 8)).astype(np.float32)
  dx_BTD = draw.normal(size=(8, 6, 8)).astype(np.float32)

  def values_and_gradient(table_VD, tokens_BT, dx_BTD):
    def lookup(table_VD):
      return embed.apply({"params": {"embedding": table_VD}}, tokens_BT)

    x_BTD, pull_back = jax.vjp(lookup, table_VD)
    (dtable_VD,) = pull_back(dx_BTD)
    return x_BTD, jax.lax.psum(dtable_VD, "data")

  run = jax.shard_map(
    values_and_gradient,
    mesh=sharder.mesh,
    in_specs=(jax.P(), jax.P("data"), jax.P("data")),
    out_specs=(jax.P("data"), jax.P()),
    axis_names={"data"},
    check_vma=False,  # as in DecoderLoss
  )
  table = jax.device_put(table_VD, sharder.sharding(("vocab", "embed")))
  x_BTD, dtable_VD = jax.jit(run)(table, tokens_BT, dx_BTD)
  np.testing.assert_array_equal(x_BTD, table_VD[tokens_BT])
  want_VD = np.zeros((16, 8))
  np.add.at(want_VD, tokens_BT, dx_BTD)
  np.testing.assert_allclose(dtable_VD, want_VD, atol=1e-5)


def test_initial_tables_give_logits_of_unit_variance(sharders):
  """For normalised hidden states."""
  embed = Embed(config_of(32, 256), sharders["one device"])
  table = embed.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))["params"]["embedding"]
  kernel = Unembed(config_of(32, 256)).init(jax.random.key(0))["params"]["kernel"]
  assert table.names == ("vocab", "embed")
  assert kernel.names == ("embed", "vocab")
  for boxed in (table, kernel):
    assert np.std(meta.unbox(boxed)) == pytest.approx(1 / 16, rel=0.05)
