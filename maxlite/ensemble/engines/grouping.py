"""Which members form a group, and why others do not."""

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax

from maxlite.ensemble.members.program import MemberProgram
from maxlite.errors import UserError
from maxlite.libraries.model import Setting


class NotAlikeError(UserError):
  """Error for members that cannot run as one stack; the message names the first difference."""


def _prng_impl() -> str:
  """The name of the default implementation of random keys."""
  options: Any = jax.config  # its type does not list all options
  return options.jax_default_prng_impl


def _has_vmappable_keys() -> bool:
  """Whether `vmap` over random keys draws each member's numbers from its own key."""
  return _prng_impl() == "threefry2x32"


def group_members(programs: Sequence[MemberProgram]) -> list[list[int]]:
  """Indices of the programs of each group, in the order of their first members."""
  if not _has_vmappable_keys():
    return [[z] for z in range(len(programs))]
  groups: dict[Hashable, list[int]] = {}
  for z, program in enumerate(programs):
    groups.setdefault(program.group, []).append(z)
  return list(groups.values())


def describe_difference(first: MemberProgram, second: MemberProgram) -> str:
  """The first setting in which two members differ that one stack cannot have."""
  if not _has_vmappable_keys():
    impl = _prng_impl()
    return f"jax_default_prng_impl={impl} draws the same random numbers for all members of a stack"
  not_set = Setting(key=None, text="not set")
  ours = first.settings()
  theirs = second.settings()
  for name in [*ours, *theirs]:
    here = ours.get(name, not_set)
    there = theirs.get(name, not_set)
    if name not in ours or name not in theirs or here.key != there.key:
      return f"{name} is {here.text} in {first.name}, and {there.text} in {second.name}"
  return f"{first.name} and {second.name} have modules that are not the same"


class Place(NamedTuple):
  """Where a member is."""

  group: int  # the number of its group
  row: int  # its position in the group


def places_of(groups: Sequence[Sequence[int]]) -> list[Place]:
  """The place of every member, from the members of each group."""
  place_of = {}
  for number, members in enumerate(groups):
    for row, z in enumerate(members):
      place_of[z] = Place(number, row)
  return [place_of[z] for z in range(len(place_of))]
