"""`maxlite.rollout`: samples of a run's model for a file of prompts, without training."""

import contextlib
import sys
from pathlib import Path

import jax
import numpy as np

from maxlite.config import Config
from maxlite.config.rollouts import rollout_sizes
from maxlite.data.loader import PromptStream
from maxlite.data.sources.chat import open_chat
from maxlite.data.tokenizer import open_tokenizer
from maxlite.errors import exit_on_user_error, write_line
from maxlite.metrics.writers import JsonlWriter, read_rows
from maxlite.rollouts.rollout_page import render
from maxlite.rollouts.sampler import RolloutSampler
from maxlite.runs.open_run import open_run_data, open_trained
from maxlite.runs.saved_run import run_folder
from maxlite.storage.file_io import write_atomically


def run_rollouts(cfg: Config) -> int:
  """Complete every prompt once, verify and reward the completions, and write them."""
  with exit_on_user_error("maxlite.rollout"):
    path = Path(cfg.convert.output_path or run_folder(cfg).directory / "samples.jsonl")
    program, params = open_trained(cfg)
    data = open_run_data(cfg, program)
    sizes = rollout_sizes(cfg, cfg.data, program.batch_shape[0])
    tokenizer = open_tokenizer(cfg.data)
    chat = open_chat(cfg.data, tokenizer)
    sampler = RolloutSampler(cfg, program, sizes, program.batch_shape, tokenizer, chat)
    stream = PromptStream(data)
    prompts = stream.all()
    rewards = []
    agreement = []
    with contextlib.ExitStack() as stack:
      file = None
      if jax.process_index() == 0:
        path.unlink(missing_ok=True)
        file = JsonlWriter(path, 0)
        stack.callback(file.close)
      for first in range(0, len(prompts), sizes.num_prompts):
        seed = [cfg.run.init_weights_seed, first]
        rollouts = sampler.sample(params, prompts[first : first + sizes.num_prompts], seed)
        rewards.append(rollouts.reward_NR @ sampler.reward_weights)
        agreement.append(rollouts.row.get("rollout_agreement", np.nan))
        if file is not None:
          for row in sampler.rows(rollouts, 0):
            file.write(row)
  if jax.process_index() > 0:
    return 0
  page = path.with_suffix(".html")
  write_atomically(page, render(read_rows(path)))
  reward_N = np.concatenate(rewards)
  line = f"{path}, {page.name}: {len(reward_N):,} completions of {len(prompts):,} prompts"
  if sampler.reward_names:
    by_prompt = reward_N.reshape(-1, cfg.rollouts.num_generations).mean(axis=1)
    error = by_prompt.std(ddof=1) / np.sqrt(len(by_prompt)) if len(by_prompt) > 1 else np.nan
    line += f"; reward {reward_N.mean():.4g}, standard error {error:.2g}"
  if cfg.rollouts.rollout_verification == "exact":
    line += f"; {np.mean(agreement):.3%} of the tokens agreed at once"
  write_line(line, sys.stdout)
  return 0
