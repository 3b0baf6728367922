"""The programs of generation: prompts into rows of a cache, and then tokens, a row a text.

Two pure functions do the work. `admit` reads prompts, all at once, and draws the first token of
each; `step` draws one more for every row that is not done. Prompts may come at any time: rows are
independent of each other, and a text is the same whatever is generated beside it.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from maxlite.generation.sampling import RowRules, Rules, draw, log_probs
from maxlite.layers import cache
from maxlite.models.decoder import Decoder

NONE = -1  # in place of a token, for a row that has none left
_SHORTEST = 16  # prompts are padded to this length, or the next power of two


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
  """A text to be continued: until the end token, or max_new_tokens."""

  prompt: Sequence[int]
  max_new_tokens: int
  rules: Rules = dataclasses.field(default_factory=Rules)
  seed: int = 0


@struct.dataclass
class Rows:
  """The state between steps."""

  cache: Any
  token_B: jax.Array  # newest token, not in the cache yet
  length_B: jax.Array  # positions in the cache
  left_B: jax.Array  # tokens that may still come; 0: the row is idle
  key_B: jax.Array
  seen_BV: jax.Array  # whether the text has the token
  rules: RowRules


class Engine:
  """`num_rows` texts at a time, each of at most `max_length` tokens with its prompt.

  Args:
    model: as of `weights.inference_model`.
    params: as of `weights.inference_params`.
    ends: the tokens that end a text, each by itself.

  Raises:
    ValueError: rows do not divide by the shards of a batch.
  """

  def __init__(
    self, model: Decoder, params: Any, *, num_rows: int, max_length: int, ends: Sequence[int]
  ) -> None:
    self.num_shards = model.sharder.num_shards("activation_batch")
    if num_rows % self.num_shards:
      rounded = -(-num_rows // self.num_shards) * self.num_shards
      raise ValueError(
        f"{num_rows} rows do not divide by the {self.num_shards} shards of a batch: take {rounded}"
      )
    self._model, self._params, self.ends = model, params, tuple(ends)
    self.num_rows, self.max_length = num_rows, max_length
    self.compile_seconds = 0.0
    self._programs: dict[Any, Callable] = {}
    self._shardings = self._row_shardings()
    self._rows = jax.jit(self._empty_rows, out_shardings=self._shardings)()
    self._stop = jax.jit(_without, donate_argnums=0, out_shardings=self._shardings)

  def check(self, request: Request) -> None:
    """Raises ValueError for a request that no row can hold."""
    num_tokens, most = len(request.prompt), self.max_length
    if not num_tokens:
      raise ValueError("the prompt has no token: begin it with the tokenizer's first token")
    if request.max_new_tokens < 1:
      raise ValueError(f"max_new_tokens={request.max_new_tokens} must be 1 or more")
    if num_tokens + request.max_new_tokens > most:
      raise ValueError(
        f"a prompt of {num_tokens} tokens and max_new_tokens={request.max_new_tokens} are more "
        f"than the {most} tokens a text may have: ask for at most {max(most - num_tokens, 0)}"
      )

  def admit(self, requests: Sequence[Request], rows: Sequence[int]) -> np.ndarray:
    """The first token of each of `requests`, which go into the idle rows `rows`.

    For every length they are padded to there are two programs: one fills all rows at once, one as
    few as the mesh allows.
    """
    for request in requests:
      self.check(request)
    size = self.num_rows if len(requests) == self.num_rows else self.num_shards
    parts = [slice(start, start + size) for start in range(0, len(requests), size)]
    tokens = [self._admit_some(requests[part], rows[part], size) for part in parts]
    return np.concatenate(tokens)

  def _admit_some(self, requests: Sequence[Request], rows: Sequence[int], size: int) -> np.ndarray:
    num_padding = size - len(requests)
    padded = [*requests, *[Request((), 0)] * num_padding]
    lengths = [len(request.prompt) for request in padded]
    longest = min(max(_SHORTEST, 1 << (max(lengths) - 1).bit_length()), self.max_length)
    tokens_BT = np.zeros((size, longest), np.int32)
    for row_T, request in zip(tokens_BT, padded, strict=True):
      row_T[: len(request.prompt)] = request.prompt
    args = (
      tokens_BT,
      np.asarray(lengths, np.int32),
      np.asarray([*rows, *[self.num_rows] * num_padding], np.int32),
      np.asarray([request.seed for request in padded], np.uint32),
      np.asarray([request.max_new_tokens for request in padded], np.int32),
      RowRules.of([request.rules for request in padded]),
    )
    return np.asarray(self._run(tokens_BT.shape, self._admit, *args))[: len(requests)]

  def step(self) -> jax.Array:
    """token_B: the next token of each row, NONE where it has none left; still being computed."""
    return self._run("step", self._step)

  def stop(self, row: int) -> None:
    """Makes a row idle, whatever it still had to come."""
    self._rows = self._stop(self._rows, row)

  def _run(self, name: Any, function: Callable, *args: Any) -> jax.Array:
    """The tokens that function(params, rows, *args) draws; its rows take the place of the old."""
    if name not in self._programs:
      start = time.perf_counter()
      whole = self._model.sharder.sharding(())
      jitted = jax.jit(function, donate_argnums=1, out_shardings=(self._shardings, whole))
      self._programs[name] = jitted.lower(self._params, self._rows, *args).compile()
      self.compile_seconds += time.perf_counter() - start
    self._rows, tokens = self._programs[name](self._params, self._rows, *args)
    return tokens

  def _empty_rows(self) -> Rows:
    shape = (self.num_shards, self.max_length)
    tokens_BT = jax.ShapeDtypeStruct(shape, jnp.int32)
    prefix = jax.eval_shape(self._forward, self._params, None, tokens_BT, tokens_BT, tokens_BT)[1]
    zeros_B = jnp.zeros(self.num_rows, jnp.int32)
    return Rows(
      cache=cache.empty(prefix, self.num_rows),
      token_B=zeros_B,
      length_B=zeros_B,
      left_B=zeros_B,
      key_B=jax.random.split(jax.random.key(0), self.num_rows),
      seen_BV=jnp.zeros((self.num_rows, self._model.cfg.vocab_size), bool),
      rules=RowRules.of([Rules()] * self.num_rows),
    )

  def _row_shardings(self) -> Rows:
    """Rows lie where their part of a batch does, and entries of key/value heads where those do."""
    sharder = self._model.sharder

    def sharding(leaf: jax.ShapeDtypeStruct) -> jax.NamedSharding:
      names = ["activation_batch", *[None] * (leaf.ndim - 1)]
      if leaf.ndim == 4 and leaf.shape[1] % sharder.num_shards("activation_kv_heads") == 0:
        names[1] = "activation_kv_heads"
      return sharder.sharding(names)

    return jax.tree.map(sharding, jax.eval_shape(self._empty_rows))

  def _forward(
    self, params: Any, entries: Any, tokens_BT, segment_BT, position_BT, last_B=None
  ) -> tuple[jax.Array, Any]:
    """(logits_BV at column `last_B`, by default the first, and the new entries of the cache)."""
    variables = {"params": params} | ({} if entries is None else {cache.COLLECTION: entries})

    def logits_at(decoder: Decoder) -> jax.Array:
      x_BTD, _ = decoder.hidden(tokens_BT, segment_BT, position_BT)
      if last_B is not None:
        x_BTD = jnp.take_along_axis(x_BTD, last_B[:, None, None], axis=1)
      return decoder.logits(x_BTD[:, :1])[:, 0]

    logits_BV, kept = self._model.apply(variables, method=logits_at, mutable=[cache.COLLECTION])
    return logits_BV, kept[cache.COLLECTION]

  def _admit(
    self, params: Any, rows: Rows, tokens_BT, length_B, row_B, seed_B, left_B, rules: RowRules
  ) -> tuple[Rows, jax.Array]:
    column_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1])[None], tokens_BT.shape)
    is_real_BT = column_BT < length_B[:, None]
    last_B = jnp.maximum(length_B - 1, 0)
    logits_BV, prefix = self._forward(
      params, None, tokens_BT, is_real_BT.astype(jnp.int32), column_BT, last_B
    )
    batch_B1 = jnp.arange(len(length_B))[:, None]
    seen_BV = jnp.zeros(logits_BV.shape, bool).at[batch_B1, tokens_BT].max(is_real_BT)
    new = Rows(None, left_B, length_B, left_B, jax.vmap(jax.random.key)(seed_B), seen_BV, rules)
    new, token_B = _draw(new, logits_BV, self.ends)
    put = lambda into, of: into.at[row_B].set(of, mode="drop")
    placed = jax.tree.map(put, rows.replace(cache=None), new)
    return placed.replace(cache=cache.insert(rows.cache, prefix, row_B, length_B)), token_B

  def _step(self, params: Any, rows: Rows) -> tuple[Rows, jax.Array]:
    is_live_B = (rows.left_B > 0).astype(jnp.int32)
    logits_BV, entries = self._forward(
      params, rows.cache, rows.token_B[:, None], is_live_B[:, None], rows.length_B[:, None]
    )
    rows = rows.replace(cache=entries, length_B=rows.length_B + is_live_B)
    return _draw(rows, logits_BV, self.ends)


def _draw(rows: Rows, logits_BV: jax.Array, ends: tuple[int, ...]) -> tuple[Rows, jax.Array]:
  """(rows with one more token, the token or NONE)."""
  # By seed and position alone: a text does not depend on what is generated beside it.
  key_B = jax.vmap(jax.random.fold_in)(rows.key_B, rows.length_B)
  token_B = draw(key_B, log_probs(logits_BV, rows.seen_BV, rows.rules))
  is_live_B = rows.left_B > 0
  goes_on_B = ~jnp.isin(token_B, jnp.asarray(ends))
  left_B = jnp.where(is_live_B & goes_on_B, rows.left_B - 1, 0)
  seen_BV = rows.seen_BV.at[jnp.arange(len(token_B)), token_B].set(True)
  rows = rows.replace(token_B=token_B, left_B=left_B, seen_BV=seen_BV)
  return rows, jnp.where(is_live_B, token_B, NONE)


def _without(rows: Rows, row: jax.Array) -> Rows:
  return rows.replace(left_B=rows.left_B.at[row].set(0))
