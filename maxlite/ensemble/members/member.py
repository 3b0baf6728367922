"""The members of an ensemble, as a user gives them."""

import dataclasses
import importlib
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, TypedDict, TypeGuard

import flax.linen as nn
import jax
import optax

from maxlite.errors import UserError
from maxlite.sharding.pytree import PyTree
from maxlite.step.api_checks import as_optimizer

# (bound module, batch) -> scalar or (scalar, {name: scalar})
Loss = Callable[[nn.Module, PyTree], PyTree]
OptimizerFunction = Callable[..., optax.GradientTransformation]
Optimizer: TypeAlias = optax.GradientTransformation | OptimizerFunction


class HyperparameterError(UserError):
  """Error for hyperparameters that differ between members and cannot be arrays."""


@dataclasses.dataclass(frozen=True)
class Member:
  """A Linen module with its optimizer and seed.

  Args:
    model: members with equal modules are trained as one stack.
    optimizer: a transformation, such as `optax.adam(1e-3)`; or a function that returns one, such as
      `optax.adam`, for members that differ in its numbers: they are data of one program.
    seed: the seed of the parameters and of random numbers in training.
    name: by default the member's number, such as m0 or, of more than ten members, m00.
    hyperparameters: the arguments of an optimizer that is a function.
    train: regexes of whole parameter paths; other parameters are frozen. By default, all train.
  """

  model: nn.Module
  optimizer: Optimizer
  seed: int = 0
  name: str = ""
  hyperparameters: Mapping[str, object] = dataclasses.field(default_factory=dict)
  train: Sequence[str] | None = None

  def __post_init__(self) -> None:
    if not isinstance(self.model, nn.Module):
      raise _not_an_instance("model", self.model, "Module")
    if isinstance(self.optimizer, optax.MultiSteps):
      object.__setattr__(self, "optimizer", self.optimizer.gradient_transformation())
    if not isinstance(self.optimizer, optax.GradientTransformation):
      self._check_optimizer_function()
    elif self.hyperparameters:
      raise UserError(
        "hyperparameters of a Member are arguments of an optimizer that is a function: write "
        "optimizer=optax.adam, or leave hyperparameters out"
      )
    if isinstance(self.train, str):
      raise UserError(f"train={self.train!r} of a Member is not a list: write [{self.train!r}]")
    try:
      operator.index(self.seed)
    except TypeError:
      given = " ".join(str(self.seed).split())
      raise UserError(f"seed={given} of a Member is not an integer") from None

  def _check_optimizer_function(self) -> None:
    """Raise UserError if the optimizer and its hyperparameters give no transformation."""
    if not callable(self.optimizer) or not self.hyperparameters:
      raise _not_an_instance("optimizer", self.optimizer, "GradientTransformation")
    name = getattr(self.optimizer, "__name__", type(self.optimizer).__name__)
    try:
      built = self.optimizer(**self.hyperparameters)
    except (TypeError, ValueError) as error:
      first_line = str(error).partition("\n")[0]
      raise UserError(f"hyperparameters of a Member: {name}(...) fails: {first_line}") from error
    if not isinstance(built, optax.GradientTransformation | optax.MultiSteps):
      raise UserError(f"optimizer={name} of a Member returns no GradientTransformation")

  def build_optimizer(self, **replaced: jax.Array) -> optax.GradientTransformation:
    """The transformation with the member's hyperparameters, of which some may be replaced."""
    if isinstance(self.optimizer, optax.GradientTransformation):
      return self.optimizer
    built = self.optimizer(**{**self.hyperparameters, **replaced})
    return as_optimizer(built, f"member {self.name}")

  @property
  def numbers(self) -> dict[str, float]:
    """The hyperparameters that are numbers."""
    numbers = {}
    for name, value in self.hyperparameters.items():
      if is_number(value):
        numbers[name] = value
    return numbers


def is_number(value: object) -> TypeGuard[int | float]:
  return isinstance(value, int | float) and not isinstance(value, bool)


def _not_an_instance(field: str, value: object, kind: str) -> UserError:
  name = getattr(value, "__name__", type(value).__name__)
  remedy = ""
  if callable(value) and not isinstance(value, nn.Module):
    remedy = f": call it, {name}(...)"
    if field == "optimizer":
      remedy += ", or give its arguments as hyperparameters"
  return UserError(f"{field}={name} of a Member is not an instance of {kind}{remedy}")


@dataclasses.dataclass(frozen=True)
class MemberFactory:
  """An importable function from which any process can build the members."""

  path: str  # package.module:function
  num_workers: int  # the number of processes; 0: one per member, up to the number of cores
  checkpoint_period: int  # steps between the snapshots from which a restarted worker resumes
  example_batch: PyTree = None  # of one member

  def __post_init__(self) -> None:
    if self.num_workers < 0 or self.checkpoint_period < 1:
      raise UserError(
        f"num_workers={self.num_workers} must be 0 or more, and "
        f"checkpoint_period={self.checkpoint_period} 1 or more"
      )


class EnsembleParts(TypedDict):
  """What a factory returns: arguments of `Ensemble`."""

  members: Sequence[Member]
  loss: Loss
  predict: Callable[[nn.Module, PyTree], PyTree]
  base: PyTree


def call_factory(path: str) -> EnsembleParts:
  """What the function returns, with the defaults of `predict` and `base`.

  Raises:
    UserError: there is no such function, or it returns something else.
  """
  module_name, _, name = path.partition(":")
  try:
    module = importlib.import_module(module_name)
    function = getattr(module, name)
  except (ImportError, AttributeError, ValueError) as error:
    raise UserError(f"no factory {path!r}, give package.module:function ({error})") from error
  ensemble = function()
  required = {"members", "loss"}
  known = required | {"predict", "base"}
  if not isinstance(ensemble, dict) or not required <= set(ensemble) <= known:
    raise UserError(f"{path} must return a dict of members, loss and, optionally, predict, base")
  return EnsembleParts(
    members=ensemble["members"],
    loss=ensemble["loss"],
    predict=ensemble.get("predict", call_model),
    base=ensemble.get("base"),
  )


def call_model(model: nn.Module, inputs: PyTree) -> PyTree:
  """The default `predict`."""
  return model(inputs)
