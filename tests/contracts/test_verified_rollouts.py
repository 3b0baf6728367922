"""The tokens of rollouts of every family are those of a loop of forward passes without a cache."""

import jax
import pytest
import tiny_families
from support.verified_rollouts import assert_drawn, open_sampler, write_prompts

from maxlite.config.model_families import MODELS


@pytest.mark.slow  # tests/rollouts/test_sampler.py has a mixture by default
@pytest.mark.parametrize("family", MODELS)
def test_tokens_are_those_of_the_trained_program(family, tmp_path):
  """Of an engine that computes another model, so that most tokens are replaced."""
  keys = tiny_families.TINY | tiny_families.FAMILY_KEYS.get(family, {})
  del keys["vocab_size"]
  values = {}
  for name, value in keys.items():
    values[name] = f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else value
  sampler, params, prompts = open_sampler(
    write_prompts(tmp_path), 1.2, jax.devices()[:1], **values | {"decoder_block": family}
  )
  rollouts = sampler.sample(params, prompts, [0, 1])
  for rollout in rollouts.rollouts[:6]:
    assert_drawn(sampler, params, rollout)
