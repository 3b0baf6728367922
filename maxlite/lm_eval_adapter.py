"""`python -m maxlite.lm_eval_adapter run --model maxlite --model_args path=runs/mine --tasks ...`

The command line of EleutherAI's `lm_eval`, with a model of its that is a run or a folder in Hugging
Face's format; and from Python `lm_eval.simple_evaluate(model=MaxliteLM("runs/mine"), tasks=...)`.
"""

import functools
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxlite.config.errors import UserError

try:
  from lm_eval.api.model import TemplateLM
  from lm_eval.api.registry import register_model
  from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
  raise ImportError(
    f"maxlite.lm_eval_adapter needs {error.name}: pip install 'maxlite[lm_eval]'"
  ) from None

from maxlite.checkpoint.run_folder import RunFolder
from maxlite.config import Config, exit_on_user_error, read_saved
from maxlite.config.schema import DataConfig, build
from maxlite.data.batch import Batch
from maxlite.data.packing import pad_row
from maxlite.data.tokenizers.tokenizer import open_tokenizer
from maxlite.hf.hf_tokenizer import tokenizer_keys
from maxlite.hf.load_model import load
from maxlite.inference.batcher import Batcher
from maxlite.inference.detokenizer import stream_texts
from maxlite.inference.engine import Engine, Request
from maxlite.inference.inference_params import inference_model, inference_params
from maxlite.inference.sampling import Rules
from maxlite.training.document_loss import row_sums

_SHORTEST = 16  # rows are padded to this length, or the next power of two
_CHUNK_TOKENS = 2048

_Scored = tuple[list[int], list[int]]  # context, and what is scored behind it


@register_model("maxlite")
class MaxliteLM(TemplateLM):
  """A model as `lm_eval` sees it.

  Texts begin with the tokenizer's bos, as all documents do in training.

  Args:
    path: as of `maxlite.load`, and so are `dtype` and `mesh`.
    batch_size: rows that are computed at once.
    max_length: of a text with its context; by default the longest in training, or of a folder in
      Hugging Face's format its max_position_embeddings. What is before is not seen.
    max_gen_toks: tokens generated where a task does not say.
    add_bos_token: False for models that were trained on texts without.
    device: given by `lm_eval`'s command line, like `max_batch_size`, and not read: JAX_PLATFORMS
      chooses the platform.

  Raises:
    UserError: the folder has no tokenizer, or says no length.
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
    add_bos_token: bool = True,
    device: str | None = None,
    max_batch_size: int | None = None,
  ) -> None:
    super().__init__()
    del device, max_batch_size
    self._loaded, self._params = load(path, dtype=dtype, mesh=mesh)
    data, longest = _data_of(Path(path).expanduser())
    self._tokenizer = open_tokenizer(data)
    self.max_length, self.max_gen_toks = max_length or longest, max_gen_toks
    if not self.max_length:
      raise UserError(f"{path}/config.json has no max_position_embeddings: give max_length")
    num_shards = self._loaded.sharder.num_shards("activation_batch")
    self.batch_size = -(-int(batch_size) // num_shards) * num_shards
    self._add_bos = add_bos_token
    score = functools.partial(row_sums, self._loaded.decoder, chunk_tokens=_CHUNK_TOKENS)
    self._score = jax.jit(score)

  @property
  def eot_token_id(self) -> int:
    return self._tokenizer.eos

  @property
  def prefix_token_id(self) -> int:
    return self._tokenizer.bos

  @property
  def tokenizer_name(self) -> str:
    return self._tokenizer.identity

  def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
    """Ids, behind bos unless `add_special_tokens` is False."""
    ids = self._tokenizer.encode(string.encode()).tolist()
    begins = self._add_bos if add_special_tokens is None else add_special_tokens
    return [self._tokenizer.bos, *ids] if begins else ids

  def _loglikelihood_tokens(
    self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
  ) -> list[tuple[float, bool]]:
    """(log-likelihood [nats], whether greedy decoding would say it) of each continuation."""
    found = self._scores([(context, scored) for _, context, scored in requests])
    for (texts, _, _), score in zip(requests, found, strict=True):
      if texts is not None:
        self.cache_hook.add_partial("loglikelihood", texts, score)
    return found

  def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
    """Log-likelihood [nats] of each text, in windows as `lm_eval` cuts them."""
    del disable_tqdm
    windows: list[_Scored] = []
    owners: list[int] = []
    for n, request in enumerate(requests):
      ids = self.tok_encode(request.args[0], add_special_tokens=False)
      cut = get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1)
      windows += map(make_disjoint_window, cut)
      owners += [n] * (len(windows) - len(owners))
    sums = np.zeros(len(requests))
    np.add.at(sums, owners, [score for score, _ in self._scores(windows)])
    for request, total in zip(requests, sums.tolist(), strict=True):
      self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
    return sums.tolist()

  def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
    """What is generated behind each context, up to any of its stop strings."""
    del disable_tqdm
    texts = [""] * len(requests)
    wishes = [json.dumps(request.args[1], sort_keys=True) for request in requests]
    for wish in dict.fromkeys(wishes):  # those that share their stop strings
      places = [n for n, other in enumerate(wishes) if other == wish]
      stops, num_tokens, rules = self._read(json.loads(wish))
      room = self._engine.max_length - num_tokens
      if room < 1:
        raise UserError(
          f"max_gen_toks={num_tokens} leaves no room for a context in max_length={self.max_length}"
        )
      prompts = [self.tok_encode(requests[n].args[0])[-room:] for n in places]
      asked = {
        Request(ids, num_tokens, rules, n): n for n, ids in zip(places, prompts, strict=True)
      }
      batcher = Batcher(self._engine)
      for request, text, _ in stream_texts(batcher, asked, self._tokenizer.decode, stops):
        texts[asked[request]] += text
    for request, text in zip(requests, texts, strict=True):
      self.cache_hook.add_partial("generate_until", request.args, text)
    return texts

  @functools.cached_property
  def _engine(self) -> Engine:
    cfg = self._loaded.cfg
    return Engine(
      inference_model(cfg, self._loaded.sharder),
      inference_params(cfg, self._params),
      num_rows=self.batch_size,
      max_length=self.max_length,
      ends=self._tokenizer.stop_token_ids,
    )

  def _read(self, wish: dict[str, Any]) -> tuple[list[str], int, Rules]:
    """(stop strings, tokens, rules) of a task's generation_kwargs."""
    until = wish.pop("until", None) or []
    stops = [until] if isinstance(until, str) else list(until)
    num_tokens = wish.pop("max_gen_toks", self.max_gen_toks)
    is_sampled = wish.pop("do_sample", wish.get("temperature", 0) > 0)
    temperature = wish.pop("temperature", 1.0)
    try:
      rules = Rules(temperature=temperature if is_sampled else 0.0, **wish)
    except TypeError:
      raise UserError(
        f"generation_kwargs has {', '.join(wish)}; known beside until, max_gen_toks, do_sample and "
        "temperature are top_k, top_p, min_p and repetition_penalty"
      ) from None
    return stops, num_tokens, rules

  def _scores(self, scored: Sequence[_Scored]) -> list[tuple[float, bool]]:
    """Of each pair; those of like length are computed together."""
    found: list[tuple[float, bool]] = [(0.0, True)] * len(scored)
    order = sorted(range(len(scored)), key=lambda n: -len(scored[n][0]) - len(scored[n][1]))
    for start in range(0, len(order), self.batch_size):
      places = order[start : start + self.batch_size]
      batch = self._batch([scored[n] for n in places])
      nll_B, likeliest_B = jax.device_get(self._score(self._params, batch))
      for n, nll, likeliest in zip(places, nll_B.tolist(), likeliest_B.tolist(), strict=False):
        found[n] = (-nll, likeliest == len(scored[n][1]))
    return found

  def _batch(self, scored: Sequence[_Scored]) -> Batch:
    longest = max(len(context) + len(targets) for context, targets in scored) - 1
    size = min(max(_SHORTEST, 1 << (longest - 1).bit_length()), self.max_length)
    rows = [self._row(*pair, size) for pair in scored]
    rows += [self._row([0], [], size)] * (self.batch_size - len(rows))
    stacked = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    sharding = self._loaded.sharder.sharding(("activation_batch", "activation_length"))
    return jax.device_put(Batch(**stacked), sharding)

  def _row(self, context: list[int], scored: list[int], size: int) -> dict[str, np.ndarray]:
    """A row that predicts `scored`, with as much of the context as there is room for."""
    if len(scored) > self.max_length:
      raise UserError(
        f"{len(scored)} tokens are to be scored at once, more than max_length={self.max_length}"
      )
    ids = np.asarray([*context, *scored], np.int32)[-size - 1 :]
    targets = ids[1:].copy()
    targets[: len(targets) - len(scored)] = -1
    return pad_row(ids[:-1], targets, np.array([len(targets)]), size)


def _data_of(folder: Path) -> tuple[DataConfig, int]:
  """(what tells the tokenizer, the longest text; 0: not said)."""
  if RunFolder(folder).config.is_file():
    cfg: Config = build(Config, read_saved(RunFolder(folder).config))
    return cfg.data, cfg.data.max_target_length
  keys = tokenizer_keys(folder)
  if not keys:
    raise UserError(f"{folder} has no tokenizer.json or tokenizer.model")
  told = json.loads((folder / "config.json").read_bytes())
  return DataConfig(**keys), told.get("max_position_embeddings", 0)


def main() -> int:
  from lm_eval.__main__ import cli_evaluate

  with exit_on_user_error("maxlite.lm_eval_adapter"):
    cli_evaluate()
  return 0


if __name__ == "__main__":
  sys.exit(main())
