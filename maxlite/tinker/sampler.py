"""Samples of adapters, with log-probabilities that equal those of training bit for bit.

The rows of a batch are decoded together, whatever adapters they have. The log-probabilities of a
completion come from the trainer's own forward pass of its whole row, so that they are the same
numbers as those of a forward request.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from maxlite.adapters.datum import Datum
from maxlite.adapters.decoding import AdapterDecoder, AdapterRequest, Factors
from maxlite.adapters.engine import AdapterEngine, AdapterState
from maxlite.data.tokenizer import Tokenizer
from maxlite.errors import UserError
from maxlite.inference.batcher import Batcher
from maxlite.inference.engine import GenerationRequest
from maxlite.inference.sampling import SamplingParams
from maxlite.storage.json_values import JsonObject
from maxlite.tinker.messages import SampledSequence

_MAX_SAMPLES = 1024  # of one request
# Fields of a request for which the server has no answer, with the values that ask for none.
_NOT_SUPPORTED: Mapping[str, object] = {
  "topk_prompt_logprobs": 0,
  "topk_sample_logprobs": 0,
  "prompt_alt_tokens_k": 0,
  "target_prompt_logprobs": None,
}


@dataclasses.dataclass(frozen=True, eq=False)
class SampleTask:
  """Several completions of a prompt.

  Attributes:
    stop_tokens: each ends a completion, and is its last token.
    stop_texts: a completion ends with the token that completes one of them.
    seed: of the request; every completion draws from its own.
    prompt_log_probs: whether those of the prompt are returned.
    last_n: of how many last tokens of the prompt; None: of all.
  """

  prompt: list[int]
  num_samples: int
  max_new_tokens: int
  sampling: SamplingParams
  seed: int
  stop_tokens: frozenset[int]
  stop_texts: tuple[str, ...]
  prompt_log_probs: bool
  last_n: int | None

  def requests(self, factors: Factors) -> list[AdapterRequest]:
    """Its completions by an adapter."""
    requests = []
    for n in range(self.num_samples):
      (seed,) = np.random.SeedSequence([self.seed, n]).generate_state(1)
      requests.append(
        AdapterRequest(self.prompt, self.max_new_tokens, self.sampling, int(seed), factors)
      )
    return requests


class SampleResult(NamedTuple):
  sequences: list[SampledSequence]
  prompt_log_probs: np.ndarray | None


class Sampler:
  """Samples completions of several adapters at a time.

  Args:
    scoring_slot: of `adapters`, for log-probabilities.
    tokenizer: None for a model without text.
    num_rows: completions that are decoded at once, and the most adapters of a call.
  """

  def __init__(
    self,
    adapters: AdapterEngine,
    tokenizer: Tokenizer | None,
    *,
    scoring_slot: int,
    num_rows: int,
  ) -> None:
    self._adapters = adapters
    self._slot = scoring_slot
    self._tokenizer = tokenizer
    self.num_rows = num_rows
    self._engine = AdapterDecoder(adapters, num_rows=num_rows)
    self._batcher = Batcher(self._engine)

  def read(self, body: JsonObject, default_seed: int) -> SampleTask:
    """Parse a request of the client.

    Raises:
      UserError: it is malformed, too long for the model, or asks for what the server lacks.
    """
    for name, without in _NOT_SUPPORTED.items():
      if body.get(name, without) not in (without, None):
        raise UserError(f"{name} is not supported by this server: leave it out")
    params = body.get("sampling_params") or {}
    prompt = _prompt_of(body)
    num_samples = _int(body.get("num_samples", 1), "num_samples", 1, _MAX_SAMPLES)
    room = self._adapters.max_length - len(prompt)
    max_new_tokens = max(room, 1)  # without room, the engine raises
    if params.get("max_tokens") is not None:
      max_new_tokens = _int(params["max_tokens"], "max_tokens", 1, 2**31 - 1)
    top_k = _int(params.get("top_k", -1), "top_k", -1, 2**31 - 1)
    seed = default_seed
    if params.get("seed") is not None:
      seed = _int(params["seed"], "seed", -(2**63), 2**64 - 1) % 2**64
    stop_tokens, stop_texts = self._stops(params.get("stop"))
    last_n = body.get("prompt_logprobs_last_n")
    task = SampleTask(
      prompt=prompt,
      num_samples=num_samples,
      max_new_tokens=max_new_tokens,
      sampling=SamplingParams(
        temperature=_float(params.get("temperature", 1.0), "temperature"),
        top_k=max(top_k, 0),
        top_p=_float(params.get("top_p", 1.0), "top_p"),
      ),
      seed=seed,
      stop_tokens=stop_tokens,
      stop_texts=stop_texts,
      prompt_log_probs=bool(body.get("prompt_logprobs")),
      last_n=None if last_n is None else _int(last_n, "prompt_logprobs_last_n", 0, 2**31 - 1),
    )
    self._engine.check(task.requests({})[0])
    return task

  def _stops(self, stop: object) -> tuple[frozenset[int], tuple[str, ...]]:
    """(tokens, texts) that end a completion; by default the end of a document."""
    if stop is None:
      return frozenset(self._tokenizer.stop_token_ids if self._tokenizer else ()), ()
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list):
      raise UserError(f"stop={stop!r} must be texts, or token ids")
    if all(isinstance(each, int) and not isinstance(each, bool) for each in stops):
      return frozenset(stops), ()
    if not all(isinstance(each, str) and each for each in stops):
      raise UserError(f"stop={stop!r} must be texts, or token ids")
    if self._tokenizer is None:
      raise UserError("stop has texts, but the server's model has no tokenizer: use token ids")
    return frozenset(), tuple(stops)

  def sample(
    self, states: Mapping[str, AdapterState], tasks: Sequence[tuple[str, SampleTask]]
  ) -> list[SampleResult]:
    """Sample for tasks, each with the adapter of its name in `states`."""
    factors = {name: self._engine.factors(state) for name, state in states.items()}
    by_task = [task.requests(factors[name]) for name, task in tasks]
    owners: dict[GenerationRequest, SampleTask] = {}
    for (_, task), requests in zip(tasks, by_task, strict=True):
      owners |= dict.fromkeys(requests, task)
    completions = self._decode(owners)
    results: dict[int, SampleResult] = {}
    for name, state in states.items():
      self._adapters.join(self._slot, state)
      for n, (owner, task) in enumerate(tasks):
        if owner == name:
          results[n] = self._scored(task, [completions[request] for request in by_task[n]])
    return [results[n] for n in range(len(tasks))]

  def _decode(
    self, owners: Mapping[GenerationRequest, SampleTask]
  ) -> dict[GenerationRequest, tuple[list[int], bool]]:
    """The tokens of each request, and whether a stop token or text has ended it."""
    tokens: dict[GenerationRequest, list[int]] = {}
    stopped: dict[GenerationRequest, bool] = {}
    waiting = collections.deque(owners)
    while waiting or not self._batcher.is_idle:
      new = [waiting.popleft() for _ in range(min(self._batcher.num_free, len(waiting)))]
      events = self._batcher.add(new)
      if not self._batcher.is_idle:
        events += self._batcher.step()
      for event in events:
        request = event.request
        if request in stopped:
          continue
        assert event.token is not None
        tokens.setdefault(request, []).append(event.token)
        if self._has_stopped(owners[request], tokens[request]):
          stopped[request] = True
          self._batcher.cancel(request)
        elif event.finish_reason:
          stopped[request] = False
    return {request: (tokens[request], stopped[request]) for request in owners}

  def reset(self) -> None:
    """Recover from any state that a failure left."""
    self._batcher.reset()

  def _has_stopped(self, task: SampleTask, tokens: list[int]) -> bool:
    if tokens[-1] in task.stop_tokens:
      return True
    if not task.stop_texts:
      return False
    assert self._tokenizer is not None
    text = self._tokenizer.decode(tokens)
    return any(stop in text for stop in task.stop_texts)

  def _scored(self, task: SampleTask, completions: list[tuple[list[int], bool]]) -> SampleResult:
    """The completions with their log-probabilities, and those of the prompt if it wants them."""
    rows = []
    for tokens, _ in completions:
      whole = np.asarray([*task.prompt, *tokens])
      weights = np.zeros(len(whole) - 1, np.float32)
      datum = Datum(whole[:-1], whole[1:], "cross_entropy", {"weights": weights})
      rows.append((self._slot, datum))
    log_probs = [result.log_probs for result in self._adapters.forward(rows)]
    start = len(task.prompt) - 1
    sequences = []
    for (tokens, stopped), of_row in zip(completions, log_probs, strict=True):
      sequences.append(SampledSequence(tokens, of_row[start:], stopped))
    of_prompt = None
    if task.prompt_log_probs:
      of_prompt = np.concatenate([[np.nan], log_probs[0][:start]]).astype(np.float32)
      if task.last_n is not None:
        of_prompt[: max(len(of_prompt) - task.last_n, 0)] = np.nan
    return SampleResult(sequences, of_prompt)


def _prompt_of(body: JsonObject) -> list[int]:
  prompt = body.get("prompt")
  chunks = prompt.get("chunks") if isinstance(prompt, dict) else None
  if not isinstance(chunks, list):
    raise UserError("the request has no prompt with chunks of tokens")
  tokens: list[int] = []
  for chunk in chunks:
    if not isinstance(chunk, dict) or chunk.get("type", "encoded_text") != "encoded_text":
      raise UserError("the prompt has an image or audio: the server's model reads tokens only")
    given = chunk.get("tokens")
    if not isinstance(given, list) or not all(type(token) is int for token in given):
      raise UserError("the prompt has a chunk whose tokens are not integers")
    tokens += given
  return tokens


def _int(value: object, name: str, low: int, high: int) -> int:
  if type(value) is not int or not low <= value <= high:
    raise UserError(f"{name}={value!r} must be an integer from {low} to {high}")
  return value


def _float(value: object, name: str) -> float:
  if isinstance(value, bool) or not isinstance(value, int | float):
    raise UserError(f"{name}={value!r} must be a number")
  return float(value)
