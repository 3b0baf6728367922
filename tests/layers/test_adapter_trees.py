"""Trees of parameters with adapters."""

import numpy as np

from maxlite.layers.lora import drop_missing_modules, merge_lora


def test_only_optional_parameters_that_were_not_saved_are_dropped():
  """A run with adapters of attention is continued with adapters of the experts too."""
  attention = {"kernel": 1, "lora_a": {"kernel": 2}, "lora_b": {"kernel": 3}}
  moe = {"wi_0": 4, "lora_a": {"wi_0": 5}, "lora_b": {"wi_0": 6}}
  saved = {"params/attention/kernel", "params/attention/lora_a/kernel"}
  saved |= {"params/attention/lora_b/kernel", "step"}
  kept = drop_missing_modules({"attention": attention, "moe": moe}, saved)
  assert kept == {"attention": attention, "moe": {"wi_0": 4}}


def test_the_adapters_of_experts_are_merged_expert_by_expert():
  rng = np.random.default_rng(0)
  w_EDF = rng.normal(size=(3, 4, 5)).astype(np.float32)
  a_EDR = rng.normal(size=(3, 4, 2)).astype(np.float32)
  b_ERF = rng.normal(size=(3, 2, 5)).astype(np.float32)
  params = {"wi_0": w_EDF, "lora_a": {"wi_0": a_EDR}, "lora_b": {"wi_0": b_ERF}}
  merged = merge_lora({"moe": params}, lora_alpha=3.0)["moe"]
  assert merged.keys() == {"wi_0"}
  for expert in range(3):
    expected = w_EDF[expert] + a_EDR[expert] @ b_ERF[expert] * (3 / 2)
    np.testing.assert_allclose(merged["wi_0"][expert], expected, rtol=1e-5, atol=1e-6)
