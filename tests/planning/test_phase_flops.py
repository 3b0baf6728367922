"""Estimated FLOPs of phases against their compiled steps."""

import jax
import pytest
from support.tiny import build, config_of

from maxlite.metrics.flops import train_flops
from maxlite.planning.hlo import parse
from maxlite.planning.hlo_cost import matmul_flops
from maxlite.training.program import flops_per_step, parameter_sizes

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
def program():
  phases = ", ".join(f"{{name: {n}, train: '{train}', steps: 1}}" for n, train in PHASES.items())
  return build(config_of(**KEYS, phases=f"[{phases}]"), jax.devices()[:1])


def counted(program):
  """Estimated FLOPs of a step by phase."""
  return dict(zip(PHASES, flops_per_step(program), strict=True))


def of_all(program):
  return train_flops(program.spec.model, parameter_sizes(program), program.batch_shape)


def test_a_phase_of_all_parameters_equals_a_step_and_others_cost_less(program):
  flops = counted(program)
  assert flops["all"] == of_all(program).total
  assert (
    flops["all"] > flops["out"] > flops["norms"] == flops["embed"] > 2 / 3 * flops["all"] * 0.95
  )
  assert flops["norms"] > flops["unembed"] == flops["head"] > flops["all"] / 3


@pytest.mark.parametrize(
  "name",
  [pytest.param(name, marks=[] if name == "unembed" else pytest.mark.slow) for name in PHASES],
)
def test_flops_equal_those_of_the_compiled_step(program, name):
  """The reference attention computes the full square, of which the estimate counts half."""
  program_of_phase = program.lower(program.objectives[list(PHASES).index(name)]).compile()
  has_backward = name not in ("head", "unembed")
  square = of_all(program).attention / (1 if has_backward else 3)
  compiled = matmul_flops(parse(program_of_phase.as_text())).total
  assert compiled == pytest.approx(counted(program)[name] + square, rel=0.02)
