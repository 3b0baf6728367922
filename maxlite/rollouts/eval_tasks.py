"""Evaluation by generation: the model completes the prompts of tasks, and rewards are their scores.

Nothing of the run changes: neither parameters nor counters, data, or the noise of training.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import cast

import jax
import numpy as np

from maxlite.config import Config
from maxlite.config.eval_tasks import eval_tasks_of
from maxlite.config.schema import DataConfig, RolloutConfig
from maxlite.config.schema.entries import EvalTaskEntry
from maxlite.data.loader import DataLoader
from maxlite.data.sources import prompts_source
from maxlite.data.sources.chat import open_chat
from maxlite.data.sources.prompts import Prompt
from maxlite.data.tokenizer import open_tokenizer
from maxlite.metrics.step_row import Row
from maxlite.metrics.writers import JsonlWriter
from maxlite.rollouts.process_0 import reward_completions
from maxlite.rollouts.rewards import Rewards
from maxlite.rollouts.rollout import Rollout
from maxlite.rollouts.writer import RolloutWriter
from maxlite.runs.saved_run import run_folder, token_cache
from maxlite.sharding.pytree import PyTree
from maxlite.training.program import Program

SAMPLES = "eval_samples.jsonl"  # In the folder of a run.
_MAX_ROWS = 64  # Completions that are written at once, unless rollout_batch_size says otherwise.


class Task:
  """A task, whose completions are the same for the same parameters."""

  def __init__(self, cfg: Config, program: Program, entry: EvalTaskEntry) -> None:
    """Open the prompts and the rewards. Raises UserError if that fails."""
    self.entry = entry
    data = _data_of(cfg, entry)
    tokenizer = open_tokenizer(data)
    chat = open_chat(data, tokenizer)
    source = prompts_source(data, cfg.model.vocab_size, token_cache(cfg))
    num_prompts = len(source.train)
    if entry.max_prompts != -1:
      num_prompts = min(num_prompts, entry.max_prompts)
    self._prompts = [cast(Prompt, source.train[n]) for n in range(num_prompts)]
    self._rewards = Rewards(
      dataclasses.replace(RolloutConfig(), reward_functions=entry.reward_functions)
    )
    num_rows = cfg.rollouts.rollout_batch_size
    if num_rows == -1:
      num_rows = min(num_prompts * entry.num_samples, _MAX_ROWS)
    self._writer = RolloutWriter(
      cfg,
      program.sharder,
      tokenizer,
      chat,
      num_rows=num_rows,
      prompt_length=max(len(prompt.ids) for prompt in self._prompts),
      completion_length=entry.max_new_tokens,
      temperature=entry.temperature,
    )

  def score(self, params: PyTree, step: int, file: JsonlWriter | None) -> Row:
    """The mean reward and its standard error over prompts; writes the completions to `file`."""
    num_samples = self.entry.num_samples
    seeds = np.random.SeedSequence(0).generate_state(len(self._prompts) * num_samples).tolist()
    rollouts = [Rollout(self._prompts[n // num_samples], seed) for n, seed in enumerate(seeds)]
    self._writer.load(params)
    self._writer.write(rollouts)
    self._writer.unload()
    texts = self._writer.texts(rollouts)
    reward_NR = reward_completions(self._rewards, rollouts, texts)
    if file is not None:
      for rollout, text, reward_R in zip(rollouts, texts, reward_NR.tolist(), strict=True):
        rewards = dict(zip(self._rewards.names, reward_R, strict=True))
        place = {"step": step, "task": self.entry.name, "prompt": rollout.prompt.text}
        file.write(place | self._writer.row(rollout, text, rewards))
    score_N = reward_NR.sum(axis=1).reshape(-1, num_samples).mean(axis=1)
    row: Row = {f"eval_task/{self.entry.name}": float(score_N.mean())}
    if len(score_N) > 1:
      error = score_N.std(ddof=1) / np.sqrt(len(score_N))
      row[f"eval_task_stderr/{self.entry.name}"] = float(error)
    return row


def _data_of(cfg: Config, entry: EvalTaskEntry) -> DataConfig:
  return dataclasses.replace(
    cfg.data,
    dataset_type="prompts",
    dataset_path=entry.path,
    dataset_mixture=(),
    max_prefill_predict_length=cfg.data.max_target_length - entry.max_new_tokens,
  )


def open_tasks(cfg: Config, program: Program) -> list[Task]:
  """The tasks of a config. Raises UserError if one cannot be opened."""
  return [Task(cfg, program, entry) for entry in eval_tasks_of(cfg)]


def score_tasks(cfg: Config, tasks: Sequence[Task], params: PyTree, step: int) -> Row:
  """The scores of all tasks; the completions are added to the run's folder."""
  row: Row = {}
  with contextlib.ExitStack() as stack:
    file = None
    if jax.process_index() == 0:
      file = JsonlWriter(run_folder(cfg).directory / SAMPLES, step - 1)
      stack.callback(file.close)
    for task in tasks:
      row |= task.score(params, step, file)
  return row


def build_evaluation(
  cfg: Config, program: Program, data: DataLoader
) -> Callable[[PyTree, PyTree, int], Row]:
  """Build the evaluation of a run's tasks, an entry of EVALUATIONS.

  It takes the moving averages of the parameters if the run keeps them, as generation does.
  """
  del data
  tasks = open_tasks(cfg, program)

  def evaluate(params: PyTree, averages: PyTree, step: int) -> Row:
    return score_tasks(cfg, tasks, params if averages is None else averages, step)

  return evaluate
