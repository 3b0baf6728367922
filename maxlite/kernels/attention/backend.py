"""What an entry of `maxlite.registry.ATTENTION_BACKENDS` states about its implementation."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxlite.kernels.hardware import Hardware


class AttentionFeatures(NamedTuple):
  """What a model uses of the contract of api.py."""

  dtype: str = "float32"
  num_channels: int = 128  # of keys or of values, whichever have more
  has_soft_cap: bool = False
  has_sinks: bool = False
  merges_keys: bool = False  # results over parts of the keys are merged (ring attention)


class PartialAttention(NamedTuple):
  """Attention to a part of the keys of a row, as functions that JAX does not differentiate.

  - forward(q_BTHC, k_BSGC, v_BSGC, mask, score) -> (o_BTHC, lse_BHT), where lse is the logarithm of
    the sum of the exponentiated scores.
  - gradients(q, k, v, mask, score, o, lse, do) -> (dq, dk, dv), where o and lse are results over
    all keys of the row, and the gradients are those that come from the given keys.

  `score` has no sinks.
  """

  forward: Callable[..., tuple[jax.Array, jax.Array]]
  gradients: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


def _any_hardware(hardware: Hardware) -> bool:
  del hardware
  return True


@dataclasses.dataclass(frozen=True)
class AttentionBackend:
  """An implementation of attention, and everything that others need to know about it."""

  # (q_BTHC, k_BSGC, v_BSGC, AttentionMask, ScoreOptions) -> o_BTHC
  run: Callable[..., jax.Array]
  has_sinks: bool = True
  has_soft_cap: bool = True
  # It computes in 16-bit types only.
  is_narrow: bool = False
  # The largest number of channels with which its backward pass works; None: any.
  max_channels: int | None = None
  # Whether it runs on the hardware, with the packages that are installed.
  runs_on: Callable[[Hardware], bool] = _any_hardware
  # Queries that are a part of the rows must be a multiple of it.
  row_multiple: int = 1
  # It works in jax.shard_map(check_vma=True).
  supports_vma: bool = True
  # For ring attention; None: it cannot merge results over parts of the keys.
  partial: PartialAttention | None = None

  def supports(self, hardware: Hardware, features: AttentionFeatures) -> bool:
    """Whether `attention=auto` may choose it."""
    return (
      self.runs_on(hardware)
      and (self.has_sinks or not features.has_sinks)
      and (self.has_soft_cap or not features.has_soft_cap)
      and (not self.is_narrow or jnp.dtype(features.dtype).itemsize == 2)
      and (self.max_channels is None or features.num_channels <= self.max_channels)
      and (self.partial is not None or not features.merges_keys)
    )
