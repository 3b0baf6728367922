"""Tiny models of every family match `transformers`: stored results, or computed live."""

import subprocess
import sys
from pathlib import Path

import pytest
from hf_measure import FIXTURES, logits_and_loss, measure
from support.needs import needs_transformers
from support.slow_cases import fast_only

from maxlite.hf.families import FAMILIES

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "fixtures" / "hf_parity.py"
# Errors from mistakes are orders of magnitude larger, those of float32 rounding one smaller.
LOGITS = 1e-5
GRADIENT = 1e-4
LOSS = 1e-5
LOSSES = 1e-4
# Families whose results the default tests compare; compiling each takes seconds. SmolLM3 is a Llama
# of which some layers have no rotary embedding.
FAST = ("deepseek_v3", "gpt_oss", "granitemoe", "qwen3_next", "smollm3")


def test_every_family_has_a_small_fixture():
  for family in FAMILIES:
    files = [path for path in (FIXTURES / family).rglob("*") if path.is_file()]
    assert 0 < sum(path.stat().st_size for path in files) < 300_000, family


@pytest.mark.parametrize("family", fast_only(FAMILIES, *FAST))
def test_logits_and_loss_of_packed_documents(family):
  logits, loss = logits_and_loss(FIXTURES / family)
  assert logits < LOGITS
  assert loss < LOSS


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_gradient_and_six_steps_of_adamw(family):
  assert_close(measure(FIXTURES / family))


# Dense, mixture of experts, and latent attention (DeepSeek-V2 without a query latent).
LIVE = ("qwen3", "mixtral", "deepseek_v2_lite")
# Models with keys that no fixture has.
VARIANTS = (
  *("exaone4_global", "gemma4_dense", "glm4_moe_air", "qwen3_moe_dense", "olmoe_clipped"),
  *("falcon_alibi", "falcon_grouped", "falcon_own_norms", "gpt_neox_sequential"),
  *("mixtral_window", "qwen2_moe_listed", "qwen3_moe_listed", "qwen3_next_listed"),
  *("ernie4_5_moe_every_second", "glm4_moe_lite_listed"),
  *("granitemoehybrid_dense", "granitemoehybrid_rope", "nemotron_h_dense"),
  "nemotron_h_latent",
  *("falcon_h1_without_norm", "falcon_h1_norm_first"),
  *("llama4_text_maverick", "cohere_plain"),
  *("phi3_longrope", "llama_dynamic", "llama_two_mscales", "deepseek_v2_two_mscales"),
)


@pytest.mark.hf
@needs_transformers
@pytest.mark.parametrize(
  "models",
  [LIVE, pytest.param(sorted({*FAMILIES, *VARIANTS} - set(LIVE)), marks=pytest.mark.slow)],
)
def test_other_weights_live(tmp_path, models):
  command = [sys.executable, str(SCRIPT), "--out", str(tmp_path), "--seed", "1", *models]
  subprocess.run(command, check=True)
  for model in models:
    assert_close(measure(tmp_path / model))


def assert_close(errors):
  assert errors.logits < LOGITS
  assert errors.gradient < GRADIENT, errors.worst
  assert errors.loss < LOSS
  assert errors.losses < LOSSES
