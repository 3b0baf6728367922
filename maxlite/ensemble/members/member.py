"""The members of an ensemble, as a user gives them."""

import dataclasses
import importlib
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypedDict, TypeGuard

import flax.linen as nn
import jax
import optax

from maxlite.errors import UserError
from maxlite.libraries.as_model import library_of
from maxlite.sharding.pytree import PyTree
from maxlite.step.api_checks import as_optimizer

# (the library's own model, batch) -> scalar or (scalar, {name: scalar})
Loss = Callable[..., PyTree]
OptimizerFunction = Callable[..., optax.GradientTransformation]
Optimizer: TypeAlias = optax.GradientTransformation | OptimizerFunction


class HyperparameterError(UserError):
  """Error for hyperparameters that differ between members and cannot be arrays."""


@dataclasses.dataclass(frozen=True)
class Member:
  """A model of any module library with its optimizer and seed.

  Args:
    model: a Linen module; an Equinox module, or one and its state; an NNX module; or a function of
      a random key (of `rngs`, for NNX) that makes one of the latter. Members with equal models, but
      for their arrays, are trained as one stack.
    optimizer: a transformation, such as `optax.adam(1e-3)`; or a function that returns one, such as
      `optax.adam`, for members that differ in its numbers: they are data of one program.
    seed: the seed of the parameters and of random numbers in training.
    name: by default the member's number, such as m0 or, of more than ten members, m00.
    hyperparameters: the arguments of an optimizer that is a function.
    train: regexes of whole parameter paths; other parameters are frozen. By default, all train.
    init: of a model that is a pair of pure functions, init(random key) -> a tree of arrays.
    apply: its other function. The loss gets it with the tree as its first argument.
  """

  model: Any = None
  optimizer: Optimizer | None = None
  seed: int = 0
  name: str = ""
  hyperparameters: Mapping[str, object] = dataclasses.field(default_factory=dict)
  train: Sequence[str] | None = None
  init: Callable[[jax.Array], PyTree] | None = dataclasses.field(default=None, kw_only=True)
  apply: Callable[..., PyTree] | None = dataclasses.field(default=None, kw_only=True)

  def __post_init__(self) -> None:
    self._check_model()
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

  def _check_model(self) -> None:
    """Raise UserError unless there is one model, by its type; `init` of an ensemble builds it."""
    pair = (self.init, self.apply)
    if pair != (None, None):
      if self.model is not None or not all(callable(function) for function in pair):
        raise UserError(
          "a Member takes a model, or init=function of a key and apply=function of its result: "
          "give one of the two"
        )
      return
    is_class = isinstance(self.model, type)
    if library_of(self.model) or (callable(self.model) and not is_class):
      return
    if is_class and not issubclass(self.model, nn.Module):
      return  # a constructor of another library
    raise _not_an_instance("model", self.model, "Module")

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
    assert self.optimizer is not None
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
  predict: Callable[..., PyTree]
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


def call_model(model: Callable[[PyTree], PyTree], inputs: PyTree) -> PyTree:
  """The default `predict`."""
  return model(inputs)
