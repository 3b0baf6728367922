"""How population-based training changes the hyperparameters of a member that copied another."""

from collections.abc import Callable

from maxlite.config.config_field import ConfigField
from maxlite.config.raw_values import FrozenMapping
from maxlite.config.schema import OptimizerConfig
from maxlite.config.sweep import draw_rule
from maxlite.config.values import Setting, parse, parse_as, suggest

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
