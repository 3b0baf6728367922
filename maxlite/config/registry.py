"""Every implementation that a config key or an argument selects by name.

To add one, write it and add a line here: the key's `choices` and the contract tests follow. An
entry is "module:attribute" and is imported on first use, so the names are known without JAX.
"""

import pkgutil
from collections import ChainMap, UserDict
from collections.abc import Mapping
from typing import Any


class Registry(UserDict[str, Any]):
  """Implementations by name; `registry[name]` imports a "module:attribute" entry."""

  def __getitem__(self, name: str) -> Any:
    entry = self.data[name]
    return pkgutil.resolve_name(entry) if isinstance(entry, str) else entry


def with_auto(registry: Registry) -> Mapping[str, Any]:
  """A live view of `registry` that begins with the name "auto"."""
  return ChainMap(registry, {"auto": None})


_OPTIM, _MOE = "maxlite.optim", "maxlite.layers.moe"

# opt_type -> (OptimizerConfig, logical names of the parameters) -> optax.GradientTransformation
OPTIMIZERS = Registry(
  {name: f"{_OPTIM}.build:{name}" for name in ("adamw", "lion", "adafactor", "muon")}
)
# lr_schedule_type -> (OptimizerConfig, steps after the warm-up) -> optax.Schedule
SCHEDULES = Registry({name: f"{_OPTIM}.schedules:{name}" for name in ("cosine", "wsd", "constant")})
# router -> see layers/moe/router.py
ROUTERS = Registry(
  {
    "softmax_topk": f"{_MOE}.router:softmax_topk",
    "topk_softmax": f"{_MOE}.router:topk_softmax",
    "group_limited_greedy": f"{_MOE}.router:group_limited_greedy",
    "sigmoid_group_topk": f"{_MOE}.router:sigmoid_group_topk",
  }
)
# How tokens reach their experts; see layers/moe/dispatch.
DISPATCHES = Registry(
  {
    "ragged": f"{_MOE}.dispatch.ragged:dispatch",
    "ring": f"{_MOE}.dispatch.all_gather:dispatch",
    "dense": f"{_MOE}.dispatch.dense:dispatch",
    "capacity": f"{_MOE}.dispatch.capacity:dispatch",
  }
)
