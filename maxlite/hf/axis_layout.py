"""How an array of ours lies in a tensor of theirs: `d h c -> (h c) d`."""

import dataclasses
import functools
import math
import re

import numpy as np


@dataclasses.dataclass(frozen=True)
class Layout:
  """Axes by name: `ours` in our order; `theirs` in theirs, those in brackets being one there."""

  ours: tuple[str, ...]
  theirs: tuple[tuple[str, ...], ...]

  @property
  def order(self) -> tuple[int, ...]:
    """Where each of their axes, brackets opened, stands among ours."""
    return tuple(self.ours.index(name) for group in self.theirs for name in group)

  def shape(self, sizes: dict[str, int]) -> tuple[int, ...]:
    """The shape of their tensor."""
    return tuple(math.prod(sizes[name] for name in group) for group in self.theirs)

  def to_ours(self, tensor: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Their tensor as an array of ours that has `shape`; a view where it can be."""
    opened = tensor.reshape([shape[axis] for axis in self.order])
    return opened.transpose(np.argsort(self.order))

  def to_theirs(self, array: np.ndarray) -> np.ndarray:
    """Our array as a tensor of theirs."""
    sizes = dict(zip(self.ours, array.shape, strict=True))
    return array.transpose(self.order).reshape(self.shape(sizes))


@functools.cache
def layout(notation: str) -> Layout:
  """The Layout that `notation` says."""
  ours, _, theirs = notation.partition("->")
  groups = [group.strip("()").split() for group in re.findall(r"\([^)]*\)|\w+", theirs)]
  made = Layout(tuple(ours.split()), tuple(map(tuple, groups)))
  names = [name for group in made.theirs for name in group]
  assert sorted(names) == sorted(made.ours), f"{notation}: both sides need the same axes"
  assert len(set(names)) == len(names), f"{notation}: an axis is there twice"
  return made
