"""Layers that a pattern lists: their order, and the stacks that they are in."""

import random

import pytest

from maxlite.config import load_config
from maxlite.config.schema import ModelConfig
from maxlite.models.layer_stacks import layer_specs, layer_stacks

LETTERS = {
  ("mamba", ""): "M",
  ("attention", ""): "*",
  ("", "mlp"): "-",
  ("", "moe"): "E",
}


def model_of(pattern):
  return ModelConfig(
    decoder_block="nemotron_h_moe",
    base_num_decoder_layers=len(pattern),
    hybrid_override_pattern=pattern,
  )


def letters(layers):
  return "".join(LETTERS[layer.mixer.name, layer.feed_forward.name] for layer in layers)


@pytest.mark.parametrize("seed", range(5))
def test_stacks_have_the_layers_of_the_pattern_in_order(seed):
  rng = random.Random(seed)
  for _ in range(50):
    unit = "".join(rng.choices("M*-E", k=rng.randint(1, 4)))
    pattern = unit * rng.randint(1, 4) + "".join(rng.choices("M*-E", k=rng.randint(0, 6)))
    model = model_of(pattern)
    assert letters(layer_specs(model)) == pattern
    stacks = layer_stacks(model)
    assert len({stack.name for stack in stacks}) == len(stacks)
    for stack in stacks:
      assert letters(stack.unit_specs(0)).count("E") <= 1
      assert len(set(map(stack.unit_specs, range(stack.num_units)))) == 1


def test_a_part_that_repeats_is_one_stack():
  stacks = layer_stacks(model_of("M-M-M-M*-*E*E"))
  found = [(letters(stack.unit_specs(0)), stack.num_units) for stack in stacks]
  assert found == [("M-", 3), ("M", 1), ("*", 1), ("-", 1), ("*E", 2)]


@pytest.mark.parametrize(
  ("preset", "most"), [("nemotron-h-8b", 13), ("nemotron3-nano-30b-a3b", 22)]
)
def test_presets_compile_few_layers(preset, most):
  stacks = layer_stacks(load_config([f"model_name={preset}"]).model)
  assert sum(stack.unit_size for stack in stacks) == most
