"""Complete prompts and chats: `maxlite.generate`, and the callback `completions` of a run."""

import collections
import contextlib
import json
import math
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence

import jax
import numpy as np

from maxlite.config import Config
from maxlite.config.schema import ModelConfig
from maxlite.data.sources.chat_template import Message
from maxlite.errors import UserError, escape_controls, exit_on_user_error, write_line
from maxlite.inference.batcher import Batcher
from maxlite.inference.detokenizer import CompletionText, stream_completions
from maxlite.inference.drafters import max_num_drafts
from maxlite.inference.engine import Engine, GenerationRequest
from maxlite.inference.inference_params import inference_model, inference_params
from maxlite.inference.prompts import (
  Conversation,
  Prompt,
  PromptEncoder,
  has_conversations,
  read_prompts,
)
from maxlite.metrics.writers import JsonlWriter
from maxlite.models.layer_stacks import has_recurrence
from maxlite.runs.open_run import open_trained
from maxlite.sharding import Sharder
from maxlite.sharding.pytree import PyTree
from maxlite.step.train_state import TrainState, averaged_params
from maxlite.storage.json_values import JsonObject
from maxlite.training.callbacks import Callback, CallbackContext
from maxlite.training.program import Program

_LENGTH_MULTIPLE = 64  # cache lengths are rounded up, so that other prompts reuse the programs


def run_generation(cfg: Config) -> int:
  """Complete a prompt, or a file of prompts as JSON lines, or chat in a terminal."""
  with exit_on_user_error("maxlite.generate"):
    if cfg.generate.return_expert_ids:
      _check_expert_ids(cfg)
    if cfg.generate.use_chat_template and not cfg.generate.prompt and not cfg.generate.prompt_file:
      return _chat(cfg)
    prompts = read_prompts(cfg.generate)
    encoder = PromptEncoder(cfg, chats=has_conversations(prompts))
    requests = encoder.requests(prompts)
    program, params = open_trained(cfg)
    engine = build_engine(
      cfg,
      program.sharder,
      params,
      encoder.stop_token_ids,
      requests,
      records_experts=cfg.generate.return_expert_ids,
    )
  batcher = Batcher(engine)
  completions = stream_completions(batcher, requests, encoder.tokenizer, cfg.generate.stop)
  if cfg.generate.prompt_file:
    _write_lines(dict(zip(requests, prompts, strict=True)), completions, batcher.expert_ids)
  else:
    (prompt,) = prompts
    engine.compile_for(requests[0])  # before the text, which reports of compilation would interrupt
    if isinstance(prompt, str):
      _write(prompt)
    _write_text(completions)
  write_line(f"{batcher.throughput}; compiled in {engine.compile_seconds:.1f} s")
  return 0


def _check_expert_ids(cfg: Config) -> None:
  """Raise UserError if there are no experts, or no JSON lines to write them to."""
  if not cfg.model.family.is_moe:
    raise UserError(
      f"return_expert_ids=true: decoder_block={cfg.model.decoder_block} has no experts; write "
      "return_expert_ids=false"
    )
  if not cfg.generate.prompt_file:
    raise UserError("return_expert_ids=true is for JSON lines: write prompt_file=FILE")


def _chat(cfg: Config) -> int:
  """Answer the lines of standard input as one conversation, until its end.

  Raises:
    UserError: as the command does; or the conversation becomes too long for the model.
  """
  encoder = PromptEncoder(cfg, chats=True)
  program, params = open_trained(cfg)
  longest = GenerationRequest([encoder.tokenizer.eos], cfg.data.max_target_length - 1)
  engine = build_engine(cfg, program.sharder, params, encoder.stop_token_ids, [longest])
  batcher = Batcher(engine)
  messages: list[Message] = []
  for n, line in enumerate(_typed_lines()):
    messages.append({"role": "user", "content": line})
    request = encoder.request(n, Conversation(messages, {}))
    engine.check(request)
    engine.compile_for(request)
    answer = _write_text(
      stream_completions(batcher, [request], encoder.tokenizer, cfg.generate.stop)
    )
    messages.append({"role": "assistant", "content": answer})
  return 0


def _typed_lines() -> Iterator[str]:
  """Yield the lines of standard input that are not blank; in a terminal, with a prompt."""
  prompt = "> " if sys.stdin.isatty() else ""
  with contextlib.suppress(EOFError, KeyboardInterrupt):
    while True:
      line = input(prompt).encode(errors="replace").decode()
      if line.strip():
        yield line


class Completer:
  """Completes `prompts` with given parameters; only the first call compiles.

  Raises:
    UserError: as the command does.
  """

  def __init__(self, cfg: Config, program: Program, prompts: Sequence[Prompt]) -> None:
    self._cfg = cfg
    self._sharder = program.sharder
    self._encoder = PromptEncoder(cfg, chats=has_conversations(prompts))
    self._requests = self._encoder.requests(prompts)
    self._engine: Engine | None = None

  def complete(self, params: PyTree) -> list[str]:
    """Return the completions of the prompts, in order; frees its memory on the devices."""
    if self._engine is None:
      self._engine = build_engine(
        self._cfg,
        self._sharder,
        params,
        self._encoder.stop_token_ids,
        self._requests,
      )
    else:
      self._engine.load(inference_params(self._cfg.model, params))
    completions = stream_completions(
      Batcher(self._engine),
      self._requests,
      self._encoder.tokenizer,
      self._cfg.generate.stop,
    )
    texts = dict.fromkeys(self._requests, "")
    for completion in completions:
      texts[completion.request] += completion.text
    self._engine.unload()
    return list(texts.values())


def build_engine(
  cfg: Config,
  sharder: Sharder,
  params: PyTree,
  stop_token_ids: Sequence[int],
  requests: Sequence[GenerationRequest] = (),
  *,
  records_experts: bool = False,
  **options: int,
) -> Engine:
  """Build an engine for `requests`, or for any of up to max_target_length tokens if empty.

  Args:
    cfg: the config of the command.
    sharder: of the mesh of the parameters.
    params: the model's parameters.
    stop_token_ids: tokens that end a completion.
    requests: the requests that the engine must hold.
    records_experts: as in `Engine`.
    **options: further arguments of `Engine`.

  Raises:
    UserError: a request exceeds max_target_length, or num_speculative_tokens what the model can
      propose.
  """
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
  num_shards = sharder.num_shards("activation_batch")
  return Engine(
    inference_model(cfg.model, sharder),
    inference_params(cfg.model, params),
    num_rows=_round_up(num_rows, num_shards),
    max_length=min(_round_up(needed, _LENGTH_MULTIPLE), max_length),
    stop_token_ids=stop_token_ids,
    num_drafts=num_drafts,
    records_experts=records_experts,
    **options,
  )


def _draft_limit(model: ModelConfig) -> str:
  """The reason, in an error message, why the model cannot propose more tokens."""
  if has_recurrence(model):
    return "cannot be proposed, since drafts cannot be taken back from a recurrent state"
  if model.mtp_num_layers:
    return f"exceeds mtp_num_layers={model.mtp_num_layers}, and each layer proposes one token"
  return f"exceeds num_draft_heads={model.num_draft_heads}, and each head proposes one token"


def _round_up(number: int, multiple: int) -> int:
  return math.ceil(number / multiple) * multiple


def _write(text: str) -> None:
  """Write to stdout; to a terminal, with escapes for what it would obey."""
  sys.stdout.write(escape_controls(text) if sys.stdout.isatty() else text)
  sys.stdout.flush()


def _write_text(completions: Iterable[CompletionText]) -> str:
  """Write a completion as text, and return it."""
  text = ""
  for completion in completions:
    text += completion.text
    _write(completion.text)
  sys.stdout.write("\n")
  return text


def _write_lines(
  prompts: Mapping[GenerationRequest, Prompt],
  completions: Iterable[CompletionText],
  expert_ids: dict[GenerationRequest, np.ndarray],
) -> None:
  """Write a JSON line per prompt in order, each as soon as all before it are finished.

  Args:
    expert_ids: `Batcher.expert_ids`, from which those of written lines are removed.
  """
  texts = dict.fromkeys(prompts, "")
  finish_reasons: dict[GenerationRequest, str] = {}
  waiting = collections.deque(prompts)
  for request, text, finish_reason in completions:
    texts[request] += text
    if finish_reason:
      finish_reasons[request] = finish_reason
    while waiting and waiting[0] in finish_reasons:
      finished = waiting.popleft()
      row = _as_json(prompts[finished]) | {
        "text": texts[finished],
        "finish_reason": finish_reasons[finished],
      }
      if finished in expert_ids:
        row["expert_ids"] = expert_ids.pop(finished).tolist()
      line = json.dumps(row, ensure_ascii=False)  # JSON escapes control characters below a space
      line = re.sub("[\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", line)
      sys.stdout.write(f"{line}\n")
      sys.stdout.flush()


def _as_json(prompt: Prompt) -> JsonObject:
  """Return the keys of a prompt in JSON lines."""
  if isinstance(prompt, Conversation):
    return {"messages": [dict(message) for message in prompt.messages]}
  return {"prompt": prompt}


class CompletionsCallback(Callback):
  """Completes prompts at every checkpoint, into completions.jsonl and the trackers."""

  def on_start(self, context: CallbackContext) -> None:
    cfg = context.cfg
    if not cfg.checkpoint.enable_checkpointing or jax.process_count() > 1:
      raise UserError("callbacks=completions needs one process and enable_checkpointing=true")
    self._trackers = context.writers.trackers
    self._prompts = read_prompts(cfg.generate)
    self._completer = Completer(cfg, context.program, self._prompts)
    self._file = JsonlWriter(context.folder / "completions.jsonl", context.first_step - 1)

  def on_checkpoint(self, step: int, state: TrainState) -> None:
    params = averaged_params(state)
    if params is None:
      params = state.params
    texts = self._completer.complete(params)
    blocks: list[str] = []  # of Markdown code
    for prompt, text in zip(self._prompts, texts, strict=True):
      self._file.write({"step": step, **_as_json(prompt), "text": text})
      blocks.append(textwrap.indent(f"{prompt}{text}", "    "))
    for tracker in self._trackers:
      tracker.write_text("completions", "\n\n".join(blocks), step)

  def on_end(self, step: int, reason: str) -> None:
    self._file.close()
