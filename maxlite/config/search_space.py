"""A search: rounds of members whose keys a sampler proposes from the results of earlier rounds."""

import dataclasses
import importlib.util
from collections.abc import Callable, Sequence
from typing import NamedTuple

from maxlite.config.config_field import ConfigField
from maxlite.config.errors import UserError
from maxlite.config.members import MEMBER_KEYS, members_of
from maxlite.config.perturbations import perturbations_of
from maxlite.config.raw_values import FrozenMapping, Raw
from maxlite.config.registry import SAMPLERS
from maxlite.config.schema import Config
from maxlite.config.sweep import MAX_MEMBERS, draw_rule, require_few_members
from maxlite.config.values import Setting, parse_entry

_COUNT = (int, ConfigField("", low=1, high=MAX_MEMBERS))
_NUMBERS = {
  "sampler": (str, ConfigField("", choices=SAMPLERS)),
  "rounds": _COUNT,
  "num_members": _COUNT,
  "seed": (int, ConfigField("", low=0)),
}
_EXAMPLE = "{sampler: tpe, rounds: 4, num_members: 8, space: {key: {uniform: [low, high]}}}"


class Dimension(NamedTuple):
  """One key of the space."""

  key: str
  draw: Callable[[float], Raw]  # of a number in [0, 1), which selects the value of a choice
  choices: int  # number of values; 0: a range


class Search(NamedTuple):
  """A parsed `search`; `num_members` are those of a round."""

  sampler: str
  rounds: int
  num_members: int
  seed: int
  space: tuple[Dimension, ...]


def search_of(raw: FrozenMapping) -> Search:
  """Parse the key; raise UserError if an entry is missing or unknown, or a value is wrong."""
  source, required = raw.located("search"), {*_NUMBERS, "space"} - {"seed"}
  space = raw.get("space")
  if not required <= set(raw) <= required | {"seed"} or not isinstance(space, FrozenMapping):
    raise UserError(f"{source}: has {', '.join(raw)}; write {_EXAMPLE}")
  numbers = FrozenMapping((key, value) for key, value in raw.items() if key != "space")
  values = {"seed": 0} | parse_entry(numbers, _NUMBERS, source)
  require_few_members(values["rounds"] * values["num_members"], source)
  keys = [Setting(key, rule, f"{source}.space") for key, rule in space.items()]
  if not keys:
    raise Setting("space", space, source).error(f"has no keys; write {_EXAMPLE}")
  return Search(**values, space=tuple(map(_dimension, keys)))


def _dimension(setting: Setting) -> Dimension:
  draw = draw_rule(setting)
  if setting.name not in MEMBER_KEYS:
    raise setting.error("is shared by all members; set it once, outside of search")
  choices = setting.raw.get("choice", ()) if isinstance(setting.raw, FrozenMapping) else ()
  return Dimension(setting.name, draw, len(choices))


def with_members(cfg: Config, entries: Sequence[FrozenMapping]) -> Config:
  """The config of an ensemble of the members that were proposed so far."""
  ensemble = dataclasses.replace(cfg.ensemble, search=FrozenMapping(), members=tuple(entries))
  return dataclasses.replace(cfg, ensemble=ensemble)


def validate_tuning(cfg: Config) -> None:
  """Raise UserError if `pbt_hyperparameters`, `search`, or a member at an end of it is wrong."""
  perturbations_of(cfg.optimizer)
  if not cfg.ensemble.search:
    return
  search = search_of(cfg.ensemble.search)
  for package in ("optuna", *["cmaes"] * (search.sampler == "cma")):
    if importlib.util.find_spec(package) is None:
      raise UserError(f"search needs {package}: pip install 'maxlite[search]'")
  for share in (0.0, 1 - 1e-9):
    entry = FrozenMapping(((d.key, d.draw(share)) for d in search.space), "search.space")
    members_of(with_members(cfg, [entry]))
