"""Finds steps whose loss or gradient norm is far above those of the latest steps.

Source: the skip-step optimizers of OLMo-core and MaxText; here steps that are not finite leave the
window as it is, and a window has at least two values.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct


class SpikeWindow(struct.PyTreeNode):
  """What an objective compares its next step with."""

  # Losses and gradient norms of the latest W finite steps, spikes included, so that a new level
  # ceases to be one. Step n is in column n % W.
  values_2W: jax.Array
  num_steps: jax.Array
  # The number of steps without an update, as they were spikes.
  num_skipped: jax.Array


def init_window(interval: int) -> SpikeWindow:
  """The window of W=`interval` values before the first step."""
  zero = jnp.zeros((), jnp.int32)
  return SpikeWindow(jnp.zeros((2, interval), jnp.float32), zero, zero)


@dataclasses.dataclass(frozen=True)
class SpikeRule:
  """Which steps of an objective are spikes."""

  objective: str
  # A value is a spike if it is more than `factor` standard deviations above the mean.
  factor: float

  def observe(
    self, window: SpikeWindow, loss: jax.Array, grad_norm: jax.Array, finite: jax.Array
  ) -> tuple[jax.Array, SpikeWindow]:
    """(whether a step is a spike, the window after it); a step that is not finite is none."""
    values_2 = jnp.stack([loss, grad_norm]).astype(jnp.float32)
    interval = window.values_2W.shape[1]
    known_1W = (jnp.arange(interval, dtype=jnp.int32) < window.num_steps)[None]
    num_known = jnp.maximum(jnp.minimum(window.num_steps, interval), 2).astype(jnp.float32)
    mean_2 = jnp.sum(window.values_2W, axis=1, where=known_1W) / num_known
    squares_2W = jnp.square(window.values_2W - mean_2[:, None])
    deviation_2 = jnp.sqrt(jnp.sum(squares_2W, axis=1, where=known_1W) / (num_known - 1))
    has_enough = window.num_steps >= max(2, interval // 2 - 1)
    is_spike = has_enough & finite & jnp.any(values_2 - mean_2 > self.factor * deviation_2)
    appended_2W = window.values_2W.at[:, window.num_steps % interval].set(values_2)
    return is_spike, SpikeWindow(
      values_2W=jnp.where(finite, appended_2W, window.values_2W),
      num_steps=window.num_steps + finite.astype(jnp.int32),
      num_skipped=window.num_skipped + is_spike.astype(jnp.int32),
    )
