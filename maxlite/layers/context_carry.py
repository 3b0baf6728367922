"""What shards of positions pass on to each other in layers that are recurrent along positions."""

import jax
import jax.numpy as jnp

from maxlite.errors import UserError
from maxlite.sharding.collectives import MeshAxes
from maxlite.sharding.pytree import PyTree


def check_length(num_positions: int, num_shards: int, num_taps: int, key: str) -> None:
  """Checks that the positions that a convolution reads before a shard's are its neighbour's.

  Args:
    num_positions: of a row.
    num_shards: of positions.
    num_taps: of the convolution.
    key: the config's key of that number.

  Raises:
    UserError: they are not.
  """
  num_before = num_taps - 1
  if num_shards > 1 and num_positions // num_shards < num_before:
    raise UserError(
      f"ici_context_parallelism: {num_shards} shards of {num_positions} positions have fewer than "
      f"the {num_before} that {key} reads before each; use fewer shards"
    )


def from_neighbour(context: MeshAxes, tree: PyTree) -> PyTree:
  """Returns the arrays of the shard before this one; zeros on the first."""
  num_shards = jax.lax.axis_size(context)
  pairs = [(shard, shard + 1) for shard in range(num_shards - 1)]
  return jax.tree.map(lambda x: jax.lax.ppermute(x, context, pairs), tree)


def of_last_shard(context: MeshAxes, x: jax.Array) -> jax.Array:
  """Returns the last shard's array on every shard."""
  is_last = jax.lax.axis_index(context) == jax.lax.axis_size(context) - 1
  return jax.lax.psum(jnp.where(is_last, x, 0), context)
