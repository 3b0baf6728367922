"""Properties of parameters that follow from their paths and from the logical names of their axes.

These are whether a phase trains a parameter, whether weight decay applies to it, how its optimizer
state is sharded, and, for Muon, which of its axes make a matrix.
"""

import difflib
import re
from collections.abc import Iterable, Mapping

import jax
import optax
from flax import linen as nn

from maxlite.errors import UserError
from maxlite.sharding.pytree import PyTree

TRAIN = "train"
FROZEN = "frozen"
# A tree like the parameters, with "train" or "frozen" at every leaf; None: all are trained.
Labels = PyTree

NO_DECAY = r"(^|/|_)(scale|bias|rate)$"  # norms, biases and rates of decay
STACKED = ("layers", "exp", "ensemble")  # axes that stack matrices and are not a side of one
WIDTHS = ("embed", "embed_no_exp", "q_lora", "kv_lora")  # of which a hidden matrix has one


def path_of(key_path: tuple) -> str:
  """Parameter path as written in regexes and messages: `layers/attention/query/kernel`.

  Only for regexes and messages: a name may itself contain `/`, as in `nn.WeightNorm`. Code
  that takes a path apart uses `names_of`.
  """
  return "/".join(names_of(key_path))


def names_of(key_path: tuple) -> tuple[str, ...]:
  """The keys of a path: names of modules and of fields, and numbers in lists."""
  return tuple(jax.tree_util.keystr((key,), simple=True) for key in key_path)


def paths_in(tree: PyTree) -> list[str]:
  """Paths of all leaves."""
  return [path_of(key_path) for key_path, _ in jax.tree.leaves_with_path(tree)]


def labels_of(params: PyTree, regexes: Iterable[str]) -> Labels:
  """Label the parameters whose whole path matches one of `regexes` as trained.

  Raises:
    UserError: a regex is invalid, or matches no path.
  """
  paths = paths_in(params)
  trained: set[str] = set()
  for regex in regexes:
    trained |= _matching(regex, paths)

  def label(key_path: tuple, _: object) -> str:
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


def labels_by_phase(params: PyTree, regexes: Mapping[str, Iterable[str]]) -> dict[str, Labels]:
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

  def either(label: str, other: str) -> str:
    return TRAIN if TRAIN in (label, other) else FROZEN

  combined, *others = labels
  for other in others:
    combined = jax.tree.map(either, combined, other)
  return combined


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


def split(tree: PyTree, labels: Labels) -> tuple[PyTree, PyTree]:
  """Split a tree like the parameters into its (trained, frozen) leaves.

  Either part has `optax.MaskedNode()`, which is an empty subtree, in place of the other's leaves,
  as `optax.partition` does.
  """
  if labels is None:
    return tree, jax.tree.map(lambda _: optax.MaskedNode(), tree)
  return _part(tree, labels, TRAIN), _part(tree, labels, FROZEN)


def _part(tree: PyTree, labels: Labels, wanted: str) -> PyTree:
  """The leaves with the label `wanted`, and `optax.MaskedNode()` in place of the others."""

  def keep(label: str, leaf: PyTree) -> PyTree:
    if label == wanted:
      return leaf
    return optax.MaskedNode()

  return jax.tree.map(keep, labels, tree)


def merge(trained: PyTree, frozen: PyTree) -> PyTree:
  """The tree of which `trained` and `frozen` are the parts."""

  def present(trained: PyTree, frozen: PyTree) -> PyTree:
    if is_masked(trained):
      return frozen
    return trained

  return jax.tree.map(present, trained, frozen, is_leaf=is_masked)


def is_masked(node: object) -> bool:
  """Whether `node` stands for a leaf of the other part of `split`."""
  return isinstance(node, optax.MaskedNode)


def partitioned(tx: optax.GradientTransformation, labels: Labels) -> optax.GradientTransformation:
  """`tx` for the trained parameters, and neither updates nor state for the frozen ones.

  Its update takes whole trees, or the trained parts of `split`.
  """
  if labels is None:
    return tx
  # As a function: optax would call labels of a module that can be called, such as Equinox's.
  return optax.partition({TRAIN: tx, FROZEN: optax.set_to_zero()}, lambda _: labels)


def decay_mask(params: PyTree) -> PyTree:
  """A tree like `params`, False where weight decay does not apply: where NO_DECAY matches."""

  def decays(key_path: tuple, _: object) -> bool:
    return re.search(NO_DECAY, path_of(key_path)) is None

  return jax.tree.map_with_path(decays, params)


def logical_names(boxed_params: PyTree) -> PyTree:
  """Logical axis names of every parameter: a tree of `jax.P` like the unboxed parameters."""

  def is_box(leaf: object) -> bool:
    return isinstance(leaf, nn.Partitioned)

  def names(box: nn.Partitioned) -> jax.P:
    return box.get_partition_spec()

  return jax.tree.map(names, boxed_params, is_leaf=is_box)


def state_names(opt_state: optax.OptState, params: PyTree, names: PyTree) -> PyTree:
  """Logical axis names for every leaf of an optimizer state.

  A leaf whose path ends in a parameter's path and that has its shape is sharded like the parameter.
  All others (counts, factored moments) are small and replicated.
  """
  of_parameter: dict[tuple[object, ...], jax.P] = {}
  leaves = jax.tree.leaves_with_path(params)
  for (key_path, leaf), leaf_names in zip(leaves, jax.tree.leaves(names), strict=True):
    of_parameter[key_path, leaf.shape] = leaf_names

  def of_leaf(key_path: tuple, leaf: jax.Array) -> jax.P:
    for start in range(len(key_path)):
      end = (key_path[start:], leaf.shape)
      if end in of_parameter:
        return of_parameter[end]
    return jax.P(*(None,) * leaf.ndim)

  return jax.tree.map_with_path(of_leaf, opt_state)


def matrix_axes(names: jax.P) -> optax.contrib.MuonDimensionNumbers | None:
  """(input axes, output axes) of a hidden weight matrix; None for all other parameters.

  One side of every hidden matrix is the model width, or the latent that latent attention projects
  up. Embeddings and unembeddings (which have a vocabulary side), norms, biases, depthwise
  convolutions and low-rank adapters are not hidden matrices.
  """
  if {"vocab", "position", "lora_rank"} & set(names):
    return None
  width = []
  others = []
  for axis, name in enumerate(names):
    if name in STACKED:
      continue
    if name in WIDTHS:
      width.append(axis)
    else:
      others.append(axis)
  if len(width) != 1 or not others:
    return None
  if width < others:
    return optax.contrib.MuonDimensionNumbers(tuple(width), tuple(others))
  return optax.contrib.MuonDimensionNumbers(tuple(others), tuple(width))
