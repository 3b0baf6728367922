"""What each parameter is, by its path and by the logical names of its axes.

Whether a phase trains it, whether it decays, and how its optimizer state is sharded.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import optax
from flax import linen as nn

from maxlite.config.errors import UserError

TRAIN = "train"
FROZEN = "frozen"
# A tree like the parameters, with "train" or "frozen" at every leaf; None: all are trained.
Labels = Any

NO_DECAY = r"(^|/|_)(scale|bias)$"  # norms and biases
STACKED = ("layers", "exp", "ensemble")  # axes that stack matrices and are not a side of one


def path_of(key_path: tuple) -> str:
  """Parameter path as written in regexes and error messages: `layers/attention/query/kernel`."""
  return "/".join(str(getattr(key, "key", getattr(key, "name", key))) for key in key_path)


def paths_in(tree: Any) -> list[str]:
  """Paths of all leaves."""
  return [path_of(key_path) for key_path, _ in jax.tree.leaves_with_path(tree)]


def labels_of(params: Any, regexes: Iterable[str]) -> Labels:
  """Label the parameters whose whole path matches one of `regexes` as trained.

  Raises:
    UserError: a regex is invalid, or matches no path.
  """
  paths = paths_in(params)
  trained: set[str] = set()
  for regex in regexes:
    trained |= _matching(regex, paths)

  def label(key_path: tuple, _: Any) -> str:
    return TRAIN if path_of(key_path) in trained else FROZEN

  return jax.tree.map_with_path(label, params)


def _matching(regex: str, paths: list[str]) -> set[str]:
  try:
    matched = {path for path in paths if re.fullmatch(regex, path)}
  except re.error as error:
    raise UserError(f"{regex!r} is not a valid regex: {error}") from None
  if not matched:
    near = ", ".join(difflib.get_close_matches(regex, paths, n=3, cutoff=0))
    raise UserError(f"{regex!r} matches no parameter's whole path; the nearest are {near}")
  return matched


def labels_by_phase(params: Any, regexes: Mapping[str, Iterable[str]]) -> dict[str, Labels]:
  """The labels of every phase, by `labels_of`; errors name the phase."""
  labels = {}
  for name, of_phase in regexes.items():
    try:
      labels[name] = labels_of(params, of_phase)
    except UserError as error:
      raise UserError(f"phase {name}: {error}") from None
  return labels


def union(labels: Iterable[Labels]) -> Labels:
  """Label as trained what any of `labels`, of which there is at least one, trains."""

  def either(*labels: str) -> str:
    return TRAIN if TRAIN in labels else FROZEN

  return jax.tree.map(either, *labels)


def trained_paths(labels: Labels) -> list[str]:
  """Paths of the parameters that are trained; `labels` must not be None."""
  leaves = jax.tree.leaves_with_path(labels)
  return [path_of(key_path) for key_path, label in leaves if label == TRAIN]


def frozen_paths(*labels: Labels) -> list[str]:
  """Paths of the parameters that none of `labels` (of all phases of a run) trains."""
  if any(each is None for each in labels):
    return []
  leaves = jax.tree.leaves_with_path(union(labels))
  return [path_of(key_path) for key_path, label in leaves if label == FROZEN]


def split(tree: Any, labels: Labels) -> tuple[Any, Any]:
  """Split a tree like the parameters into its (trained, frozen) leaves.

  Either part has `optax.MaskedNode()`, which is an empty subtree, in place of the other's leaves,
  as `optax.partition` does.
  """
  if labels is None:
    return tree, jax.tree.map(lambda _: optax.MaskedNode(), tree)

  def trained(label: str, leaf: Any) -> Any:
    return leaf if label == TRAIN else optax.MaskedNode()

  def frozen(label: str, leaf: Any) -> Any:
    return leaf if label == FROZEN else optax.MaskedNode()

  return jax.tree.map(trained, labels, tree), jax.tree.map(frozen, labels, tree)


def merge(trained: Any, frozen: Any) -> Any:
  """The tree of which `trained` and `frozen` are the parts."""

  def present(trained: Any, frozen: Any) -> Any:
    return frozen if is_masked(trained) else trained

  return jax.tree.map(present, trained, frozen, is_leaf=is_masked)


def is_masked(node: Any) -> bool:
  return isinstance(node, optax.MaskedNode)


def partitioned(tx: optax.GradientTransformation, labels: Labels) -> optax.GradientTransformation:
  """`tx` for the trained parameters, and neither updates nor state for the frozen ones.

  Its update takes whole trees, or the trained parts of `split`.
  """
  if labels is None:
    return tx
  return optax.partition({TRAIN: tx, FROZEN: optax.set_to_zero()}, labels)


def decay_mask(params: Any) -> Any:
  """True for each parameter that decays: all except norms and biases."""

  def decays(key_path: tuple, _: Any) -> bool:
    return re.search(NO_DECAY, path_of(key_path)) is None

  return jax.tree.map_with_path(decays, params)


def logical_names(boxed_params: Any) -> Any:
  """Logical axis names of every parameter: a tree of `jax.P` like the unboxed parameters."""

  def is_box(leaf: Any) -> bool:
    return isinstance(leaf, nn.Partitioned)

  return jax.tree.map(lambda box: jax.P(*box.names), boxed_params, is_leaf=is_box)


def state_names(opt_state: Any, params: Any, names: Any) -> Any:
  """Logical axis names for every leaf of an optimizer state.

  A leaf whose path ends in a parameter's path and that has its shape is sharded like the parameter.
  All others (counts, factored moments) are small and replicated.
  """
  leaves = zip(jax.tree.leaves_with_path(params), jax.tree.leaves(names), strict=True)
  of_parameter = {(key_path, leaf.shape): leaf_names for (key_path, leaf), leaf_names in leaves}

  def of_leaf(key_path: tuple, leaf: Any) -> jax.P:
    for start in range(len(key_path)):
      end = (key_path[start:], leaf.shape)
      if end in of_parameter:
        return of_parameter[end]
    return jax.P(*(None,) * leaf.ndim)

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
  width = tuple(widths)
  others = tuple(axis for axis in sides if axis not in widths)
  if width < others:
    return optax.contrib.MuonDimensionNumbers(width, others)
  return optax.contrib.MuonDimensionNumbers(others, width)
