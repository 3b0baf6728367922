"""Collections, such as batch statistics, of modules of which no parameter is trained."""

from collections.abc import Iterator

import jax

from maxlite.optim.labels import TRAIN, Labels, names_of
from maxlite.sharding.pytree import PyTree

Path = tuple[str, ...]


def freeze_collections(before: PyTree, after: PyTree, labels: Labels) -> PyTree:
  """The collections after a step, unchanged for modules of which no parameter is trained.

  A module without parameters follows the nearest enclosing module that has some.
  """
  is_trained: dict[Path, bool] = {}  # by module, whether a parameter in it is trained
  for key_path, label in jax.tree.leaves_with_path(labels):
    names = names_of(key_path)
    if names[0] == "params":
      names = names[1:]
    for depth in range(len(names) + 1):
      module = names[:depth]
      is_trained[module] = is_trained.get(module, False) or label == TRAIN

  def leaf(key_path: tuple, old: PyTree, new: PyTree) -> PyTree:
    for module in _modules_around(key_path):
      if module in is_trained:
        return new if is_trained[module] else old
    return new if is_trained[()] else old

  return jax.tree.map_with_path(leaf, before, after)


def _modules_around(key_path: tuple) -> Iterator[Path]:
  """Possible paths of the modules that enclose a variable, the innermost first.

  The name of the collection is the first key in Flax, and below their module if models are in a
  dict; or there is none.
  """
  keys = names_of(key_path[:-1])
  layouts = [keys[:n] + keys[n + 1 :] for n in range(len(keys))]
  layouts.append(keys)
  for depth in range(len(keys), 0, -1):
    for layout in layouts:
      yield layout[:depth]
