"""A trained run, evaluated or made to write text."""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxlite.config import Config, exit_with_one_line, load_config, read_saved
from maxlite.config.schema import flatten
from maxlite.data.tokenizer import Tokenizer, open_tokenizer
from maxlite.models.decoder import Decoder
from maxlite.parallel.process import enable_compilation_cache, keep_freed_memory
from maxlite.storage.checkpoint import Checkpoints
from maxlite.training.evaluate import evaluate
from maxlite.training.run import open_trainer_data, run_folder
from maxlite.training.setup import Trainer, build_trainer
from maxlite.training.state import averaged_params


def run_evaluation(cfg: Config, argv: Sequence[str]) -> int:
  """Prints the loss of the run's newest checkpoint over eval_steps held-out batches (-1: all)."""
  with exit_with_one_line("maxlite.evaluate"):
    cfg = config_of_run(cfg, argv)
    trainer, params, averages, step = open_weights(cfg)
    data = open_trainer_data(trainer)
    batches = data.eval_batches(cfg.observe.eval_steps)
  eval_step = trainer.eval_step(data.source.num_bytes_V)
  result = evaluate(trainer, eval_step, params, batches, averages)
  figures = "  ".join(f"{name} {value:.6g}" for name, value in result.items())
  sys.stdout.write(f"{run_folder(cfg).directory} step {step}  {figures}\n")
  return 0


def run_generation(cfg: Config, argv: Sequence[str]) -> int:
  """Prints the prompt and, as it comes, what the run's newest checkpoint makes of it."""
  with exit_with_one_line("maxlite.generate"):
    cfg = config_of_run(cfg, argv)
    if cfg.data.dataset_type == "synthetic":
      raise ValueError("a run on dataset_type=synthetic has no tokenizer to write text with")
    tokenizer = open_tokenizer(cfg.data)
    trainer, params, _ = open_trained(cfg)
  prompt = [tokenizer.bos, *tokenizer.encode(cfg.generate.prompt.encode())]
  sys.stdout.write(cfg.generate.prompt)
  for text in _as_text(generate(trainer, params, prompt, tokenizer.eos), tokenizer):
    sys.stdout.write(text)
    sys.stdout.flush()
  sys.stdout.write("\n")
  return 0


def config_of_run(cfg: Config, argv: Sequence[str]) -> Config:
  """The config that the run named by `cfg` was trained with, but for what `argv` sets by key.

  YAML files in `argv` do not count: they would set back what the run was started with.

  Raises:
    ValueError: there is no such run, or a key would change the shape of its model.
  """
  folder = run_folder(cfg)
  if not folder.config.exists():
    raise ValueError(f"there is no run {folder.directory}: train it first, or correct run_name")
  typed = [word for word in argv if not word.endswith((".yml", ".yaml"))]
  cfg = load_config(typed, defaults=read_saved(folder.config), needs_data=False)
  folder.config_changes(flatten(cfg))
  return cfg


def open_trained(cfg: Config) -> tuple[Trainer, Any, int]:
  """(trainer, parameters, step) of the newest checkpoint of the run that `cfg` names.

  The parameters are their moving averages where the run keeps any.
  """
  trainer, params, averages, step = open_weights(cfg)
  return trainer, params if averages is None else averages, step


def open_weights(cfg: Config) -> tuple[Trainer, Any, Any, int]:
  """(trainer, parameters, their averages, step) of that checkpoint.

  The averages are None where the run keeps none.
  """
  enable_compilation_cache(cfg.run.jax_cache_dir)
  keep_freed_memory()
  trainer = build_trainer(cfg)
  trainer.check_devices()
  checkpoints = Checkpoints(cfg.checkpoint, run_folder(cfg).checkpoints, report=_to_stderr)
  state = trainer.abstract_state
  averaged = {} if state.ema is None else {"ema": state.ema}
  parts, step = checkpoints.restore_parts({"params": state.params} | averaged)
  return trainer, parts["params"], averaged_params(state.replace(**parts)), step


def generate(trainer: Trainer, params: Any, prompt: Sequence[int], eos: int) -> Iterator[int]:
  """Sampled tokens after `prompt` until `eos` or max_new_tokens; the newest T tokens are seen."""
  cfg, length = trainer.cfg.generate, trainer.cfg.data.max_target_length
  next_token = jax.jit(_build_next_token(trainer.model, cfg.temperature))
  key = jax.random.key(cfg.decode_sampling_seed)
  tokens = list(prompt)
  for n in range(cfg.max_new_tokens):
    seen = tokens[-length:]
    # Every shard of the batch has the same row.
    tokens_BT = np.zeros((trainer.sharder.num_shards("activation_batch"), length), np.int32)
    tokens_BT[:, : len(seen)] = seen
    token = int(next_token(params, tokens_BT, len(seen), jax.random.fold_in(key, n)))
    if token == eos:
      return
    tokens.append(token)
    yield token


def _build_next_token(model: Decoder, temperature: float) -> Callable:
  def next_token(
    params: Any, tokens_BT: jax.Array, num_seen: jax.Array, key: jax.Array
  ) -> jax.Array:
    column_T = jnp.arange(tokens_BT.shape[1])[None]
    segment_BT = jnp.broadcast_to(column_T < num_seen, tokens_BT.shape).astype(jnp.int32)
    position_BT = jnp.broadcast_to(column_T, tokens_BT.shape)
    x_BTD, _, w_DV = model.apply(
      {"params": params}, tokens_BT, segment_BT, position_BT, method=model.hidden_and_unembedding
    )
    logits_V = x_BTD[0, num_seen - 1].astype(jnp.float32) @ w_DV.astype(jnp.float32)
    if temperature == 0:
      return jnp.argmax(logits_V)
    return jax.random.categorical(key, logits_V / temperature)

  return next_token


def _as_text(tokens: Iterator[int], tokenizer: Tokenizer) -> Iterator[str]:
  """Text as it becomes certain: a character whose bytes are not all there yet is waited for."""
  ids, shown = [], ""
  for token in tokens:
    ids.append(token)
    text = tokenizer.decode(ids)
    if not text.endswith("\N{REPLACEMENT CHARACTER}"):
      yield text[len(shown) :]
      shown = text
  yield tokenizer.decode(ids)[len(shown) :]


def _to_stderr(line: str) -> None:
  sys.stderr.write(f"{line}\n")
