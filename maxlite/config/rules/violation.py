"""What a rule between keys reports, and what several files of rules need.

A rule is a few lines of a function that takes the config: it checks the values, and only if they
break the rule, it computes the message. The function yields a `Violation` for each broken rule, and
the first one is raised.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import isqrt
from types import MappingProxyType
from typing import NamedTuple

from maxlite.config.schema import DEFAULTS, Config, EnsembleConfig, flatten

# The keys that define an ensemble.
ENSEMBLE_KEYS = ("members", "sweep", "search", "ladder")


class Violation(NamedTuple):
  """A broken rule; the message is `SOURCE: KEY=VALUE with OTHER=VALUE: TEXT; write FIX`."""

  keys: Sequence[str]  # the keys that the rule is about, the one to change first
  text: str  # the rule, and, without a `fix`, what to write instead
  # {key: what to write} of a key that has another name in the entries of `dataset_mixture`.
  fix: Mapping[str, str] = MappingProxyType({})


Violations = Iterator[Violation]


def ensemble_key(ensemble: EnsembleConfig) -> str:
  """The first set key that defines an ensemble; empty without an ensemble."""
  values = flatten(ensemble)
  for key in ENSEMBLE_KEYS:
    if values[key]:
      return key
  return ""


def changed_keys(cfg: Config, keys: Sequence[str]) -> list[str]:
  """Those of `keys` that are not at their defaults, in order."""
  values = flatten(cfg)
  return [key for key in keys if values[key] != DEFAULTS[key]]


def largest_divisor(number: int, limit: int) -> int:
  """The largest divisor of `number` up to `limit`; both are at least 1."""
  largest = 1
  for divisor in range(1, isqrt(number) + 1):
    if number % divisor:
      continue
    for candidate in (divisor, number // divisor):
      if largest < candidate <= limit:
        largest = candidate
  return largest
