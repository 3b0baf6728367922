"""Adapter for EleutherAI's `lm_eval`: evaluate a run or a Hugging Face folder on its tasks.

  python -m maxlite.lm_eval_adapter run --model maxlite --model_args path=runs/mine --tasks ...

is the command line of `lm_eval` with the model `maxlite` registered. From Python:
`lm_eval.simple_evaluate(model=MaxliteLM("runs/mine"), tasks=...)`.
"""

import dataclasses
import functools
import json
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import jax
import numpy as np

try:
  from lm_eval.api.model import TemplateLM
  from lm_eval.api.registry import register_model
  from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
  message = f"maxlite.lm_eval_adapter needs {error.name}: pip install 'maxlite[lm_eval]'"
  raise (SystemExit if __name__ == "__main__" else ImportError)(message) from None

from maxlite.config import Config, read_values
from maxlite.config.schema import DEFAULTS, DataConfig, build
from maxlite.data.batch import Batch, DeviceBatch
from maxlite.data.packing import pad_row
from maxlite.data.tokenizer import encode_prompt, open_tokenizer
from maxlite.data.vocabulary_check import check_vocabulary
from maxlite.errors import UserError, exit_on_user_error
from maxlite.evaluation.document_losses import row_sums
from maxlite.hf.hf_folder import read_config
from maxlite.hf.hf_tokenizer import tokenizer_keys
from maxlite.hf.load_model import load, open_folder
from maxlite.inference.batcher import Batcher
from maxlite.inference.detokenizer import stream_completions
from maxlite.inference.engine import Engine, GenerationRequest
from maxlite.inference.inference_params import inference_model, inference_params
from maxlite.inference.sampling import SamplingParams
from maxlite.storage.json_values import Json, JsonObject

_MIN_LENGTH = 16  # rows are padded to this length, or to the next power of two
_CHUNK_TOKENS = 2048

_ScoredIds = tuple[list[int], list[int]]  # context, and the continuation that is scored


class _Request(Protocol):
  """An instance of a task of `lm_eval`; the first argument is a string."""

  args: tuple[Json, ...]


class _GenerationOptions(NamedTuple):
  """The generation_kwargs of a request."""

  stop_strings: list[str]
  num_tokens: int  # new ones, at most
  sampling: SamplingParams


@register_model("maxlite")
class MaxliteLM(TemplateLM):
  """A model for `lm_eval`.

  Sequences begin as documents do in training (`add_bos` of the run).

  Args:
    path, dtype, mesh: see `maxlite.load`.
    batch_size: rows per forward pass.
    max_length: limit of a sequence with its context, which is truncated on the left; by default
      max_target_length of the run, or max_position_embeddings of a Hugging Face folder.
    max_gen_toks: default number of tokens to generate, for tasks that do not set it.
    add_bos_token: whether sequences begin with bos instead (eos, if the tokenizer has none).
    device, max_batch_size: passed by `lm_eval` and ignored; JAX_PLATFORMS selects the platform.

  Raises:
    UserError: the folder has no tokenizer, or does not define a length.
  """

  def __init__(
    self,
    path: str,
    batch_size: int | str = 8,
    max_length: int | None = None,
    max_gen_toks: int = 256,
    dtype: str | None = None,
    mesh: Mapping[str, int] | None = None,
    *,
    add_bos_token: bool | None = None,
    device: str | None = None,
    max_batch_size: int | None = None,
    trust_plugins: bool = False,
  ) -> None:
    super().__init__()
    del device, max_batch_size
    self._model, self._params = load(path, dtype=dtype, mesh=mesh, trust_plugins=trust_plugins)
    data, trained_length = _data_config(str(path))
    if add_bos_token is not None:
      data = dataclasses.replace(data, add_bos=str(add_bos_token).lower())
    self._tokenizer = open_tokenizer(data)
    check_vocabulary(self._tokenizer, self._model.cfg.vocab_size)
    self.max_length = max_length or trained_length
    self.max_gen_toks = max_gen_toks
    if not self.max_length:
      raise UserError(f"{path}/config.json has no max_position_embeddings: set max_length")
    num_shards = self._model.sharder.num_shards("activation_batch")
    self.batch_size = -(-int(batch_size) // num_shards) * num_shards
    score = functools.partial(row_sums, self._model.decoder, chunk_tokens=_CHUNK_TOKENS)
    self._score = jax.jit(score)

  @property
  def eot_token_id(self) -> int:
    return self._tokenizer.eos

  @property
  def prefix_token_id(self) -> int:
    if self._tokenizer.bos is None:
      return self._tokenizer.eos
    return self._tokenizer.bos

  @property
  def tokenizer_name(self) -> str:
    return self._tokenizer.identity

  def tok_encode(
    self, string: str, add_special_tokens: bool | None = None, **unused: object
  ) -> list[int]:
    """Encode `string` as the start of a document; as a later part without `add_special_tokens`."""
    del unused
    if add_special_tokens is False:
      return self._tokenizer.encode(string.encode()).tolist()
    return encode_prompt(self._tokenizer, string.encode())

  def _loglikelihood_tokens(
    self, requests: Sequence[tuple[object, list[int], list[int]]], **unused: object
  ) -> list[tuple[float, bool]]:
    """Return (log-likelihood [nats], whether it is the greedy completion) per continuation."""
    del unused
    scores = self._scores([(context, scored) for _, context, scored in requests])
    for (cache_key, _, _), score in zip(requests, scores, strict=True):
      if cache_key is not None:
        self.cache_hook.add_partial("loglikelihood", cache_key, score)
    return scores

  def loglikelihood_rolling(
    self, requests: list[_Request], disable_tqdm: bool = False
  ) -> list[float]:
    """Return the log-likelihood [nats] of each string, in the windows that `lm_eval` defines."""
    del disable_tqdm
    windows: list[_ScoredIds] = []
    owners: list[int] = []
    for n, request in enumerate(requests):
      ids = self.tok_encode(request.args[0], add_special_tokens=False)
      rolling = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1)
      windows += map(make_disjoint_window, rolling)
      owners += [n] * (len(windows) - len(owners))
    sums = np.zeros(len(requests))
    np.add.at(sums, owners, [score for score, _ in self._scores(windows)])
    for request, total in zip(requests, sums.tolist(), strict=True):
      self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
    return sums.tolist()

  def generate_until(self, requests: list[_Request], disable_tqdm: bool = False) -> list[str]:
    """Complete each context up to any of its stop strings."""
    del disable_tqdm
    # The indices of the requests that have the same generation_kwargs.
    groups: dict[str, list[int]] = {}
    for n, request in enumerate(requests):
      kwargs = json.dumps(request.args[1], sort_keys=True)
      groups.setdefault(kwargs, []).append(n)
    completions = [""] * len(requests)
    for kwargs, indices in groups.items():
      contexts = {n: requests[n].args[0] for n in indices}
      completed = self._complete(contexts, self._parse(json.loads(kwargs)))
      for n, text in completed.items():
        completions[n] = text
    for request, text in zip(requests, completions, strict=True):
      self.cache_hook.add_partial("generate_until", request.args, text)
    return completions

  def _complete(self, contexts: Mapping[int, str], options: _GenerationOptions) -> dict[int, str]:
    """Return the completion of each context, whose key is the seed of its random numbers."""
    max_context = self._engine.max_length - options.num_tokens
    if max_context < 1:
      raise UserError(
        f"max_gen_toks={options.num_tokens} leaves no room for a context in "
        f"max_length={self.max_length}"
      )
    index_of = {}
    for n, context in contexts.items():
      ids = self.tok_encode(context)[-max_context:]
      index_of[GenerationRequest(ids, options.num_tokens, options.sampling, n)] = n
    completions = dict.fromkeys(contexts, "")
    stream = stream_completions(
      Batcher(self._engine),
      index_of,
      self._tokenizer,
      options.stop_strings,
    )
    for request, text, _ in stream:
      completions[index_of[request]] += text
    return completions

  @functools.cached_property
  def _engine(self) -> Engine:
    return Engine(
      inference_model(self._model.cfg, self._model.sharder),
      inference_params(self._model.cfg, self._params),
      num_rows=self.batch_size,
      max_length=self.max_length,
      stop_token_ids=self._tokenizer.stop_token_ids,
    )

  def _parse(self, kwargs: JsonObject) -> _GenerationOptions:
    """Parse generation_kwargs; raises UserError if one is not supported."""
    stop_strings = kwargs.pop("until", None) or []
    if isinstance(stop_strings, str):
      stop_strings = [stop_strings]
    num_tokens = kwargs.pop("max_gen_toks", self.max_gen_toks)
    do_sample = kwargs.pop("do_sample", kwargs.get("temperature", 0) > 0)
    temperature = kwargs.pop("temperature", 1.0)
    if not do_sample:
      temperature = 0.0
    try:
      sampling = SamplingParams(temperature=temperature, **kwargs)
    except TypeError:
      raise UserError(
        f"generation_kwargs has {', '.join(kwargs)}; supported are until, max_gen_toks, do_sample, "
        "temperature, top_k, top_p, min_p and repetition_penalty"
      ) from None
    return _GenerationOptions(list(stop_strings), num_tokens, sampling)

  def _scores(self, pairs: Sequence[_ScoredIds]) -> list[tuple[float, bool]]:
    scores: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
    # The longest first.
    order = sorted(range(len(pairs)), key=lambda n: -_num_ids(pairs[n]))
    for start in range(0, len(order), self.batch_size):
      indices = order[start : start + self.batch_size]
      batch = self._batch([pairs[n] for n in indices])
      nll_B, num_greedy_B = jax.device_get(self._score(self._params, batch))
      # Rows that fill up the batch have no request.
      by_request = zip(indices, nll_B.tolist(), num_greedy_B.tolist(), strict=False)
      for n, nll, num_greedy in by_request:
        _, scored = pairs[n]
        scores[n] = (-nll, num_greedy == len(scored))
    return scores

  def _batch(self, pairs: Sequence[_ScoredIds]) -> DeviceBatch:
    """Build a batch with a row for each pair, filled up with rows without targets."""
    num_positions = max(map(_num_ids, pairs)) - 1
    power_of_two = 1 << (num_positions - 1).bit_length()
    size = min(max(_MIN_LENGTH, power_of_two), self.max_length)
    rows = [self._row(context, scored, size) for context, scored in pairs]
    rows += [self._row([0], [], size)] * (self.batch_size - len(rows))
    stacked = {}
    for name in rows[0]:
      stacked[name] = np.stack([row[name] for row in rows])
    sharding = self._model.sharder.sharding(("activation_batch", "activation_length"))
    return jax.device_put(Batch(**stacked), sharding)

  def _row(self, context: list[int], scored: list[int], size: int) -> dict[str, np.ndarray]:
    """Build a row that predicts `scored`, with as much of the context as fits."""
    if len(scored) > self.max_length:
      raise UserError(
        f"a continuation of {len(scored)} tokens exceeds max_length={self.max_length}"
      )
    ids = np.asarray([*context, *scored], np.int32)[-size - 1 :]
    targets = ids[1:].copy()
    targets[: len(targets) - len(scored)] = -1
    return pad_row(ids[:-1], targets, np.array([len(targets)]), size)


def _num_ids(pair: _ScoredIds) -> int:
  """Return the number of ids of a context and its continuation."""
  context, scored = pair
  return len(context) + len(scored)


def _data_config(path: str) -> tuple[DataConfig, int]:
  """Return (data config with the tokenizer, maximum length or 0 if undefined)."""
  folder, run = open_folder(path)
  if run and run.config.is_file():
    cfg: Config = build(Config, read_values(run.config))
    return cfg.data, cfg.data.max_target_length
  keys = tokenizer_keys(folder)
  if not keys:
    raise UserError(f"{folder} has no tokenizer.json or tokenizer.model")
  hf = read_config(folder)
  data: DataConfig = build(DataConfig, DEFAULTS | keys)
  return data, hf.get("max_position_embeddings", 0)


def main() -> int:
  from lm_eval.__main__ import cli_evaluate

  with exit_on_user_error("maxlite.lm_eval_adapter"):
    cli_evaluate()
  return 0


if __name__ == "__main__":
  sys.exit(main())
