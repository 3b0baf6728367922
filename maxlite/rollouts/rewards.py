"""Rewards of completions: functions of the user, and the entries of REWARDS.

A reward is a function of the completions of a whole set: `(prompts=, completions=, **fields)`
returns a number for each. `prompts` are as their lines have them, `completions` texts; every other
field of the lines is a list too, with None where a line lacks it.
"""

import json
import re
import threading
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from maxlite.config.plugins import import_function
from maxlite.config.schema import RolloutConfig
from maxlite.data.sources.prompts import Prompt
from maxlite.errors import UserError
from maxlite.registry import REWARDS, ROLLOUT_LOSSES
from maxlite.storage.json_values import Json

Reward = Callable[..., Sequence[float]]


def check_rewards(cfg: RolloutConfig, losses: Iterable[str]) -> None:
  """Raise UserError unless losses that need rewards have them, and all can be imported."""
  has_rewards = any(
    loss in ROLLOUT_LOSSES and ROLLOUT_LOSSES.entry(loss).has_rewards for loss in losses
  )
  if has_rewards and not cfg.reward_functions:
    raise UserError(
      "completions need rewards: write reward_functions=[equal_answer], or another of "
      f"{', '.join(REWARDS)}, or [FILE.py:FUNCTION]"
    )
  Rewards(cfg)


class Rewards:
  """The reward functions of a config, by name in its order.

  Raises:
    UserError: one cannot be imported, or there are not as many weights.
  """

  def __init__(self, cfg: RolloutConfig) -> None:
    if cfg.reward_weights and len(cfg.reward_weights) != len(cfg.reward_functions):
      raise UserError(
        f"reward_weights={list(cfg.reward_weights)} for {len(cfg.reward_functions)} functions: "
        "write as many, or reward_weights=[]"
      )
    self._timeout = cfg.reward_timeout_seconds or None
    self.names: list[str] = []
    self._functions: list[Reward] = []
    for reference in cfg.reward_functions:
      name, function = _find(reference)
      self.names.append(name)
      self._functions.append(function)
    self.weight_R = np.asarray(cfg.reward_weights or [1.0] * len(self.names))

  def __call__(self, prompts: Sequence[Prompt], completions: Sequence[str]) -> np.ndarray:
    """Return reward_NR, the value of each function for each completion.

    Raises:
      UserError: a function fails, takes too long, or returns no finite number for a completion.
    """
    fields = sorted({name for prompt in prompts for name in prompt.fields})
    columns = {name: [prompt.fields.get(name) for prompt in prompts] for name in fields}
    rewards = []
    for name, function in zip(self.names, self._functions, strict=True):
      values = self._call(name, function, [prompt.text for prompt in prompts], completions, columns)
      rewards.append(_checked(name, values, prompts, completions))
    return np.reshape(rewards, (len(rewards), len(completions))).T

  def _call(
    self,
    name: str,
    function: Reward,
    prompts: Sequence[Json],
    completions: Sequence[str],
    columns: dict[str, list[Json]],
  ) -> object:
    """Call a function in a thread, which is left alone after the time limit."""
    outcome: dict[str, object] = {}

    def call() -> None:
      try:
        outcome["values"] = function(prompts=prompts, completions=list(completions), **columns)
      except BaseException as error:  # of the user's code, sys.exit() included
        outcome["error"] = error

    thread = threading.Thread(target=call, name=f"reward {name}", daemon=True)
    thread.start()
    thread.join(self._timeout)
    if thread.is_alive():
      raise UserError(
        f"reward {name} took more than reward_timeout_seconds={self._timeout:g} for "
        f"{len(completions)} completions: raise it, or correct the function"
      )
    if "error" in outcome:
      error = outcome["error"]
      raise UserError(
        f"reward {name} failed: {type(error).__name__}: {error}: it is called with "
        f"prompts, completions{''.join(f', {column}' for column in columns)}"
      )
    return outcome["values"]


def _find(reference: str) -> tuple[str, Reward]:
  """(name, function) of an entry of `reward_functions`."""
  if reference in REWARDS:
    return reference, REWARDS[reference]
  function = import_function("reward_functions", reference, REWARDS)
  return function.__name__, function


def _checked(
  name: str, values: object, prompts: Sequence[Prompt], completions: Sequence[str]
) -> np.ndarray:
  """Return the values as float64 [N]; UserError with the first completion that has none."""
  try:
    reward_N = np.asarray(values, np.float64)
  except (TypeError, ValueError):
    reward_N = np.empty(0)
  if reward_N.shape != (len(completions),):
    raise UserError(
      f"reward {name} returned {values!r:.80} for {len(completions)} completions: return a list "
      "with a number for each"
    )
  for n in np.flatnonzero(~np.isfinite(reward_N))[:1]:
    raise UserError(
      f"reward {name} is {reward_N[n]} for the completion {completions[n]!r:.200} of "
      f"{prompts[n].place}: return a finite number"
    )
  return reward_N


def equal_answer(
  *, completions: Sequence[str], answer: Sequence[Json] = (), **_: object
) -> list[float]:
  """1 if the completion is the text of `answer`, without space around either; otherwise 0."""
  _require("equal_answer", "answer", answer, completions)
  pairs = zip(completions, answer, strict=True)
  return [float(text.strip() == str(value).strip()) for text, value in pairs]


def regex(*, completions: Sequence[str], pattern: Sequence[Json] = (), **_: object) -> list[float]:
  """1 if the regex in the field `pattern` matches the whole completion; otherwise 0."""
  _require("regex", "pattern", pattern, completions)
  pairs = zip(completions, pattern, strict=True)
  return [float(re.fullmatch(str(value), text) is not None) for text, value in pairs]


def json_valid(*, completions: Sequence[str], **_: object) -> list[float]:
  """1 if the completion is JSON; otherwise 0."""

  def is_json(text: str) -> bool:
    try:
      json.loads(text)
    except (ValueError, RecursionError):
      return False
    return True

  return [float(is_json(text)) for text in completions]


def length(
  *, completions: Sequence[str], max_characters: Sequence[Json] = (), **_: object
) -> list[float]:
  """1 up to `max_characters` characters, falling to 0 at twice as many."""
  _require("length", "max_characters", max_characters, completions)
  rewards = []
  for text, limit in zip(completions, max_characters, strict=True):
    excess = len(text) / max(float(str(limit)), 1) - 1
    rewards.append(1 - min(max(excess, 0.0), 1.0))
  return rewards


def _require(name: str, field: str, values: Sequence[Json], completions: Sequence[str]) -> None:
  if len(values) != len(completions) or any(value is None for value in values):
    raise ValueError(f"every line of the prompts needs a field `{field}` for the reward {name}")
