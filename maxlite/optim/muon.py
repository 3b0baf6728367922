"""Muon: updates of hidden matrices are orthogonalised, each matrix by itself.

`muon_split` says what a matrix is:
- `none`: every kernel as it is stored.
- `parts`: the matrices that latent attention stores in one kernel. These are the up-projections to
  keys and to values, and the down-projections to the latent and to the key's rotated channels.
- `heads`: in addition, every head of queries, keys and values by itself, so that heads with large
  gradients do not decide the directions of the others.

Sources: Jordan et al., Muon (2024); updates scaled to the size of Adam's as in Liu et al., Muon is
Scalable for LLM Training (2025), section 2.2; heads as in GLM-5 (2026), "Muon Split", and Kimi K3
(2026), "Per-Head Muon". DeepSeek-V2 (2024), section 2.1.2, has the matrices of latent attention.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from maxlite.config.schema import ModelConfig, OptimizerConfig
from maxlite.optim.labels import is_masked, matrix_axes, path_of
from maxlite.sharding.pytree import PyTree

# By path of a parameter, the sizes of its parts.
_Sizes = Mapping[tuple, tuple[int, ...]]
_PER_HEAD = r"(^|/)(query|key|value|kv_up)/kernel$"
_HEADS = ("q_heads", "kv_heads")


class _Parts(NamedTuple):
  """The matrices that are stored in one array, along its last axis."""

  arrays: tuple[jax.Array, ...]


def muon(cfg: OptimizerConfig, names: PyTree, model: ModelConfig) -> optax.GradientTransformation:
  """Muon for hidden matrices and Adam for the rest, with one learning rate."""

  def matrix(key_path: tuple, axes: jax.P) -> optax.contrib.MuonDimensionNumbers | None:
    numbers = matrix_axes(axes)
    if numbers is None or cfg.muon_split != "heads" or not re.search(_PER_HEAD, path_of(key_path)):
      return numbers
    outputs = [axis for axis in numbers.output_axis if axes[axis] not in _HEADS]
    return numbers._replace(output_axis=tuple(outputs))

  transform = optax.contrib.muon(
    learning_rate=1.0,
    beta=cfg.muon_beta,
    muon_weight_dimension_numbers=jax.tree.map_with_path(matrix, names),
    consistent_rms=0.2,
  )
  transform = optax.chain(transform, optax.scale(-1.0))  # optax's muon already negates updates
  if cfg.muon_split != "none":
    sizes: dict[tuple, tuple[int, ...]] = {}
    for key_path, _ in jax.tree.leaves_with_path(names):
      of_kernel = _sizes_of_parts(path_of(key_path), model)
      if of_kernel:
        sizes[key_path] = of_kernel
    transform = _by_part(transform, sizes)
  # Its Adam for other parameters is not used: it has Nesterov momentum and ignores adam_eps.

  def kind(axes: jax.P) -> str:
    return "muon" if matrix_axes(axes) else "adam"

  kinds = jax.tree.map(kind, names)
  adam = optax.scale_by_adam(cfg.adam_b1, cfg.adam_b2, cfg.adam_eps)
  return optax.partition({"muon": transform, "adam": adam}, kinds)


def _sizes_of_parts(path: str, model: ModelConfig) -> tuple[int, ...]:
  """The sizes of the matrices in a kernel, along its last axis; empty if it is one matrix."""
  mla = model.mla
  if re.search(r"(^|/)kv_up/kernel$", path):
    return (mla.qk_nope_head_dim, mla.v_head_dim)
  if re.search(r"(^|/)kv_down/kernel$", path):
    return (mla.kv_lora_rank, mla.qk_rope_head_dim)
  return ()


def _by_part(
  transform: optax.GradientTransformation, sizes: _Sizes
) -> optax.GradientTransformation:
  """`transform` on parameters whose parts are arrays; its state has whole arrays."""

  def init(params: PyTree) -> optax.OptState:
    return _join(transform.init(_cut(params, sizes)))

  def update(
    updates: PyTree, state: optax.OptState, params: PyTree | None = None
  ) -> tuple[PyTree, optax.OptState]:
    updates, state = transform.update(_cut(updates, sizes), _cut(state, sizes), _cut(params, sizes))
    return _join(updates), _join(state)

  return optax.GradientTransformation(init, update)


def _cut(tree: PyTree, sizes: _Sizes) -> PyTree:
  """Parts in place of all arrays whose paths end in one of `sizes`, as in an optimizer's state."""

  def cut(key_path: tuple, leaf: PyTree) -> PyTree:
    ends = (key_path[start:] for start in range(len(key_path)))
    of_parts = next((sizes[end] for end in ends if end in sizes), None)
    if of_parts is None:
      return leaf
    if is_masked(leaf):  # in the state of optax's own Adam
      return _Parts((leaf,) * len(of_parts))
    return _Parts(tuple(jnp.split(leaf, np.cumsum(of_parts)[:-1].tolist(), axis=-1)))

  return jax.tree.map_with_path(cut, tree, is_leaf=is_masked)


def _join(tree: PyTree) -> PyTree:
  """The inverse of `_cut`."""

  def join(node: PyTree) -> PyTree:
    if not isinstance(node, _Parts):
      return node
    if is_masked(node.arrays[0]):
      return node.arrays[0]
    return jnp.concatenate(node.arrays, axis=-1)

  return jax.tree.map(join, tree, is_leaf=lambda node: isinstance(node, _Parts))
