"""The points of a sweep: every combination of a grid, or seeded random draws.

A point is what one member is given by it, as settings: their words are typed like any others.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

from maxlite.config.errors import UserError
from maxlite.config.frozen_mapping import FrozenMapping, Raw
from maxlite.config.schema import KEYS
from maxlite.config.values import Setting, find_key, parse

Point = tuple[Setting, ...]
_WORDS = ({"grid"}, {"draw", "num_members"}, {"draw", "num_members", "seed"})
_RULES = "{log_uniform: [low, high]}, {uniform: [low, high]} or {choice: [values]}"
_PATIENCE = 100  # draws per member before the rules are held to have no more points


def sweep_points(sweep: FrozenMapping) -> list[Point]:
  """The points in the order of writing, the last key of a grid changing fastest; none: empty.

  A random number depends on the seed, its key and its place in the row only: more members, and but
  for points that come up again also more keys, leave it as it is.

  Raises:
    UserError: the sweep is neither a grid nor a draw, or a value does not fit its key.
  """
  if not sweep:
    return []
  if set(sweep) not in _WORDS:
    fix = "write {grid: {key: [values]}} or {draw: {key: rule}, num_members: 16, seed: 0}"
    raise UserError(f"{_place(sweep)}: has {', '.join(sweep)}, no whole grid or draw; {fix}")
  if "grid" in sweep:
    return list(itertools.product(*map(_listed, _keys(sweep, "grid"))))
  seed = _count(sweep, "seed", low=0)
  return _distinct(zip(*(_draws(key, seed) for key in _keys(sweep, "draw")), strict=True), sweep)


def _place(sweep: FrozenMapping, kind: str = "") -> str:
  return f"sweep{kind and '.'}{kind}" + (f" ({sweep.source})" if sweep.source else "")


def _keys(sweep: FrozenMapping, kind: str) -> list[Setting]:
  """What is written for each key of the grid or draw."""
  whole = Setting(kind, sweep[kind], _place(sweep))
  if not isinstance(whole.raw, FrozenMapping) or not whole.raw:
    raise whole.error(f"names no keys; write {kind}: {{key: ...}}")
  settings = [Setting(key, raw, _place(sweep, kind)) for key, raw in whole.raw.items()]
  for setting in settings:
    find_key(setting)
  return settings


def _count(sweep: FrozenMapping, word: str, low: int) -> int:
  setting = Setting(word, sweep.get(word, "0"), _place(sweep))
  number = int(setting.raw) if isinstance(setting.raw, str) and setting.raw.isdecimal() else -1
  if number < low:
    raise setting.error(f"is no whole number from {low}; write {word}: 16")
  return number


def _listed(setting: Setting) -> list[Setting]:
  """One setting for each value in the list that `setting` has for its key."""
  if not isinstance(setting.raw, tuple) or not setting.raw:
    raise setting.error(f"is no list of values; write {setting.name}: [value, value]")
  return [Setting(setting.name, value, setting.source) for value in setting.raw]


def _distinct(draws: Iterator[Point], sweep: FrozenMapping) -> list[Point]:
  """The first num_members points that differ."""
  num_members = _count(sweep, "num_members", low=1)
  points: dict[Point, None] = {}
  for point in itertools.islice(draws, _PATIENCE * num_members):
    points[point] = None
    if len(points) == num_members:
      return list(points)
  whole = Setting("num_members", str(num_members), _place(sweep))
  raise whole.error(f"is more than the rules can tell apart; write num_members: {len(points)}")


def _draws(setting: Setting, seed: int) -> Iterator[Setting]:
  """Endless draws by the rule that `setting` has for its key."""
  draw = _rule(setting)
  dice = random.Random(f"{seed} {setting.name}")
  while True:
    yield Setting(setting.name, draw(dice.random()), setting.source)


def _rule(setting: Setting) -> Callable[[float], Raw]:
  """From a uniform number in [0, 1) to what is written for the key."""
  name, raw = "", setting.raw
  if isinstance(setting.raw, FrozenMapping) and len(setting.raw) == 1:
    [(name, raw)] = setting.raw.items()
  if name not in ("log_uniform", "uniform", "choice"):
    raise setting.error(f"is no rule; write {setting.name}: {_RULES}")
  values = _listed(Setting(setting.name, raw, setting.source))
  if name == "choice":
    return lambda share: values[int(share * len(values))].raw
  if find_key(setting).type not in (int, float):
    raise setting.error(f"draws numbers; write {setting.name}: {{choice: [values]}}")
  bounds = [parse(value) for value in values]
  if len(bounds) != 2 or bounds[0] >= bounds[1]:
    raise setting.error(f"needs a low and a higher bound; write {{{name}: [low, high]}}")
  if name == "log_uniform" and bounds[0] <= 0:
    raise setting.error("has no logarithm at its low end; write a bound above 0, or uniform")
  return _between(bounds[0], bounds[1], KEYS[setting.name].type, logarithmic=name == "log_uniform")


def _between(low: Any, high: Any, kind: type, *, logarithmic: bool) -> Callable[[float], str]:
  """Draws between two bounds, as text: whole numbers, or 4 significant digits."""
  if logarithmic:
    number = lambda share: low * math.pow(high / low, share)
  elif kind is int:
    number = lambda share: low - 0.5 + share * (high - low + 1)  # the bounds as often as others
  else:
    number = lambda share: low + share * (high - low)
  digits = round if kind is int else lambda exact: float(f"{exact:.4g}")
  return lambda share: str(min(max(digits(number(share)), low), high))
