"""FLOPs and parameter counts against published figures and hand-counted small models."""

import dataclasses

import pytest

from maxlite.config import load_config
from maxlite.config.schema import LatentAttentionConfig, ModelConfig, MoeConfig
from maxlite.metrics.flops import active_parameter_count, parameter_sizes, train_flops

LLAMA2_7B = ModelConfig(
  decoder_block="llama",
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
  decoder_block="mixtral",
  base_num_kv_heads=8,
  moe=MoeConfig(num_experts=8, num_experts_per_tok=2, base_moe_mlp_dim=14336),
)
# Widths are distinct primes, or twice one if they must be even, so that no terms can be confused.
TINY = ModelConfig(
  vocab_size=13,
  base_emb_dim=7,
  base_num_decoder_layers=2,
  base_num_query_heads=3,
  base_num_kv_heads=1,
  head_dim=10,
  base_mlp_dim=11,
  moe=MoeConfig(num_experts=17, num_experts_per_tok=2, base_moe_mlp_dim=19),
)


def flops_of(model, *batch_shape):
  return train_flops(model, parameter_sizes(model), batch_shape)


def counts_of(model):
  """(all parameters, active ones)"""
  sizes = parameter_sizes(model)
  return sum(sizes.values()), active_parameter_count(sizes, model)


def test_published_parameter_counts():
  assert counts_of(LLAMA2_7B) == (6_738_415_616, 6_738_415_616)
  assert counts_of(MIXTRAL_8X7B) == (46_702_792_704, 12_879_925_248)


def test_tied_embeddings_are_counted_once_and_still_a_matmul():
  tied = dataclasses.replace(TINY, logits_via_embedding=True)
  assert counts_of(TINY)[0] - counts_of(tied)[0] == 13 * 7
  assert flops_of(tied, 10, 10) == flops_of(TINY, 10, 10)


@pytest.mark.parametrize(
  ("family", "activations", "feed_forward"),
  [
    ("llama", ("silu", "linear"), 3 * 7 * 11),
    ("llama", ("relu",), 2 * 7 * 11),
    ("mixtral", ("silu", "linear"), 2 * 3 * 7 * 19 + 7 * 17),
    ("olmoe", ("relu",), 2 * 2 * 7 * 19 + 7 * 17),
  ],
)
def test_every_matmul_is_counted_once(family, activations, feed_forward):
  model = dataclasses.replace(TINY, decoder_block=family, mlp_activations=activations)
  projections = 7 * 30 + 2 * (7 * 10) + 30 * 7
  attention = 3 * 2 * 2 * 100 * 10 * 30 / 2 * 2
  flops = flops_of(model, 10, 10)
  assert flops.attention == attention
  assert flops.total == 6 * 100 * (2 * (projections + feed_forward) + 7 * 13) + attention


@pytest.mark.parametrize(("q_lora_rank", "query"), [(0, 7 * 3 * 51), (29, 7 * 29 + 29 * 3 * 51)])
def test_latent_attention_and_dense_layers_are_counted(q_lora_rank, query):
  """Layers: one dense, then twice a dense one and a mixture with two shared experts."""
  mla = LatentAttentionConfig(
    q_lora_rank, 31, qk_nope_head_dim=5, qk_rope_head_dim=46, v_head_dim=2
  )
  plan = dataclasses.replace(
    TINY.moe, shared_experts=2, first_num_dense_layers=1, interleave_moe_layer_step=2
  )
  model = dataclasses.replace(
    TINY, decoder_block="deepseek", base_num_decoder_layers=5, mla=mla, moe=plan
  )
  projections = query + 7 * (31 + 46) + 31 * 3 * (5 + 2) + 3 * 2 * 7
  feed_forward = 3 * (3 * 7 * 11) + 2 * ((2 + 2) * 3 * 7 * 19 + 7 * 17)
  attention = 6 * 100 * 5 * 3 * (5 + 46 + 2) * 10 / 2
  flops = flops_of(model, 10, 10)
  assert flops.attention == attention
  assert flops.total == 6 * 100 * (5 * projections + feed_forward + 7 * 13) + attention


def test_deepseek2_16b_equals_maxtext():
  model = load_config(["model_name=deepseek2-16b"]).model
  flops = flops_of(model, 24, 2048)
  assert round(flops.total / 1e12, 2) == 764.67
  assert round(100 * flops.attention / flops.total, 2) == 5.46


@pytest.mark.parametrize(("family", "num_local"), [("llama", 4), ("gemma2", 2), ("gpt_oss", 2)])
def test_a_window_reduces_scores_of_local_layers_only(family, num_local):
  model = dataclasses.replace(TINY, decoder_block=family, base_num_decoder_layers=4)
  length = 8
  window = 3
  seen = [min(t + 0.5, window) for t in range(length)]  # halves, as the causal square is halved
  whole, local = (
    flops_of(changed, 2, length).attention
    for changed in (model, dataclasses.replace(model, sliding_window_size=window))
  )
  hidden = length**2 / 2 - (length * window - window**2 / 2)
  assert sum(seen) == pytest.approx(length * window - window**2 / 2)
  assert local / whole == pytest.approx(1 - num_local / 4 * hidden / (length**2 / 2))
