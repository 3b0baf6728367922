"""The experts' feed-forward networks, over rows sorted by expert."""

from collections.abc import Callable

import jax

from maxlite.kernels.grouped_matmul.api import grouped_matmul


def apply_experts(
  x_MD: jax.Array,
  wi_EDF: tuple[jax.Array, ...],
  wo_EFD: jax.Array,
  group_sizes_E: jax.Array,
  activation: Callable[[jax.Array], jax.Array],
  backend: str,
) -> jax.Array:
  """y_MD: act(x wi[0]) * (x wi[1]) wo of each row's own expert; without wi[1], not gated."""
  h_MF = activation(grouped_matmul(x_MD, wi_EDF[0], group_sizes_E, backend=backend))
  if wi_EDF[1:]:
    h_MF *= grouped_matmul(x_MD, wi_EDF[1], group_sizes_E, backend=backend)
  return grouped_matmul(h_MF, wo_EFD, group_sizes_E, backend=backend)
