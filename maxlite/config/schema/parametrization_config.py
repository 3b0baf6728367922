"""Parametrization of the model by its width."""

import dataclasses

from maxlite.config.config_field import model_field


@dataclasses.dataclass(frozen=True)
class ParametrizationConfig:
  """How initial weights and updates depend on the width of the model."""

  parametrization: str = model_field(
    "standard",
    "`standard`, or `mup`: initial weights and updates scaled for the width, so that the best "
    "learning rate of a model of the base width is that of wider ones (docs/tuning.md).",
    choices=("standard", "mup"),
  )
  mup_base_emb_dim: int = model_field(
    0, "base_emb_dim at which mup is the standard parametrization.", low=0
  )
  mup_base_head_dim: int = model_field(
    0, "head_dim at which mup is the standard parametrization; 0: head_dim.", low=0
  )
