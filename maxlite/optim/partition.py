"""Which parameters get what, decided by their paths and by the logical names of their axes."""

import re
from typing import Any

import jax
from flax import linen as nn

NO_DECAY = r"(^|/|_)(scale|bias)$"  # norms and biases
STACKED = ("layers", "exp", "ensemble")  # axes that number matrices instead of being a side of one


def path_of(key_path: tuple) -> str:
  """Parameter path as written in regexes and error messages: `layers/attention/query/kernel`."""
  return "/".join(str(getattr(key, "key", getattr(key, "name", key))) for key in key_path)


def decay_mask(params: Any) -> Any:
  """True for each parameter that weight decay applies to: all but norms and biases."""
  return jax.tree_util.tree_map_with_path(
    lambda key_path, _: re.search(NO_DECAY, path_of(key_path)) is None, params
  )


def logical_names(boxed_params: Any) -> Any:
  """Tree like the unboxed parameters; each leaf a `jax.P` of logical axis names."""
  return jax.tree.map(
    lambda box: jax.P(*box.names),
    boxed_params,
    is_leaf=lambda leaf: isinstance(leaf, nn.Partitioned),
  )


def state_names(opt_state: Any, params: Any, names: Any) -> Any:
  """Logical names for every leaf of an optimizer state.

  A slot that ends in a parameter's path and has its shape lies like the parameter; whatever else
  (counts, factored moments) is small and lies whole on every device.
  """
  shapes = jax.tree_util.tree_leaves_with_path(params)
  by_path = {
    key_path: (leaf.shape, leaf_names)
    for (key_path, leaf), leaf_names in zip(shapes, jax.tree.leaves(names), strict=True)
  }

  def of_leaf(key_path: tuple, leaf: Any) -> jax.P:
    ends = (key_path[start:] for start in range(len(key_path)))
    shape, leaf_names = next((by_path[end] for end in ends if end in by_path), (None, None))
    whole = jax.P(*(None,) * leaf.ndim)
    return leaf_names if leaf_names is not None and leaf.shape == shape else whole

  return jax.tree_util.tree_map_with_path(of_leaf, opt_state)


def matrix_axes(names: jax.P) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
  """(input axes, output axes) of a hidden weight matrix; None for anything else.

  One side of every hidden matrix is the model's width. Embeddings and unembeddings (which have a
  vocabulary side), norms, biases and low-rank adapters are not hidden matrices.
  """
  sides = [axis for axis, name in enumerate(names) if name not in STACKED]
  widths = [axis for axis in sides if names[axis].startswith("embed")]
  if len(sides) < 2 or len(widths) != 1 or {"vocab", "lora_rank"} & set(names):
    return None
  others = tuple(axis for axis in sides if axis != widths[0])
  width = (widths[0],)
  return (width, others) if widths[0] < others[0] else (others, width)
