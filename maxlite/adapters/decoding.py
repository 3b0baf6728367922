"""Decodes rows that have adapters of their own, on one base.

A row is a decode engine of one row; a step is `vmap` of its step over rows, which share the base's
weights and have the factors of their adapters. Shapes do not depend on the requests, and no row
reads another, so a completion has the same bits whatever adapters the other rows have.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from flax.traverse_util import flatten_dict, unflatten_dict

from maxlite.adapters.engine import HEAD, AdapterEngine, AdapterState, adapted_logits
from maxlite.inference.engine import (
  MAX_STEPS,
  NO_TOKEN,
  DecodeState,
  Engine,
  GenerationRequest,
)
from maxlite.inference.inference_params import (
  inference_model,
  inference_params,
  unstack_layers,
)
from maxlite.layers.lora import LoraLinear
from maxlite.layers.transposed_linear import TransposedLinear, TransposedLoraLinear
from maxlite.models import Decoder
from maxlite.sharding import Sharder
from maxlite.sharding.pytree import PyTree

Factors = dict[tuple[str, ...], Any]


@dataclasses.dataclass(frozen=True, eq=False)
class AdapterRequest(GenerationRequest):
  """A prompt to complete with the adapter that `AdapterDecoder.factors` returned."""

  factors: Factors = dataclasses.field(default_factory=dict)


@struct.dataclass
class _Rows:
  """All rows, along a leading axis: the state of a decode engine of one row, and its factors."""

  states: DecodeState
  factors: Factors


class _NewRow(NamedTuple):
  """A prompt, padded, for a row, with its adapter."""

  prompts: Any
  row: Any
  factors: Factors


class _OneRow(Engine):
  """An engine of one row, whose parameters contain scaled factors of an adapter."""

  def _logits(self, params: PyTree, x: jax.Array) -> jax.Array:
    cfg = self._model.cfg
    of_adapter = flatten_dict(params["head"])
    unembedding: Any = self._model.apply({"params": params}, method=self._model.unembedding)
    factors = [of_adapter[path] for path in HEAD]
    logits_TV = adapted_logits(cfg, params, x.reshape(-1, x.shape[-1]), unembedding, *factors)
    return logits_TV.reshape(*x.shape[:-1], -1)


class AdapterDecoder(Engine):
  """Decodes `num_rows` sequences at a time, each with its adapter.

  Args:
    adapters: whose base and bound of ranks it shares.
    num_rows: completions that are decoded at once.
  """

  def __init__(self, adapters: AdapterEngine, *, num_rows: int) -> None:
    cfg = adapters.base_cfg
    sharder = adapters.sharder
    self._adapters = adapters
    self._whole = sharder.sharding(())
    model = _with_adapters(inference_model(cfg, sharder), adapters, sharder)
    params = inference_params(cfg, adapters.base_params)
    self._shape_factors = jax.jit(self._decode_factors, out_shardings=self._whole)
    self._no_factors = self.factors(adapters.empty())
    # For its functions, which get the parameters of a row. A single block, since what is read of
    # the caches must not depend on the lengths of other rows.
    self._one = _OneRow(
      model,
      jax.eval_shape(_with_factors, params, self._no_factors),
      num_rows=1,
      max_length=adapters.max_length,
      stop_token_ids=(),
      first_block=0,
    )
    super().__init__(
      model,
      params,
      num_rows=num_rows,
      max_length=adapters.max_length,
      stop_token_ids=(),
    )
    self._cancel = jax.jit(_make_idle, donate_argnums=0, out_shardings=self._shardings)

  def factors(self, state: AdapterState) -> Factors:
    """The scaled factors of an adapter, by layer, on the device."""
    return self._shape_factors(state.factors, state.scale_P)

  def prefill(self, requests: Sequence[GenerationRequest], rows: Sequence[int]) -> np.ndarray:
    """Insert `requests` into the idle rows `rows` and return the first token of each."""
    tokens = []
    for request, row in zip(requests, rows, strict=True):
      self.check(request)
      assert isinstance(request, AdapterRequest)
      prompts = self._prompts([request], [0], 1)
      new = _NewRow(prompts, np.int32(row), request.factors)
      tokens.append(self._run(prompts.token_BT.shape, self._prefill_row, new))
    return np.asarray(jax.device_get(tokens))

  def step(self, num_steps: int = 1) -> jax.Array:
    """Run `num_steps` decode steps, at most MAX_STEPS, and return their token_NBT."""
    return self._run("step", self._decode, np.int32(num_steps))

  def _empty_state(self) -> Any:
    def in_rows(leaf: jax.Array) -> jax.Array:
      return jnp.broadcast_to(leaf[None], (self.num_rows, *leaf.shape))

    states = jax.tree.map(in_rows, self._idle_row())
    factors = {
      path: jnp.zeros((self.num_rows, *leaf.shape), leaf.dtype)
      for path, leaf in self._no_factors.items()
    }
    return _Rows(states, factors)

  def _idle_row(self) -> DecodeState:
    return jax.tree.map(jnp.asarray, self._one._empty_state())

  def _state_shardings(self) -> Any:
    return jax.tree.map(lambda _: self._whole, jax.eval_shape(self._empty_state))

  def _prefill_row(self, params: PyTree, rows: Any, new: _NewRow) -> tuple[Any, jax.Array]:
    """(rows, first token) after a prompt has got a row."""
    of_row = _with_factors(params, new.factors)
    state, token_B = self._one._prefill(of_row, self._idle_row(), new.prompts)

    def insert(all_rows: jax.Array, leaf: jax.Array) -> jax.Array:
      return all_rows.at[new.row].set(leaf)

    return jax.tree.map(insert, rows, _Rows(state, new.factors)), token_B[0]

  def _decode(self, params: PyTree, rows: Any, num_steps: jax.Array) -> tuple[Any, jax.Array]:
    """(rows, token_NBT) after `num_steps`, or as soon as all rows are idle."""

    def decode_row(row: tuple[Factors, DecodeState]) -> tuple[DecodeState, jax.Array]:
      factors, state = row
      return self._one._step(_with_factors(params, factors), state)

    def is_unfinished(carry: tuple) -> jax.Array:
      n, states, _ = carry
      return (n < num_steps) & jnp.any(states.remaining_B > 0)

    def step(carry: tuple) -> tuple:
      n, states, token_NBT = carry
      if self.has_experts:  # whose grouped matmuls would copy the weights for each row
        states, token_B1T = jax.lax.map(decode_row, (rows.factors, states))
      else:
        states, token_B1T = jax.vmap(decode_row)((rows.factors, states))
      return n + 1, states, token_NBT.at[n].set(token_B1T[:, 0])

    token_NBT = jnp.full((MAX_STEPS, self.num_rows, 1), NO_TOKEN, jnp.int32)
    start = (jnp.int32(0), rows.states, token_NBT)
    _, states, token_NBT = jax.lax.while_loop(is_unfinished, step, start)
    return rows.replace(states=states), token_NBT

  def _decode_factors(self, factors: Factors, scale_P: jax.Array) -> Factors:
    scaled = self._adapters.scaled(factors, scale_P)
    head = {path: scaled.pop(path) for path in HEAD}
    cfg = self._adapters.base_cfg
    by_layer = unflatten_dict(scaled)
    if cfg.scan_layers:
      by_layer = unstack_layers(cfg, by_layer)
    return flatten_dict(by_layer) | head


def _with_adapters(model: Decoder, adapters: AdapterEngine, sharder: Sharder) -> Decoder:
  """`model` with linear layers that have adapters."""
  cfg = dataclasses.replace(model.cfg, lora=adapters.lora)
  linear = TransposedLoraLinear if model.linear is TransposedLinear else LoraLinear
  return Decoder(cfg, sharder, linear)


def _with_factors(params: PyTree, factors: Factors) -> PyTree:
  """Parameters of a model with an adapter; those of the unembedding are under `head`."""
  of_layers = {path: leaf for path, leaf in factors.items() if path not in HEAD}
  head = unflatten_dict({path: factors[path] for path in HEAD})
  return unflatten_dict(flatten_dict(params) | of_layers) | {"head": head}


def _make_idle(rows: _Rows, row: int) -> _Rows:
  remaining_B1 = rows.states.remaining_B.at[row].set(0)
  states = dataclasses.replace(rows.states, remaining_B=remaining_B1)
  return dataclasses.replace(rows, states=states)
