"""Compiled programs of generation: prefill prompts into rows of a cache, then decode row by row.

Both are pure functions. Prefill processes prompts in parallel and samples the first token of each.
A decode step samples one more token for every active row, or several if drafts are accepted. Rows
are independent: a completion does not depend on the requests that share the batch.
"""

import dataclasses
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from maxlite.config.errors import UserError
from maxlite.inference.sampling import (
  BatchSamplingParams,
  SamplingParams,
  keys_at,
  log_probs,
  propose,
  sample,
  verify,
)
from maxlite.layers import cache
from maxlite.metrics.waits import report_wait
from maxlite.models.decoder import Decoder

NO_TOKEN = -1  # padding in the output of rows that have finished
MAX_STEPS = 16  # decode steps per call


@dataclasses.dataclass(frozen=True, eq=False)
class GenerationRequest:
  """A prompt to complete, up to a stop token or `max_new_tokens`."""

  prompt: Sequence[int]
  max_new_tokens: int
  sampling: SamplingParams = dataclasses.field(default_factory=SamplingParams)
  seed: int = 0


@struct.dataclass
class DecodeState:
  """The state of all rows between decode steps."""

  cache: Any
  token_B: jax.Array  # newest token, not in the cache yet
  length_B: jax.Array  # positions in the cache
  remaining_B: jax.Array  # tokens that may still be generated; 0: the row is idle
  key_B: jax.Array
  seen_BV: jax.Array  # whether the token occurs in the prompt or completion
  sampling: BatchSamplingParams
  x_BD: jax.Array  # for draft heads: the hidden state that `token_B` was sampled from


class Engine:
  """Decodes `num_rows` sequences at a time, each of at most `max_length` tokens with its prompt.

  Args:
    model: from `inference_params.inference_model`.
    params: from `inference_params.inference_params`.
    stop_token_ids: tokens that end a completion.
    num_drafts: tokens that the model's draft heads propose per decode step.
    first_block: cache positions read at least; doubled whenever a row has reached them. GPUs, which
      would have to synchronize with the host each time, read all.
    min_prompt_length: prompts are padded to this length times a power of `prompt_growth`, and each
      such length is a program.
    prompt_growth: a larger one has fewer programs and more padding.

  Raises:
    UserError: the shards of a batch do not divide num_rows, or there are fewer draft heads.
  """

  def __init__(
    self,
    model: Decoder,
    params: Any,
    *,
    num_rows: int,
    max_length: int,
    stop_token_ids: Sequence[int],
    num_drafts: int = 0,
    first_block: int = 128,
    min_prompt_length: int = 16,
    prompt_growth: int = 2,
  ) -> None:
    self.num_shards = model.sharder.num_shards("activation_batch")
    if num_rows % self.num_shards:
      raise UserError(
        f"{num_rows} rows are not divisible by the {self.num_shards} shards of a batch: use "
        f"{num_rows + -num_rows % self.num_shards}"
      )
    num_heads = model.cfg.num_draft_heads
    if num_drafts > num_heads:
      raise UserError(
        f"num_draft_heads={num_heads} cannot propose {num_drafts} tokens: use at most as many"
      )
    self._model, self._params, self.stop_token_ids = model, params, tuple(stop_token_ids)
    self.num_rows, self.max_length, self.num_drafts = num_rows, max_length, num_drafts
    self._min_prompt_length = min_prompt_length
    self._prompt_growth = prompt_growth
    self._first_block = 0 if model.sharder.platform == "gpu" else first_block
    self.compile_seconds = 0.0
    self._programs: dict[Hashable, Callable] = {}
    self._shardings = self._state_shardings()
    self._init_state = jax.jit(self._empty_state, out_shardings=self._shardings)
    self._state = self._init_state()
    make_idle = lambda state, row: state.replace(remaining_B=state.remaining_B.at[row].set(0))
    self._cancel = jax.jit(make_idle, donate_argnums=0, out_shardings=self._shardings)

  def check(self, request: GenerationRequest) -> None:
    """Raise UserError if no row can hold the request."""
    num_tokens, limit = len(request.prompt), self.max_length
    if not num_tokens:
      raise UserError("the prompt has no tokens: begin it with the tokenizer's bos token")
    if request.max_new_tokens < 1:
      raise UserError(f"max_new_tokens={request.max_new_tokens} must be 1 or more")
    if num_tokens >= limit:
      raise UserError(
        f"the prompt has {num_tokens} tokens, but the maximum length of a prompt with its "
        f"completion is {limit}: shorten it to at most {limit - 1}"
      )
    if num_tokens + request.max_new_tokens > limit:
      raise UserError(
        f"a prompt of {num_tokens} tokens and max_new_tokens={request.max_new_tokens} exceed the "
        f"maximum length of {limit} tokens: request at most {limit - num_tokens}"
      )

  def compile_ahead(self) -> None:
    """Compile all programs that a request may need, except prefill of all rows at once."""
    self._program("step", self._steps, np.int32(0))
    for length in sorted({self._padded(1 << n) for n in range(self.max_length.bit_length() + 1)}):
      args = self._prefill_args([GenerationRequest([0] * length, 0)], [0], self.num_shards)
      self._program(args[0].shape, self._prefill, *args)

  def prefill(self, requests: Sequence[GenerationRequest], rows: Sequence[int]) -> np.ndarray:
    """Insert `requests` into the idle rows `rows` and return the first token of each.

    There are two programs for each padded length: one fills all rows at once, the other as few as
    the mesh allows.
    """
    for request in requests:
      self.check(request)
    size = self.num_rows if len(requests) == self.num_rows else self.num_shards
    tokens = []
    for start in range(0, len(requests), size):
      batch, batch_rows = requests[start : start + size], rows[start : start + size]
      args = self._prefill_args(batch, batch_rows, size)
      tokens.append(np.asarray(self._run(args[0].shape, self._prefill, *args))[: len(batch)])
    return np.concatenate(tokens)

  def step(self, num_steps: int = 1) -> jax.Array:
    """Run `num_steps` decode steps, at most MAX_STEPS, and return their token_NBT.

    Entries are padded with NO_TOKEN, also within a row and step after its tokens. The array is
    returned asynchronously.
    """
    return self._run("step", self._steps, np.int32(num_steps))

  def cancel(self, row: int) -> None:
    self._state = self._cancel(self._state, row)

  def reset(self) -> None:
    """Make all rows idle with a new state, since a failed program may have consumed the old one."""
    self._state = self._init_state()

  def load(self, params: Any) -> None:
    """Replace the parameters by `params`, of the same shapes and shardings, and reset."""
    self._params = params
    self.reset()

  def unload(self) -> None:
    """Free the memory of the parameters and rows until `load`; the programs stay compiled."""
    self._params = self._state = None

  def _padded(self, length: int) -> int:
    padded = self._min_prompt_length
    while padded < length:
      padded *= self._prompt_growth
    return min(padded, self.max_length)

  def _prefill_args(
    self, requests: Sequence[GenerationRequest], rows: Sequence[int], size: int
  ) -> tuple:
    num_padding = size - len(requests)
    padded = [*requests, *[GenerationRequest((), 0)] * num_padding]
    int32 = lambda values: np.asarray(list(values), np.int32)
    lengths = [len(request.prompt) for request in padded]
    tokens_BT = np.zeros((size, self._padded(max(lengths))), np.int32)
    for row_T, request in zip(tokens_BT, padded, strict=True):
      row_T[: len(request.prompt)] = request.prompt
    return (
      tokens_BT,
      int32(lengths),
      int32([*rows, *[self.num_rows] * num_padding]),
      np.asarray([request.seed for request in padded], np.uint32),
      int32(request.max_new_tokens for request in padded),
      BatchSamplingParams.stack([request.sampling for request in padded]),
    )

  def _run(self, name: Hashable, function: Callable, *args: Any) -> jax.Array:
    """Run function(params, state, *args), store the new state and return the tokens."""
    program = self._program(name, function, *args)
    self._state, tokens = program(self._params, self._state, *args)
    return tokens

  def _program(self, name: Hashable, function: Callable, *args: Any) -> Callable:
    """Return the compiled `function`; `name` must determine the shapes of the arguments."""
    if name not in self._programs:
      start = time.perf_counter()
      replicated = self._model.sharder.sharding(())
      jitted = jax.jit(function, donate_argnums=1, out_shardings=(self._shardings, replicated))
      what = "a decode step" if name == "step" else f"prefill of {name} tokens"
      with report_wait(f"compiling {what}"):
        self._programs[name] = jitted.lower(self._params, self._state, *args).compile()
      self.compile_seconds += time.perf_counter() - start
    return self._programs[name]

  def _empty_state(self) -> DecodeState:
    tokens_BT = jax.ShapeDtypeStruct((self.num_shards, self.max_length), jnp.int32)
    x_BTD, prefix = jax.eval_shape(self._hidden, self._params, None, *[tokens_BT] * 3)
    zeros_B = jnp.zeros(self.num_rows, jnp.int32)
    return DecodeState(
      cache=cache.init_cache(prefix, self.num_rows, 1 + self.num_drafts, self._first_block),
      token_B=zeros_B,
      length_B=zeros_B,
      remaining_B=zeros_B,
      key_B=jax.random.split(jax.random.key(0), self.num_rows),
      seen_BV=jnp.zeros((self.num_rows, self._model.cfg.vocab_size), bool),
      sampling=BatchSamplingParams.stack([SamplingParams()] * self.num_rows),
      x_BD=jnp.zeros((self.num_rows, x_BTD.shape[-1]), x_BTD.dtype),
    )

  def _state_shardings(self) -> DecodeState:
    """Rows use the batch sharding; cache entries also that of the key/value heads."""
    sharder = self._model.sharder

    def sharding(leaf: jax.ShapeDtypeStruct) -> jax.NamedSharding:
      names = ["activation_batch", *[None] * (leaf.ndim - 1)]
      if leaf.ndim == 4 and leaf.shape[1] % sharder.num_shards("activation_kv_heads") == 0:
        names[1] = "activation_kv_heads"
      return sharder.sharding(names)

    return jax.tree.map(sharding, jax.eval_shape(self._empty_state))

  def _hidden(
    self, params: Any, entries: Any, tokens_BT, segment_BT, position_BT
  ) -> tuple[jax.Array, Any]:
    """Return (x_BTD, the new cache entries)."""
    variables = {"params": params} | ({} if entries is None else {cache.COLLECTION: entries})
    options = {"method": self._model.hidden, "mutable": [cache.COLLECTION]}
    (x_BTD, _), new = self._model.apply(variables, tokens_BT, segment_BT, position_BT, **options)
    return x_BTD, new[cache.COLLECTION]

  def _logits(self, params: Any, x: jax.Array) -> jax.Array:
    return self._model.apply({"params": params}, x, method=self._model.logits)

  def _draft_logits(self, params: Any, x_BD: jax.Array) -> jax.Array:
    """Return logits_BJV of the tokens after the newest one."""
    if not self.num_drafts:
      return jnp.zeros((self.num_rows, 0, self._model.cfg.vocab_size))
    method = self._model.draft_hidden
    y_B1JD = self._model.apply({"params": params}, x_BD[:, None], method=method)
    return self._logits(params, y_B1JD[:, :, : self.num_drafts])[:, 0]

  def _prefill(
    self,
    params: Any,
    state: DecodeState,
    tokens_BT: jax.Array,
    length_B: jax.Array,
    row_B: jax.Array,
    seed_B: jax.Array,
    remaining_B: jax.Array,
    sampling: BatchSamplingParams,
  ) -> tuple[DecodeState, jax.Array]:
    """Return (state, token_B) after inserting prompts as the rows `row_B`."""
    column_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1])[None], tokens_BT.shape)
    is_real_BT = column_BT < length_B[:, None]
    x_BTD, prefix = self._hidden(params, None, tokens_BT, is_real_BT.astype(jnp.int32), column_BT)
    last_B11 = jnp.maximum(length_B - 1, 0)[:, None, None]
    x_B1D = jnp.take_along_axis(x_BTD, last_B11, axis=1)
    logits_BV = self._logits(params, x_B1D)[:, 0]
    batch_B1 = jnp.arange(len(length_B))[:, None]
    seen_BV = jnp.zeros(logits_BV.shape, bool).at[batch_B1, tokens_BT].max(is_real_BT)
    key_B = jax.vmap(jax.random.key)(seed_B)
    token_B = sample(keys_at(key_B, length_B), log_probs(logits_BV, seen_BV, sampling))
    x_BD = x_B1D[:, 0]
    new = DecodeState(None, token_B, length_B, remaining_B, key_B, seen_BV, sampling, x_BD)
    new, token_B1 = self._append_tokens(new, token_B[:, None])
    insert = lambda old, rows: old.at[row_B].set(rows, mode="drop")
    inserted = jax.tree.map(insert, state.replace(cache=None), new)
    entries = cache.insert(state.cache, prefix, row_B, length_B)
    return inserted.replace(cache=entries), token_B1[:, 0]

  def _steps(
    self, params: Any, state: DecodeState, num_steps: jax.Array
  ) -> tuple[DecodeState, jax.Array]:
    """Return (state, token_NBT) after `num_steps`, or as soon as all rows are idle."""
    token_NBT = jnp.full((MAX_STEPS, self.num_rows, 1 + self.num_drafts), NO_TOKEN, jnp.int32)

    def is_unfinished(carry: tuple) -> jax.Array:
      n, state, _ = carry
      return (n < num_steps) & jnp.any(state.remaining_B > 0)

    def step(carry: tuple) -> tuple:
      n, state, token_NBT = carry
      state, token_BT = self._step(params, state)
      return n + 1, state, token_NBT.at[n].set(token_BT)

    return jax.lax.while_loop(is_unfinished, step, (jnp.int32(0), state, token_NBT))[1:]

  def _step(self, params: Any, state: DecodeState) -> tuple[DecodeState, jax.Array]:
    """Return (state, token_BT) after a forward pass over the newest tokens and their drafts."""
    is_active_B1, first_B = (state.remaining_B > 0)[:, None], state.length_B + 1
    draft_logits_BJV = self._draft_logits(params, state.x_BD)
    drafts = propose(draft_logits_BJV, state.seen_BV, state.sampling, state.key_B, first_B)
    tokens_BT = jnp.concatenate([state.token_B[:, None], drafts.token_BJ], axis=1)
    column_1T = jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None]
    is_active_BT = jnp.broadcast_to(is_active_B1, tokens_BT.shape).astype(jnp.int32)
    position_BT = state.length_B[:, None] + column_1T
    x_BTD, entries = self._hidden(params, state.cache, tokens_BT, is_active_BT, position_BT)
    process = jax.vmap(log_probs, (1, 1, None), 1)
    log_p_BTV = process(self._logits(params, x_BTD), drafts.seen_BTV, state.sampling)
    num_accepted_B, token_B = verify(drafts, log_p_BTV, state.key_B, first_B)
    num_accepted_B1 = num_accepted_B[:, None]
    length_B = state.length_B + jnp.where(is_active_B1[:, 0], 1 + num_accepted_B, 0)
    if self.num_drafts:
      entries = cache.rewind(entries, length_B)
    x_BD = jnp.take_along_axis(x_BTD, num_accepted_B1[..., None], axis=1)[:, 0]
    state = state.replace(cache=entries, token_B=token_B, length_B=length_B, x_BD=x_BD)
    drafted_BT = jnp.pad(drafts.token_BJ, ((0, 0), (0, 1)))
    new_BT = jnp.where(column_1T < num_accepted_B1, drafted_BT, token_B[:, None])
    return self._append_tokens(state, jnp.where(column_1T <= num_accepted_B1, new_BT, NO_TOKEN))

  def _append_tokens(self, state: DecodeState, new_BT: jax.Array) -> tuple[DecodeState, jax.Array]:
    """Count tokens as generated; return (state, those up to the first stop token or the limit)."""
    column_1T = jnp.arange(new_BT.shape[1], dtype=jnp.int32)[None]
    is_new_BT = (new_BT != NO_TOKEN) & (column_1T < state.remaining_B[:, None])
    is_stop_BT = jnp.isin(new_BT, jnp.asarray(self.stop_token_ids)) & is_new_BT
    num_stops_BT = jnp.cumsum(is_stop_BT.astype(jnp.int32), axis=1)
    is_new_BT &= (num_stops_BT == 0) | ((num_stops_BT == 1) & is_stop_BT)
    num_left_B = state.remaining_B - jnp.sum(is_new_BT, axis=1, dtype=jnp.int32)
    remaining_B = jnp.where(jnp.any(is_stop_BT, axis=1), 0, num_left_B)
    batch_B1 = jnp.arange(len(remaining_B))[:, None]
    seen_BV = state.seen_BV.at[batch_B1, jnp.maximum(new_BT, 0)].max(is_new_BT)
    state = state.replace(remaining_B=remaining_B, seen_BV=seen_BV)
    return state, jnp.where(is_new_BT, new_BT, NO_TOKEN)
