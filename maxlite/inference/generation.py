"""A trained run, evaluated or made to write text."""

import collections
import dataclasses
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from maxlite.config import Config, exit_on_user_error
from maxlite.config.errors import UserError
from maxlite.config.schema import GenerateConfig
from maxlite.data.tokenizers.tokenizer import Tokenizer, open_tokenizer
from maxlite.inference.batcher import Batcher
from maxlite.inference.detokenizer import stream_texts
from maxlite.inference.engine import Engine, Request
from maxlite.inference.inference_params import inference_model, inference_params
from maxlite.inference.sampling import Rules
from maxlite.training.open_run import config_of_run, open_trained
from maxlite.training.trainer import Trainer

_LENGTH_MULTIPLE = 64


def run_generation(cfg: Config, argv: Sequence[str]) -> int:
  """Writes what the run's newest checkpoint makes of the prompt, as it comes, or of many."""
  with exit_on_user_error("maxlite.generate"):
    cfg = config_of_run(cfg, argv)
    prompts = _prompts(cfg.generate)
    tokenizer = open_text_tokenizer(cfg)
    requests = [_request(cfg, n, prompt, tokenizer) for n, prompt in enumerate(prompts)]
    trainer, params, _ = open_trained(cfg)
    engine = build_engine(trainer, params, tokenizer.stop_token_ids, requests)
  batcher = Batcher(engine)
  texts = stream_texts(batcher, requests, tokenizer.decode, cfg.generate.stop)
  write = _write_lines if cfg.generate.prompt_file else _write_text
  write(dict(zip(requests, prompts, strict=True)), texts)
  _to_stderr(f"{batcher.meter}; compiled in {engine.compile_seconds:.1f} s")
  return 0


def open_text_tokenizer(cfg: Config) -> Tokenizer:
  """The tokenizer of the run's data.

  Raises:
    UserError: the run's data are no text.
  """
  if cfg.data.dataset_type == "synthetic":
    raise UserError("a run on dataset_type=synthetic has no tokenizer to write text with")
  return open_tokenizer(cfg.data)


def build_engine(
  trainer: Trainer, params: Any, ends: Sequence[int], requests: Sequence[Request] = ()
) -> Engine:
  """An engine for `requests`, or for any of max_target_length where there are none.

  A text ends with any token of `ends`.

  Raises:
    UserError: a request is longer than that, or more is to be drafted than there are heads.
  """
  cfg, longest = trainer.cfg, trainer.cfg.data.max_target_length
  num_drafts = _num_drafts(cfg)
  needed = max((len(r.prompt) + r.max_new_tokens for r in requests), default=longest)
  if needed > longest:
    raise UserError(
      f"prompt and max_new_tokens={cfg.generate.max_new_tokens} are up to {needed} tokens, but "
      f"max_target_length={longest}, the longest text in training: lower max_new_tokens, or give "
      f"max_target_length={needed} to go beyond that"
    )
  num_shards = trainer.sharder.num_shards("activation_batch")
  num_rows = min(len(requests) or cfg.generate.decode_batch_size, cfg.generate.decode_batch_size)
  return Engine(
    inference_model(cfg.model, trainer.sharder),
    inference_params(cfg.model, params),
    num_rows=-(-num_rows // num_shards) * num_shards,
    # Rounded up, so that another prompt seldom means another program.
    max_length=min(-(-needed // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE, longest),
    ends=ends,
    num_drafts=num_drafts,
  )


def _num_drafts(cfg: Config) -> int:
  """Tokens drafted for each step. Raises UserError where there are fewer draft heads."""
  num_heads, wanted = cfg.model.num_draft_heads, cfg.generate.num_speculative_tokens
  if wanted > num_heads:
    raise UserError(
      f"num_speculative_tokens={wanted} are more than num_draft_heads={num_heads}, and each is "
      f"proposed by a head of its own: write num_speculative_tokens={num_heads} or less"
    )
  return num_heads if wanted < 0 else wanted


def _prompts(cfg: GenerateConfig) -> list[str]:
  if not cfg.prompt_file:
    return [cfg.prompt]
  path = Path(cfg.prompt_file)
  if not path.is_file():
    raise UserError(f"prompt_file={cfg.prompt_file} is no file")
  lines = [line for line in path.read_text("utf-8").splitlines() if line.strip()]
  if not lines:
    raise UserError(f"prompt_file={cfg.prompt_file} has no line")
  return [_prompt(cfg.prompt_file, number, line) for number, line in enumerate(lines, start=1)]


def _prompt(file: str, number: int, line: str) -> str:
  try:
    row = json.loads(line)
  except json.JSONDecodeError:
    row = None
  if not isinstance(row, dict) or not isinstance(row.get("prompt"), str):
    raise UserError(f'prompt_file={file}, text {number}: write {{"prompt": "..."}}')
  return row["prompt"]


def _request(cfg: Config, n: int, prompt: str, tokenizer: Tokenizer) -> Request:
  own = cfg.generate
  rules = Rules(**{field.name: getattr(own, field.name) for field in dataclasses.fields(Rules)})
  tokens = [tokenizer.bos, *map(int, tokenizer.encode(prompt.encode()))]
  seed = (own.decode_sampling_seed + n) % 2**32
  return Request(tokens, own.max_new_tokens, rules, seed)


def _write_text(prompts: Mapping[Request, str], texts: Iterable[tuple[Request, str, str]]) -> None:
  """The prompt and, as it comes, the text behind it."""
  sys.stdout.write(*prompts.values())
  for _, text, _ in texts:
    sys.stdout.write(text)
    sys.stdout.flush()
  sys.stdout.write("\n")


def _write_lines(prompts: Mapping[Request, str], texts: Iterable[tuple[Request, str, str]]) -> None:
  """A JSON line per prompt, in their order, each as soon as those before it are written."""
  text_of, done = dict.fromkeys(prompts, ""), {}
  waiting = collections.deque(prompts)
  for request, text, reason in texts:
    text_of[request] += text
    if reason:
      done[request] = reason
    while waiting and waiting[0] in done:
      first = waiting.popleft()
      row = {"prompt": prompts[first], "text": text_of[first], "finish_reason": done[first]}
      sys.stdout.write(f"{json.dumps(row, ensure_ascii=False)}\n")
      sys.stdout.flush()


def _to_stderr(line: str) -> None:
  sys.stderr.write(f"{line}\n")
