"""Parts of a parameter tree that are trained in turns, and their optimizers' states.

A part is the whole tree with None where a leaf is not of it, so every leaf keeps its path.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import optax
from flax import struct

from maxlite.config.errors import UserError
from maxlite.optim.partition import path_of


def partition_params(params: Any, regexes: Iterable[str]) -> tuple[Any, Any]:
  """(trained, frozen): the leaves of whose path some regex matches all, and the others.

  Raises:
    UserError: a regex is none, or matches no path.
  """
  paths, chosen = paths_in(params), set()
  for regex in regexes:
    try:
      matched = {path for path in paths if re.fullmatch(regex, path)}
    except re.error as error:
      raise UserError(f"{regex!r} is no regex: {error}") from None
    if not matched:
      near = ", ".join(difflib.get_close_matches(regex, paths, n=3, cutoff=0))
      raise UserError(f"{regex!r} matches no parameter's whole path; the nearest are {near}")
    chosen |= matched
  keep = lambda is_chosen: jax.tree_util.tree_map_with_path(
    lambda key_path, leaf: leaf if (path_of(key_path) in chosen) == is_chosen else None, params
  )
  return keep(True), keep(False)


def merge(*parts: Any) -> Any:
  """The tree that the parts (of one structure) make up; the first that has a leaf gives it."""
  first = lambda *leaves: next((leaf for leaf in leaves if not _is_absent(leaf)), leaves[0])
  return jax.tree.map(first, *parts, is_leaf=_is_absent)


def paths_in(part: Any) -> list[str]:
  """Paths of the leaves that are there."""
  return [path_of(key_path) for key_path, _ in jax.tree_util.tree_leaves_with_path(part)]


def _is_absent(node: Any) -> bool:
  return node is None or isinstance(node, optax.MaskedNode)


@struct.dataclass
class PhaseStates:
  """The optimizers' states; `shared` holds what several phases have in common, by the first one."""

  own: dict[str, Any]
  shared: dict[str, Any]


class PhaseOptimizers:
  """One optimizer per phase, each with state for the leaves its phase trains and for no other.

  Where states are shared, phases that train the same leaf have one state for it. A count that
  stands beside a leaf's slots, as Adam's does, is shared with them; any other, as a schedule's,
  stays the phase's own.
  """

  def __init__(
    self,
    optimizers: Mapping[str, optax.GradientTransformation],
    trained: Mapping[str, Any],
    *,
    share: bool = False,
  ):
    """
    Args:
      trained: by phase, its part of the parameters; shapes and types suffice.

    Raises:
      UserError: the optimizers of two phases that share a leaf keep different state for it.
    """
    self._optimizers = optimizers
    self._trained = {name: set(paths_in(part)) for name, part in trained.items()}
    self._slots = {name: jax.eval_shape(tx.init, trained[name]) for name, tx in optimizers.items()}
    self._leaders = self._find_leaders() if share else {name: name for name in optimizers}
    self._shared = {name: self._find_shared(name, trained[name]) for name in optimizers}
    for name, leader in self._leaders.items():
      self._check_same_structure(leader, name)

  def init(self, trained: Mapping[str, Any]) -> PhaseStates:
    """All states before the first step, of every phase's part of the parameters."""
    states = {name: tx.init(trained[name]) for name, tx in self._optimizers.items()}
    own = {name: self._part(name, state, shared=False) for name, state in states.items()}
    shared = {}
    for leader in dict.fromkeys(self._leaders.values()):
      group = [name for name in states if self._leaders[name] == leader]
      if len(group) > 1:
        shared[leader] = merge(*(self._part(name, states[name], shared=True) for name in group))
    return PhaseStates(own, shared)

  def update(
    self, name: str, gradients: Any, states: PhaseStates, trained: Any
  ) -> tuple[Any, PhaseStates]:
    """(the phase's part of the parameters after one step, all states)."""
    state = merge(states.own[name], self._common(name, states))
    with jax.numpy_dtype_promotion("standard"):  # optax mixes types
      updates, state = self._optimizers[name].update(gradients, state, trained)
    return optax.apply_updates(trained, updates), self._put(name, states, state)

  def _common(self, name: str, states: PhaseStates) -> Any:
    """What of the phase's state is shared, shaped like its own."""
    leader = self._leaders[name]
    slots = dict(jax.tree_util.tree_leaves_with_path(states.shared.get(leader)))
    return jax.tree_util.tree_map_with_path(
      lambda key_path, _: slots.get(key_path), self._slots[name]
    )

  def _put(self, name: str, states: PhaseStates, state: Any) -> PhaseStates:
    own = states.own | {name: self._part(name, state, shared=False)}
    leader = self._leaders[name]
    if leader not in states.shared:
      return PhaseStates(own, states.shared)
    moved = self._part(name, state, shared=True)
    slots = dict(jax.tree_util.tree_leaves_with_path(moved))
    shared = jax.tree_util.tree_map_with_path(slots.get, states.shared[leader])
    return PhaseStates(own, states.shared | {leader: shared})

  def _part(self, name: str, state: Any, *, shared: bool) -> Any:
    return jax.tree_util.tree_map_with_path(
      lambda key_path, slot: slot if (key_path in self._shared[name]) == shared else None, state
    )

  def _find_leaders(self) -> dict[str, str]:
    """By phase, the first one of those it shares a leaf with, directly or through others."""
    leaders: dict[str, str] = {}
    for name, paths in self._trained.items():
      joined = {leaders[other] for other in leaders if paths & self._trained[other]}
      first = next((other for other in leaders if other in joined), name)
      leaders = {other: first if lead in joined else lead for other, lead in leaders.items()}
      leaders[name] = first
    return leaders

  def _find_shared(self, name: str, trained: Any) -> set[tuple]:
    """Key paths of the phase's slots that another phase has too."""
    others = [
      set(_key_paths(self._slots[other]))
      for other, leader in self._leaders.items()
      if other != name and leader == self._leaders[name]
    ]
    elsewhere = set().union(*others)
    params = set(_key_paths(trained))
    of_leaves = {
      key_path: ends
      for key_path in _key_paths(self._slots[name])
      for ends in reversed(range(len(key_path)))  # of two that fit, the longer path wins
      if key_path[ends:] in params
    }
    beside = {key_path[: ends - 1] for key_path, ends in of_leaves.items()}
    return {
      key_path
      for key_path in _key_paths(self._slots[name])
      if key_path in elsewhere and (key_path in of_leaves or key_path[:-1] in beside)
    }

  def _check_same_structure(self, leader: str, name: str) -> None:
    common = sorted(self._trained[leader] & self._trained[name])
    first, second = self._slots[leader], self._slots[name]
    try:
      same = merge(first, second), merge(second, first)
    except ValueError:
      same = None
    if leader != name and (same is None or _kinds(same[0]) != _kinds(same[1])):
      leaf = common[0] if common else "a leaf"
      raise UserError(
        f"phases {leader} and {name} share the state of {leaf}, but their optimizers keep "
        "different state: give both the same kind, or have each keep its own (of a run, "
        "phase_optimizer_state=own)"
      )


def _key_paths(tree: Any) -> list[tuple]:
  return [key_path for key_path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def _kinds(tree: Any) -> list[tuple]:
  return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]
