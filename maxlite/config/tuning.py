"""Searches and population-based training.

A search is rounds of members whose keys a sampler proposes from the results of earlier rounds.
Population-based training changes the hyperparameters of a member that copied another.
"""

import dataclasses
import importlib.util
from collections.abc import Callable, Sequence
from typing import NamedTuple

from maxlite.config.config_field import ConfigField
from maxlite.config.members import MEMBER_KEYS, members_of
from maxlite.config.raw_values import FrozenMapping, Raw
from maxlite.config.schema import Config, OptimizerConfig
from maxlite.config.schema.entries import SEARCH_FORM, SearchEntry
from maxlite.config.sweep import draw_rule, require_few_members
from maxlite.config.values import Setting, parse, parse_as, parse_entry, suggest
from maxlite.errors import UserError
from maxlite.registry import OPTIMIZERS, SAMPLERS


class Dimension(NamedTuple):
  """One key of the space."""

  key: str
  draw: Callable[[float], Raw]  # from a number in [0, 1), which selects the value of a choice
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
  source = raw.located("search")
  search = parse_entry(SearchEntry, raw, source)
  require_few_members(search.rounds * search.num_members, source)
  if not search.space:
    raise Setting("space", search.space, source).error(f"has no keys; write {SEARCH_FORM}")
  place = f"{source}.space"
  space = tuple(_dimension(Setting(key, rule, place)) for key, rule in search.space.items())
  return Search(search.sampler, search.rounds, search.num_members, search.seed, space)


def _dimension(setting: Setting) -> Dimension:
  draw = draw_rule(setting)
  if setting.name not in MEMBER_KEYS - {"steps"}:  # losses at other steps do not compare
    raise setting.error("is shared by all members; set it once, outside of search")
  num_choices = 0
  if isinstance(setting.raw, FrozenMapping):
    num_choices = len(setting.raw.get("choice", ()))
  return Dimension(setting.name, draw, num_choices)


def with_members(cfg: Config, entries: Sequence[FrozenMapping]) -> Config:
  """The config of an ensemble of members that a search proposed so far, or of a ladder."""
  ensemble = dataclasses.replace(
    cfg.ensemble, search=FrozenMapping(), ladder=FrozenMapping(), members=tuple(entries)
  )
  return dataclasses.replace(cfg, ensemble=ensemble)


def check_tuning(cfg: Config) -> None:
  """Raise UserError if `pbt_hyperparameters`, `search`, or a member at an end of it is wrong."""
  perturbations_of(cfg.optimizer)
  if not cfg.ensemble.search:
    return
  search = search_of(cfg.ensemble.search)
  for package in SAMPLERS.entry(search.sampler).packages:
    if importlib.util.find_spec(package) is None:
      raise UserError(f"search needs {package}: pip install 'maxlite[search]'")
  for share in (0.0, 1 - 1e-9):
    values = [(dimension.key, dimension.draw(share)) for dimension in search.space]
    members_of(with_members(cfg, [FrozenMapping(values, "search.space")]))


# (the donor's value, a uniform number in [0, 1)) -> the new value
Perturbation = Callable[[float, float], float]
_FACTOR = ConfigField("", low=0)
# Hyperparameters that every optimizer reads, and those that some read: see OptimizerEntry.
_OF_ALL = ("learning_rate", "adam_weight_decay")
_OF_SOME = ("adam_eps", "adam_b1", "adam_b2", "muon_beta")
HYPERPARAMETERS = (*_OF_ALL, *_OF_SOME)
_DECAY_RATES = ("adam_b1", "adam_b2", "muon_beta")  # below 1, which a factor would exceed


def perturbations_of(cfg: OptimizerConfig) -> dict[str, Perturbation]:
  """The change of every key of `pbt_hyperparameters`.

  Raises:
    UserError: a key is not a hyperparameter of this optimizer, or has neither factors nor a rule.
  """
  source = cfg.pbt_hyperparameters.located("pbt_hyperparameters")
  perturbations = {}
  for key, raw in cfg.pbt_hyperparameters.items():
    perturbations[key] = _perturbation(Setting(key, raw, source), cfg.opt_type)
  return perturbations


def _perturbation(setting: Setting, opt_type: str) -> Perturbation:
  key = setting.name
  if key not in HYPERPARAMETERS:
    raise setting.error(f"cannot change during training; {suggest(key, HYPERPARAMETERS)}")
  if key in _OF_SOME and key not in OPTIMIZERS.entry(opt_type).hyperparameters:
    raise setting.error(f"is not read by opt_type={opt_type}; remove it")
  if isinstance(setting.raw, FrozenMapping):
    return _drawn(setting)
  if key in _DECAY_RATES:
    raise setting.error(f"may reach 1 by factors; write {key}: {{uniform: [0.8, 0.99]}}")
  if not isinstance(setting.raw, tuple) or not setting.raw:
    raise setting.error(f"has no factors; write {key}: [0.8, 1.25]")
  factors: list[float] = []
  for raw in setting.raw:
    factors.append(parse_as(Setting(key, raw, setting.source), float, _FACTOR))
  return _multiplied(factors)


def _drawn(setting: Setting) -> Perturbation:
  """A new value by a rule, whatever the donor has."""
  draw = draw_rule(setting)

  def perturb(value: float, share: float) -> float:
    del value
    return float(parse(Setting(setting.name, draw(share), setting.source)))

  return perturb


def _multiplied(factors: Sequence[float]) -> Perturbation:
  """The donor's value times one of `factors`."""

  def perturb(value: float, share: float) -> float:
    return value * factors[int(share * len(factors))]

  return perturb
