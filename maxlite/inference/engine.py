"""Compiled programs of generation: prefill prompts into rows of a cache, then decode row by row.

Both are pure functions. Prefill processes prompts in parallel and samples the first token of each.
A decode step samples one more token for every active row, or several if drafts are accepted. Rows
are independent: a completion does not depend on the requests that share the batch.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from maxlite.errors import UserError
from maxlite.inference.drafters import (
  DecodedStep,
  DraftRows,
  PrefilledPrompts,
  build_drafter,
)
from maxlite.inference.sampling import (
  BatchSamplingParams,
  SamplingParams,
  accepted_tokens,
  keys_at,
  log_probs,
  sample,
  verify,
)
from maxlite.inference.scoring import MAX_TOP, TokenScore, route, score, token_scores
from maxlite.layers import cache
from maxlite.layers.moe import routes
from maxlite.metrics.waits import report_wait
from maxlite.models.decoder import Decoder
from maxlite.models.routes import route_shape, stack_routes
from maxlite.sharding.pytree import PyTree

NO_TOKEN = -1  # padding in the output of rows that have finished
MAX_STEPS = 16  # decode steps per call
_STEP = "step"  # name of the program of decode steps; programs of prefill have a shape


@dataclasses.dataclass(frozen=True, eq=False)
class GenerationRequest:
  """A prompt to complete, up to a stop token or `max_new_tokens`; equal only to itself."""

  prompt: Sequence[int]
  max_new_tokens: int
  sampling: SamplingParams = dataclasses.field(default_factory=SamplingParams)
  seed: int = 0


@struct.dataclass
class DecodeState:
  """The state of all rows between decode steps.

  Attributes:
    cache: keys and values of the positions before `token_B`; None for new rows.
    token_B: the newest token, which is not in the cache yet.
    length_B: number of positions in the cache.
    remaining_B: number of tokens that may still be generated; 0 if the row is idle.
    key_B: the random key of the row's request.
    seen_BV: whether the token occurs in the prompt or completion.
    sampling: the sampling parameters.
    draft: what the drafter keeps (drafters.py); None for new rows.
    expert_BSNK: the experts of the positions in the cache, if they are recorded.
  """

  cache: PyTree
  token_B: jax.Array
  length_B: jax.Array
  remaining_B: jax.Array
  key_B: jax.Array
  seen_BV: jax.Array
  sampling: BatchSamplingParams
  draft: PyTree
  expert_BSNK: jax.Array | None


class _Prompts(NamedTuple):
  """Prompts to insert into rows, padded to the same length and to a number of requests.

  Attributes:
    token_BT: the tokens.
    length_B: number of tokens; 0 for requests that are padding.
    row_B: the rows; `num_rows`, which does not exist, for requests that are padding.
    seed_B: the seeds.
    remaining_B: number of tokens to generate.
    sampling: the sampling parameters.
  """

  token_BT: np.ndarray
  length_B: np.ndarray
  row_B: np.ndarray
  seed_B: np.ndarray
  remaining_B: np.ndarray
  sampling: BatchSamplingParams


# (params, state, argument) -> (new state, tokens).
_Function = Callable[[PyTree, DecodeState, PyTree], tuple[DecodeState, jax.Array]]


class _Carry(NamedTuple):
  """What a loop over decode steps updates: steps taken, the state, and the new tokens."""

  num_steps: jax.Array
  state: DecodeState
  token_NBT: jax.Array


class Engine:
  """Decodes `num_rows` sequences at a time, each of at most `max_length` tokens with its prompt.

  Args:
    model: from `inference_params.inference_model`.
    params: from `inference_params.inference_params`.
    stop_token_ids: tokens that end a completion.
    num_drafts: tokens that the model's draft heads, or its layers of multi-token prediction,
      propose per decode step.
    first_block: cache positions read at least; doubled whenever a row has reached them. GPUs, which
      would have to synchronize with the host each time, read all.
    min_prompt_length: prompts are padded to this length times a power of `prompt_growth`, and each
      such length is a program.
    prompt_growth: a larger one has fewer programs and more padding.
    records_experts: whether rows keep the experts of their tokens, for `expert_ids`.

  Raises:
    UserError: the shards of a batch do not divide num_rows, or num_drafts exceeds what the model
      can propose.
  """

  def __init__(
    self,
    model: Decoder,
    params: PyTree,
    *,
    num_rows: int,
    max_length: int,
    stop_token_ids: Sequence[int],
    num_drafts: int = 0,
    first_block: int = 128,
    min_prompt_length: int = 16,
    prompt_growth: int = 2,
    records_experts: bool = False,
  ) -> None:
    self.num_shards = model.sharder.num_shards("activation_batch")
    rest = num_rows % self.num_shards
    if rest:
      raise UserError(
        f"{num_rows} rows are not divisible by the {self.num_shards} shards of a batch: use "
        f"{num_rows + self.num_shards - rest}"
      )
    self._drafter = build_drafter(model, num_drafts)
    if model.sharder.platform == "gpu":
      first_block = 0
    self.stop_token_ids = tuple(stop_token_ids)
    self.num_rows = num_rows
    self.max_length = max_length
    self.num_drafts = num_drafts
    self.has_experts = model.cfg.family.is_moe
    self.records_experts = records_experts
    self.compile_seconds = 0.0
    self._model = model
    self._params = params
    self._min_prompt_length = min_prompt_length
    self._prompt_growth = prompt_growth
    self._first_block = first_block
    self._programs: dict[Hashable, jax.stages.Compiled] = {}
    self._shardings = self._state_shardings()
    self._init_state = jax.jit(self._empty_state, out_shardings=self._shardings)
    self._state: DecodeState | None = self._init_state()
    self._cancel = jax.jit(_make_idle, donate_argnums=0, out_shardings=self._shardings)
    replicated = model.sharder.sharding(())
    self._score = jax.jit(
      functools.partial(score, model), static_argnums=3, out_shardings=replicated
    )
    self._route = jax.jit(functools.partial(route, model), out_shardings=replicated)

  def check(self, request: GenerationRequest) -> None:
    """Raise UserError if no row can hold the request."""
    num_tokens = len(request.prompt)
    limit = self.max_length
    if not num_tokens:
      raise UserError(
        "the prompt is empty, and the tokenizer puts no token before a text: write a prompt, or "
        "set add_bos=true"
      )
    vocab_size = self._model.cfg.vocab_size
    for token in (min(request.prompt), max(request.prompt)):
      if not 0 <= token < vocab_size:
        raise UserError(f"prompt: token {token} is outside of the model's vocab_size={vocab_size}")
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

  def compile_ahead(self, is_cancelled: Callable[[], bool] = lambda: False) -> None:
    """Compile all programs that a request may need, except prefill of all rows at once.

    Args:
      is_cancelled: asked before each program.
    """
    lengths = {self._padded(1 << n) for n in range(self.max_length.bit_length() + 1)}
    for length in sorted(lengths):
      if not is_cancelled():
        self.compile_for(GenerationRequest([0] * length, 0))

  def compile_for(self, request: GenerationRequest) -> None:
    """Compile the programs that complete `request`, if it is added alone."""
    self._program(_STEP, self._steps, np.int32(0))
    prompts = self._prompts([request], [0], self.num_shards)
    self._program(prompts.token_BT.shape, self._prefill, prompts)

  def prefill(self, requests: Sequence[GenerationRequest], rows: Sequence[int]) -> np.ndarray:
    """Insert `requests` into the idle rows `rows` and return the first token of each.

    There are two programs for each padded length: one fills all rows at once, the other as few as
    the mesh allows.
    """
    for request in requests:
      self.check(request)
    size = self.num_shards
    if len(requests) == self.num_rows:
      size = self.num_rows
    tokens: list[np.ndarray] = []
    for start in range(0, len(requests), size):
      batch = requests[start : start + size]
      prompts = self._prompts(batch, rows[start : start + size], size)
      token_B = self._run(prompts.token_BT.shape, self._prefill, prompts)
      tokens.append(np.asarray(token_B)[: len(batch)])
    return np.concatenate(tokens)

  def step(self, num_steps: int = 1) -> jax.Array:
    """Run `num_steps` decode steps, at most MAX_STEPS, and return their token_NBT.

    Entries are padded with NO_TOKEN, also within a row and step after its tokens. The array is
    returned asynchronously.
    """
    return self._run(_STEP, self._steps, np.int32(num_steps))

  def expert_ids(self, row: int, length: int) -> np.ndarray:
    """The experts of the first `length` tokens of a row, [length, MoE layers, K]."""
    assert self._state is not None
    assert self._state.expert_BSNK is not None, "an engine without records_experts"
    return np.asarray(self._state.expert_BSNK[row])[:length]

  def score(self, tokens: Sequence[int], num_top: int = 1) -> list[TokenScore | None]:
    """Score `tokens` by a forward pass without a cache; None for the first one.

    The first call for a padded length compiles a program, and so does the first one for more than
    one of the most likely tokens.

    Args:
      tokens: at most max_length.
      num_top: how many of the most likely tokens each position has at least, up to MAX_TOP.
    """
    num_top = 1 if num_top <= 1 else MAX_TOP
    token_BT, length_B = self._padded_tokens(tokens)
    with report_wait(f"log-probabilities of {token_BT.shape} tokens"):
      scores = jax.device_get(self._score(self._params, token_BT, length_B, num_top))
    return token_scores(scores, 0, list(tokens))

  def route(self, tokens: Sequence[int]) -> np.ndarray:
    """The experts [S, N, K] of `tokens` in every MoE layer, by a forward pass without a cache.

    The first call for a padded length compiles a program.
    """
    token_BT, length_B = self._padded_tokens(tokens)
    with report_wait(f"experts of {token_BT.shape} tokens"):
      expert_BTNK = jax.device_get(self._route(self._params, token_BT, length_B))
    return np.asarray(expert_BTNK[0, : len(tokens)])

  def _padded_tokens(self, tokens: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """(token_BT, length_B) with `tokens` as the first row, and a row per shard as prefill has."""
    token_BT = np.zeros((self.num_shards, self._padded(len(tokens))), np.int32)
    token_BT[0, : len(tokens)] = tokens
    length_B = np.where(np.arange(self.num_shards) == 0, len(tokens), 0).astype(np.int32)
    return token_BT, length_B

  def cancel(self, row: int) -> None:
    """Make a row idle."""
    self._state = self._cancel(self._state, row)

  def reset(self) -> None:
    """Make all rows idle with a new state, since a failed program may have consumed the old one."""
    self._state = self._init_state()

  def load(self, params: PyTree) -> None:
    """Replace the parameters by `params`, of the same shapes and shardings, and reset."""
    self._params = params
    self.reset()

  def unload(self) -> None:
    """Free the memory of the parameters and rows until `load`; the programs stay compiled."""
    self._params = None
    self._state = None

  def _padded(self, length: int) -> int:
    """The length to which a prompt of `length` tokens is padded."""
    padded = self._min_prompt_length
    while padded < length:
      padded *= self._prompt_growth
    return min(padded, self.max_length)

  def _prompts(
    self, requests: Sequence[GenerationRequest], rows: Sequence[int], size: int
  ) -> _Prompts:
    """Pad the prompts of `requests`, which get `rows`, to `size` prompts of one length."""
    num_padding = size - len(requests)
    no_request = GenerationRequest((), 0)
    padded = [*requests, *[no_request] * num_padding]
    padded_rows = [*rows, *[self.num_rows] * num_padding]
    lengths = [len(request.prompt) for request in padded]
    token_BT = np.zeros((size, self._padded(max(lengths))), np.int32)
    for row_T, request in zip(token_BT, padded, strict=True):
      row_T[: len(request.prompt)] = request.prompt
    return _Prompts(
      token_BT=token_BT,
      length_B=np.asarray(lengths, np.int32),
      row_B=np.asarray(padded_rows, np.int32),
      seed_B=np.asarray([request.seed for request in padded], np.uint32),
      remaining_B=np.asarray([request.max_new_tokens for request in padded], np.int32),
      sampling=BatchSamplingParams.stack([request.sampling for request in padded]),
    )

  def _run(self, name: Hashable, function: _Function, argument: PyTree) -> jax.Array:
    """Run function(params, state, argument), store the new state and return the tokens."""
    program = self._program(name, function, argument)
    self._state, tokens = program(self._params, self._state, argument)
    return tokens

  def _program(self, name: Hashable, function: _Function, argument: PyTree) -> jax.stages.Compiled:
    """Return the compiled `function`; `name` must determine the shapes of the argument."""
    if name not in self._programs:
      start = time.perf_counter()
      replicated = self._model.sharder.sharding(())
      jitted = jax.jit(function, donate_argnums=1, out_shardings=(self._shardings, replicated))
      what = f"prefill of {name} tokens"
      if name == _STEP:
        what = "a decode step"
      with report_wait(f"compiling {what}"):
        lowered = jitted.lower(self._params, self._state, argument)
        self._programs[name] = lowered.compile()
      self.compile_seconds += time.perf_counter() - start
    return self._programs[name]

  def _empty_state(self) -> DecodeState:
    """The state of idle rows."""
    tokens_BT = jax.ShapeDtypeStruct((self.num_shards, self.max_length), jnp.int32)
    x_BTD, prefix, _ = jax.eval_shape(
      self._hidden,
      self._params,
      None,
      tokens_BT,
      tokens_BT,
      tokens_BT,
    )
    of_prompt_B = jax.ShapeDtypeStruct((self.num_shards,), jnp.int32)
    prompts = (x_BTD, tokens_BT, of_prompt_B, of_prompt_B)
    draft = jax.eval_shape(self._prefilled_draft, self._params, *prompts)
    zeros_B = jnp.zeros(self.num_rows, jnp.int32)
    expert_BSNK = None
    if self.records_experts:
      shape = (self.num_rows, self.max_length, *route_shape(self._model.cfg))
      expert_BSNK = jnp.zeros(shape, jnp.int32)
    return DecodeState(
      cache=cache.init_cache(prefix, self.num_rows, 1 + self.num_drafts, self._first_block),
      token_B=zeros_B,
      length_B=zeros_B,
      remaining_B=zeros_B,
      key_B=jax.random.split(jax.random.key(0), self.num_rows),
      seen_BV=jnp.zeros((self.num_rows, self._model.cfg.vocab_size), bool),
      sampling=BatchSamplingParams.stack([SamplingParams()] * self.num_rows),
      draft=self._drafter.init(draft, self.num_rows, self._first_block),
      expert_BSNK=expert_BSNK,
    )

  def _state_shardings(self) -> DecodeState:
    """Rows use the batch sharding; cache entries also the sharding of key/value heads."""
    sharder = self._model.sharder

    def sharding(leaf: jax.ShapeDtypeStruct) -> jax.NamedSharding:
      names = ["activation_batch", *[None] * (leaf.ndim - 1)]
      if leaf.ndim == 4 and leaf.shape[1] % sharder.num_shards("activation_kv_heads") == 0:
        names[1] = "activation_kv_heads"
      return sharder.sharding(names)

    shardings = jax.tree.map(sharding, jax.eval_shape(self._empty_state))
    if self.records_experts:
      rows = sharder.sharding(("activation_batch", None, None, None))
      shardings = dataclasses.replace(shardings, expert_BSNK=rows)
    return shardings

  def _hidden(
    self,
    params: PyTree,
    entries: PyTree,
    token_BT: jax.Array,
    segment_BT: jax.Array,
    position_BT: jax.Array,
  ) -> tuple[jax.Array, PyTree, jax.Array | None]:
    """Return (x_BTD, the new cache entries, expert_BTNK if recorded).

    Without `entries` the tokens begin their rows.
    """
    variables = {"params": params}
    if entries is not None:
      variables[cache.COLLECTION] = entries
    recorded = [routes.COLLECTION] if self.records_experts else []
    (x_BTD, _), new = self._model.apply(
      variables,
      token_BT,
      segment_BT,
      position_BT,
      method=self._model.hidden,
      mutable=[cache.COLLECTION, *recorded],
    )
    expert_BTNK = None
    if self.records_experts:
      expert_BTNK = stack_routes(new[routes.COLLECTION], self._model.cfg)
    return x_BTD, new[cache.COLLECTION], expert_BTNK

  def _prefilled_draft(
    self,
    params: PyTree,
    x_BTD: jax.Array,
    token_BT: jax.Array,
    length_B: jax.Array,
    token_B: jax.Array,
  ) -> PyTree:
    """Return what the drafter keeps of new rows; see `PrefilledPrompts`."""
    prompts = PrefilledPrompts(x_BTD, token_BT, length_B, token_B)
    return self._drafter.prefill(params, prompts)

  def _apply(self, params: PyTree, method: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
    """Apply a method of the model that changes no variables."""
    return cast(jax.Array, self._model.apply({"params": params}, x, method=method))

  def _logits(self, params: PyTree, x: jax.Array) -> jax.Array:
    return self._apply(params, self._model.logits, x)

  def _prefill(
    self, params: PyTree, state: DecodeState, prompts: _Prompts
  ) -> tuple[DecodeState, jax.Array]:
    """Return (state, token_B) after inserting prompts as the rows `prompts.row_B`."""
    token_BT = jnp.asarray(prompts.token_BT)
    length_B = jnp.asarray(prompts.length_B)
    row_B = jnp.asarray(prompts.row_B)
    column_BT = jnp.broadcast_to(jnp.arange(token_BT.shape[1])[None], token_BT.shape)
    is_real_BT = column_BT < length_B[:, None]
    segment_BT = is_real_BT.astype(jnp.int32)
    x_BTD, prefix, expert_BTNK = self._hidden(params, None, token_BT, segment_BT, column_BT)
    last_B11 = jnp.maximum(length_B - 1, 0)[:, None, None]
    x_B1D = jnp.take_along_axis(x_BTD, last_B11, axis=1)
    logits_BV = self._logits(params, x_B1D)[:, 0]
    batch_B1 = jnp.arange(len(length_B))[:, None]
    seen_BV = jnp.zeros(logits_BV.shape, bool).at[batch_B1, token_BT].max(is_real_BT)
    key_B = jax.vmap(jax.random.key)(prompts.seed_B)
    log_prob_BV = log_probs(logits_BV, seen_BV, prompts.sampling)
    token_B = sample(keys_at(key_B, length_B), log_prob_BV)
    new = DecodeState(
      cache=None,
      token_B=token_B,
      length_B=length_B,
      remaining_B=jnp.asarray(prompts.remaining_B),
      key_B=key_B,
      seen_BV=seen_BV,
      sampling=prompts.sampling,
      draft=None,
      expert_BSNK=None,
    )
    new, new_token_B1 = self._append_tokens(new, token_B[:, None])
    entries = cache.insert(state.cache, prefix, row_B, length_B)
    new_draft = self._prefilled_draft(params, x_BTD, token_BT, length_B, token_B)
    draft = self._drafter.insert(state.draft, new_draft, row_B, length_B)

    def insert(old: jax.Array, rows: jax.Array) -> jax.Array:
      return old.at[row_B].set(rows, mode="drop")

    others = dataclasses.replace(state, cache=None, draft=None, expert_BSNK=None)
    inserted = jax.tree.map(insert, others, new)
    inserted = dataclasses.replace(
      inserted,
      cache=entries,
      draft=draft,
      expert_BSNK=_write_experts(state.expert_BSNK, expert_BTNK, row_B, column_BT),
    )
    return inserted, new_token_B1[:, 0]

  def _steps(
    self, params: PyTree, state: DecodeState, num_steps: jax.Array
  ) -> tuple[DecodeState, jax.Array]:
    """Return (state, token_NBT) after `num_steps`, or as soon as all rows are idle."""

    def is_unfinished(carry: _Carry) -> jax.Array:
      is_active = jnp.any(carry.state.remaining_B > 0)
      return (carry.num_steps < num_steps) & is_active

    def step(carry: _Carry) -> _Carry:
      state, token_BT = self._step(params, carry.state)
      token_NBT = carry.token_NBT.at[carry.num_steps].set(token_BT)
      return _Carry(carry.num_steps + 1, state, token_NBT)

    shape = (MAX_STEPS, self.num_rows, 1 + self.num_drafts)
    first = _Carry(
      num_steps=jnp.int32(0),
      state=state,
      token_NBT=jnp.full(shape, NO_TOKEN, jnp.int32),
    )
    last = jax.lax.while_loop(is_unfinished, step, first)
    return last.state, last.token_NBT

  def _step(self, params: PyTree, state: DecodeState) -> tuple[DecodeState, jax.Array]:
    """Return (state, token_BT) after a forward pass over the newest tokens and their drafts."""
    is_active_B = state.remaining_B > 0
    rows = DraftRows(
      length_B=state.length_B,
      is_active_B=is_active_B,
      seen_BV=state.seen_BV,
      sampling=state.sampling,
      key_B=state.key_B,
    )
    drafts, draft = self._drafter.propose(params, state.draft, rows)
    # The forward pass over the newest token of each row, and the drafts after it.
    token_BT = jnp.concatenate([state.token_B[:, None], drafts.token_BJ], axis=1)
    column_1T = jnp.arange(token_BT.shape[1], dtype=jnp.int32)[None]
    segment_BT = jnp.broadcast_to(is_active_B[:, None], token_BT.shape).astype(jnp.int32)
    position_BT = state.length_B[:, None] + column_1T
    x_BTD, entries, expert_BTNK = self._hidden(
      params, state.cache, token_BT, segment_BT, position_BT
    )
    logits_BTV = self._logits(params, x_BTD)
    log_probs_at_positions = jax.vmap(log_probs, in_axes=(1, 1, None), out_axes=1)
    log_p_BTV = log_probs_at_positions(logits_BTV, drafts.seen_BTV, state.sampling)
    first_draft_B = state.length_B + 1
    num_accepted_B, last_token_B = verify(drafts, log_p_BTV, state.key_B, first_draft_B)
    length_B = state.length_B + jnp.where(is_active_B, 1 + num_accepted_B, 0)
    if self.num_drafts:
      entries = cache.rewind(entries, length_B)
    new_BT = accepted_tokens(drafts, num_accepted_B, last_token_B, padding=NO_TOKEN)
    step = DecodedStep(
      x_BTD=x_BTD,
      token_BT=new_BT,
      num_accepted_B=num_accepted_B,
      length_B=state.length_B,
      is_active_B=is_active_B,
    )
    state = dataclasses.replace(
      state,
      cache=entries,
      token_B=last_token_B,
      length_B=length_B,
      draft=self._drafter.advance(params, draft, step),
      expert_BSNK=_write_experts(
        state.expert_BSNK, expert_BTNK, jnp.arange(self.num_rows), position_BT
      ),
    )
    return self._append_tokens(state, new_BT)

  def _append_tokens(self, state: DecodeState, new_BT: jax.Array) -> tuple[DecodeState, jax.Array]:
    """Count new tokens up to the first stop token or the row's limit, and replace the others.

    Return the state, and `new_BT` with NO_TOKEN in place of the tokens that do not count.
    """
    column_1T = jnp.arange(new_BT.shape[1], dtype=jnp.int32)[None]
    is_new_BT = (new_BT != NO_TOKEN) & (column_1T < state.remaining_B[:, None])
    is_stop_BT = jnp.isin(new_BT, jnp.asarray(self.stop_token_ids, jnp.int32)) & is_new_BT
    num_stops_BT = jnp.cumsum(is_stop_BT.astype(jnp.int32), axis=1)
    is_new_BT &= (num_stops_BT == 0) | ((num_stops_BT == 1) & is_stop_BT)
    num_left_B = state.remaining_B - jnp.sum(is_new_BT, axis=1, dtype=jnp.int32)
    remaining_B = jnp.where(jnp.any(is_stop_BT, axis=1), 0, num_left_B)
    batch_B1 = jnp.arange(len(remaining_B))[:, None]
    seen_BV = state.seen_BV.at[batch_B1, jnp.maximum(new_BT, 0)].max(is_new_BT)
    state = dataclasses.replace(state, remaining_B=remaining_B, seen_BV=seen_BV)
    return state, jnp.where(is_new_BT, new_BT, NO_TOKEN)


def _write_experts(
  expert_BSNK: jax.Array | None,
  new_BTNK: jax.Array | None,
  row_B: jax.Array,
  position_BT: jax.Array,
) -> jax.Array | None:
  """Write the experts of new positions, which overwrite those of rejected drafts."""
  if expert_BSNK is None:
    return None
  return expert_BSNK.at[row_B[:, None], position_BT].set(new_BTNK, mode="drop")


def _make_idle(state: DecodeState, row: int) -> DecodeState:
  return dataclasses.replace(state, remaining_B=state.remaining_B.at[row].set(0))
