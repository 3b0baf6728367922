"""N copies of any Linen module as one module, by `nn.vmap`."""

from typing import Any

import flax.linen as nn
import jax


def lift(module: nn.Module, num_members: int) -> nn.Module:
  """A module that computes `num_members` copies of `module` on the same inputs.

  Every variable, and the result, has a first axis of this size. In the parameters it is the logical
  axis `ensemble`; axes without a logical name are None. `init` draws different parameters for every
  member, and `apply` different random numbers. Methods other than `__call__` are not lifted.
  """
  return _LiftedModule(module, num_members)


class _LiftedModule(nn.Module):
  module: nn.Module
  num_members: int

  def setup(self) -> None:
    nn.share_scope(self, self.module)  # its variables keep their paths

  def __call__(self, *args: Any, **kwargs: Any) -> Any:
    # The inputs are not arguments of the lifted function, because they need not be arrays.
    run = nn.vmap(
      lambda module: module(*args, **kwargs),
      variable_axes={True: 0},
      split_rngs={True: True},
      axis_size=self.num_members,
      metadata_params={nn.PARTITION_NAME: "ensemble"},
    )
    result = run(self.module)
    if self.is_initializing():
      for name, params in self.variables.get("params", {}).items():
        named = jax.tree.map(_with_names, params, is_leaf=_has_names)
        self.put_variable("params", name, named)
    return result


def _has_names(leaf: Any) -> bool:
  return isinstance(leaf, nn.meta.AxisMetadata)


def _with_names(leaf: Any) -> Any:
  """The parameter with logical names, if the module gave it none."""
  if _has_names(leaf):
    return leaf
  return nn.LogicallyPartitioned(leaf, ("ensemble", *[None] * (leaf.ndim - 1)))
