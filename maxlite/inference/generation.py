"""Complete prompts: `maxlite.generate`, and the callback `completions` of a run."""

import collections
import json
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from maxlite.config import Config, UserError, exit_on_user_error
from maxlite.config.schema import DEFAULT_NEW_TOKENS, GenerateConfig
from maxlite.data.sources.jsonl import read_objects
from maxlite.data.tokenizer import Tokenizer, open_tokenizer
from maxlite.inference.batcher import Batcher
from maxlite.inference.detokenizer import stream_completions
from maxlite.inference.engine import Engine, GenerationRequest
from maxlite.inference.inference_params import inference_model, inference_params
from maxlite.inference.sampling import SamplingParams
from maxlite.metrics.writers import JsonlWriter
from maxlite.runs.open_run import open_trained
from maxlite.step.train_state import TrainState, averaged_params
from maxlite.training.callbacks import Callback, CallbackContext
from maxlite.training.trainer import Trainer

_LENGTH_MULTIPLE = 64  # cache lengths are rounded up, so that other prompts reuse the programs
Completions = Iterable[tuple[GenerationRequest, str, str]]  # as of `stream_completions`


def run_generation(cfg: Config) -> int:
  """Stream the completion of a prompt, or write those of a file of prompts as JSON lines."""
  with exit_on_user_error("maxlite.generate"):
    prompts = read_prompts(cfg.generate)
    tokenizer = open_text_tokenizer(cfg)
    requests = [_request(cfg, n, p, tokenizer) for n, p in enumerate(prompts)]
    trainer, params = open_trained(cfg)
    engine = build_engine(trainer, params, tokenizer.stop_token_ids, requests)
  batcher = Batcher(engine)
  completions = stream_completions(batcher, requests, tokenizer.decode, cfg.generate.stop)
  write = _write_lines if cfg.generate.prompt_file else _write_text
  write(dict(zip(requests, prompts, strict=True)), completions)
  sys.stderr.write(f"{batcher.throughput}; compiled in {engine.compile_seconds:.1f} s\n")
  return 0


class Completer:
  """Completes `prompts` with given parameters; only the first call compiles.

  Raises:
    UserError: as the command does.
  """

  def __init__(self, trainer: Trainer, prompts: Sequence[str]) -> None:
    self._trainer, self._tokenizer = trainer, open_text_tokenizer(trainer.cfg)
    cfg = trainer.cfg
    self._requests = [_request(cfg, n, p, self._tokenizer) for n, p in enumerate(prompts)]
    self._engine: Engine | None = None

  def complete(self, params: Any) -> list[str]:
    """Return the completions of the prompts, in order; frees its memory on the devices."""
    cfg, tokenizer = self._trainer.cfg, self._tokenizer
    if self._engine is None:
      stop_token_ids = tokenizer.stop_token_ids
      self._engine = build_engine(self._trainer, params, stop_token_ids, self._requests)
    else:
      self._engine.load(inference_params(cfg.model, params))
    batcher, texts = Batcher(self._engine), dict.fromkeys(self._requests, "")
    stop = cfg.generate.stop
    for request, text, _ in stream_completions(batcher, self._requests, tokenizer.decode, stop):
      texts[request] += text
    self._engine.unload()
    return list(texts.values())


def open_text_tokenizer(cfg: Config) -> Tokenizer:
  """Open the tokenizer of the run's data; raise UserError if they are synthetic."""
  if cfg.data.dataset_type == "synthetic":
    raise UserError("a run on dataset_type=synthetic has no tokenizer to write text with")
  return open_tokenizer(cfg.data)


def build_engine(
  trainer: Trainer,
  params: Any,
  stop_token_ids: Sequence[int],
  requests: Sequence[GenerationRequest] = (),
  **options: int,
) -> Engine:
  """Build an engine for `requests`, or for any of up to max_target_length tokens if empty.

  Args:
    **options: of `Engine`.

  Raises:
    UserError: a request exceeds max_target_length, or num_speculative_tokens the draft heads.
  """
  cfg, max_length = trainer.cfg, trainer.cfg.data.max_target_length
  num_heads, num_drafts = cfg.model.num_draft_heads, cfg.generate.num_speculative_tokens
  if num_drafts > num_heads:
    raise UserError(
      f"num_speculative_tokens={num_drafts} exceeds num_draft_heads={num_heads}, and each head "
      f"proposes one token: set num_speculative_tokens={num_heads} or less"
    )
  needed = max((len(r.prompt) + r.max_new_tokens for r in requests), default=max_length)
  if needed > max_length:
    raise UserError(
      f"prompt and max_new_tokens={cfg.generate.max_new_tokens} are up to {needed} tokens, but "
      f"max_target_length={max_length}, the longest sequence in training: lower max_new_tokens, "
      f"shorten the prompt, or set max_target_length={needed} to exceed it"
    )
  num_shards = trainer.sharder.num_shards("activation_batch")
  num_rows = min(len(requests) or cfg.generate.decode_batch_size, cfg.generate.decode_batch_size)
  return Engine(
    inference_model(cfg.model, trainer.sharder),
    inference_params(cfg.model, params),
    num_rows=num_rows + -num_rows % num_shards,
    max_length=min(needed + -needed % _LENGTH_MULTIPLE, max_length),
    stop_token_ids=stop_token_ids,
    num_drafts=num_heads if num_drafts < 0 else num_drafts,
    **options,
  )


def read_prompts(cfg: GenerateConfig) -> list[str]:
  """`prompt`, or those of `prompt_file`; raise UserError if it has none.

  Unpaired surrogates, which JSON and bytes that are not UTF-8 give, become question marks.
  """
  if not cfg.prompt_file:
    return [_encode(cfg.prompt).decode()]
  path = Path(cfg.prompt_file).expanduser()
  if not path.is_file():
    raise UserError(f"prompt_file={cfg.prompt_file} is not a file")
  prompts = []
  for place, record in read_objects(path, 0, 1):
    prompts.append(record.get("prompt"))
    if not isinstance(prompts[-1], str):
      raise UserError(f'prompt_file={place}: write {{"prompt": "..."}}')
  if not prompts:
    raise UserError(f"prompt_file={cfg.prompt_file} has no lines")
  return [_encode(prompt).decode() for prompt in prompts]


def _encode(text: str) -> bytes:
  return text.encode(errors="replace")


def _request(cfg: Config, n: int, prompt: str, tokenizer: Tokenizer) -> GenerationRequest:
  """The request of the n-th prompt."""
  generate = cfg.generate
  sampling = SamplingParams(
    temperature=generate.decode_sampling_temperature,
    top_k=generate.decode_sampling_top_k,
    top_p=generate.decode_sampling_nucleus_p,
    min_p=generate.decode_sampling_min_p,
    repetition_penalty=generate.decode_sampling_repetition_penalty,
  )
  tokens = [tokenizer.bos, *map(int, tokenizer.encode(_encode(prompt)))]
  num_new = generate.max_new_tokens
  if num_new == -1:
    room = cfg.data.max_target_length - len(tokens)
    num_new = max(min(room, DEFAULT_NEW_TOKENS), 1)  # without room, `build_engine` raises
  seed = (generate.decode_sampling_seed + n) % 2**32
  return GenerationRequest(tokens, num_new, sampling, seed)


def _write_text(prompts: Mapping[GenerationRequest, str], completions: Completions) -> None:
  sys.stdout.write(*prompts.values())
  for _, text, _ in completions:
    sys.stdout.write(text)
    sys.stdout.flush()
  sys.stdout.write("\n")


def _write_lines(prompts: Mapping[GenerationRequest, str], completions: Completions) -> None:
  """Write a JSON line per prompt in order, each as soon as all before it are finished."""
  texts, finish_reasons = dict.fromkeys(prompts, ""), {}
  waiting = collections.deque(prompts)
  for request, text, finish_reason in completions:
    texts[request] += text
    if finish_reason:
      finish_reasons[request] = finish_reason
    while waiting and waiting[0] in finish_reasons:
      r = waiting.popleft()
      row = {"prompt": prompts[r], "text": texts[r], "finish_reason": finish_reasons[r]}
      sys.stdout.write(f"{json.dumps(row, ensure_ascii=False)}\n")
      sys.stdout.flush()


class CompletionsCallback(Callback):
  """Completes prompts at every checkpoint, into completions.jsonl and the trackers."""

  def on_start(self, context: CallbackContext) -> None:
    cfg, self._context = context.cfg, context
    if not cfg.checkpoint.enable_checkpointing or jax.process_count() > 1:
      raise UserError("callbacks=completions needs one process and enable_checkpointing=true")
    self._prompts = read_prompts(cfg.generate)
    self._completer = Completer(context.trainer, self._prompts)
    self._file = JsonlWriter(context.folder / "completions.jsonl", context.first_step - 1)

  def on_checkpoint(self, step: int, state: TrainState) -> None:
    context, averages = self._context, averaged_params(state)
    params = state.params if averages is None else averages
    pairs = list(zip(self._prompts, self._completer.complete(params), strict=True))
    for prompt, text in pairs:
      self._file.write({"step": step, "prompt": prompt, "text": text})
    code = "\n\n".join(textwrap.indent(f"{prompt}{text}", "    ") for prompt, text in pairs)
    for tracker in context.writers.trackers:
      tracker.write_text("completions", code, step)

  def on_end(self, step: int, reason: str) -> None:
    self._file.close()
