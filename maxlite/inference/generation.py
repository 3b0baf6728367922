"""Complete prompts: `maxlite.generate`, and the callback `completions` of a run."""

import collections
import json
import math
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import jax

from maxlite.config import Config, UserError, exit_on_user_error
from maxlite.config.errors import escape_controls, write_line
from maxlite.config.registry import SOURCES
from maxlite.config.schema import DEFAULT_NEW_TOKENS, GenerateConfig, ModelConfig
from maxlite.data.sources.jsonl import read_objects
from maxlite.data.tokenizer import Tokenizer, encode_prompt, open_tokenizer
from maxlite.data.vocabulary_check import check_vocabulary
from maxlite.inference.batcher import Batcher
from maxlite.inference.detokenizer import CompletionText, stream_completions
from maxlite.inference.drafters import max_num_drafts
from maxlite.inference.engine import Engine, GenerationRequest
from maxlite.inference.inference_params import inference_model, inference_params
from maxlite.inference.sampling import SamplingParams
from maxlite.metrics.writers import JsonlWriter
from maxlite.runs.open_run import open_trained
from maxlite.sharding.pytree import PyTree
from maxlite.step.train_state import TrainState, averaged_params
from maxlite.training.callbacks import Callback, CallbackContext
from maxlite.training.trainer import Trainer

_LENGTH_MULTIPLE = 64  # cache lengths are rounded up, so that other prompts reuse the programs


def run_generation(cfg: Config) -> int:
  """Stream the completion of a prompt, or write those of a file of prompts as JSON lines."""
  with exit_on_user_error("maxlite.generate"):
    prompts = read_prompts(cfg.generate)
    tokenizer = open_text_tokenizer(cfg)
    requests = _requests(cfg, prompts, tokenizer)
    trainer, params = open_trained(cfg)
    engine = build_engine(trainer, params, tokenizer.stop_token_ids, requests)
  batcher = Batcher(engine)
  completions = stream_completions(batcher, requests, tokenizer, cfg.generate.stop)
  if cfg.generate.prompt_file:
    _write_lines(dict(zip(requests, prompts, strict=True)), completions)
  else:
    (prompt,) = prompts
    engine.compile_for(requests[0])  # before the text, which reports of compilation would interrupt
    _write_text(prompt, completions)
  write_line(f"{batcher.throughput}; compiled in {engine.compile_seconds:.1f} s")
  return 0


class Completer:
  """Completes `prompts` with given parameters; only the first call compiles.

  Raises:
    UserError: as the command does.
  """

  def __init__(self, trainer: Trainer, prompts: Sequence[str]) -> None:
    self._trainer = trainer
    self._tokenizer = open_text_tokenizer(trainer.cfg)
    self._requests = _requests(trainer.cfg, prompts, self._tokenizer)
    self._engine: Engine | None = None

  def complete(self, params: PyTree) -> list[str]:
    """Return the completions of the prompts, in order; frees its memory on the devices."""
    cfg = self._trainer.cfg
    if self._engine is None:
      self._engine = build_engine(
        self._trainer,
        params,
        self._tokenizer.stop_token_ids,
        self._requests,
      )
    else:
      self._engine.load(inference_params(cfg.model, params))
    completions = stream_completions(
      Batcher(self._engine),
      self._requests,
      self._tokenizer,
      cfg.generate.stop,
    )
    texts = dict.fromkeys(self._requests, "")
    for completion in completions:
      texts[completion.request] += completion.text
    self._engine.unload()
    return list(texts.values())


def open_text_tokenizer(cfg: Config) -> Tokenizer:
  """Open the tokenizer of the run's data.

  Raises:
    UserError: the data are synthetic, or the tokenizer has ids that the model lacks.
  """
  if SOURCES.entry(cfg.data.dataset_type).is_synthetic:
    raise UserError("a run on dataset_type=synthetic has no tokenizer to write text with")
  tokenizer = open_tokenizer(cfg.data)
  check_vocabulary(tokenizer, cfg.model.vocab_size)
  return tokenizer


def build_engine(
  trainer: Trainer,
  params: PyTree,
  stop_token_ids: Sequence[int],
  requests: Sequence[GenerationRequest] = (),
  **options: int,
) -> Engine:
  """Build an engine for `requests`, or for any of up to max_target_length tokens if empty.

  Args:
    trainer: the trainer of the model.
    params: the model's parameters.
    stop_token_ids: tokens that end a completion.
    requests: the requests that the engine must hold.
    **options: further arguments of `Engine`.

  Raises:
    UserError: a request exceeds max_target_length, or num_speculative_tokens what the model can
      propose.
  """
  cfg = trainer.cfg
  max_length = cfg.data.max_target_length
  limit = max_num_drafts(cfg.model)
  num_drafts = cfg.generate.num_speculative_tokens
  if num_drafts > limit:
    raise UserError(
      f"num_speculative_tokens={num_drafts} {_draft_limit(cfg.model)}: set "
      f"num_speculative_tokens={limit} or less"
    )
  if num_drafts < 0:
    num_drafts = limit
  lengths = [len(request.prompt) + request.max_new_tokens for request in requests]
  needed = max(lengths, default=max_length)
  if needed > max_length:
    raise UserError(
      f"prompt and max_new_tokens={cfg.generate.max_new_tokens} are up to {needed} tokens, but "
      f"max_target_length={max_length}, the longest sequence in training: lower max_new_tokens, "
      f"shorten the prompt, or set max_target_length={needed} to exceed it"
    )
  num_rows = cfg.generate.decode_batch_size
  if requests:
    num_rows = min(num_rows, len(requests))
  num_shards = trainer.sharder.num_shards("activation_batch")
  return Engine(
    inference_model(cfg.model, trainer.sharder),
    inference_params(cfg.model, params),
    num_rows=_round_up(num_rows, num_shards),
    max_length=min(_round_up(needed, _LENGTH_MULTIPLE), max_length),
    stop_token_ids=stop_token_ids,
    num_drafts=num_drafts,
    **options,
  )


def _draft_limit(model: ModelConfig) -> str:
  """The reason, in an error message, why the model cannot propose more tokens."""
  if model.num_recurrent_layers:
    return "cannot be proposed, since drafts cannot be taken back from a recurrent state"
  if model.mtp_num_layers:
    return f"exceeds mtp_num_layers={model.mtp_num_layers}, and each layer proposes one token"
  return f"exceeds num_draft_heads={model.num_draft_heads}, and each head proposes one token"


def _round_up(number: int, multiple: int) -> int:
  return math.ceil(number / multiple) * multiple


def read_prompts(cfg: GenerateConfig) -> list[str]:
  """`prompt`, or those of `prompt_file`; raise UserError if it has none.

  Unpaired surrogates, which JSON and bytes that are not UTF-8 give, become question marks.
  """
  if not cfg.prompt_file:
    return [_encode(cfg.prompt).decode()]
  path = Path(cfg.prompt_file).expanduser()
  if not path.is_file():
    raise UserError(f"prompt_file={cfg.prompt_file} is not a file")
  prompts: list[str] = []
  for place, record in read_objects(path, 0, 1):
    prompt = record.get("prompt")
    if not isinstance(prompt, str):
      raise UserError(f'prompt_file={place}: write {{"prompt": "..."}}')
    prompts.append(_encode(prompt).decode())
  if not prompts:
    raise UserError(f"prompt_file={cfg.prompt_file} has no lines")
  return prompts


def _encode(text: str) -> bytes:
  return text.encode(errors="replace")


def _requests(cfg: Config, prompts: Sequence[str], tokenizer: Tokenizer) -> list[GenerationRequest]:
  """The requests of `prompts`, each with another seed."""
  return [_request(cfg, n, prompt, tokenizer) for n, prompt in enumerate(prompts)]


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
  tokens = encode_prompt(tokenizer, _encode(prompt))
  num_new = generate.max_new_tokens
  if num_new == -1:
    room = cfg.data.max_target_length - len(tokens)
    num_new = max(min(room, DEFAULT_NEW_TOKENS), 1)  # without room, `build_engine` raises
  seed = (generate.decode_sampling_seed + n) % 2**32
  return GenerationRequest(tokens, num_new, sampling, seed)


def _write_text(prompt: str, completions: Iterable[CompletionText]) -> None:
  """Write the prompt and its completion as text; to a terminal, with escapes for what it obeys."""
  shown = escape_controls if sys.stdout.isatty() else str
  sys.stdout.write(shown(prompt))
  for completion in completions:
    sys.stdout.write(shown(completion.text))
    sys.stdout.flush()
  sys.stdout.write("\n")


def _write_lines(
  prompts: Mapping[GenerationRequest, str], completions: Iterable[CompletionText]
) -> None:
  """Write a JSON line per prompt in order, each as soon as all before it are finished."""
  texts = dict.fromkeys(prompts, "")
  finish_reasons: dict[GenerationRequest, str] = {}
  waiting = collections.deque(prompts)
  for request, text, finish_reason in completions:
    texts[request] += text
    if finish_reason:
      finish_reasons[request] = finish_reason
    while waiting and waiting[0] in finish_reasons:
      finished = waiting.popleft()
      row = {
        "prompt": prompts[finished],
        "text": texts[finished],
        "finish_reason": finish_reasons[finished],
      }
      line = json.dumps(row, ensure_ascii=False)  # JSON escapes control characters below a space
      line = re.sub("[\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", line)
      sys.stdout.write(f"{line}\n")
      sys.stdout.flush()


class CompletionsCallback(Callback):
  """Completes prompts at every checkpoint, into completions.jsonl and the trackers."""

  def on_start(self, context: CallbackContext) -> None:
    cfg = context.cfg
    if not cfg.checkpoint.enable_checkpointing or jax.process_count() > 1:
      raise UserError("callbacks=completions needs one process and enable_checkpointing=true")
    self._trackers = context.writers.trackers
    self._prompts = read_prompts(cfg.generate)
    self._completer = Completer(context.trainer, self._prompts)
    self._file = JsonlWriter(context.folder / "completions.jsonl", context.first_step - 1)

  def on_checkpoint(self, step: int, state: TrainState) -> None:
    params = averaged_params(state)
    if params is None:
      params = state.params
    texts = self._completer.complete(params)
    blocks: list[str] = []  # of Markdown code
    for prompt, text in zip(self._prompts, texts, strict=True):
      self._file.write({"step": step, "prompt": prompt, "text": text})
      blocks.append(textwrap.indent(f"{prompt}{text}", "    "))
    for tracker in self._trackers:
      tracker.write_text("completions", "\n\n".join(blocks), step)

  def on_end(self, step: int, reason: str) -> None:
    self._file.close()
