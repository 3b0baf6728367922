"""Groups of parameters, selected by their paths and by the logical names of their axes."""

import dataclasses
import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import optax
from flax import linen as nn

from maxlite.config.errors import UserError

NO_DECAY = r"(^|/|_)(scale|bias)$"  # norms and biases
STACKED = ("layers", "exp", "ensemble")  # axes that stack matrices and are not a side of one


def path_of(key_path: tuple) -> str:
  """Parameter path as written in regexes and error messages: `layers/attention/query/kernel`."""
  return "/".join(str(getattr(key, "key", getattr(key, "name", key))) for key in key_path)


def paths_in(tree: Any) -> list[str]:
  """Paths of all leaves."""
  return [path_of(key_path) for key_path, _ in jax.tree.leaves_with_path(tree)]


@dataclasses.dataclass(frozen=True)
class Partition:
  """The parameters that a step trains, by path; None: all of them.

  A part of a tree has None in place of the other leaves, so every leaf keeps its path. Optax's
  transformations treat None as an empty subtree: they neither update it nor keep state for it.
  """

  trained: frozenset[str] | None = None

  @classmethod
  def matching(cls, params: Any, regexes: Iterable[str]) -> "Partition":
    """Select the parameters whose whole path matches one of `regexes`.

    Raises:
      UserError: a regex is invalid, or matches no path.
    """
    paths, trained = paths_in(params), set()
    for regex in regexes:
      try:
        matched = {path for path in paths if re.fullmatch(regex, path)}
      except re.error as error:
        raise UserError(f"{regex!r} is not a valid regex: {error}") from None
      if not matched:
        near = ", ".join(difflib.get_close_matches(regex, paths, n=3, cutoff=0))
        raise UserError(f"{regex!r} matches no parameter's whole path; the nearest are {near}")
      trained |= matched
    return cls(frozenset(trained))

  @classmethod
  def by_phase(cls, params: Any, regexes: Mapping[str, Iterable[str]]) -> "dict[str, Partition]":
    """Select the parameters of every phase, as `matching`; errors name the phase."""
    partitions = {}
    for name, of_phase in regexes.items():
      try:
        partitions[name] = cls.matching(params, of_phase)
      except UserError as error:
        raise UserError(f"phase {name}: {error}") from None
    return partitions

  @classmethod
  def union(cls, partitions: Iterable["Partition"]) -> "Partition":
    return cls(frozenset().union(*(partition.trained or () for partition in partitions)))

  def split(self, tree: Any) -> tuple[Any, Any]:
    """Split a tree like the parameters into (trained, frozen)."""
    is_trained = lambda key_path: self.trained is None or path_of(key_path) in self.trained
    keep = lambda wanted: jax.tree.map_with_path(
      lambda key_path, leaf: leaf if is_trained(key_path) == wanted else None, tree
    )
    return keep(True), keep(False)


ALL_PARAMETERS = Partition()


def merge(*parts: Any) -> Any:
  """Merge parts of one tree; where several have a leaf, the first one's is taken."""
  first = lambda *leaves: next((leaf for leaf in leaves if leaf is not None), None)
  return jax.tree.map(first, *parts, is_leaf=lambda node: node is None)


def decay_mask(params: Any) -> Any:
  """True for each parameter that decays: all except norms and biases."""
  decays = lambda key_path, _: re.search(NO_DECAY, path_of(key_path)) is None
  return jax.tree.map_with_path(decays, params)


def logical_names(boxed_params: Any) -> Any:
  """Logical axis names of every parameter: a tree of `jax.P` like the unboxed parameters."""
  is_box = lambda leaf: isinstance(leaf, nn.Partitioned)
  return jax.tree.map(lambda box: jax.P(*box.names), boxed_params, is_leaf=is_box)


def state_names(opt_state: Any, params: Any, names: Any) -> Any:
  """Logical axis names for every leaf of an optimizer state.

  A leaf whose path ends in a parameter's path and that has its shape is sharded like the parameter.
  All others (counts, factored moments) are small and replicated.
  """
  leaves = zip(jax.tree.leaves_with_path(params), jax.tree.leaves(names), strict=True)
  of_parameter = {(key_path, leaf.shape): leaf_names for (key_path, leaf), leaf_names in leaves}

  def of_leaf(key_path: tuple, leaf: Any) -> jax.P:
    ends = ((key_path[start:], leaf.shape) for start in range(len(key_path)))
    replicated = jax.P(*(None,) * leaf.ndim)
    return next((of_parameter[end] for end in ends if end in of_parameter), replicated)

  return jax.tree.map_with_path(of_leaf, opt_state)


def matrix_axes(names: jax.P) -> optax.contrib.MuonDimensionNumbers | None:
  """(input axes, output axes) of a hidden weight matrix; None for all other parameters.

  One side of every hidden matrix is the model width. Embeddings and unembeddings (which have a
  vocabulary side), norms, biases and low-rank adapters are not hidden matrices.
  """
  sides = [axis for axis, name in enumerate(names) if name not in STACKED]
  widths = [axis for axis in sides if names[axis].startswith("embed")]
  if len(sides) < 2 or len(widths) != 1 or {"vocab", "lora_rank"} & set(names):
    return None
  width, others = tuple(widths), tuple(axis for axis in sides if axis not in widths)
  inputs, outputs = (width, others) if width < others else (others, width)
  return optax.contrib.MuonDimensionNumbers(inputs, outputs)
