"""The points of a sweep: every combination of a grid, or seeded random draws, for every seed."""

import itertools
import math
import random
from collections.abc import Callable, Iterator

from maxlite.config.raw_values import FrozenMapping, Raw
from maxlite.config.schema.entries import MAX_MEMBERS, SweepEntry
from maxlite.config.values import Setting, find_key, parse, parse_entry
from maxlite.errors import UserError

Point = tuple[Setting, ...]  # what one member of the sweep sets
_FORMS = ({"grid"}, {"draw", "num_members"}, {"draw", "num_members", "seed"})  # and `seeds`
_SEED = "init_weights_seed"  # which `seeds` sets
_RULES = "{log_uniform: [low, high]}, {uniform: [low, high]} or {choice: [values]}"
_MAX_DRAWS = 100  # per member, before the rules count as having no further points


def sweep_points(sweep: FrozenMapping) -> list[Point]:
  """The distinct points in order, the last key of a grid varying fastest; empty without a sweep.

  With `seeds`, every point is there once per seed, and seeds vary fastest. A random value depends
  only on the seed, its key and its row. More members, or more keys, do not change it, except that
  duplicate points are skipped.

  Raises:
    UserError: the sweep is neither a grid nor a draw, or a value does not fit its key.
  """
  if not sweep:
    return []
  source = sweep.located("sweep")
  if set(sweep) - {"seeds"} not in _FORMS and set(sweep) != {"seeds"}:
    fix = (
      "write {grid: {key: [values]}}, {draw: {key: rule}, num_members: 16, seed: 0}, or one of "
      "them with seeds: 4"
    )
    raise UserError(f"{source}: has {', '.join(sweep)}, not a complete grid or draw; {fix}")
  parsed = parse_entry(SweepEntry, sweep, source)
  points = _points_of_keys(sweep, parsed, source)
  if "seeds" not in sweep:
    return points
  require_few_members(len(points) * parsed.seeds, source)
  with_seeds: list[Point] = []
  for point in points:
    for setting in point:
      if setting.name == _SEED:
        raise setting.error("is also set by seeds; remove one of the two")
    for seed in range(parsed.seeds):
      with_seeds.append((*point, Setting(_SEED, str(seed), source)))
  return with_seeds


def _points_of_keys(sweep: FrozenMapping, parsed: SweepEntry, source: str) -> list[Point]:
  """The points of a grid or a draw; one without settings if there is neither."""
  if "grid" in sweep:
    values = [_values(key) for key in _keys(parsed.grid, "grid", sweep)]
    require_few_members(math.prod(len(of_key) for of_key in values), source)
    return list(itertools.product(*values))
  if "draw" not in sweep:
    return [()]
  draws = [_draws(key, parsed.seed) for key in _keys(parsed.draw, "draw", sweep)]
  points: dict[Point, None] = {}
  for point in itertools.islice(zip(*draws, strict=True), _MAX_DRAWS * parsed.num_members):
    points[point] = None
    if len(points) == parsed.num_members:
      return list(points)
  num_members = Setting("num_members", sweep["num_members"], source)
  raise num_members.error(f"is more than the distinct points; write num_members: {len(points)}")


def _keys(written: FrozenMapping, kind: str, sweep: FrozenMapping) -> list[Setting]:
  """The keys under `grid` or `draw` of a sweep, each with its values or its rule."""
  if not written:
    whole = Setting(kind, written, sweep.located("sweep"))
    raise whole.error(f"has no keys; write {kind}: {{key: ...}}")
  source = sweep.located(f"sweep.{kind}")
  keys = [Setting(key, raw, source) for key, raw in written.items()]
  for key in keys:
    find_key(key)
  return keys


def require_few_members(count: int, source: str) -> None:
  """Raise UserError if there are more than MAX_MEMBERS members."""
  if count > MAX_MEMBERS:
    raise UserError(f"{source}: {count} members are more than {MAX_MEMBERS}; write fewer values")


def _values(setting: Setting) -> list[Setting]:
  """One setting per value of a key's list."""
  if not isinstance(setting.raw, tuple) or not setting.raw:
    raise setting.error(f"is not a list of values; write {setting.name}: [value, value]")
  return [Setting(setting.name, value, setting.source) for value in setting.raw]


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
  name, raw = _rule(setting)
  values = _values(Setting(setting.name, raw, setting.source))
  if name == "choice":
    return _choice(values)
  kind = find_key(setting).type
  if kind not in (int, float):
    raise setting.error(f"is not a number; write {setting.name}: {{choice: [values]}}")
  bounds = [parse(value) for value in values]
  if len(bounds) != 2 or bounds[0] >= bounds[1]:
    raise setting.error(f"needs a low and a higher bound; write {{{name}: [low, high]}}")
  low, high = bounds
  if name == "log_uniform" and low <= 0:
    raise setting.error("has no logarithm at its low end; write a bound above 0, or uniform")
  return _between(low, high, kind, logarithmic=name == "log_uniform")


def _rule(setting: Setting) -> tuple[str, Raw]:
  """(name of the rule, its bounds or values)."""
  if isinstance(setting.raw, FrozenMapping) and len(setting.raw) == 1:
    [(name, raw)] = setting.raw.items()
    if name in ("log_uniform", "uniform", "choice"):
      return name, raw
  raise setting.error(f"is not a rule; write {setting.name}: {_RULES}")


def _choice(values: list[Setting]) -> Callable[[float], Raw]:
  def draw(share: float) -> Raw:
    return values[int(share * len(values))].raw

  return draw


def _between(low: float, high: float, kind: type, *, logarithmic: bool) -> Callable[[float], str]:
  """Draw text between two bounds: whole numbers, or 4 significant digits."""

  def number(share: float) -> float:
    if logarithmic:
      return float(low * math.pow(high / low, share))
    if kind is int:  # all whole numbers equally often
      return float(low - 0.5 + share * (high - low + 1))
    return float(low + share * (high - low))

  def draw(share: float) -> str:
    exact = number(share)
    rounded = round(exact) if kind is int else float(f"{exact:.4g}")
    return str(min(max(rounded, low), high))

  return draw
