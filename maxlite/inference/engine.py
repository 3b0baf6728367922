"""The programs of generation: prompts into rows of a cache, and then tokens, a row a text.

Two pure functions do the work. `admit` reads prompts, all at once, and draws the first token of
each; a step draws one more for every row that is not done, or several where draft heads have
guessed well. Prompts may come at any time: rows are independent of each other, and a text is the
same whatever is generated beside it.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from maxlite.config.errors import UserError
from maxlite.inference.sampling import RowRules, Rules, draw, log_probs
from maxlite.inference.speculative import keys_at, propose, verify
from maxlite.layers import cache
from maxlite.models.decoder import Decoder

NONE = -1  # in place of a token, for a row that has none left
MAX_STEPS = 16  # of one call
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
  x_BD: jax.Array | None = None  # for draft heads: the state that `token_B` was drawn from


class Engine:
  """`num_rows` texts at a time, each of at most `max_length` tokens with its prompt.

  Args:
    model: as of `weights.inference_model`.
    params: as of `weights.inference_params`.
    ends: the tokens that end a text, each by itself.
    num_drafts: how many tokens the model's draft heads guess for it to read in one step.
    first_block: how many places of the cache are read at least; twice as many, and so on, when a
      row has reached them. A GPU, which would have to ask the host each time, reads all.

  Raises:
    UserError: rows do not divide by the shards of a batch, or there are fewer draft heads.
  """

  def __init__(
    self,
    model: Decoder,
    params: Any,
    *,
    num_rows: int,
    max_length: int,
    ends: Sequence[int],
    num_drafts: int = 0,
    first_block: int = 128,
  ) -> None:
    self.num_shards = model.sharder.num_shards("activation_batch")
    if num_rows % self.num_shards:
      rounded = -(-num_rows // self.num_shards) * self.num_shards
      raise UserError(
        f"{num_rows} rows do not divide by the {self.num_shards} shards of a batch: take {rounded}"
      )
    if num_drafts > model.cfg.num_draft_heads:
      raise UserError(
        f"{num_drafts} tokens cannot be guessed by num_draft_heads={model.cfg.num_draft_heads}: "
        "take at most as many"
      )
    self._model, self._params, self.ends = model, params, tuple(ends)
    self.num_rows, self.max_length, self.num_drafts = num_rows, max_length, num_drafts
    self._first_block = 0 if model.sharder.platform == "gpu" else first_block
    self.compile_seconds = 0.0
    self._programs: dict[Any, Callable] = {}
    self._shardings = self._row_shardings()
    self._new_rows = jax.jit(self._empty_rows, out_shardings=self._shardings)
    self._rows = self._new_rows()
    self._stop = jax.jit(_without, donate_argnums=0, out_shardings=self._shardings)

  def check(self, request: Request) -> None:
    """Raises UserError for a request that no row can hold."""
    num_tokens, most = len(request.prompt), self.max_length
    if not num_tokens:
      raise UserError("the prompt has no token: begin it with the tokenizer's first token")
    if request.max_new_tokens < 1:
      raise UserError(f"max_new_tokens={request.max_new_tokens} must be 1 or more")
    if num_tokens + request.max_new_tokens > most:
      raise UserError(
        f"a prompt of {num_tokens} tokens and max_new_tokens={request.max_new_tokens} are more "
        f"than the {most} tokens a text may have: ask for at most {max(most - num_tokens, 0)}"
      )

  def compile_ahead(self) -> None:
    """Compiles what a request may need, but for prompts that fill all rows at once."""
    self._program("step", self._steps, np.int32(0))
    for length in sorted({self._padded(1 << n) for n in range(self.max_length.bit_length() + 1)}):
      args = self._admit_args([Request([0] * length, 0)], [0], self.num_shards)
      self._program(args[0].shape, self._admit, *args)

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
    args = self._admit_args(requests, rows, size)
    return np.asarray(self._run(args[0].shape, self._admit, *args))[: len(requests)]

  def _padded(self, length: int) -> int:
    """What prompts of `length` tokens are padded to."""
    return min(max(_SHORTEST, 1 << (length - 1).bit_length()), self.max_length)

  def _admit_args(self, requests: Sequence[Request], rows: Sequence[int], size: int) -> tuple:
    num_padding = size - len(requests)
    padded = [*requests, *[Request((), 0)] * num_padding]
    lengths = [len(request.prompt) for request in padded]
    tokens_BT = np.zeros((size, self._padded(max(lengths))), np.int32)
    for row_T, request in zip(tokens_BT, padded, strict=True):
      row_T[: len(request.prompt)] = request.prompt
    return (
      tokens_BT,
      np.asarray(lengths, np.int32),
      np.asarray([*rows, *[self.num_rows] * num_padding], np.int32),
      np.asarray([request.seed for request in padded], np.uint32),
      np.asarray([request.max_new_tokens for request in padded], np.int32),
      RowRules.of([request.rules for request in padded]),
    )

  def step(self, num_steps: int = 1) -> jax.Array:
    """token_NBT: what each row draws in steps 1, ..., num_steps, at most MAX_STEPS of them.

    NONE where there is nothing; of a row and step tokens come before NONE. Being computed still.
    """
    return self._run("step", self._steps, np.int32(num_steps))

  def stop(self, row: int) -> None:
    """Makes a row idle, whatever it still had to come."""
    self._rows = self._stop(self._rows, row)

  def clear(self) -> None:
    """Makes all rows idle and new: a program that failed may have left none."""
    self._rows = self._new_rows()

  def _run(self, name: Any, function: Callable, *args: Any) -> jax.Array:
    """The tokens that function(params, rows, *args) draws; its rows take the place of the old."""
    program = self._program(name, function, *args)
    self._rows, tokens = program(self._params, self._rows, *args)
    return tokens

  def _program(self, name: Any, function: Callable, *args: Any) -> Callable:
    """The compiled `function`, of which `name` and the arguments' shapes are those of before."""
    if name not in self._programs:
      start = time.perf_counter()
      whole = self._model.sharder.sharding(())
      jitted = jax.jit(function, donate_argnums=1, out_shardings=(self._shardings, whole))
      self._programs[name] = jitted.lower(self._params, self._rows, *args).compile()
      self.compile_seconds += time.perf_counter() - start
    return self._programs[name]

  def _empty_rows(self) -> Rows:
    shape = (self.num_shards, self.max_length)
    tokens_BT = jax.ShapeDtypeStruct(shape, jnp.int32)
    rows_BT = (tokens_BT, tokens_BT, tokens_BT)
    x_BTD, prefix = jax.eval_shape(self._hidden, self._params, None, *rows_BT)
    zeros_B = jnp.zeros(self.num_rows, jnp.int32)
    return Rows(
      cache=cache.init_cache(prefix, self.num_rows, 1 + self.num_drafts, self._first_block),
      token_B=zeros_B,
      length_B=zeros_B,
      left_B=zeros_B,
      key_B=jax.random.split(jax.random.key(0), self.num_rows),
      seen_BV=jnp.zeros((self.num_rows, self._model.cfg.vocab_size), bool),
      rules=RowRules.of([Rules()] * self.num_rows),
      x_BD=self._kept(jnp.zeros((self.num_rows, x_BTD.shape[-1]), x_BTD.dtype)),
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

  def _hidden(
    self, params: Any, entries: Any, tokens_BT, segment_BT, position_BT
  ) -> tuple[jax.Array, Any]:
    """(x_BTD, the new entries of the cache)."""
    variables = {"params": params} | ({} if entries is None else {cache.COLLECTION: entries})
    (x_BTD, _), kept = self._model.apply(
      variables,
      *(tokens_BT, segment_BT, position_BT),
      method=self._model.hidden,
      mutable=[cache.COLLECTION],
    )
    return x_BTD, kept[cache.COLLECTION]

  def _logits(self, params: Any, x: jax.Array) -> jax.Array:
    return self._model.apply({"params": params}, x, method=self._model.logits)

  def _draft_logits(self, params: Any, x_BD: jax.Array | None) -> jax.Array:
    """logits_BJV of the tokens behind the newest."""
    if x_BD is None:
      return jnp.zeros((self.num_rows, 0, self._model.cfg.vocab_size))
    model, x_B1D = self._model, x_BD[:, None]
    y_B1JD = model.apply({"params": params}, x_B1D, method=model.draft_hidden)
    return self._logits(params, y_B1JD[:, :, : self.num_drafts])[:, 0]

  def _kept(self, x_BD: jax.Array) -> jax.Array | None:
    return x_BD if self.num_drafts else None

  def _admit(
    self, params: Any, rows: Rows, tokens_BT, length_B, row_B, seed_B, left_B, rules: RowRules
  ) -> tuple[Rows, jax.Array]:
    """(rows, token_B)"""
    column_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1])[None], tokens_BT.shape)
    is_real_BT = column_BT < length_B[:, None]
    x_BTD, prefix = self._hidden(params, None, tokens_BT, is_real_BT.astype(jnp.int32), column_BT)
    last_B11 = jnp.maximum(length_B - 1, 0)[:, None, None]
    x_B1D = jnp.take_along_axis(x_BTD, last_B11, axis=1)
    logits_BV = self._logits(params, x_B1D)[:, 0]
    batch_B1 = jnp.arange(len(length_B))[:, None]
    seen_BV = jnp.zeros(logits_BV.shape, bool).at[batch_B1, tokens_BT].max(is_real_BT)
    key_B = jax.vmap(jax.random.key)(seed_B)
    token_B = draw(keys_at(key_B, length_B), log_probs(logits_BV, seen_BV, rules))
    new = Rows(None, token_B, length_B, left_B, key_B, seen_BV, rules, self._kept(x_B1D[:, 0]))
    new, token_B1 = self._with_tokens(new, token_B[:, None])
    put = lambda into, of: into.at[row_B].set(of, mode="drop")
    placed = jax.tree.map(put, rows.replace(cache=None), new)
    entries = cache.insert(rows.cache, prefix, row_B, length_B)
    return placed.replace(cache=entries), token_B1[:, 0]

  def _steps(self, params: Any, rows: Rows, num_steps: jax.Array) -> tuple[Rows, jax.Array]:
    """(rows, token_NBT) after so many steps, or as soon as no row has a token left."""
    token_NBT = jnp.full((MAX_STEPS, self.num_rows, 1 + self.num_drafts), NONE, jnp.int32)

    def goes_on(carry: tuple) -> jax.Array:
      n, rows, _ = carry
      return (n < num_steps) & jnp.any(rows.left_B > 0)

    def step(carry: tuple) -> tuple:
      n, rows, token_NBT = carry
      rows, token_BT = self._step(params, rows)
      return n + 1, rows, token_NBT.at[n].set(token_BT)

    return jax.lax.while_loop(goes_on, step, (jnp.int32(0), rows, token_NBT))[1:]

  def _step(self, params: Any, rows: Rows) -> tuple[Rows, jax.Array]:
    """(rows, token_BT): what the model makes of the newest token and of drafts behind it."""
    is_live_B1, first_B = (rows.left_B > 0)[:, None], rows.length_B + 1
    draft_logits_BJV = self._draft_logits(params, rows.x_BD)
    drafts = propose(draft_logits_BJV, rows.seen_BV, rows.rules, rows.key_B, first_B)
    tokens_BT = jnp.concatenate([rows.token_B[:, None], drafts.token_BJ], axis=1)
    column_1T = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None]
    is_live_BT = jnp.broadcast_to(is_live_B1, tokens_BT.shape).astype(jnp.int32)
    position_BT = rows.length_B[:, None] + column_1T
    x_BTD, entries = self._hidden(params, rows.cache, tokens_BT, is_live_BT, position_BT)
    process = jax.vmap(log_probs, (1, 1, None), 1)
    log_p_BTV = process(self._logits(params, x_BTD), drafts.seen_BTV, rows.rules)
    num_taken_B, token_B = verify(drafts, log_p_BTV, rows.key_B, first_B)
    num_taken_B1 = num_taken_B[:, None]
    length_B = rows.length_B + jnp.where(is_live_B1[:, 0], 1 + num_taken_B, 0)
    if self.num_drafts:
      entries = cache.rewind(entries, length_B)
    x_BD = jnp.take_along_axis(x_BTD, num_taken_B1[..., None], axis=1)[:, 0]
    rows = rows.replace(cache=entries, token_B=token_B, length_B=length_B, x_BD=self._kept(x_BD))
    drafted_BT = jnp.pad(drafts.token_BJ, ((0, 0), (0, 1)))
    new_BT = jnp.where(column_1T < num_taken_B1, drafted_BT, token_B[:, None])
    return self._with_tokens(rows, jnp.where(column_1T <= num_taken_B1, new_BT, NONE))

  def _with_tokens(self, rows: Rows, new_BT: jax.Array) -> tuple[Rows, jax.Array]:
    """(rows with these tokens in their texts, those of them that a row had left, up to an end)."""
    column_1T = jnp.arange(new_BT.shape[1], dtype=jnp.int32)[None]
    is_new_BT = (new_BT != NONE) & (column_1T < rows.left_B[:, None])
    is_end_BT = jnp.isin(new_BT, jnp.asarray(self.ends)) & is_new_BT
    num_ends_BT = jnp.cumsum(is_end_BT.astype(jnp.int32), axis=1)
    is_new_BT &= (num_ends_BT == 0) | ((num_ends_BT == 1) & is_end_BT)
    num_left_B = rows.left_B - jnp.sum(is_new_BT, axis=1, dtype=jnp.int32)
    left_B = jnp.where(jnp.any(is_end_BT, axis=1), 0, num_left_B)
    batch_B1 = jnp.arange(len(left_B))[:, None]
    seen_BV = rows.seen_BV.at[batch_B1, jnp.maximum(new_BT, 0)].max(is_new_BT)
    return rows.replace(left_B=left_B, seen_BV=seen_BV), jnp.where(is_new_BT, new_BT, NONE)


def _without(rows: Rows, row: jax.Array) -> Rows:
  return rows.replace(left_B=rows.left_B.at[row].set(0))
