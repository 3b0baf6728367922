"""The backends of attention: each states here what the rest of the package must know of it.

An implementation is imported on first use, and JAX not at all, because the rules of a config read
these entries too.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from maxlite.kernels.hardware import AMPERE, HOPPER, Hardware
from maxlite.kernels.tokamax_library import find_attention
from maxlite.registry import Implementation, imported


class AttentionFeatures(NamedTuple):
  """What a model uses of the contract of api.py."""

  dtype: str = "float32"
  num_channels: int = 128  # of keys or of values, whichever have more
  has_soft_cap: bool = False
  has_sinks: bool = False
  merges_keys: bool = False  # results over parts of the keys are merged (ring attention)


def _any_hardware(hardware: Hardware) -> bool:
  del hardware
  return True


@dataclasses.dataclass(frozen=True)
class AttentionBackend:
  """An entry of ATTENTION_BACKENDS."""

  # (q_BTHC, k_BSGC, v_BSGC, AttentionMask, ScoreOptions) -> o_BTHC, or "module:attribute".
  implementation: Implementation
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
  # A `PartialAttention`, or "module:attribute"; None: it cannot merge results over parts of the
  # keys, as ring attention does.
  partial: Implementation | None = None

  @property
  def run(self) -> Implementation:
    return imported(self.implementation)

  def supports(self, hardware: Hardware, features: AttentionFeatures) -> bool:
    """Whether it can compute these features on this hardware."""
    return (
      self.runs_on(hardware)
      and (self.has_sinks or not features.has_sinks)
      and (self.has_soft_cap or not features.has_soft_cap)
      and (not self.is_narrow or features.dtype in ("bfloat16", "float16"))
      and (self.max_channels is None or features.num_channels <= self.max_channels)
      and (self.partial is not None or not features.merges_keys)
    )


REFERENCE = AttentionBackend("maxlite.kernels.attention.reference:attention")
CHUNKED = AttentionBackend(
  "maxlite.kernels.attention.chunked:attention",
  partial="maxlite.kernels.attention.chunked:PARTIAL_ATTENTION",
)
DOT_PRODUCT = AttentionBackend(
  "maxlite.kernels.attention.dot_product:attention",
  has_sinks=False,
  has_soft_cap=False,
)


def _is_tpu(hardware: Hardware) -> bool:
  return hardware.platform == "tpu"


SPLASH = AttentionBackend(
  "maxlite.kernels.attention.splash:attention",
  runs_on=_is_tpu,
  row_multiple=128,
  supports_vma=False,
)


def _has_cudnn(hardware: Hardware) -> bool:
  # JAX asks an attached GPU for the version of cuDNN.
  return hardware.is_attached and hardware.compute_capability >= AMPERE


CUDNN = AttentionBackend(
  "maxlite.kernels.attention.dot_product:cudnn_attention",
  has_sinks=False,
  has_soft_cap=False,
  is_narrow=True,
  max_channels=128,
  runs_on=_has_cudnn,
  supports_vma=False,
)


def _has_tokamax(hardware: Hardware) -> bool:
  return HOPPER <= hardware.compute_capability < 11.0 and find_attention() is not None


TOKAMAX = AttentionBackend(
  "maxlite.kernels.attention.tokamax:attention",
  has_sinks=False,
  is_narrow=True,
  runs_on=_has_tokamax,
  supports_vma=False,
)
