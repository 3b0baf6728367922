"""FLOPs and sizes against published figures and hand-counted small models."""

import dataclasses

import pytest

from maxlite.config.schema import ModelConfig, MoeConfig
from maxlite.observe.flops import active_parameter_count, parameter_count, train_flops_per_step

LLAMA2_7B = ModelConfig(
  vocab_size=32000,
  base_emb_dim=4096,
  base_num_decoder_layers=32,
  base_num_query_heads=32,
  base_num_kv_heads=32,
  head_dim=128,
  base_mlp_dim=11008,
)
MIXTRAL_8X7B = dataclasses.replace(
  LLAMA2_7B,
  base_num_kv_heads=8,
  moe=MoeConfig(num_experts=8, num_experts_per_tok=2, base_moe_mlp_dim=14336),
)
# Widths are distinct primes, so that no two terms can stand in for each other.
TINY = ModelConfig(
  vocab_size=13,
  base_emb_dim=7,
  base_num_decoder_layers=2,
  base_num_query_heads=3,
  base_num_kv_heads=1,
  head_dim=5,
  base_mlp_dim=11,
  moe=MoeConfig(num_experts=17, num_experts_per_tok=2, base_moe_mlp_dim=19),
)


def test_published_sizes():
  assert parameter_count(LLAMA2_7B, moe=False) == 6_738_415_616
  assert active_parameter_count(LLAMA2_7B, moe=False) == 6_738_415_616
  assert parameter_count(MIXTRAL_8X7B, moe=True) == 46_702_792_704
  assert active_parameter_count(MIXTRAL_8X7B, moe=True) == 12_879_925_248


def test_tied_embeddings_are_one_parameter_but_still_a_matmul():
  tied = dataclasses.replace(TINY, logits_via_embedding=True)
  assert parameter_count(TINY, moe=False) - parameter_count(tied, moe=False) == 13 * 7
  flops = train_flops_per_step(TINY, 100, 10, moe=False)
  assert train_flops_per_step(tied, 100, 10, moe=False) == flops


@pytest.mark.parametrize(
  ("moe", "activations", "feed_forward"),
  [
    (False, ("silu", "linear"), 3 * 7 * 11),
    (False, ("relu",), 2 * 7 * 11),
    (True, ("silu", "linear"), 2 * 3 * 7 * 19 + 7 * 17),
    (True, ("relu",), 2 * 2 * 7 * 19 + 7 * 17),
  ],
)
def test_every_matmul_is_counted_once(moe, activations, feed_forward):
  model = dataclasses.replace(TINY, mlp_activations=activations)
  projections = 7 * 15 + 2 * (7 * 5) + 15 * 7
  attention = 3 * 2 * 2 * 100 * 10 * 15 / 2 * 2
  flops = train_flops_per_step(model, 100, 10, moe=moe)
  assert flops.attention == attention
  assert flops.total == 6 * 100 * (2 * (projections + feed_forward) + 7 * 13) + attention
