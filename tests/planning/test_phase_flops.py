"""Estimated FLOPs of phases against their compiled steps."""

import jax
import pytest
from support.tiny import config_of

from maxlite.metrics.flops import train_flops
from maxlite.planning.hlo import parse
from maxlite.planning.hlo_cost import matmul_flops
from maxlite.training.trainer import build_trainer

pytestmark = pytest.mark.usefixtures("fast_programs")
PHASES = {
  "all": ".*",
  "lora": ".*lora_.*",
  "norms": "layers/.*norm.*",
  "out": "layers/attention/out/kernel",
  "head": "final_norm/.*",
  "unembed": "unembed/.*",
  "embed": "embed/.*",
}
KEYS = {
  "decoder_block": "llama",
  "base_emb_dim": 32,
  "base_mlp_dim": 96,
  "lora_rank": 4,
  "logits_chunk_tokens": 4096,
  "base_num_decoder_layers": 2,
  "scan_layers": True,
  "scan_unroll": 1,
  "attention": "reference",
}


@pytest.fixture(scope="module")
def trainer():
  phases = ", ".join(f"{{name: {n}, train: '{train}', steps: 1}}" for n, train in PHASES.items())
  return build_trainer(config_of(**KEYS, phases=f"[{phases}]"), jax.devices()[:1])


def counted(trainer):
  """Estimated FLOPs of a step by phase."""
  return dict(zip(PHASES, trainer.flops_per_step, strict=True))


def of_all(trainer):
  return train_flops(trainer.cfg.model, trainer.parameter_sizes, trainer.batch_shape)


def test_a_phase_of_all_parameters_equals_a_step_and_others_cost_less(trainer):
  flops = counted(trainer)
  assert flops["all"] == of_all(trainer).total
  assert (
    flops["all"] > flops["out"] > flops["norms"] == flops["embed"] > 2 / 3 * flops["all"] * 0.95
  )
  assert flops["norms"] > flops["unembed"] == flops["head"] > flops["all"] / 3


@pytest.mark.parametrize(
  "name",
  [pytest.param(name, marks=[] if name == "unembed" else pytest.mark.slow) for name in PHASES],
)
def test_flops_equal_those_of_the_compiled_step(trainer, name):
  """The reference attention computes the full square, of which the estimate counts half."""
  program = trainer.lower_step(list(PHASES).index(name)).compile()
  has_backward = name not in ("head", "unembed")
  square = of_all(trainer).attention / (1 if has_backward else 3)
  compiled = matmul_flops(parse(program.as_text())).total
  assert compiled == pytest.approx(counted(trainer)[name] + square, rel=0.02)
