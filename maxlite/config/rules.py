"""The form of rules between keys.

A rule function takes the values of all keys, the `family` of the model, and as `ensemble_key` the
first set key that defines an ensemble (empty: none). It yields `(violated, keys, text)` for each of
its rules, in order: whether the values violate it, the keys that it is about, and the rule with
what to write instead.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

Values = SimpleNamespace
Rules = Iterator[tuple[Any, str, str]]
