"""The members of a ladder: for every budget of FLOPs several widths, each with several seeds."""

import math
from typing import NamedTuple

from maxlite.config.config_field import ConfigField
from maxlite.config.members import members_of
from maxlite.config.model_function import unused_keys
from maxlite.config.raw_values import FrozenMapping
from maxlite.config.schema import Config, ModelConfig, flatten
from maxlite.config.schema.entries import LADDER_FORM, LadderEntry
from maxlite.config.sweep import require_few_members
from maxlite.config.tuning import with_members
from maxlite.config.values import Setting, parse_as, parse_entry
from maxlite.errors import UserError

MIN_WIDTHS = 4  # of a budget: a parabola through three has no residuals
# The keys that grow with base_emb_dim; a latent of width 0 stays away.
_WIDTHS = (
  "base_mlp_dim",
  "base_moe_mlp_dim",
  "base_num_query_heads",
  "base_num_kv_heads",
  "global_num_kv_heads",
  "q_lora_rank",
  "kv_lora_rank",
  "gdn_num_key_heads",
  "gdn_num_value_heads",
  "mamba_num_heads",
  "indexer_n_heads",
)
_BUDGET = ConfigField("", low=1)
_WIDTH = ConfigField("", low=1)


class Rung(NamedTuple):
  """The widths of one budget."""

  budget: float  # FLOPs
  widths: tuple[int, ...]  # ascending
  source: str  # for error messages


class Ladder(NamedTuple):
  """A parsed `ladder`, by ascending budgets."""

  rungs: tuple[Rung, ...]
  seeds: int


def ladder_of(raw: FrozenMapping) -> Ladder:
  """Parse the key; raise UserError if an entry is missing or unknown, or a value is wrong."""
  source = raw.located("ladder")
  entry = parse_entry(LadderEntry, raw, source)
  if not entry.budgets:
    raise Setting("budgets", entry.budgets, source).error(f"has no budgets; write {LADDER_FORM}")
  rungs: dict[float, Rung] = {}
  for name, widths in entry.budgets.items():
    place = f"{source}.budgets"
    budget = parse_as(Setting("budget", name, place), float, _BUDGET)
    if budget in rungs:
      raise UserError(f"{place}: {name} is there twice; write one list of widths")
    rungs[budget] = Rung(budget, _widths(Setting(name, widths, place)), place)
  num_cells = sum(len(rung.widths) for rung in rungs.values())
  require_few_members(num_cells * entry.seeds, source)
  return Ladder(tuple(rungs[budget] for budget in sorted(rungs)), entry.seeds)


def _widths(setting: Setting) -> tuple[int, ...]:
  widths = parse_as(setting, tuple[int, ...], _WIDTH)
  if len(set(widths)) < len(widths):
    raise setting.error("has a width twice; remove one of the two")
  if len(widths) < MIN_WIDTHS:
    raise setting.error(f"has fewer than {MIN_WIDTHS} widths, which a fit needs; write more")
  return tuple(sorted(widths))


def budget_name(budget: float) -> str:
  """A budget as in names of members: 1e12, 3.2e13."""
  mantissa, _, exponent = f"{budget:.3e}".partition("e")
  return f"{float(mantissa):g}e{int(exponent)}"


def width_step(model: ModelConfig) -> int:
  """The widths of a ladder are multiples of this, so that what grows with them stays whole."""
  return model.base_emb_dim // math.gcd(model.base_emb_dim, *_growing(model).values())


def width_settings(model: ModelConfig, width: int) -> dict[str, int]:
  """The keys of a model of this width; all but these stay as they are."""
  settings = {"base_emb_dim": width}
  for key, value in _growing(model).items():
    settings[key] = value * width // model.base_emb_dim
  return settings


def _growing(model: ModelConfig) -> dict[str, int]:
  """The values of the keys that grow with the width, of parts that the model has."""
  unused = unused_keys(model)
  values = flatten(model)
  return {key: values[key] for key in _WIDTHS if key not in unused and values[key]}


def member_entry(model: ModelConfig, budget: float, width: int, seed: int) -> FrozenMapping:
  """An entry of `members`, without its steps."""
  entries: dict[str, str] = {"name": f"{budget_name(budget)}_w{width}_s{seed}"}
  for key, value in width_settings(model, width).items():
    entries[key] = str(value)
  entries["init_weights_seed"] = str(seed)
  return FrozenMapping(entries.items())


def check_ladder(cfg: Config) -> None:
  """Raise UserError if `ladder` or a member of it is wrong."""
  if not cfg.ensemble.ladder:
    return
  step = width_step(cfg.model)
  for rung in ladder_of(cfg.ensemble.ladder).rungs:
    entries = []
    for width in rung.widths:
      if width % step:
        growing = ", ".join(f"{key}={value}" for key, value in _growing(cfg.model).items())
        raise UserError(
          f"{rung.source}: width {width} with base_emb_dim={cfg.model.base_emb_dim}, {growing}, "
          f"which grow with it, is not a multiple of {step}; write {max(width // step, 1) * step}"
        )
      entries.append(member_entry(cfg.model, rung.budget, width, seed=0))
    members_of(with_members(cfg, entries))
