"""Rewards and advantages: their values, and one clear line for what a function does wrong."""

import dataclasses
import json

import numpy as np
import pytest

from maxlite.config.schema import RolloutConfig
from maxlite.data.sources.prompts import Prompt
from maxlite.errors import UserError
from maxlite.registry import ADVANTAGES
from maxlite.rollouts.rewards import Rewards, check_rewards

TEXTS = ["cab", ' {"a": 1} ', "12345678"]


def prompts_of(**fields):
  return [
    Prompt(f"file:{n}", "p", [1], {name: values[n] for name, values in fields.items()}, {})
    for n in range(len(TEXTS))
  ]


def rewards_of(*functions, **keys):
  return Rewards(dataclasses.replace(RolloutConfig(), reward_functions=functions, **keys))


def test_built_in_rewards():
  rewards = rewards_of("equal_answer", "regex", "json_valid", "length")
  prompts = prompts_of(
    answer=["cab ", "x", 12345678], pattern=["c..", "c..", r"\d{3}"], max_characters=[3, 100, 5]
  )
  reward_NR = rewards(prompts, TEXTS)
  wanted = [[1, 1, 0, 1], [0, 0, 1, 1], [1, 0, 1, 0.4]]
  np.testing.assert_allclose(reward_NR, wanted)


def function_in(folder, body):
  code = f"import time\ndef my(*, completions, **fields):\n  {body}\n"
  (folder / "my_reward.py").write_text(code)
  return f"{folder}/my_reward.py:my"


@pytest.mark.parametrize(
  ("body", "error"),
  [
    ("return [1.0]", "returned"),
    ("return [1.0, float('nan'), 2.0]", "nan for the completion"),
    ("return [1, 'x', 2]", "returned"),
    ("raise KeyError('answer')", "KeyError"),
    ("import sys; sys.exit(0)", "SystemExit"),
    ("time.sleep(30)", "reward_timeout_seconds=0.05"),
  ],
)
def test_a_wrong_reward_is_one_line_that_names_it(tmp_path, monkeypatch, body, error):
  monkeypatch.syspath_prepend(str(tmp_path))
  monkeypatch.delitem(__import__("sys").modules, "my_reward", raising=False)
  rewards = rewards_of(function_in(tmp_path, body), reward_timeout_seconds=0.05)
  with pytest.raises(UserError, match=error) as raised:
    rewards(prompts_of(), TEXTS)
  assert "reward my" in str(raised.value)
  assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
  ("functions", "keys", "error"),
  [
    ((), {}, r"reward_functions=\[equal_answer\]"),
    (("equal",), {}, "FILE.py:FUNCTION"),
    (("missing.py:f",), {}, "no file"),
    (("regex", "length"), {"reward_weights": (1.0,)}, "reward_weights"),
  ],
)
def test_rewards_are_checked_before_a_run(functions, keys, error):
  cfg = dataclasses.replace(RolloutConfig(), reward_functions=functions, **keys)
  with pytest.raises(UserError, match=error):
    check_rewards(cfg, ["grpo"])


def test_a_missing_field_is_named():
  with pytest.raises(UserError, match="`answer`"):
    rewards_of("equal_answer")(prompts_of(answer=["a", None, "b"]), TEXTS)


def test_advantages_are_those_of_their_definitions():
  reward_NG = np.asarray([[1.0, 0.0, 0.0, 1.0], [2.0, 2.0, 2.0, 2.0], [3.0, -1.0, 0.0, 0.0]])
  for row in range(3):
    rewards = reward_NG[row]
    for n, reward in enumerate(rewards):
      others = np.delete(rewards, n).mean()
      mean = rewards.mean()
      deviation = np.sqrt(np.sum((rewards - mean) ** 2) / 3)
      wanted = {
        "leave_one_out": reward - others,
        "group_mean": reward - mean,
        "group": (reward - mean) / (deviation + 1e-4),
      }
      for name, value in wanted.items():
        found = ADVANTAGES[name](reward_NG)
        assert found.shape == reward_NG.shape
        assert found[row, n] == pytest.approx(value, abs=1e-12)


def test_prompts_are_read_with_their_fields(tmp_path):
  from support.tiny import config_of

  from maxlite.data.sources import prompts_source

  path = tmp_path / "prompts.jsonl"
  rows = [{"prompt": "ab", "answer": 1}, {"messages": [{"role": "user", "content": "x"}]}]
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  keys = {"dataset_type": "prompts", "dataset_path": path, "loss_type": "grpo"}

  def read(**more):
    cfg = config_of(**keys | more)
    return prompts_source(cfg.data, cfg.model.vocab_size, tmp_path).train

  with pytest.raises(UserError, match="chat_template_path"):
    read()
  assert len(read(on_bad_row="skip")) == 1
  template = tmp_path / "template.jinja"
  template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}{{ eos_token }}")
  source = read(chat_template_path=template)
  assert source[0].ids == [256, 97, 98]
  assert source[0].fields == {"answer": 1}
  assert source[1].ids == [120, 257]
  assert source.identity != read(on_bad_row="skip").identity
  with pytest.raises(UserError, match="max_prefill_predict_length"):
    read(chat_template_path=template, max_prefill_predict_length=2)
