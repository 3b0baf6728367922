"""Drafters: what proposes tokens for speculative decoding, with what it keeps between steps.

A drafter keeps a pytree for all rows, `Draft` below, which the engine carries in its state.
"""

import abc
import dataclasses
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import struct

from maxlite.config.schema import ModelConfig
from maxlite.errors import UserError
from maxlite.inference.sampling import BatchSamplingParams, Drafts, propose, propose_in_turn
from maxlite.layers import cache
from maxlite.models.decoder import Decoder
from maxlite.models.layer_stacks import has_recurrence
from maxlite.sharding.pytree import PyTree

# What a drafter keeps; the first axis of its arrays, except those of caches, is the row.
Draft = Any


class PrefilledPrompts(NamedTuple):
  """Prompts after their prefill.

  Attributes:
    x_BTD: their states.
    token_BT: their tokens, followed by padding.
    length_B: their numbers of tokens.
    token_B: the token sampled after each.
  """

  x_BTD: jax.Array
  token_BT: jax.Array
  length_B: jax.Array
  token_B: jax.Array


class DecodedStep(NamedTuple):
  """The result of a decode step.

  Attributes:
    x_BTD: the states of the positions that the step added: of the newest token and its drafts.
    token_BT: the tokens after them: the accepted drafts, then one more; the others are arbitrary.
    num_accepted_B: number of accepted drafts.
    length_B: number of positions before the step.
    is_active_B: whether the row takes part.
  """

  x_BTD: jax.Array
  token_BT: jax.Array
  num_accepted_B: jax.Array
  length_B: jax.Array
  is_active_B: jax.Array


class DraftRows(NamedTuple):
  """What drafts are sampled by, for all rows.

  Attributes:
    length_B: number of positions in the cache, which is the position of the newest token.
    is_active_B: whether the row takes part.
    seen_BV: whether the token occurs in the prompt or completion.
    sampling: the sampling parameters.
    key_B: the random keys.
  """

  length_B: jax.Array
  is_active_B: jax.Array
  seen_BV: jax.Array
  sampling: BatchSamplingParams
  key_B: jax.Array


@dataclasses.dataclass(frozen=True)
class Drafter(abc.ABC):
  """Proposes `num_drafts` tokens after the newest one of every row."""

  model: Decoder
  num_drafts: int

  @abc.abstractmethod
  def init(self, prefilled: Draft, num_rows: int, first_block: int) -> Draft:
    """Return the draft of idle rows.

    Args:
      prefilled: shapes and types of the result of `prefill` for prompts of the maximum length.
      num_rows: number of rows.
      first_block: see `cache.init_cache`.
    """

  @abc.abstractmethod
  def prefill(self, params: PyTree, prompts: PrefilledPrompts) -> Draft:
    """Return the draft of new rows."""

  @abc.abstractmethod
  def insert(self, draft: Draft, new: Draft, row_B: jax.Array, length_B: jax.Array) -> Draft:
    """Return `draft` with the result of `prefill` in the rows `row_B`.

    Args:
      draft: of all rows.
      new: of prompts of `length_B` tokens.
      row_B: rows that do not exist are not written.
      length_B: numbers of tokens.
    """

  @abc.abstractmethod
  def propose(self, params: PyTree, draft: Draft, rows: DraftRows) -> tuple[Drafts, Draft]:
    """Sample drafts after the newest token."""

  @abc.abstractmethod
  def advance(self, params: PyTree, draft: Draft, step: DecodedStep) -> Draft:
    """Return the draft after a decode step."""


class HeadDrafter(Drafter):
  """The draft heads of a model, which read the state that the newest token was sampled from.

  It keeps this state, x_BD. Without drafts it proposes nothing.
  """

  def init(self, prefilled: Draft, num_rows: int, first_block: int) -> Draft:
    del first_block
    return jnp.zeros((num_rows, prefilled.shape[-1]), prefilled.dtype)

  def prefill(self, params: PyTree, prompts: PrefilledPrompts) -> Draft:
    del params
    return _at_columns(prompts.x_BTD, prompts.length_B - 1)

  def insert(self, draft: Draft, new: Draft, row_B: jax.Array, length_B: jax.Array) -> Draft:
    del length_B
    return draft.at[row_B].set(new, mode="drop")

  def propose(self, params: PyTree, draft: Draft, rows: DraftRows) -> tuple[Drafts, Draft]:
    logits_BJV = self._logits(params, draft)
    first_B = rows.length_B + 1
    return propose(logits_BJV, rows.seen_BV, rows.sampling, rows.key_B, first_B), draft

  def _logits(self, params: PyTree, x_BD: jax.Array) -> jax.Array:
    if not self.num_drafts:
      return jnp.zeros((len(x_BD), 0, self.model.cfg.vocab_size))
    variables = {"params": params}
    y_B1JD = self.model.apply(variables, x_BD[:, None], method=self.model.draft_hidden)
    y_B1JD = cast(jax.Array, y_B1JD)[:, :, : self.num_drafts]
    logits_B1JV = self.model.apply(variables, y_B1JD, method=self.model.logits)
    return cast(jax.Array, logits_B1JV)[:, 0]

  def advance(self, params: PyTree, draft: Draft, step: DecodedStep) -> Draft:
    del params, draft
    return _at_columns(step.x_BTD, step.num_accepted_B)


@struct.dataclass
class MtpDraft:
  """What multi-token prediction keeps.

  With t the position of the newest token, layer k, from 1, has processed the positions up to t - k,
  the last of which reads the newest token.

  Attributes:
    caches: of each layer.
    h_BJD: the state of each layer at its last position.
    y_BD: the state of the first layer's logits at its last position.
  """

  caches: tuple[PyTree, ...]
  h_BJD: jax.Array
  y_BD: jax.Array


class MtpDrafter(Drafter):
  """The layers of multi-token prediction, each of which proposes one token.

  The layers process accepted tokens with the states of the model, as in training. Of a prompt
  shorter than the number of layers less one, the later layers also read arbitrary states, so fewer
  of their drafts are accepted.
  """

  def init(self, prefilled: Draft, num_rows: int, first_block: int) -> Draft:
    num_new = 1 + self.num_drafts
    caches = []
    for prefix in prefilled.caches:
      caches.append(cache.init_cache(prefix, num_rows, num_new, first_block))
    _, num_layers, dim = prefilled.h_BJD.shape
    dtype = prefilled.h_BJD.dtype
    return MtpDraft(
      caches=tuple(caches),
      h_BJD=jnp.zeros((num_rows, num_layers, dim), dtype),
      y_BD=jnp.zeros((num_rows, dim), dtype),
    )

  def prefill(self, params: PyTree, prompts: PrefilledPrompts) -> Draft:
    num_positions = prompts.token_BT.shape[1]
    position_1T = jnp.arange(num_positions, dtype=jnp.int32)[None]
    position_BT = jnp.broadcast_to(position_1T, prompts.token_BT.shape)
    last_B1 = prompts.length_B[:, None] - 1
    token_BT = jnp.roll(prompts.token_BT, -1, axis=1)
    token_BT = jnp.where(position_BT == last_B1, prompts.token_B[:, None], token_BT)
    h_BTD = prompts.x_BTD
    caches = []
    last_by_layer = []
    normed_by_layer = []
    for j in range(self.num_drafts):
      segment_BT = (position_BT <= last_B1 - j).astype(jnp.int32)
      h_BTD, y_BTD, entries = self.apply_layer(
        params, j, None, h_BTD, token_BT, segment_BT, position_BT
      )
      last_B = prompts.length_B - 1 - j
      caches.append(entries)
      last_by_layer.append(_at_columns(h_BTD, last_B))
      normed_by_layer.append(_at_columns(y_BTD, last_B))
      token_BT = jnp.roll(token_BT, -1, axis=1)
    return MtpDraft(tuple(caches), jnp.stack(last_by_layer, axis=1), normed_by_layer[0])

  def insert(self, draft: Draft, new: Draft, row_B: jax.Array, length_B: jax.Array) -> Draft:
    caches = []
    for j, (entries, prefix) in enumerate(zip(draft.caches, new.caches, strict=True)):
      length_of_layer_B = jnp.maximum(length_B - j, 0)
      caches.append(cache.insert(entries, prefix, row_B, length_of_layer_B))
    return MtpDraft(
      caches=tuple(caches),
      h_BJD=draft.h_BJD.at[row_B].set(new.h_BJD, mode="drop"),
      y_BD=draft.y_BD.at[row_B].set(new.y_BD, mode="drop"),
    )

  def propose(self, params: PyTree, draft: Draft, rows: DraftRows) -> tuple[Drafts, Draft]:
    chain = _MtpChain(self, params, draft, rows)
    drafts = propose_in_turn(
      self.num_drafts,
      chain.next_logits,
      rows.seen_BV,
      rows.sampling,
      rows.key_B,
      rows.length_B + 1,
    )
    caches = []
    for entries, before in zip(chain.caches, draft.caches, strict=True):
      caches.append(cache.with_lengths_of(entries, before))
    return drafts, draft.replace(caches=tuple(caches))

  def advance(self, params: PyTree, draft: Draft, step: DecodedStep) -> Draft:
    num_columns = step.token_BT.shape[1]
    column_1T = jnp.arange(num_columns, dtype=jnp.int32)[None]
    is_real_BT = step.is_active_B[:, None] & (column_1T <= step.num_accepted_B[:, None])
    segment_BT = is_real_BT.astype(jnp.int32)
    h_BTD = step.x_BTD
    caches = []
    last_by_layer = []
    normed_by_layer = []
    for j in range(self.num_drafts):
      # Column c reads token c after the newest one before the step, 1 + j positions earlier.
      position_BT = jnp.maximum(step.length_B[:, None] + column_1T - j, 0)
      h_BTD, y_BTD, entries = self.apply_layer(
        params, j, draft.caches[j], h_BTD, step.token_BT, segment_BT, position_BT
      )
      caches.append(entries)
      last_by_layer.append(_at_columns(h_BTD, step.num_accepted_B))
      normed_by_layer.append(_at_columns(y_BTD, step.num_accepted_B))
      before_B1D = draft.h_BJD[:, j : j + 1]
      h_BTD = jnp.concatenate([before_B1D, h_BTD[:, :-1]], axis=1)
    return MtpDraft(tuple(caches), jnp.stack(last_by_layer, axis=1), normed_by_layer[0])

  def apply_layer(
    self,
    params: PyTree,
    j: int,
    entries: PyTree,
    h_BTD: jax.Array,
    token_BT: jax.Array,
    segment_BT: jax.Array,
    position_BT: jax.Array,
  ) -> tuple[jax.Array, jax.Array, PyTree]:
    """(states, states of the logits, the new cache entries) of layer j, see `Decoder.mtp_layer`."""
    variables = {"params": params}
    if entries is not None:
      variables[cache.COLLECTION] = entries
    (h_BTD, y_BTD), new = self.model.apply(
      variables,
      j,
      h_BTD,
      jnp.maximum(token_BT, 0),
      segment_BT,
      position_BT,
      method=self.model.mtp_layer,
      mutable=[cache.COLLECTION],
    )
    return h_BTD, y_BTD, new[cache.COLLECTION]


class _MtpChain:
  """The layers' proposals of one step, token by token.

  The state of a layer at a draft is the state of the layer before it at the previous token.
  """

  def __init__(self, drafter: MtpDrafter, params: PyTree, draft: MtpDraft, rows: DraftRows):
    self.caches = list(draft.caches)
    self._drafter = drafter
    self._params = params
    self._rows = rows
    self._states = list(jnp.unstack(draft.h_BJD, axis=1))
    self._y_BD = draft.y_BD

  def next_logits(self, tokens: list[jax.Array]) -> jax.Array:
    """logits_BV of the token after the drafts `tokens`, of which the last one is new."""
    if tokens:
      self._read(len(tokens), tokens[-1])
    model = self._drafter.model
    logits_B1V = model.apply({"params": self._params}, self._y_BD[:, None], method=model.logits)
    return cast(jax.Array, logits_B1V)[:, 0]

  def _read(self, number: int, token_B: jax.Array) -> None:
    """Apply the layers that the draft `number`, from 1, is an input of."""
    segment_B1 = self._rows.is_active_B[:, None].astype(jnp.int32)
    previous = list(self._states)
    for j in range(number, self._drafter.num_drafts):
      position_B = jnp.maximum(self._rows.length_B + number - 1 - j, 0)
      h_B1D, y_B1D, self.caches[j] = self._drafter.apply_layer(
        self._params,
        j,
        self.caches[j],
        previous[j - 1][:, None],
        token_B[:, None],
        segment_B1,
        position_B[:, None],
      )
      self._states[j] = h_B1D[:, 0]
      if j == number:
        self._y_BD = y_B1D[:, 0]


def max_num_drafts(cfg: ModelConfig) -> int:
  """Return how many tokens a model can propose: one per draft head or layer.

  Models with recurrent layers propose none, since drafts cannot be taken back from their states.
  """
  if has_recurrence(cfg):
    return 0
  return cfg.num_draft_heads + cfg.mtp_num_layers


def build_drafter(model: Decoder, num_drafts: int) -> Drafter:
  """Build the drafter of a model.

  Raises:
    UserError: `num_drafts` exceeds what the model can propose.
  """
  limit = max_num_drafts(model.cfg)
  if num_drafts > limit:
    key = "num_draft_heads"
    if model.cfg.mtp_num_layers:
      key = "mtp_num_layers"
    raise UserError(
      f"{key}={getattr(model.cfg, key)} cannot propose {num_drafts} tokens: use at most {limit}"
    )
  if num_drafts and model.cfg.mtp_num_layers:
    return MtpDrafter(model, num_drafts)
  return HeadDrafter(model, num_drafts)


def _at_columns(x_BTD: jax.Array, column_B: jax.Array) -> jax.Array:
  """x_BD at a column of each row; at the first one if it is negative."""
  column_B11 = jnp.maximum(column_B, 0)[:, None, None]
  return jnp.take_along_axis(x_BTD, column_B11, axis=1)[:, 0]
