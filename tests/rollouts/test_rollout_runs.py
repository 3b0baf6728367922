"""Runs that train on rollouts: resumed between the steps on one set, stopped, and in phases."""

import contextlib
import io
import json
import signal

import numpy as np
import pytest
from support.host_runs import LIGHT, run
from support.slow_cases import slow
from support.tiny import config_of, mesh_keys
from support.tiny_run import Output, keys_in, last_manifest, logged, parameter_hash, start

from maxlite.metrics.writers import read_rows
from maxlite.runs.evaluate_run import run_evaluation

SECONDS = {"generation_seconds", "verification_seconds", "reward_seconds"}
REWARD = """
def letters(*, prompts, completions, answer, **_):
  return [sum(text.count(letter) for letter in wanted) for text, wanted in zip(completions, answer)]
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
  """A folder with prompts and a reward."""
  folder = tmp_path_factory.mktemp("rollouts")
  rows = [{"prompt": text, "answer": "aeiou"} for text in ("ab", "c", "bca", "d", "ee")]
  (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
  (folder / "reward_of_letters.py").write_text(REWARD)
  return folder


def keys_of(files, **keys):
  return {
    "loss_type": "grpo",
    "dataset_type": "prompts",
    "dataset_path": files / "prompts.jsonl",
    "max_prefill_predict_length": 4,
    "max_completion_length": 5,
    "num_generations": 4,
    "reward_functions": f"[{files}/reward_of_letters.py:letters]",
    "router_jitter": 0,
    "num_iterations": 3,
    "rollout_routes": "replay",
    "learning_rate": 0.02,  # so that another policy chooses other experts
    "checkpoint_period": 1,
    **keys,
  }


def rows_of(folder):
  """The metrics of a run's steps, without times."""
  return [
    {name: value for name, value in row.items() if name not in SECONDS} for row in logged(folder)
  ]


@pytest.fixture(scope="module")
def whole(files, tmp_path_factory):
  """(folder, output) of a run without interruption."""
  folder = tmp_path_factory.mktemp("whole")
  code, output = start(folder, **keys_of(files))
  assert code == 0
  return folder, output


def test_the_first_step_on_a_set_is_on_policy_and_the_others_are_not(whole):
  rows = rows_of(whole[0])
  for row in rows:
    is_first = row["step"] % 3 == 1
    assert (row["approx_kl"] == 0) == is_first
    assert row["rollout_agreement"] == 1
  rewards = [row["reward"] for row in rows]
  assert rewards[0] == rewards[1] == rewards[2]
  assert rewards[3] != rewards[0]
  rollouts = read_rows(whole[0] / "run/rollouts.jsonl")
  assert {row["step"] for row in rollouts} == {1, 4, 7}
  first = [each for row in rollouts if row["step"] == 1 for each in row["completions"]]
  assert np.mean([each["rewards"]["letters"] for each in first]) == pytest.approx(rewards[0])


def test_all_steps_on_a_set_have_the_experts_of_its_policy(whole):
  """By the load of each expert, and by the experts that are written for every token."""
  loads = [row["expert_load"] for row in read_rows(whole[0] / "run/expert_load.jsonl")]
  rows = read_rows(whole[0] / "run/rollouts.jsonl")
  for step in (1, 4):
    assert loads[step - 1] == loads[step] == loads[step + 1]
    load_E = np.zeros(4, int)
    for row in rows:
      if row["step"] == step:
        for completion in row["completions"]:
          experts = np.asarray(completion["expert_ids"])
          assert len(experts) == len(row["prompt"]) + len(completion["tokens"])  # BOS, no last
          load_E += np.bincount(experts.ravel(), minlength=4)
    np.testing.assert_array_equal(loads[step - 1], [load_E])
  assert loads[0] != loads[3]


@pytest.mark.parametrize("step", [slow(3), 4, slow(5)])
def test_resumed_at_any_step_it_equals_an_uninterrupted_run(files, whole, tmp_path, step):
  """Before a set is written (3), and between the steps on it (4, 5)."""
  code, _ = start(tmp_path, Output(step, signal.SIGTERM), **keys_of(files))
  assert code == 128 + signal.SIGTERM
  code, output = start(tmp_path, **keys_of(files))
  assert code == 0
  assert rows_of(tmp_path) == rows_of(whole[0])
  assert parameter_hash(output) == parameter_hash(whole[1])
  assert last_manifest(tmp_path) == last_manifest(whole[0])
  texts = [read_rows(each / "run/rollouts.jsonl") for each in (tmp_path, whole[0])]
  assert texts[0] == texts[1]


@pytest.mark.slow
def test_a_phase_of_adapters_stays_near_the_model_without_them(files, tmp_path):
  keys = keys_of(
    files,
    num_iterations=1,
    grpo_beta=0.1,
    lora_rank=2,
    loss_type="next_token",
    dataset_type="text",
    dataset_path=files / "reward_of_letters.py",
    phases=(
      "[{name: rl, train: ['.*lora_.*'], steps: 1, loss: grpo, dataset_type: prompts, "
      f"dataset_path: [{files}/prompts.jsonl]}}, "
      "{name: text, train: ['.*lora_.*'], steps: 1}]"
    ),
  )
  code, _ = start(tmp_path, **keys)
  assert code == 0
  rows = rows_of(tmp_path)
  assert ["reward" in row for row in rows] == [True, False] * 4
  assert rows[0]["kl"] == 0
  assert rows[2]["kl"] > 0


def test_tasks_at_evaluations_change_nothing_and_evaluate_repeats_them(files, whole, tmp_path):
  tasks = (
    f"[{{name: letters, path: [{files}/prompts.jsonl], max_new_tokens: 6, num_samples: 2, "
    f"temperature: 1, reward_functions: ['{files}/reward_of_letters.py:letters']}}]"
  )
  code, output = start(tmp_path, **keys_of(files, eval_tasks=tasks))
  assert code == 0
  assert parameter_hash(output) == parameter_hash(whole[1])
  scores = {}
  for row in rows_of(tmp_path):
    if row["step"] in (4, 8):
      scores[row["step"]] = row.pop("eval_task/letters"), row.pop("eval_task_stderr/letters")
    assert "eval_task/letters" not in row
  samples = read_rows(tmp_path / "run/eval_samples.jsonl")
  assert [row["step"] for row in samples] == [4] * 10 + [8] * 10
  rewards = np.asarray([row["rewards"]["letters"] for row in samples if row["step"] == 8])
  by_prompt = rewards.reshape(5, 2).mean(axis=1)
  assert scores[8] == pytest.approx((by_prompt.mean(), by_prompt.std(ddof=1) / np.sqrt(5)))
  evaluated = io.StringIO()
  with contextlib.redirect_stdout(evaluated):
    run_evaluation(config_of(**keys_in(tmp_path, **keys_of(files, eval_tasks=tasks))))
  assert f"eval_task/letters {scores[8][0]:.6g}" in evaluated.getvalue()


def test_advantages_compare_the_completions_of_a_prompt(whole):
  for row in read_rows(whole[0] / "run/rollouts.jsonl"):
    rewards = np.asarray([sum(each["rewards"].values()) for each in row["completions"]])
    advantages = [each["advantage"] for each in row["completions"]]
    wanted = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
    np.testing.assert_allclose(advantages, wanted, atol=1e-9)


@pytest.mark.slow
def test_two_processes_write_the_tokens_of_one(files, tmp_path):
  keys = keys_of(files) | LIGHT | {"decoder_block": "mixtral", "num_iterations": 2, "steps": 2}
  texts = []
  for name, processes in (("one", 1), ("two", 2)):
    folder = tmp_path / name
    run(folder, processes=processes, devices=2 // processes, **keys)
    texts.append(read_rows(folder / "run/rollouts.jsonl"))
  assert texts[0] == texts[1]


@pytest.mark.slow
def test_experts_on_eight_devices_give_the_tokens_and_losses_of_one(files, tmp_path):
  results = []
  for name, devices, mesh in (("one", 1, "fsdp=1"), ("eight", 8, "fsdp=2 expert=4")):
    keys = keys_of(files, steps=3, sparse_matmul="true", global_batch_size=16, ema_decay=0)
    run(tmp_path / name, processes=1, devices=devices, **keys | mesh_keys(mesh))
    rollouts = read_rows(tmp_path / name / "run/rollouts.jsonl")
    texts = [[each["tokens"] for each in row["completions"]] for row in rollouts]
    results.append((texts, [row["loss"] for row in rows_of(tmp_path / name)]))
  (texts, losses), (sharded_texts, sharded_losses) = results
  assert sharded_texts == texts
  np.testing.assert_allclose(sharded_losses, losses, atol=1e-6)
