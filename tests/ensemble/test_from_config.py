"""Members from configs: which of them are one stack, and that its numbers are of solo runs."""

import jax
import numpy as np
import pytest
from families import jit_on_one_device, largest_error
from support.tiny import KEYS, uneven_batch

from maxlite.config import load_config
from maxlite.config.members import members_of
from maxlite.ensemble.engines.engine_base import Placement
from maxlite.ensemble.engines.grouping import describe_difference, group_members
from maxlite.ensemble.engines.member_group import MemberGroup
from maxlite.ensemble.run.from_config import ConfigPrograms

TINY = KEYS | {"decoder_block": "llama", "base_num_decoder_layers": 1}


def programs_of(members: str, **keys: object) -> list:
  """The programs of the members on one device."""
  arguments = [f"{name}={value}" for name, value in (TINY | keys).items()]
  cfg = load_config([*arguments, f"members={members}"])
  builder = ConfigPrograms(jax.devices(), 16, np.ones(cfg.model.vocab_size))
  placement = Placement(tuple(jax.devices()[:1]))
  return [builder.build(member, placement) for member in members_of(cfg)]


@pytest.mark.parametrize(
  ("members", "groups"),
  [
    ("[{init_weights_seed: 0}, {init_weights_seed: 1}, {learning_rate: 1}]", [[0, 1, 2]]),
    (
      "[{adam_b2: 0.9}, {warmup_steps_fraction: 0.3}, {learning_rate_schedule_steps: 5}]",
      [[0, 1, 2]],
    ),
    (
      "[{gradient_clipping_threshold: 0}, {gradient_clipping_threshold: 1}, {name: a}]",
      [[0, 2], [1]],
    ),
    ("[{opt_type: adamw}, {opt_type: lion}]", [[0], [1]]),
    ("[{base_mlp_dim: 32}, {base_mlp_dim: 48}, {learning_rate: 1}]", [[0, 2], [1]]),
    ("[{z_loss_multiplier: 0}, {z_loss_multiplier: 0.1}]", [[0], [1]]),
  ],
)
def test_members_that_differ_in_seeds_and_numbers_of_the_optimizer_are_one_stack(members, groups):
  programs = programs_of(members, gradient_clipping_threshold=0)
  assert group_members(programs) == groups


def test_the_first_key_that_a_stack_cannot_have_is_named():
  first, second = programs_of("[{name: a}, {name: b, base_mlp_dim: 48, learning_rate: 1}]")
  assert describe_difference(first, second) == "base_mlp_dim is 32 in a, and 48 in b"


@pytest.mark.slow
def test_every_number_of_the_optimizer_may_differ_in_a_stack():
  """Learning rates of five steps, the first losses, and the parameters, beside solo runs."""
  members = (
    "[{learning_rate: 1e-2, warmup_steps_fraction: 0.5, learning_rate_schedule_steps: 7}, "
    "{learning_rate: 3e-3, adam_b1: 0.8, adam_b2: 0.99, adam_eps: 1e-3, adam_weight_decay: 0.3, "
    "warmup_steps_fraction: 0.2, learning_rate_final_fraction: 0.5, init_weights_seed: 3, "
    "gradient_clipping_threshold: 0.1}]"
  )
  programs = programs_of(members, gradient_clipping_threshold=1)
  group = MemberGroup(programs, own_batches=False)
  state = jit_on_one_device(group.init)()
  step = jit_on_one_device(group.step)
  solo_states = [jit_on_one_device(each.functions.init)(each.seed_array) for each in programs]
  solo_steps = [jit_on_one_device(each.functions.step) for each in programs]
  for n in range(5):
    batch = uneven_batch(n)
    state, metrics = step(state, batch)
    for z, solo_step in enumerate(solo_steps):
      solo_states[z], expected = solo_step(solo_states[z], batch)
      for name in ("learning_rate", "loss", "grad_norm"):
        np.testing.assert_allclose(metrics[name][z], expected[name], rtol=2e-5, err_msg=name)
  for z, solo in enumerate(solo_states):
    member = group.with_shared(jax.device_get(group.take(state, z)), {})
    assert largest_error(member.params, jax.device_get(solo.params)) <= 2e-5
