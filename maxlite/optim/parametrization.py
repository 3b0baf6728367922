"""Maximal update parametrization (muP): hyperparameters that transfer between widths.

With m = base_emb_dim / mup_base_emb_dim, relative to the standard parametrization, where every
kernel starts at 1/sqrt(fan in) and all parameters have one learning rate:

| parameter | initial value x | update of Adam and Lion x | update of Muon x |
|---|---|---|---|
| embedding | sqrt(m) | 1 | 1 |
| hidden kernels, also of experts | 1 | 1/m | 1/sqrt(m) |
| output kernel, router | 1/sqrt(m) | 1/m | 1/m |
| biases, norms, sinks, taps of convolutions | 1 | 1 | 1 |

All widths (heads, MLP, experts, latents) are taken to grow with base_emb_dim; vocabulary, number of
experts and depth do not. Muon's updates have singular values of 0.2 sqrt(max(fan in, fan out)), an
update of Adam up to a multiple of the width, and muP asks for sqrt(fan out / fan in).

muP also multiplies outputs: logits of a tied embedding by 1/m, attention scores of wider heads by
sqrt(mup_base_head_dim / head_dim). An optimizer that does not depend on the gradient's scale gives
the same model if a factor of a parameter is multiplied into its initial value and its updates
instead. That is done here, with the scales of norms where there are any, so the forward pass is the
same as ever, and so are checkpoints and exports. Weight decay is not scaled.

Sources: Yang et al., Tensor Programs V (2022), tables 3 and 8 and appendix J.2.1; for experts and
routers, Malasnicki et al., muP for Mixture of Experts (2025); for spectral norms, Yang, Simon and
Bernstein, A Spectral Condition for Feature Learning (2023).
"""

import operator
import re
from typing import NamedTuple

import jax
import optax

from maxlite.config.schema import ModelConfig
from maxlite.optim.labels import NO_DECAY, matrix_axes, path_of
from maxlite.registry import MupUpdates
from maxlite.sharding.pytree import PyTree


class ParameterScale(NamedTuple):
  """Factors of a parameter relative to the standard parametrization."""

  init: float
  update: float


def parameter_scale(
  path: str, names: jax.P, cfg: ModelConfig, updates: MupUpdates = "adam"
) -> ParameterScale:
  """The factors of one parameter of a `cfg` with muP.

  Args:
    path: such as `layers/attention/query/kernel`.
    names: its logical axes.
    updates: the kind of the optimizer's updates; see `OptimizerEntry`.
  """
  m = cfg.base_emb_dim / cfg.scaling.mup_base_emb_dim
  if re.search(NO_DECAY, path) or len(names) < 2 or "taps" in names:  # of one channel each
    scale = ParameterScale(1.0, 1.0)
  elif names[0] == "vocab":
    scale = ParameterScale(m**0.5, 1.0)
  elif {"vocab", "router"} & set(names):
    scale = ParameterScale(m**-0.5, 1 / m)
  elif updates == "muon" and matrix_axes(names) is not None:
    scale = ParameterScale(1.0, m**-0.5)
  else:
    scale = ParameterScale(1.0, 1 / m)
  folded = _output_factor(path, cfg, m)
  return ParameterScale(scale.init * folded, scale.update * folded)


def _output_factor(path: str, cfg: ModelConfig, m: float) -> float:
  """muP's factor of logits or attention scores, for the parameter that takes it."""
  if cfg.logits_via_embedding and re.search(r"(^|/)final_norm/scale$", path):
    return 1 / m
  queries = "query/(kernel|bias)"
  if cfg.family.attention.qk_norm:
    queries = "query_norm/scale"
  if re.search(rf"/attention/{queries}$", path):
    base_head_dim = cfg.scaling.mup_base_head_dim or cfg.head_dim
    return (base_head_dim / cfg.head_dim) ** 0.5
  return 1.0


def scale_initial(params: PyTree, names: PyTree, cfg: ModelConfig) -> PyTree:
  """`params`, drawn by the standard parametrization, for the parametrization of `cfg`."""
  if cfg.scaling.parametrization == "standard":
    return params

  def scale(key_path: tuple, leaf: jax.Array, axes: jax.P) -> jax.Array:
    return leaf * parameter_scale(path_of(key_path), axes, cfg).init

  return jax.tree.map_with_path(scale, params, names)


def scale_updates(
  names: PyTree, cfg: ModelConfig, updates: MupUpdates
) -> optax.GradientTransformation:
  """Multiply every update by its factor, before weight decay and learning rate."""

  def factor(key_path: tuple, axes: jax.P) -> float:
    return parameter_scale(path_of(key_path), axes, cfg, updates).update

  factors = jax.tree.map_with_path(factor, names)

  def scale(values: PyTree, params: PyTree | None) -> PyTree:
    del params
    return jax.tree.map(operator.mul, values, factors)

  return optax.stateless(scale)
