"""Rollouts: every token is the one that a loop of forward passes of the trained model draws."""

import json

import jax
import numpy as np
import pytest
from support.tiny import mesh_keys
from support.verified_rollouts import assert_drawn, open_sampler, write_prompts

from maxlite.training.loss import run_forward

slow = pytest.mark.slow


@pytest.fixture
def prompts_file(tmp_path):
  return write_prompts(tmp_path)


@pytest.mark.parametrize(
  ("factor", "keys"),
  [
    pytest.param(1.0, {}, marks=slow),
    (1.2, {}),
    pytest.param(1.0, {"dtype": "bfloat16"}, marks=slow),
    pytest.param(1.2, {"decoder_block": "deepseek"}, marks=slow),
    pytest.param(1.2, {"decoder_block": "qwen3_next", "base_num_decoder_layers": 4}, marks=slow),
  ],
)
def test_tokens_are_those_of_a_loop_of_forward_passes(prompts_file, factor, keys):
  """Also if the engine computes another model, whose tokens are then replaced."""
  sampler, params, prompts = open_sampler(prompts_file, factor, jax.devices()[:1], **keys)
  rollouts = sampler.sample(params, prompts, [0, 1])
  if "dtype" not in keys:
    assert (rollouts.row["rollout_agreement"] < 1) == (factor != 1)
  for rollout in rollouts.rollouts:
    assert_drawn(sampler, params, rollout)
  assert len({tuple(rollout.ids) for rollout in rollouts.rollouts[:4]}) > 1


@pytest.mark.parametrize(
  ("mesh", "size", "num_rows", "sparse"),
  [
    ("expert=2", 2, 2, "false"),  # on one device these are the programs of the test before
    pytest.param("expert=2", 2, 8, "true", marks=slow),
    pytest.param("fsdp=2 expert=4", 8, 8, "true", marks=slow),
  ],
)
def test_a_mesh_gives_the_tokens_of_one_device(prompts_file, mesh, size, num_rows, sparse):
  results = []
  for num_devices, degrees in ((1, ""), (size, mesh)):
    rows = {"per_device_batch_size": num_rows // num_devices}
    keys = mesh_keys(degrees) | rows | {"sparse_matmul": sparse}
    devices = jax.devices()[:num_devices]
    sampler, params, prompts = open_sampler(prompts_file, 1.0, devices, **keys)
    results.append(sampler.sample(jax.device_get(params), prompts, [0, 1]))
  one, sharded = results
  assert [each.ids for each in sharded.rollouts] == [each.ids for each in one.rollouts]
  np.testing.assert_allclose(sharded.log_prob_NC, one.log_prob_NC, atol=1e-5)


@slow
def test_unverified_tokens_are_the_engines_and_their_experts_the_trained_programs(prompts_file):
  sampler, params, prompts = open_sampler(
    prompts_file,
    1.2,
    jax.devices()[:1],
    rollout_verification="off",
    rollout_routes="replay",
  )
  rollouts = sampler.sample(params, prompts, [0, 1])
  assert "rollout_agreement" not in rollouts.row
  differing = 0
  for rollout in rollouts.rollouts:
    try:
      assert_drawn(sampler, params, rollout)
    except AssertionError:
      differing += 1
  assert differing
  program = sampler._program
  batch = rollouts.batch(sampler.sizes, program.batch_shape, is_first=True, masks_truncated=False)

  @jax.jit
  def experts(params, batch):
    hidden = run_forward(program.model, params, batch, None, drafts=False, records_experts=True)
    return hidden.expert_BTNK

  real = batch.segment_BT > 0
  live_BTNK = np.asarray(experts(params, batch))
  np.testing.assert_array_equal(batch.expert_BTNK[real], live_BTNK[real])


ENVIRONMENT = """
def answer(messages):
  assert messages[-1]["role"] == "assistant"
  if len(messages) > 2:
    return None
  return [{"role": "user", "content": "z"}]
"""
TEMPLATE = (
  "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
  "{% endfor %}"
)


def test_an_environment_answers_turns_whose_tokens_are_not_the_models(tmp_path):
  """Tokens are not encoded again: those of the first turn stay as they were drawn."""
  path = tmp_path / "prompts.jsonl"
  path.write_text('{"prompt": [{"role": "user", "content": "ab"}]}\n')
  (tmp_path / "environment_of_tests.py").write_text(ENVIRONMENT)
  (tmp_path / "template.jinja").write_text(TEMPLATE)
  sampler, params, prompts = open_sampler(
    path,
    1.2,
    jax.devices()[:1],
    chat_template_path=tmp_path / "template.jinja",
    rollout_environment=f"{tmp_path}/environment_of_tests.py:answer",
    max_completion_length=12,
    max_prefill_predict_length=5,
    global_batch_size=4,
    reward_functions="[]",
  )
  sampler.writer.stop_token_ids = tuple(range(100, 264))  # so that turns end
  rollouts = sampler.sample(params, prompts, [0, 1]).rollouts
  answered = [each for each in rollouts if each.answers]
  assert answered
  for rollout in rollouts:
    assert_drawn(sampler, params, rollout)
  for rollout in answered:
    (answer,) = rollout.answers
    said = [n for n, is_own in enumerate(rollout.is_own) if not is_own]
    assert said[0] == answer.num_before
    assert [rollout.ids[n] for n in said][-1] == ord("z")


def test_stop_strings_end_a_turn_and_have_no_loss(prompts_file):
  """They may be of several tokens, and of tokens that verification replaces."""
  sampler, params, prompts = open_sampler(prompts_file, 1.2, jax.devices()[:1])
  free = sampler.sample(params, prompts, [0, 1])
  spelled = [text[1:3] for text in free.texts if text[1:3].isascii() and len(text) > 3]
  stop = spelled[0]
  sampler, params, prompts = open_sampler(
    prompts_file, 1.2, jax.devices()[:1], rollout_stop=json.dumps([stop])
  )
  stopped = sampler.sample(params, prompts, [0, 1])
  assert any(text != other for text, other in zip(stopped.texts, free.texts, strict=True))
  for rollout, text, whole in zip(stopped.rollouts, stopped.texts, free.rollouts, strict=True):
    assert rollout.ids == whole.ids[: len(rollout.ids)]
    assert stop not in text
    if len(rollout.ids) < len(whole.ids) or not all(rollout.has_loss):
      assert rollout.finish_reason == "stop"
      assert rollout.has_loss == [True] * (len(rollout.ids) - 2) + [False] * 2
