"""The members of an ensemble that differ in their seeds only: is one better, or is it the seed?"""

import json
import statistics
from collections.abc import Sequence

from maxlite.ensemble.report.leaderboard import (
  NO_VALUE,
  LeaderboardEntry,
  format_settings,
  markdown_table,
)
from maxlite.evaluation.paired import paired_difference, standard_error

_SEED = "init_weights_seed"
_TITLES = ("configuration", "seeds", "mean", "std. error", "difference", "95 % interval", "")


def seeds_table(entries: Sequence[LeaderboardEntry]) -> str:
  """A Markdown table of the configurations, best first; empty if none has two seeds.

  Differences are to the best configuration, between members of one seed, which saw the same
  held-out rows. Members that did not finish are left out: their losses are of other steps.
  """
  losses: dict[str, dict[object, float]] = {}  # by configuration, by seed
  for entry in entries:
    settings = {key: value for key, value in entry.overrides.items() if key != _SEED}
    key = json.dumps(settings, sort_keys=True, default=dict)
    own = losses.setdefault(key, {})
    if entry.final_loss is not None and entry.status == "finished":
      own[entry.overrides.get(_SEED)] = entry.final_loss
  ranked = sorted((key for key in losses if losses[key]), key=lambda key: _mean(losses[key]))
  if not any(len(losses[key]) > 1 for key in ranked):
    return ""
  best = ranked[0]
  rows = [_row(key, losses[key], losses[best], is_best=key == best) for key in ranked]
  return markdown_table(_TITLES, [True] + [False] * 5 + [True], rows)


def _mean(by_seed: dict[object, float]) -> float:
  return statistics.fmean(by_seed.values())


def _row(
  key: str, own: dict[object, float], best: dict[object, float], *, is_best: bool
) -> list[str]:
  settings = json.loads(key)
  values = list(own.values())
  error = f"{standard_error(values):.4f}" if len(values) > 1 else NO_VALUE
  cells = [format_settings(settings) or "all", str(len(values)), f"{_mean(own):.4f}", error]
  if is_best:
    return [*cells, NO_VALUE, NO_VALUE, "best mean"]
  seeds = [seed for seed in own if seed in best]
  if len(seeds) < 2:
    return [*cells, NO_VALUE, NO_VALUE, "fewer than two seeds in common"]
  found = paired_difference([own[seed] for seed in seeds], [best[seed] for seed in seeds])
  verdict = "worse" if found.is_distinguishable else "not distinguishable"
  interval = f"{found.low:+.4f} to {found.high:+.4f}"
  return [*cells, f"{found.mean:+.4f}", interval, verdict]
