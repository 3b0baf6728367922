"""Rollouts of a tiny model, and the loop of forward passes that their tokens are compared with."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from support.tiny import LENGTH, build, config_of

from maxlite.config.rollouts import rollout_sizes
from maxlite.data.sources import prompts_source
from maxlite.data.sources.chat import open_chat
from maxlite.data.tokenizer import open_tokenizer
from maxlite.rollouts.sampler import RolloutSampler

PROMPTS = [{"prompt": text, "answer": "x"} for text in ("ab", "c", "", "bca")]
KEYS = {
  "loss_type": "grpo",
  "dataset_type": "prompts",
  "max_prefill_predict_length": 4,
  "max_completion_length": 5,
  "num_generations": 4,
  "rollout_temperature": 1.3,
  "reward_functions": "[equal_answer]",
}


def write_prompts(folder: Path) -> Path:
  """A file of PROMPTS."""
  path = folder / "prompts.jsonl"
  path.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
  return path


def open_sampler(path, factor=1.0, devices=None, **keys):
  """(sampler, parameters, prompts) of a tiny model, whose engine multiplies its parameters."""
  cfg = config_of(**{"dataset_path": path, "decoder_block": "mixtral", **KEYS, **keys})
  program = build(cfg, devices)
  tokenizer = open_tokenizer(cfg.data)
  sizes = rollout_sizes(cfg, cfg.data, program.batch_shape[0])
  chat = open_chat(cfg.data, tokenizer)
  sampler = RolloutSampler(cfg, program, sizes, program.batch_shape, tokenizer, chat)
  load = sampler.writer.load
  sampler.writer.load = lambda params: load(jax.tree.map(lambda leaf: leaf * factor, params))
  source = prompts_source(cfg.data, cfg.model.vocab_size, path.parent)
  prompts = [source.train[n % len(source.train)] for n in range(sizes.num_prompts)]
  # Tiny initial weights would make all tokens equally likely.
  params = jax.tree.map(lambda leaf: leaf * 3, program.init(3).params)
  return sampler, params, prompts


def assert_drawn(sampler, params, rollout):
  """Assert that a forward pass over all tokens before draws each token of the model."""
  program = sampler._program
  rows = program.batch_shape[0]

  @jax.jit
  def draw(tokens_T, length, seed):
    segment_T = (jnp.arange(LENGTH) < length).astype(jnp.int32)
    position_T = jnp.arange(LENGTH, dtype=jnp.int32)
    fields = [jnp.tile(x_T, (rows, 1)) for x_T in (tokens_T, segment_T, position_T)]
    logits_BTV = program.model.apply({"params": params}, *fields)
    logits_V = logits_BTV[0, length - 1].astype(jnp.float32)
    key = jax.random.fold_in(jax.random.key(seed), length)
    return jax.random.categorical(key, jax.nn.log_softmax(logits_V / 1.3))

  before = list(rollout.prompt.ids)
  for token, is_own in zip(rollout.ids, rollout.is_own, strict=True):
    if is_own:
      padded = np.pad(np.asarray(before, np.int32), (0, LENGTH - len(before)))
      assert int(draw(padded, len(before), np.uint32(rollout.seed))) == token
    before.append(token)
  is_stopped = rollout.ids[-1] in sampler.writer.stop_token_ids
  assert rollout.finish_reason == ("stop" if is_stopped else "length")
