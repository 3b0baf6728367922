"""Collections, such as batch statistics, of modules of which no parameter is trained."""

from collections.abc import Iterator

import jax

from maxlite.optim.labels import Labels, frozen_paths, path_of, trained_paths
from maxlite.sharding.pytree import PyTree


def freeze_collections(before: PyTree, after: PyTree, labels: Labels) -> PyTree:
  """The collections after a step, unchanged for modules of which no parameter is trained.

  A module without parameters follows the nearest enclosing module that has some.
  """
  trained = _module_paths(trained_paths(labels))
  frozen = _module_paths(frozen_paths(labels))

  def leaf(key_path: tuple, old: PyTree, new: PyTree) -> PyTree:
    is_trained = bool(trained)
    for module in _modules_around(key_path):
      if _any_below(trained + frozen, module):
        is_trained = _any_below(trained, module)
        break
    return new if is_trained else old

  return jax.tree.map_with_path(leaf, before, after)


def _module_paths(paths: list[str]) -> list[str]:
  return [f"{path}/".removeprefix("params/") for path in paths]


def _any_below(paths: list[str], module: str) -> bool:
  return any(path.startswith(module) for path in paths)


def _modules_around(key_path: tuple) -> Iterator[str]:
  """Possible paths of the modules that enclose a variable, the innermost first.

  The name of the collection is the first key in Flax, and below their module if models are in a
  dict; or there is none.
  """
  keys = path_of(key_path[:-1]).split("/")
  layouts = [keys[:n] + keys[n + 1 :] for n in range(len(keys))]
  layouts.append(keys)
  for depth in range(len(keys), 0, -1):
    for layout in layouts:
      yield f"{'/'.join(layout[:depth])}/"
