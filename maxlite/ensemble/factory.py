"""Members that any process can make for itself, because a function that can be imported does."""

import dataclasses
import importlib
from typing import Any

import flax.linen as nn

from maxlite.config.errors import UserError


@dataclasses.dataclass(frozen=True)
class Factory:
  """Where members come from, and how many processes are to train them."""

  path: str  # package.module:function
  num_workers: int  # 0: one per member, up to the cores
  checkpoint_period: int  # steps between the files that a worker which dies goes on from
  example_batch: Any = None

  def __post_init__(self) -> None:
    if self.num_workers < 0 or self.checkpoint_period < 1:
      raise UserError(
        f"num_workers={self.num_workers} must be 0 or more, and "
        f"checkpoint_period={self.checkpoint_period} 1 or more"
      )


def call_factory(path: str) -> dict[str, Any]:
  """What the function says of an ensemble: {members, loss, predict}.

  Raises:
    UserError: there is no such function, or it returns something else.
  """
  module, _, name = path.partition(":")
  try:
    function = getattr(importlib.import_module(module), name)
  except (ImportError, AttributeError, ValueError) as error:
    raise UserError(f"no factory {path!r}, give package.module:function ({error})") from error
  made = function()
  if not isinstance(made, dict) or not {"members", "loss"} <= set(made) <= {
    "members",
    "loss",
    "predict",
  }:
    raise UserError(f"{path} must return a dict of members, loss and, if you like, predict")
  return {"predict": call_model, **made}


def call_model(model: nn.Module, inputs: Any) -> Any:
  """What members are compared by unless they say otherwise."""
  return model(inputs)
