"""N copies of any Linen module as one module, by `nn.vmap`."""

import flax.linen as nn
import jax

from maxlite.errors import UserError
from maxlite.kernels.vmapped_convolution import keep_members_apart
from maxlite.sharding.pytree import PyTree


def lift(module: nn.Module, num_members: int) -> nn.Module:
  """A module that computes `num_members` copies of `module` on the same inputs.

  Every variable, and the result, has a first axis of this size. In what `init` returns it is the
  logical axis `ensemble`; axes without a logical name are None. `init` draws different parameters
  for every member, and `apply` different random numbers. Methods other than `__call__` are not
  lifted.

  Raises:
    UserError: `module` is not an instance of a module, or there is no member.
  """
  if not isinstance(module, nn.Module):
    name = getattr(module, "__name__", type(module).__name__)
    raise UserError(f"lift takes an instance of nn.Module, and not {name}: call it, {name}(...)")
  if not isinstance(num_members, int) or num_members < 1:
    raise UserError(f"lift takes a number of members of at least 1, and not {num_members!r}")
  keep_members_apart()
  return _LiftedModule(module, num_members)


class _LiftedModule(nn.Module):
  module: nn.Module
  num_members: int

  def setup(self) -> None:
    nn.share_scope(self, self.module)  # its variables keep their paths

  def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
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
      for collection, variables in dict(self.variables).items():
        for name, value in variables.items():
          if collection != "params" and isinstance(value, tuple):  # sown, which is of one call
            continue
          named = jax.tree.map(_with_names, value, is_leaf=_has_names)
          self.put_variable(collection, name, named)
    return result


def _has_names(leaf: PyTree) -> bool:
  return isinstance(leaf, nn.meta.AxisMetadata)


def _with_names(leaf: PyTree) -> PyTree:
  """The variable with logical names, if the module gave it none."""
  if _has_names(leaf):
    return leaf
  return nn.LogicallyPartitioned(leaf, ("ensemble", *[None] * (leaf.ndim - 1)))
