"""Initializers of parameters whose axes have logical names."""

from collections.abc import Callable

import jax
from flax import linen as nn

from maxlite.sharding.pytree import PyTree

Init = Callable[..., jax.Array]  # (key, shape, dtype) -> the initial value


def partitioned(init: Init, names: tuple[str, ...]) -> Init:
  """Returns `init` with the logical names of its result's axes, for `nn.Module.param`.

  The result is boxed with the names. Its type is that of an array, because `param` returns the
  array in the box.
  """
  boxed: Callable[..., PyTree] = nn.with_logical_partitioning(init, names)
  return boxed
