"""The points of a sweep: every combination of a grid, or seeded random draws."""

import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

from maxlite.config.config_field import ConfigField
from maxlite.config.errors import UserError
from maxlite.config.raw_values import FrozenMapping, Raw
from maxlite.config.values import Setting, find_key, parse, parse_as

Point = tuple[Setting, ...]  # what one member of the sweep sets
MAX_MEMBERS = 4096
_FORMS = ({"grid"}, {"draw", "num_members"}, {"draw", "num_members", "seed"})
_RULES = "{log_uniform: [low, high]}, {uniform: [low, high]} or {choice: [values]}"
_MAX_DRAWS = 100  # per member, before the rules count as having no further points


def sweep_points(sweep: FrozenMapping) -> list[Point]:
  """The distinct points in order, the last key of a grid varying fastest; empty without a sweep.

  A random value depends only on the seed, its key and its row. More members, or more keys, do not
  change it, except that duplicate points are skipped.

  Raises:
    UserError: the sweep is neither a grid nor a draw, or a value does not fit its key.
  """
  if not sweep:
    return []
  source = sweep.located("sweep")
  if set(sweep) not in _FORMS:
    fix = "write {grid: {key: [values]}} or {draw: {key: rule}, num_members: 16, seed: 0}"
    raise UserError(f"{source}: has {', '.join(sweep)}, not a complete grid or draw; {fix}")
  kind = "grid" if "grid" in sweep else "draw"
  whole = Setting(kind, sweep[kind], source)
  if not isinstance(whole.raw, FrozenMapping) or not whole.raw:
    raise whole.error(f"has no keys; write {kind}: {{key: ...}}")
  keys = [Setting(key, raw, sweep.located(f"sweep.{kind}")) for key, raw in whole.raw.items()]
  for key in keys:
    find_key(key)
  if kind == "grid":
    values = [*map(_values, keys)]
    require_few_members(math.prod(map(len, values)), source)
    return list(itertools.product(*values))
  num_members = Setting("num_members", sweep["num_members"], source)
  seed = parse_as(Setting("seed", sweep.get("seed", "0"), source), int, ConfigField("", low=0))
  draws = zip(*(_draws(key, seed) for key in keys), strict=True)
  return _distinct(draws, num_members)


def require_few_members(count: int, source: str) -> None:
  if count > MAX_MEMBERS:
    raise UserError(f"{source}: {count} members are more than {MAX_MEMBERS}; write fewer values")


def _values(setting: Setting) -> list[Setting]:
  """One setting per value of a key's list."""
  if not isinstance(setting.raw, tuple) or not setting.raw:
    raise setting.error(f"is not a list of values; write {setting.name}: [value, value]")
  return [Setting(setting.name, value, setting.source) for value in setting.raw]


def _distinct(draws: Iterator[Point], num_members: Setting) -> list[Point]:
  """The first `num_members` distinct points."""
  count = parse_as(num_members, int, ConfigField("", low=1, high=MAX_MEMBERS))
  points: dict[Point, None] = {}
  for point in itertools.islice(draws, _MAX_DRAWS * count):
    points[point] = None
    if len(points) == count:
      return list(points)
  raise num_members.error(f"is more than the distinct points; write num_members: {len(points)}")


def _draws(setting: Setting, seed: int) -> Iterator[Setting]:
  """Endless draws by a key's rule."""
  draw = draw_rule(setting)
  generator = random.Random(f"{seed} {setting.name}")
  while True:
    yield Setting(setting.name, draw(generator.random()), setting.source)


def draw_rule(setting: Setting) -> Callable[[float], Raw]:
  """A function from a uniform number in [0, 1) to a raw value of the key.

  Raises:
    UserError: the setting is not a rule, or does not fit its key.
  """
  name, raw = "", setting.raw
  if isinstance(setting.raw, FrozenMapping) and len(setting.raw) == 1:
    [(name, raw)] = setting.raw.items()
  if name not in ("log_uniform", "uniform", "choice"):
    raise setting.error(f"is not a rule; write {setting.name}: {_RULES}")
  values = _values(Setting(setting.name, raw, setting.source))
  if name == "choice":
    return lambda share: values[int(share * len(values))].raw
  kind = find_key(setting).type
  if kind not in (int, float):
    raise setting.error(f"is not a number; write {setting.name}: {{choice: [values]}}")
  bounds = [parse(value) for value in values]
  if len(bounds) != 2 or bounds[0] >= bounds[1]:
    raise setting.error(f"needs a low and a higher bound; write {{{name}: [low, high]}}")
  if name == "log_uniform" and bounds[0] <= 0:
    raise setting.error("has no logarithm at its low end; write a bound above 0, or uniform")
  return _between(bounds[0], bounds[1], kind, logarithmic=name == "log_uniform")


def _between(low: Any, high: Any, kind: type, *, logarithmic: bool) -> Callable[[float], str]:
  """Draw text between two bounds: whole numbers, or 4 significant digits."""
  if logarithmic:
    number = lambda share: low * math.pow(high / low, share)
  elif kind is int:
    number = lambda share: low - 0.5 + share * (high - low + 1)  # all integers equally often
  else:
    number = lambda share: low + share * (high - low)
  rounded = round if kind is int else lambda exact: float(f"{exact:.4g}")
  return lambda share: str(min(max(rounded(number(share)), low), high))
