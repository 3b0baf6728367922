"""Ensembles: many members trained by one command."""

import dataclasses

from maxlite.config.config_field import field
from maxlite.config.raw_values import FrozenMapping
from maxlite.registry import (
  ENSEMBLE_EXECUTORS,
  ENSEMBLE_STRATEGIES,
  with_auto,
)


@dataclasses.dataclass(frozen=True)
class EnsembleConfig:
  """Many members trained by one command; read if `members`, `sweep`, `search` or `ladder` is
  set."""

  members: tuple[FrozenMapping, ...] = field(
    (),
    "Members, each {key: value} with an optional `name`. A `model_name` applies the keys of that "
    "preset which a member may set.",
  )
  sweep: FrozenMapping = field(
    FrozenMapping(),
    "Generated members: {grid: {key: [values]}} gives every combination; {draw: {key: rule}, "
    "num_members: N, seed: 0} random ones. With `members`: the product.",
  )
  search: FrozenMapping = field(
    FrozenMapping(),
    "Members in rounds, proposed by a sampler of Optuna from the held-out losses of earlier "
    "rounds: {sampler: tpe, rounds: N, num_members: N, space: {key: rule}}.",
  )
  ladder: FrozenMapping = field(
    FrozenMapping(),
    "Members of several widths for each of several budgets of FLOPs, and a fit of the best width "
    "of each budget: {budgets: {FLOPs: [widths]}, seeds: 2}.",
  )
  ensemble_strategy: str = field(
    "auto",
    "How members are trained: `stacked` as one module, lifted by nn.vmap, if they differ in seeds "
    "and numbers of the optimizer only; `fused` one stack per architecture in one program; "
    "`submesh` some devices each; `processes` in separate processes; `padded` as one stack of the "
    "largest member's shapes. `switched` is for members in Python.",
    choices=with_auto(ENSEMBLE_STRATEGIES),
  )
  ensemble_data: str = field(
    "shared",
    "Batches: `shared` by all members; `independent` order per member; `bootstrap` also samples "
    "with replacement.",
    choices=("shared", "independent", "bootstrap"),
  )
  ensemble_executor: str = field(
    "local", "Starts the workers of ensemble_strategy=processes.", choices=ENSEMBLE_EXECUTORS
  )
  ensemble_memory_gb: float = field(
    0.0, "GB per device for all members' state; 0: all of it.", low=0
  )
  ensemble_num_workers: int = field(
    0, "Workers of ensemble_strategy=processes; 0: one per member, up to the CPU cores.", low=0
  )
  asha_reduction_factor: int = field(
    0,
    "Reduction factor of successive halving (ASHA's eta): at each rung one in this many members "
    "continues, and the next rung has this many times the steps; asynchronous with "
    "ensemble_strategy=processes. 0: no halving.",
    low=0,
  )
  asha_min_steps: int = field(100, "Steps before the first rung of halving.", low=1)
  pbt_period: int = field(
    0,
    "Population-based training (PBT): every this many steps all members are evaluated and saved, "
    "and the worst by held-out loss continue from the weights and the optimizer state of the "
    "best, with `pbt_hyperparameters` changed. 0: no exchange.",
    low=0,
  )
  pbt_fraction: float = field(
    0.25,
    "Share of the members that an exchange of PBT replaces, at least one; as many of the best are "
    "copied. 0: none.",
    low=0,
    high=0.5,
  )

  @property
  def is_set(self) -> bool:
    return bool(self.members or self.sweep or self.search or self.ladder)
