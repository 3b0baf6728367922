"""A datum: tokens with what a loss reads of each, checked and padded to the shape of a program."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from maxlite.adapters.losses import LOSSES, LossInputs
from maxlite.errors import UserError

MIN_LENGTH = 16  # of padded rows, which have this length times a power of two
_MAX_TARGETS = 1024  # per token
# Inputs that a loss needs in addition to the targets.
POLICY_INPUTS = ("logprobs", "advantages")
NEEDS = {
  "cross_entropy": ("weights",),
  "importance_sampling": POLICY_INPUTS,
  "ppo": POLICY_INPUTS,
  "cispo": POLICY_INPUTS,
  "dro": POLICY_INPUTS,
  "gspo": (*POLICY_INPUTS, "sequence_ratio_mask"),
}
OPTIONS = {
  "ppo": ("clip_low_threshold", "clip_high_threshold"),
  "cispo": ("clip_low_threshold", "clip_high_threshold"),
  "gspo": ("clip_low_threshold", "clip_high_threshold"),
  "dro": ("beta",),
}
DEFAULTS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2, "beta": 0.05}


@dataclasses.dataclass(frozen=True, eq=False)
class Datum:
  """A row of N tokens, and a loss of the log-probabilities of its targets.

  Attributes:
    tokens: [N].
    targets: [N], or [N, K] for several per position; position i predicts target i.
    loss: an entry of LOSSES.
    inputs: by the names in NEEDS: weights like `targets`; `logprobs` of the policy that wrote the
      targets, `advantages` and `sequence_ratio_mask`, [N] each.
    options: by the names in OPTIONS.
  """

  tokens: np.ndarray
  targets: np.ndarray
  loss: str = "cross_entropy"
  inputs: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
  options: dict[str, float] = dataclasses.field(default_factory=dict)

  @property
  def shape(self) -> tuple[int, int]:
    """(T, K): padded numbers of positions and of targets per position, powers of two."""
    num_targets = 1 if self.targets.ndim == 1 else self.targets.shape[1]
    return max(MIN_LENGTH, _power_of_two(len(self.tokens))), _power_of_two(num_targets)


class Row(NamedTuple):
  """A padded datum, or several stacked."""

  tokens_T: Any
  length: Any
  targets_TK: Any
  loss: Any  # its number in LOSSES
  inputs: LossInputs


def check_datum(datum: Datum, vocab_size: int, max_length: int) -> None:
  """Raise UserError unless the engine can compute the datum's loss."""
  _check_loss(datum)
  num_tokens = len(datum.tokens)
  if datum.tokens.ndim != 1 or not 1 <= num_tokens <= max_length:
    raise UserError(
      f"a datum has tokens of the shape {datum.tokens.shape}: give it from 1 to {max_length}, the "
      "maximum length of the server's model (max_target_length)"
    )
  shape = datum.targets.shape
  if shape[:1] != (num_tokens,) or len(shape) > 2 or not datum.targets.size:
    raise UserError(
      f"target_tokens has the shape {shape}, but its datum has {num_tokens} tokens: give one "
      "target, or K, per token"
    )
  if datum.targets.size > _MAX_TARGETS * num_tokens:
    raise UserError(f"target_tokens has the shape {shape}: give at most {_MAX_TARGETS} per token")
  for name, ids in (("a datum", datum.tokens), ("target_tokens", datum.targets)):
    if ids.min() < 0 or ids.max() >= vocab_size:
      raise UserError(
        f"{name} has token ids from {ids.min()} to {ids.max()}: the model has ids from 0 to "
        f"{vocab_size - 1} (vocab_size={vocab_size})"
      )
  for name in NEEDS[datum.loss]:
    wanted = shape if name == "weights" else (num_tokens,)
    if name not in datum.inputs:
      raise UserError(f"loss {datum.loss} needs {name}: add it to the datum's loss_fn_inputs")
    if datum.inputs[name].shape != wanted:
      raise UserError(f"{name} has the shape {datum.inputs[name].shape}: the targets need {wanted}")


def _check_loss(datum: Datum) -> None:
  if datum.loss not in LOSSES:
    raise UserError(f"loss {datum.loss!r} is not available: use one of {', '.join(LOSSES)}")
  needs = NEEDS[datum.loss]
  if datum.loss != "cross_entropy" and datum.targets.ndim == 2:
    raise UserError(f"loss {datum.loss} has one target per token: give target_tokens one axis")
  # A mask of zeros and ones would be silently ignored.
  unknown = sorted(datum.inputs.keys() - {*needs, "target_tokens", "weights"})
  if unknown:
    raise UserError(f"loss {datum.loss} does not read {unknown[0]}: it reads {', '.join(needs)}")
  options = OPTIONS.get(datum.loss, ())
  unknown = sorted(datum.options.keys() - set(options))
  if unknown:
    allowed = ", ".join(options) or "nothing"
    raise UserError(f"loss {datum.loss} does not read {unknown[0]}: loss_fn_config takes {allowed}")


def stack_rows(data: Sequence[Datum], num_rows: int) -> Row:
  """Stack data of the same `shape` and empty rows to `num_rows` rows."""
  num_positions, num_targets = data[0].shape
  rows = [_padded(datum, num_positions, num_targets) for datum in data]
  empty = jax.tree.map(np.zeros_like, rows[0])
  rows += [empty] * (num_rows - len(rows))
  return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)


def _padded(datum: Datum, num_positions: int, num_targets: int) -> Row:
  num_tokens = len(datum.tokens)

  def of_targets(values: np.ndarray | None, dtype: type) -> np.ndarray:
    padded: np.ndarray = np.zeros((num_positions, num_targets), dtype)
    if values is not None:
      columns = values.reshape(num_tokens, -1)
      padded[:num_tokens, : columns.shape[1]] = columns
    return padded

  def of_tokens(name: str) -> np.ndarray:
    padded = np.zeros(num_positions, np.float32)
    if name in datum.inputs and name in NEEDS[datum.loss]:
      padded[:num_tokens] = datum.inputs[name]
    return padded

  tokens_T = np.zeros(num_positions, np.int32)
  tokens_T[:num_tokens] = datum.tokens
  options = DEFAULTS | datum.options
  weights = datum.inputs.get("weights") if datum.loss == "cross_entropy" else None
  return Row(
    tokens_T=tokens_T,
    length=np.int32(num_tokens),
    targets_TK=of_targets(datum.targets, np.int32),
    loss=np.int32(list(LOSSES).index(datum.loss)),
    inputs=LossInputs(
      weight_TK=of_targets(weights, np.float32),
      behaviour_T=of_tokens("logprobs"),
      advantage_T=of_tokens("advantages"),
      mask_T=of_tokens("sequence_ratio_mask"),
      low=np.float32(options["clip_low_threshold"]),
      high=np.float32(options["clip_high_threshold"]),
      beta=np.float32(options["beta"]),
    ),
  )


def _power_of_two(number: int) -> int:
  return 1 << max(number - 1, 0).bit_length()
