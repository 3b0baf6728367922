"""The optimizers: clip -> scale -> decoupled weight decay -> learning rate."""

from typing import Any

import jax
import optax

from maxlite.config.registry import OPTIMIZERS
from maxlite.config.schema import OptimizerConfig
from maxlite.optim.adam import scale_by_adam
from maxlite.optim.partition import decay_mask, matrix_axes
from maxlite.optim.schedules import build_schedule


def _adam(cfg: OptimizerConfig) -> optax.GradientTransformation:
  return scale_by_adam(cfg.adam_b1, cfg.adam_b2, cfg.adam_eps)


def adamw(cfg: OptimizerConfig, names: Any) -> optax.GradientTransformation:
  """Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization (2017)."""
  del names
  return _adam(cfg)


def lion(cfg: OptimizerConfig, names: Any) -> optax.GradientTransformation:
  """Source: Chen et al., Symbolic Discovery of Optimization Algorithms (2023)."""
  del names
  return optax.scale_by_lion(cfg.adam_b1, cfg.adam_b2)


def adafactor(cfg: OptimizerConfig, names: Any) -> optax.GradientTransformation:
  """Source: Shazeer and Stern, Adafactor (2018), without momentum."""
  del cfg, names
  return optax.chain(
    optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0), optax.scale_by_param_block_rms()
  )


def muon(cfg: OptimizerConfig, names: Any) -> optax.GradientTransformation:
  """Muon for hidden matrices, Adam for the rest; one learning rate serves both.

  Source: Jordan et al., Muon (2024); updates brought to the size of Adam's as in Liu et al., Muon
  is Scalable for LLM Training (2025), section 2.2.
  """
  transform = optax.contrib.muon(
    learning_rate=1.0,
    beta=cfg.muon_beta,
    muon_weight_dimension_numbers=_muon_dimensions(names),
    consistent_rms=0.2,
  )
  transform = optax.chain(transform, optax.scale(-1.0))  # optax's muon has its sign turned already
  # Not optax's own Adam for the rest: that is Nesterov's variant, and deaf to adam_eps.
  kinds = jax.tree.map(lambda leaf: "muon" if matrix_axes(leaf) else "adam", names)
  return optax.partition({"muon": transform, "adam": _adam(cfg)}, kinds)


def _muon_dimensions(names: Any) -> Any:
  def of_param(param_names: jax.P) -> optax.contrib.MuonDimensionNumbers | None:
    axes = matrix_axes(param_names)
    return axes and optax.contrib.MuonDimensionNumbers(*axes)

  return jax.tree.map(of_param, names)


def build_optimizer(cfg: OptimizerConfig, names: Any) -> optax.GradientTransformation:
  """The optimizer of `cfg` for parameters whose axes have the logical `names` (a tree of `jax.P`).

  Its state counts the updates made, by which the learning rate is scheduled.
  """
  parts = [
    OPTIMIZERS[cfg.opt_type](cfg, names),
    optax.add_decayed_weights(cfg.adam_weight_decay, mask=decay_mask),
    optax.scale_by_learning_rate(build_schedule(cfg)),
  ]
  if cfg.gradient_clipping_threshold:
    parts.insert(0, optax.clip_by_global_norm(cfg.gradient_clipping_threshold))
  return _with_standard_promotion(optax.chain(*parts))


def _with_standard_promotion(tx: optax.GradientTransformation) -> optax.GradientTransformation:
  """`tx` as it is; optax mixes types, which our own code may not where promotion is strict."""

  def update(updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
    with jax.numpy_dtype_promotion("standard"):
      return tx.update(updates, state, params)

  return optax.GradientTransformation(tx.init, update)
