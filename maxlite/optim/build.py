"""The optimizers: clip -> scale -> decoupled weight decay -> learning rate."""

import dataclasses
import functools
import inspect
from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from maxlite.config.config_field import KeyValue
from maxlite.config.raw_values import show
from maxlite.config.schema import ModelConfig, OptimizerConfig
from maxlite.errors import UserError
from maxlite.optim.labels import decay_mask
from maxlite.optim.parametrization import scale_updates
from maxlite.optim.schedules import build_schedule, schedule_numbers
from maxlite.registry import OPTIMIZERS, SCHEDULES
from maxlite.sharding.pytree import PyTree


def adamw(cfg: OptimizerConfig, names: PyTree) -> optax.GradientTransformation:
  """Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization (2017)."""
  del names
  return optax.scale_by_adam(cfg.adam_b1, cfg.adam_b2, cfg.adam_eps)


def lion(cfg: OptimizerConfig, names: PyTree) -> optax.GradientTransformation:
  """Source: Chen et al., Symbolic Discovery of Optimization Algorithms (2023)."""
  del names
  return optax.scale_by_lion(cfg.adam_b1, cfg.adam_b2)


def adafactor(cfg: OptimizerConfig, names: PyTree) -> optax.GradientTransformation:
  """Source: Shazeer and Stern, Adafactor (2018), without momentum."""
  del cfg, names
  return optax.chain(
    optax.scale_by_factored_rms(),
    optax.clip_by_block_rms(1.0),
    optax.scale_by_param_block_rms(),
  )


def of_optax(cfg: OptimizerConfig, names: PyTree) -> optax.GradientTransformation:
  """The optimizer `opt_type=optax.NAME`, with the learning rate and the weight decay of the config.

  Raises:
    UserError: optax has no such optimizer, or it does not take these arguments.
  """
  del names
  name = cfg.opt_type.removeprefix("optax.")
  factory = getattr(optax, name, None)
  if factory is None:
    factory = getattr(optax.contrib, name, None)
  parameters: Collection[str] = ()
  if callable(factory):
    parameters = inspect.signature(factory).parameters
  if factory is None or "learning_rate" not in parameters:
    raise UserError(
      f"opt_type={cfg.opt_type}: optax {optax.__version__} has no optimizer of this name that "
      "takes a learning_rate; write one such as opt_type=optax.adabelief"
    )
  decay: dict[str, object] = {}
  if "weight_decay" in parameters:
    decay["weight_decay"] = cfg.adam_weight_decay
    mask = next((each for each in ("mask", "weight_decay_mask") if each in parameters), None)
    if mask is not None:
      decay[mask] = decay_mask
  elif not (isinstance(cfg.adam_weight_decay, (int, float)) and cfg.adam_weight_decay == 0):
    raise UserError(f"opt_type={cfg.opt_type} has no weight decay; write adam_weight_decay=0")
  schedule = build_schedule(cfg)
  try:
    transform: optax.GradientTransformation = factory(
      learning_rate=schedule, **decay, **cfg.opt_kwargs
    )
  except (TypeError, ValueError) as error:
    raise UserError(
      f"opt_type={cfg.opt_type} with opt_kwargs={show(cfg.opt_kwargs)}: {error}; write arguments "
      f"of optax.{name}"
    ) from None
  return transform


# Hyperparameters of a config that an optimizer may have in its state instead of its program.
UPDATE_NUMBERS = (
  "adam_weight_decay",
  "adam_b1",
  "adam_b2",
  "adam_eps",
  "muon_beta",
  "gradient_clipping_threshold",
)
RATE_NUMBERS = ("learning_rate", "learning_rate_final_fraction")
SCHEDULE_NUMBERS = (
  "learning_rate_schedule_steps",
  "warmup_steps_fraction",
  "wsd_decay_steps_fraction",
)


def number_names(cfg: OptimizerConfig) -> tuple[str, ...]:
  """The names of the hyperparameters that an optimizer may have in its state.

  The lengths of the schedule are among them if the schedule takes arrays in their place.
  """
  if SCHEDULES.entry(cfg.lr_schedule_type).takes_arrays:
    return (*UPDATE_NUMBERS, *RATE_NUMBERS, *SCHEDULE_NUMBERS)
  return (*UPDATE_NUMBERS, *RATE_NUMBERS)


def numbers_of(cfg: OptimizerConfig) -> dict[str, float]:
  """The values of `number_names`; `learning_rate_schedule_steps` must be > 0."""
  values = {**vars(cfg), **schedule_numbers(cfg)}
  return {name: values[name] for name in number_names(cfg)}


def build_optimizer(
  cfg: OptimizerConfig, names: PyTree, model: ModelConfig, stored: Collection[str] = ()
) -> optax.GradientTransformation:
  """Build the optimizer for parameters with the logical axis `names` (a tree of `jax.P`).

  Its learning rate follows the number of updates, which its state counts. The state also has, as
  float32, the hyperparameters that population-based training changes.

  Args:
    stored: names of further hyperparameters in `numbers_of` that the state has.

  Raises:
    UserError: the model has muP, which has no rule for this optimizer.
  """
  clips = cfg.gradient_clipping_threshold > 0
  in_state = {*cfg.pbt_hyperparameters, *stored}
  if not in_state:
    return _chain(cfg, names, model, clips)

  @functools.wraps(OptimizerConfig, updated=())  # Optax reads the names of its arguments
  def rebuild(**values: KeyValue) -> optax.GradientTransformation:
    return _chain(OptimizerConfig(**values), names, model, clips)

  fixed = vars(cfg).keys() - in_state
  return optax.inject_hyperparams(rebuild, fixed, jnp.float32)(**vars(cfg))


def learning_rate(cfg: OptimizerConfig, opt_state: optax.OptState) -> jax.Array:
  """The learning rate of the next update, with the hyperparameters in the optimizer's state."""
  stored = hyperparameters(opt_state)
  in_force: dict[str, Any] = {}  # traced values in the place of numbers
  for name in stored.keys() & {*RATE_NUMBERS, *SCHEDULE_NUMBERS}:
    in_force[name] = stored[name]
  schedule = build_schedule(dataclasses.replace(cfg, **in_force))
  return schedule(_num_updates(opt_state).astype(jnp.float32))


def _num_updates(opt_state: optax.OptState) -> jax.Array:
  """The number of updates so far, by which the schedule is read."""

  def is_of_schedule(key_path: tuple, _: object) -> bool:
    return getattr(key_path[-1], "tuple_name", "") == "ScaleByScheduleState"

  counts = optax.tree.get_all_with_path(opt_state, "count", filtering=is_of_schedule)
  return counts[-1][1]


def hyperparameters(opt_state: optax.OptState) -> dict[str, jax.Array]:
  """The hyperparameters in the state, by their keys in the config; may be empty."""
  return optax.tree.get(opt_state, "hyperparams", {})


def with_hyperparameters(
  opt_state: optax.OptState, values: Mapping[str, jax.Array]
) -> optax.OptState:
  """The optimizer state with other values of its hyperparameters."""
  if not values:
    return opt_state
  return optax.tree.set(opt_state, hyperparams=values)


def _chain(
  cfg: OptimizerConfig, names: PyTree, model: ModelConfig, clips: bool
) -> optax.GradientTransformation:
  """The optimizer of a config whose hyperparameters may be traced."""
  entry = OPTIMIZERS.entry(cfg.opt_type)
  parts: list[optax.GradientTransformation] = []
  if clips:
    parts.append(optax.clip_by_global_norm(cfg.gradient_clipping_threshold))
  optimizer = OPTIMIZERS[cfg.opt_type]
  if entry.reads_model:
    optimizer = functools.partial(optimizer, model=model)
  parts.append(optimizer(cfg, names))
  if model.scaling.parametrization == "mup":
    if entry.mup_updates is None:
      raise UserError(
        f"opt_type={cfg.opt_type} with parametrization=mup: {entry.why_no_mup}; write "
        "opt_type=adamw, lion or muon"
      )
    parts.append(scale_updates(names, model, entry.mup_updates))
  if entry.has_rate:
    # Counts the updates, which the optimizer may do by any name.
    parts.append(optax.scale_by_schedule(lambda count: 1.0))
    return optax.chain(*parts)
  parts.append(optax.add_decayed_weights(cfg.adam_weight_decay, mask=decay_mask))
  parts.append(optax.scale_by_learning_rate(build_schedule(cfg)))
  return optax.chain(*parts)
