"""An engine of low-rank adapters on one frozen base, each in a slot with its own optimizer.

The rows of a call may belong to any slots. A compiled loop takes a tile of rows at a time: it
multiplies all of them by the base's weights at once, and each by the factors of its slot, and adds
the gradient of each row to its slot's. A tile always has the same shape: the length to which a row
is padded follows from the row alone, the number of rows from that length, and empty rows complete
the last tile. So every row is computed by the same program, in which no row reads another, and a
slot's rows are added in their order. Therefore the bits of an adapter do not depend on the other
slots: not on their number, order, ranks or failures, and not on how its rows are divided into
calls.

Source: Hu et al., LoRA (2021), section 4.1.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from flax.linen import meta
from flax.traverse_util import flatten_dict, unflatten_dict

from maxlite.adapters.datum import Datum, Row, check_datum, stack_rows
from maxlite.adapters.losses import loss_of_row
from maxlite.config.schema import LoraConfig, ModelConfig
from maxlite.errors import UserError
from maxlite.kernels.numerics import apply_soft_cap
from maxlite.layers.lora import ADAPTER, drop_modules, merge_lora
from maxlite.models import Decoder
from maxlite.models.layer_stacks import layer_specs
from maxlite.optim.labels import logical_names
from maxlite.sharding import Sharder
from maxlite.sharding.pytree import PyTree

ROWS_PER_CALL = 16  # which the arrays of a compiled call have room for
_LOGITS_POSITIONS = 256  # whose logits are in memory at once
HEAD = (("unembed", "lora_a"), ("unembed", "lora_b"))  # paths of the unembedding's factors
# Parts of a model that an adapter may leave out, in the order of `scale_P`.
_ATTENTION, _MLP, _HEAD = range(3)

Path = tuple[str, ...]
Factors = dict[Path, Any]  # of all modules, by the path of the parameter


class AdapterSpec(NamedTuple):
  """What an adapter is made of, without its values."""

  rank: int = 32
  seed: int = 0
  train_attn: bool = True
  train_mlp: bool = True
  train_unembed: bool = True


class AdamW(NamedTuple):
  """Hyperparameters of one step, as in `torch.optim.AdamW`.

  `grad_clip_norm` bounds the global norm of the gradient; 0: no bound.
  """

  learning_rate: float = 1e-4
  beta1: float = 0.9
  beta2: float = 0.95
  eps: float = 1e-12
  weight_decay: float = 0.0
  grad_clip_norm: float = 0.0


class AdapterState(struct.PyTreeNode):
  """The state of an adapter, on the host; or of all slots, with a leading axis.

  Attributes:
    factors: float32, zero beyond the adapter's rank.
    gradients: the sum since the last update.
    mu, nu: the moments of AdamW.
    count: number of updates.
    scale_P: alpha / rank for each part of the model, 0 for one that is not adapted.
  """

  factors: Any
  gradients: Any
  mu: Any
  nu: Any
  count: Any
  scale_P: Any


class RowResult(NamedTuple):
  """The loss of a datum, and the log-probabilities [nats] of its targets, shaped like them."""

  loss: float
  log_probs: np.ndarray


class AdapterEngine:
  """Trains up to `num_slots` adapters at a time on a frozen model.

  Args:
    cfg: of the base; adapters that it already has are merged into its weights.
    sharder: of the mesh of `params`.
    params: the base's parameters.
    num_slots: adapters on the device at once.
    max_rank: the bound of ranks; factors have this size, whatever the rank.
    max_length: of rows [tokens].
    alpha: adapters are scaled by alpha / rank.
    adapts_experts: whether routed experts get adapters, a part of the MLP.
    tile_tokens: of the rows that are computed together; longer rows, and rows of a model with
      experts, are computed one at a time. With more tokens the base's weights are read less often,
      and calls with fewer rows compute more empty ones. Bits depend on it.

  Raises:
    UserError: the mesh divides rows, or tile_tokens is not a power of two.
  """

  def __init__(
    self,
    cfg: ModelConfig,
    sharder: Sharder,
    params: Mapping[str, PyTree],
    *,
    num_slots: int,
    max_rank: int,
    max_length: int,
    alpha: float = 32.0,
    adapts_experts: bool = True,
    tile_tokens: int = 256,
  ) -> None:
    for axis in ("activation_batch", "activation_length"):
      if sharder.num_shards(axis) > 1:
        raise UserError(
          "the engine of adapters computes whole rows, which the mesh would divide: set "
          "ici_tensor_parallelism=-1 to use several devices, and all other degrees to 1"
        )
    if tile_tokens < 1 or tile_tokens & (tile_tokens - 1):
      raise UserError(f"tile_tokens={tile_tokens} must be a power of two, as lengths of rows are")
    if cfg.lora.lora_rank:
      params = merge_lora(params, cfg.lora.lora_alpha)
    params = drop_modules(params, (*ADAPTER, "draft_head", "mtp"))
    if cfg.logits_via_embedding:  # the adapter of the unembedding must not change the embedding
      table = cast(Any, params["embed"])["embedding"]
      params = params | {"unembed": {"kernel": table.T}}
    # Without what differs between training and generation, and with a scale of 1: each slot's is
    # an array.
    self.base_cfg = dataclasses.replace(
      cfg,
      logits_via_embedding=False,
      num_draft_heads=0,
      mtp_num_layers=0,
      quantization="",
      lora=LoraConfig(),
      moe=dataclasses.replace(
        cfg.moe, capacity_factor=-1.0, ragged_buffer_factor=-1.0, router_jitter=0.0
      ),
    )
    has_experts = adapts_experts and cfg.family.is_moe
    self.lora = LoraConfig(lora_rank=max_rank, lora_alpha=max_rank, lora_experts=has_experts)
    self.base_params = params
    self.num_slots = num_slots
    self.max_rank = max_rank
    self.max_length = max_length
    self.alpha = alpha
    # Grouped matmuls of several rows would copy the experts' weights for each.
    self._tile_tokens = 1 if cfg.family.is_moe else tile_tokens
    self._model = Decoder(dataclasses.replace(self.base_cfg, lora=self.lora), sharder)
    boxed = jax.eval_shape(self._draw_all, jax.random.key(0))
    names = flatten_dict(logical_names(boxed))
    self._rank_axes = {path: names[path].index("lora_rank") for path in _adapter_paths(names)}
    self.sharder = sharder
    mixers = {part.name for layer in layer_specs(cfg) for part in layer.mixer.parts}
    self._parts = {path: _part_of(path, mixers) for path in self._rank_axes}
    self._init = jax.jit(self._new_factors)
    one = jax.eval_shape(self._new_state, np.uint32(0), np.int32(1), np.zeros(3, np.float32))
    self._empty = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), one)
    # Of all programs alike, since each kind of input is another compilation.
    whole = sharder.sharding(())
    of_slots = self._slot_shardings(sharder, names)
    self._forward_rows = jax.jit(self._forward_loop, out_shardings=whole)
    self._gradient_rows = jax.jit(
      self._gradient_loop, donate_argnums=1, out_shardings=(of_slots, whole)
    )
    # The step only reads the slots, and then one slot is written in place: a program that did both
    # would copy all slots.
    self._step = jax.jit(_step_of_slot)
    self._write = jax.jit(_write_slot, donate_argnums=0, out_shardings=of_slots)
    self._read = jax.jit(_read_slot, out_shardings=whole)
    self._merge = jax.jit(self._merged)
    self._clear = jax.jit(self._empty_slots, out_shardings=of_slots)
    self.reset()

  def new_adapter(self, spec: AdapterSpec) -> AdapterState:
    """The state of a new adapter, on the host; the model with it equals its base.

    Raises:
      UserError: the rank is out of bounds, or the adapter has no part.
    """
    if not 1 <= spec.rank <= self.max_rank:
      raise UserError(
        f"rank={spec.rank} of the adapter must be from 1 to {self.max_rank}, the server's "
        "max_lora_rank"
      )
    parts = (spec.train_attn, spec.train_mlp, spec.train_unembed)
    if not any(parts):
      raise UserError("an adapter without parts: set train_attn, train_mlp or train_unembed")
    scale_P = np.asarray(parts, np.float32) * np.float32(self.alpha / spec.rank)
    factors = self._init(np.uint32(spec.seed % 2**32), np.int32(spec.rank), scale_P)
    return self._empty.replace(factors=jax.device_get(factors), scale_P=scale_P)

  def empty(self) -> AdapterState:
    """The state of an adapter that changes nothing."""
    return self._empty

  def reset(self) -> None:
    """Clear all slots, since a failed program may have consumed them."""
    self._slots = self._clear()

  def fits(self, state: AdapterState) -> bool:
    """Whether a state, which may be of another engine, has the shapes of this one's adapters."""
    try:
      same = jax.tree.map(lambda leaf, empty: np.shape(leaf) == empty.shape, state, self._empty)
    except ValueError:  # other modules
      return False
    return all(jax.tree.leaves(same))

  def join(self, slot: int, state: AdapterState) -> None:
    """Put an adapter into a slot, in place of all that the slot has."""
    self._slots = self._write(self._slots, np.int32(slot), state)

  def leave(self, slot: int) -> AdapterState:
    """Take the adapter out of a slot, which is cleared."""
    state = self.read(slot)
    self.join(slot, self._empty)
    return state

  def read(self, slot: int) -> AdapterState:
    """The state of a slot, on the host."""
    return jax.device_get(self._read(self._slots, np.int32(slot)))

  def check(self, datum: Datum) -> None:
    """Raise UserError unless the engine can compute the datum's loss."""
    check_datum(datum, self.base_cfg.vocab_size, self.max_length)

  def forward(self, rows: Sequence[tuple[int, Datum]]) -> list[RowResult]:
    """Compute losses and log-probabilities of data by the adapters of their slots."""
    return self._call(rows, trains=False)

  def forward_backward(self, rows: Sequence[tuple[int, Datum]]) -> list[RowResult]:
    """As `forward`; also add the gradients of the losses to those of the slots."""
    return self._call(rows, trains=True)

  def update(self, slot: int, hyperparameters: AdamW) -> float:
    """Take a step with a slot's gradient and clear it; returns the norm of the gradient.

    If the norm is not finite, only the gradient is cleared.

    Raises:
      UserError: a hyperparameter is out of range.
    """
    check_hyperparameters(hyperparameters)
    numbers = jax.tree.map(np.float32, hyperparameters)
    state, norm = self._step(self._slots, np.int32(slot), numbers)
    self._slots = self._write(self._slots, np.int32(slot), state)
    return float(norm)

  def merged(self, state: AdapterState) -> PyTree:
    """The base's parameters with the product of an adapter's factors added, of `base_cfg`."""
    return self._merge(self.base_params, state.factors, state.scale_P)

  def lower(self, rows: Sequence[tuple[int, Datum]]) -> jax.stages.Lowered:
    """The program of a `forward_backward` of up to ROWS_PER_CALL rows of one shape."""
    arguments = self._arguments(rows)
    return self._gradient_rows.lower(self.base_params, self._slots, *arguments)

  def _call(self, rows: Sequence[tuple[int, Datum]], *, trains: bool) -> list[RowResult]:
    results: dict[int, RowResult] = {}
    remaining = list(range(len(rows)))
    while remaining:
      chosen = _choose_rows(rows, remaining)
      called = [rows[n] for n in chosen]
      arguments = self._arguments(called)
      if trains:
        self._slots, outputs = self._gradient_rows(self.base_params, self._slots, *arguments)
      else:
        outputs = self._forward_rows(self.base_params, self._slots, *arguments)
      loss_NR, log_prob_NRTK = jax.device_get(outputs)
      loss_M = loss_NR.reshape(-1)
      log_prob_MTK = log_prob_NRTK.reshape(ROWS_PER_CALL, *log_prob_NRTK.shape[2:])
      for n, (_, datum), loss, log_prob_TK in zip(
        chosen, called, loss_M, log_prob_MTK, strict=False
      ):
        num_targets = datum.targets.size // len(datum.tokens)
        of_datum = log_prob_TK[: len(datum.tokens), :num_targets]
        results[n] = RowResult(float(loss), of_datum.reshape(datum.targets.shape))
      remaining = [n for n in remaining if n not in results]
    return [results[n] for n in range(len(rows))]

  def _arguments(self, rows: Sequence[tuple[int, Datum]]) -> tuple[Row, np.ndarray, np.int32]:
    """(rows, their slots, their number) of a call; N tiles of R rows, completed by empty ones."""
    data = [datum for _, datum in rows]
    num_positions, _ = data[0].shape
    size = min(max(self._tile_tokens // num_positions, 1), ROWS_PER_CALL)
    slot_M = np.zeros(ROWS_PER_CALL, np.int32)
    slot_M[: len(rows)] = [slot for slot, _ in rows]

    def in_tiles(leaf_M: np.ndarray) -> np.ndarray:
      return leaf_M.reshape(-1, size, *leaf_M.shape[1:])

    row_NR, slot_NR = jax.tree.map(in_tiles, (stack_rows(data, ROWS_PER_CALL), slot_M))
    return row_NR, slot_NR, np.int32(len(rows))

  def _gradient_loop(
    self, base: PyTree, slots: AdapterState, rows_NR: Row, slot_NR: jax.Array, num_rows: jax.Array
  ) -> tuple[AdapterState, tuple[jax.Array, jax.Array]]:
    size = slot_NR.shape[1]

    def body(n: jax.Array, carry: tuple) -> tuple:
      gradients, outputs = carry
      rows = jax.tree.map(lambda leaf: leaf[n], rows_NR)
      slot_R = slot_NR[n]
      factors = jax.tree.map(lambda leaf: leaf[slot_R], slots.factors)

      def log_probs(factors: Factors) -> jax.Array:
        return self._tile_log_probs(base, factors, slots.scale_P[slot_R], rows)

      log_prob_RTK, pull = jax.vjp(log_probs, factors)
      loss_R, change_RTK = _losses(rows, log_prob_RTK)
      (gradient,) = pull(change_RTK)

      def add(i: jax.Array, gradients: Factors) -> Factors:
        slot = slot_R[i]
        return jax.tree.map(
          lambda total, leaf: total.at[slot].set(total[slot] + leaf[i]), gradients, gradient
        )

      # Without the rows that pad the last tile: adding zero changes the bits of -0.
      num_added = jnp.minimum(num_rows - n * size, size)
      gradients = jax.lax.fori_loop(0, num_added, add, gradients)
      return gradients, _with_tile(outputs, n, loss_R, log_prob_RTK)

    num_tiles = (num_rows + size - 1) // size
    start = (slots.gradients, _no_outputs(rows_NR))
    gradients, outputs = jax.lax.fori_loop(0, num_tiles, body, start)
    return slots.replace(gradients=gradients), outputs

  def _forward_loop(
    self, base: PyTree, slots: AdapterState, rows_NR: Row, slot_NR: jax.Array, num_rows: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    size = slot_NR.shape[1]

    def body(n: jax.Array, outputs: tuple) -> tuple:
      rows = jax.tree.map(lambda leaf: leaf[n], rows_NR)
      factors = jax.tree.map(lambda leaf: leaf[slot_NR[n]], slots.factors)
      log_prob_RTK = self._tile_log_probs(base, factors, slots.scale_P[slot_NR[n]], rows)
      loss_R, _ = _losses(rows, log_prob_RTK)
      return _with_tile(outputs, n, loss_R, log_prob_RTK)

    num_tiles = (num_rows + size - 1) // size
    return jax.lax.fori_loop(0, num_tiles, body, _no_outputs(rows_NR))

  def _tile_log_probs(
    self, base: PyTree, factors: Factors, scale_RP: jax.Array, rows: Row
  ) -> jax.Array:
    """log_prob_RTK of a tile's rows, each with its own factors."""
    of_rows = jax.vmap(self._row_log_probs, in_axes=(None, 0, 0, 0))
    return of_rows(base, factors, scale_RP, rows)

  def _row_log_probs(
    self, base: PyTree, factors: Factors, scale_P: jax.Array, row: Row
  ) -> jax.Array:
    """log_prob_TK of a row, 0 beyond its tokens."""
    scaled = self.scaled(factors, scale_P)
    head_a, head_b = (scaled.pop(path) for path in HEAD)
    params = unflatten_dict(flatten_dict(base) | scaled)
    position_T = jnp.arange(len(row.tokens_T), dtype=jnp.int32)
    segment_T = (position_T < row.length).astype(jnp.int32)
    hidden: PyTree = self._model.apply(
      {"params": params},
      row.tokens_T[None],
      segment_T[None],
      position_T[None],
      method=self._model.hidden,
    )
    x_TD = hidden[0][0]
    unembedding: PyTree = self._model.apply({"params": params}, method=self._model.unembedding)
    w_DV = unembedding.astype(x_TD.dtype)

    @jax.checkpoint
    def log_probs(x_tD: jax.Array, targets_tK: jax.Array) -> jax.Array:
      logits_tV = adapted_logits(self.base_cfg, params, x_tD, w_DV, head_a, head_b)
      return jnp.take_along_axis(jax.nn.log_softmax(logits_tV), targets_tK, axis=1)

    size = min(_LOGITS_POSITIONS, len(row.tokens_T))
    chunks = jax.tree.map(
      lambda leaf: leaf.reshape(-1, size, leaf.shape[1]), (x_TD, row.targets_TK)
    )
    log_prob_NtK = jax.lax.map(lambda chunk: log_probs(*chunk), chunks)
    log_prob_TK = log_prob_NtK.reshape(row.targets_TK.shape)
    return jnp.where(segment_T[:, None] > 0, log_prob_TK, 0)

  def scaled(self, factors: Factors, scale_P: jax.Array) -> Factors:
    """The factors with every second one times the scale of its part of the model."""
    scaled = {}
    for path, leaf in factors.items():
      scaled[path] = leaf
      if ADAPTER[1] in path:
        scaled[path] = leaf * scale_P[self._parts[path]]
    return scaled

  def _draw_all(self, key: jax.Array) -> dict[str, PyTree]:
    """Random parameters of a model with adapters, with logical axis names."""
    cfg = self.base_cfg
    tokens_BT = jnp.zeros((1, 1), jnp.int32)
    params: PyTree = self._model.init(key, tokens_BT)["params"]
    a_DR = jax.nn.initializers.lecun_normal()(key, (cfg.base_emb_dim, self.max_rank))
    b_RV = jnp.zeros((self.max_rank, cfg.vocab_size))
    of_head: dict[str, PyTree] = {
      ADAPTER[0]: meta.Partitioned(a_DR, ("embed", "lora_rank")),
      ADAPTER[1]: meta.Partitioned(b_RV, ("lora_rank", "vocab")),
    }
    return params | {"unembed": params["unembed"] | of_head}

  def _new_factors(self, seed: jax.Array, rank: jax.Array, scale_P: jax.Array) -> Factors:
    """Random first factors and zeros, without what is beyond the rank or in no part."""
    drawn = flatten_dict(meta.unbox(self._draw_all(jax.random.key(seed))))
    factors = {}
    for path, axis in self._rank_axes.items():
      leaf = drawn[path].astype(jnp.float32)
      shape = [1] * leaf.ndim
      shape[axis] = self.max_rank
      is_used = (jnp.arange(self.max_rank) < rank) & (scale_P[self._parts[path]] > 0)
      factors[path] = jnp.where(is_used.reshape(shape), leaf, 0)
    return factors

  def _empty_slots(self) -> AdapterState:
    return jax.tree.map(
      lambda leaf: jnp.zeros((self.num_slots, *leaf.shape), leaf.dtype), self._empty
    )

  def _slot_shardings(
    self, sharder: Sharder, names: Mapping[Path, Sequence[str | None]]
  ) -> AdapterState:
    """The shardings of the slots' arrays: of factors, those of the model's."""
    whole = sharder.sharding(())
    factors = {path: sharder.sharding((None, *names[path])) for path in self._rank_axes}
    return AdapterState(factors, factors, factors, factors, whole, whole)

  def _new_state(self, seed: jax.Array, rank: jax.Array, scale_P: jax.Array) -> AdapterState:
    factors = self._new_factors(seed, rank, scale_P)
    zeros = jax.tree.map(jnp.zeros_like, factors)
    return AdapterState(factors, zeros, zeros, zeros, jnp.zeros((), jnp.int32), scale_P)

  def _merged(self, base: PyTree, factors: Factors, scale_P: jax.Array) -> PyTree:
    scaled = self.scaled(factors, scale_P)
    head_a, head_b = (scaled.pop(path) for path in HEAD)
    params = merge_lora(unflatten_dict(flatten_dict(base) | scaled), self.max_rank)
    kernel: PyTree = params["unembed"]
    kernel = kernel["kernel"]
    # `Decoder.unembedding` divides the kernel by it.
    change = jnp.float32(self.base_cfg.logits_scaling) * (head_a @ head_b)
    return params | {"unembed": {"kernel": (kernel + change).astype(kernel.dtype)}}


def adapted_logits(
  cfg: ModelConfig,
  params: PyTree,
  x_TD: jax.Array,
  w_DV: jax.Array,
  a_DR: jax.Array,
  b_RV: jax.Array,
) -> jax.Array:
  """logits_TV, float32, of the unembedding w_DV with an adapter's scaled factors."""
  dtype = x_TD.dtype
  logits_TV = jnp.matmul(x_TD, w_DV.astype(dtype), preferred_element_type=jnp.float32)
  low_TR = x_TD @ a_DR.astype(dtype)
  logits_TV += jnp.matmul(low_TR, b_RV.astype(dtype), preferred_element_type=jnp.float32)
  if cfg.family.unembed_bias:
    bias_V = cast(Any, params)["unembed_bias"]["bias"]
    logits_TV += bias_V.astype(jnp.float32)[None]
  return apply_soft_cap(logits_TV, cfg.final_logits_soft_cap)


def check_hyperparameters(hyper: AdamW) -> None:
  """Raise UserError if a hyperparameter is out of range or NaN."""
  for name in ("beta1", "beta2"):
    value = getattr(hyper, name)
    if not 0 <= value < 1:
      raise UserError(f"{name}={value} must be 0 or above and below 1")
  if not hyper.eps > 0:  # parameters without a gradient would become 0 / 0
    raise UserError(f"eps={hyper.eps} must be above 0")
  for name in ("learning_rate", "weight_decay", "grad_clip_norm"):
    value = getattr(hyper, name)
    if not 0 <= value < float("inf"):
      raise UserError(f"{name}={value} must be 0 or above, and finite")


def _adapter_paths(paths: Mapping[Path, object]) -> list[Path]:
  return [path for path in paths if not set(path).isdisjoint(ADAPTER)]


def _part_of(path: Path, mixers: set[str]) -> int:
  if path in HEAD:
    return _HEAD
  return _MLP if mixers.isdisjoint(path) else _ATTENTION


def _choose_rows(rows: Sequence[tuple[int, Datum]], remaining: Sequence[int]) -> list[int]:
  """The numbers of the next rows of one shape; none overtakes another row of its slot."""
  shape = rows[remaining[0]][1].shape
  chosen: list[int] = []
  waiting: set[int] = set()
  for n in remaining:
    slot, datum = rows[n]
    if slot not in waiting and datum.shape == shape and len(chosen) < ROWS_PER_CALL:
      chosen.append(n)
    else:
      waiting.add(slot)
  return chosen


def _losses(rows: Row, log_prob_RTK: jax.Array) -> tuple[jax.Array, jax.Array]:
  """(loss_R, gradient_RTK) of a tile.

  In a loop, because under `vmap` every row would compute every loss, and a gradient of a loss that
  the row does not have may be 0 * inf.
  """

  def of_row(arguments: tuple[Row, jax.Array]) -> tuple[jax.Array, jax.Array]:
    row, log_prob_TK = arguments
    loss_of = jax.value_and_grad(loss_of_row, argnums=1)
    loss, change_TK = loss_of(row.loss, log_prob_TK, row.inputs)
    return loss, change_TK

  return jax.lax.map(of_row, (rows, log_prob_RTK))


def _no_outputs(rows_NR: Row) -> tuple[jax.Array, jax.Array]:
  targets_NRTK = rows_NR.targets_TK
  return jnp.zeros(targets_NRTK.shape[:2]), jnp.zeros(targets_NRTK.shape)


def _with_tile(
  outputs: tuple[jax.Array, jax.Array], n: jax.Array, loss_R: jax.Array, log_prob_RTK: jax.Array
) -> tuple[jax.Array, jax.Array]:
  loss_NR, log_prob_NRTK = outputs
  return loss_NR.at[n].set(loss_R), log_prob_NRTK.at[n].set(log_prob_RTK)


def _read_slot(slots: AdapterState, slot: jax.Array) -> AdapterState:
  return jax.tree.map(lambda leaf: leaf[slot], slots)


def _write_slot(slots: AdapterState, slot: jax.Array, state: AdapterState) -> AdapterState:
  return jax.tree.map(lambda leaf, new: leaf.at[slot].set(new), slots, state)


def _step_of_slot(
  slots: AdapterState, slot: jax.Array, hyper: AdamW
) -> tuple[AdapterState, jax.Array]:
  """(state, norm of the gradient) of a slot after a step of AdamW."""
  old = _read_slot(slots, slot)
  norm = optax.tree.norm(old.gradients)
  bounds = (hyper.grad_clip_norm > 0) & (norm > hyper.grad_clip_norm)
  factor = jnp.where(bounds, hyper.grad_clip_norm / norm, 1)
  gradients = jax.tree.map(lambda leaf: leaf * factor, old.gradients)
  count = old.count + 1
  time = count.astype(jnp.float32)
  mu = jax.tree.map(
    lambda mean, leaf: hyper.beta1 * mean + (1 - hyper.beta1) * leaf, old.mu, gradients
  )
  nu = jax.tree.map(
    lambda mean, leaf: hyper.beta2 * mean + (1 - hyper.beta2) * leaf**2, old.nu, gradients
  )

  def stepped(leaf: jax.Array, mean: jax.Array, square: jax.Array) -> jax.Array:
    root = jnp.sqrt(square / (1 - hyper.beta2**time))
    update = mean / (1 - hyper.beta1**time) / (root + hyper.eps)
    return leaf - hyper.learning_rate * (update + hyper.weight_decay * leaf)

  factors = jax.tree.map(stepped, old.factors, mu, nu)
  new = old.replace(factors=factors, mu=mu, nu=nu, count=count)
  new = jax.tree.map(lambda after, before: jnp.where(jnp.isfinite(norm), after, before), new, old)
  return new.replace(gradients=jax.tree.map(jnp.zeros_like, old.gradients)), norm
