"""Searches and population-based training.

A search is rounds of members whose keys a sampler proposes from the results of earlier rounds.
Population-based training changes the hyperparameters of a member that copied another.
"""

import dataclasses
import importlib.util
from collections.abc import Callable, Sequence
from typing import NamedTuple

from maxlite.config.config_field import ConfigField
from maxlite.config.errors import UserError
from maxlite.config.members import MEMBER_KEYS, members_of
from maxlite.config.raw_values import FrozenMapping, Raw
from maxlite.config.registry import SAMPLERS
from maxlite.config.schema import Config, OptimizerConfig
from maxlite.config.sweep import MAX_MEMBERS, draw_rule, require_few_members
from maxlite.config.values import Setting, parse, parse_as, parse_entry, suggest

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


# (the donor's value, a uniform number in [0, 1)) -> the new value
Perturbation = Callable[[float, float], float]
_FACTOR = ConfigField("", low=0)
_ADAM = ("adamw", "muon")
# Key -> the optimizers that read it; None: all.
HYPERPARAMETERS: dict[str, tuple[str, ...] | None] = {
  "learning_rate": None,
  "adam_weight_decay": None,
  "adam_eps": _ADAM,
  "adam_b1": (*_ADAM, "lion"),
  "adam_b2": (*_ADAM, "lion"),
  "muon_beta": ("muon",),
}
_DECAY_RATES = ("adam_b1", "adam_b2", "muon_beta")  # below 1, which a factor would exceed


def perturbations_of(cfg: OptimizerConfig) -> dict[str, Perturbation]:
  """The change of every key of `pbt_hyperparameters`.

  Raises:
    UserError: a key is not a hyperparameter of this optimizer, or has neither factors nor a rule.
  """
  source = cfg.pbt_hyperparameters.located("pbt_hyperparameters")
  settings = [Setting(key, raw, source) for key, raw in cfg.pbt_hyperparameters.items()]
  return {setting.name: _perturbation(setting, cfg.opt_type) for setting in settings}


def _perturbation(setting: Setting, opt_type: str) -> Perturbation:
  key = setting.name
  if key not in HYPERPARAMETERS:
    raise setting.error(f"cannot change during training; {suggest(key, HYPERPARAMETERS)}")
  optimizers = HYPERPARAMETERS[key]
  if optimizers and opt_type not in optimizers:
    raise setting.error(f"is not read by opt_type={opt_type}; remove it")
  if isinstance(setting.raw, FrozenMapping):
    draw = draw_rule(setting)
    return lambda _, share: float(parse(Setting(key, draw(share), setting.source)))
  if key in _DECAY_RATES:
    raise setting.error(f"may reach 1 by factors; write {key}: {{uniform: [0.8, 0.99]}}")
  if not isinstance(setting.raw, tuple) or not setting.raw:
    raise setting.error(f"has no factors; write {key}: [0.8, 1.25]")
  numbers = [Setting(key, raw, setting.source) for raw in setting.raw]
  factors = [parse_as(number, float, _FACTOR) for number in numbers]
  return lambda value, share: value * factors[int(share * len(factors))]
