"""The experts' feed-forward networks, over rows sorted by expert."""

import jax
from jax.ad_checkpoint import checkpoint_name

from maxlite.kernels.grouped_matmul.api import grouped_matmul
from maxlite.layers.mlp import ACTIVATIONS, gated


def apply_experts(
  x_MD: jax.Array,
  wi_EDF: tuple[jax.Array, ...],
  wo_EFD: jax.Array,
  group_sizes_E: jax.Array,
  activation: str,
  backend: str,
) -> jax.Array:
  """y_MD: act(x wi[0]) * (x wi[1]) wo of each row's own expert; without wi[1], not gated."""
  up = [
    checkpoint_name(grouped_matmul(x_MD, w_EDF, group_sizes_E, backend=backend), "mlpwi")
    for w_EDF in wi_EDF
  ]
  h_MF = gated(*up, activation) if up[1:] else ACTIVATIONS[activation](up[0])
  return checkpoint_name(grouped_matmul(h_MF, wo_EFD, group_sizes_E, backend=backend), "mlpwo")
