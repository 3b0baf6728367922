"""Attention to a cache in blocks equals the reference, and skips blocks without visible keys."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.slow_cases import slow

from maxlite.kernels.attention import api, cached

B = 3
T = 2
H = 4
C = 8
S = 11
CUTS = {"one block": [], "three blocks": [4, 9]}
# Number of keys including those of the queries; the last block has no visible key.
LENGTH_B = np.array([3, 8, 9])


def drawn(*shape):
  return np.random.default_rng(len(shape) + shape[-1]).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize(("num_groups", "sinks"), [slow(1, False), (2, True), (4, False)])
def test_agrees_with_the_reference(cuts, num_groups, sinks):
  q_BTHC = drawn(B, T, H, C)
  sink_H = None
  if sinks:
    sink_H = drawn(H)
  k_BGSC = drawn(B, num_groups, S, C)
  v_BGSC = drawn(B, num_groups, S, C + 1)
  options = {"scale": 0.7, "soft_cap": 1.5, "sink_H": sink_H}
  query_BT = LENGTH_B[:, None] - T + np.arange(T)[None]
  visible_BTS = np.arange(S)[None, None] <= query_BT[..., None]

  def blocks(x, axis):
    return [jnp.asarray(part) for part in np.split(x, cuts, axis=axis)]

  masks = [cached.BlockMask(part, jnp.any(part)) for part in blocks(visible_BTS, 2)]
  keys = blocks(k_BGSC, 2)
  values = blocks(v_BGSC, 2)
  if cuts:  # a skipped block may contain anything
    keys[-1] = jnp.full_like(keys[-1], jnp.nan)
    values[-1] = jnp.full_like(values[-1], jnp.nan)
  attend = jax.jit(functools.partial(cached.attention, **options))
  got_BTHC = attend(q_BTHC, keys, values, masks)
  for b, length in enumerate(LENGTH_B):
    ones = np.ones((1, length), np.int32)
    k_1GSC = k_BGSC[b : b + 1, :, :length]
    v_1GSC = v_BGSC[b : b + 1, :, :length]
    expected = functools.partial(
      api.attention,
      q_segment_BT=ones[:, :T],
      kv_segment_BS=ones,
      q_start=length - T,
      block_q=1,
      backend="reference",
      **options,
    )
    want_1THC = jax.jit(expected)(q_BTHC[b : b + 1], k_1GSC.swapaxes(1, 2), v_1GSC.swapaxes(1, 2))
    np.testing.assert_allclose(got_BTHC[b : b + 1], want_1THC, atol=2e-6)
