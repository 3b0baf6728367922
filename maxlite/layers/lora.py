"""LoRA adapters: linear layers with adapters, and their parameters.

Also the table of all modules that can be added to a trained model: adapters, draft heads, layers of
multi-token prediction, and indexers.

Source: Hu et al., LoRA (2021), section 4.1.
"""

import math
from collections.abc import Collection, Mapping, Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.traverse_util import flatten_dict, unflatten_dict

from maxlite.config.schema import ModelConfig
from maxlite.kernels.numerics import accumulator_dtype
from maxlite.layers.linear import Linear, LinearClass
from maxlite.sharding import Sharder
from maxlite.sharding.pytree import PyTree

ADAPTER = ("lora_a", "lora_b")
# Modules that can be added to a model that was trained without them, by keys of ADDED_MODULES.
OPTIONAL_MODULES = (*ADAPTER, "draft_head", "mtp", "indexer")


class LoraLinear(nn.Module):
  """A `Linear` plus a low-rank product, the adapter.

  The adapter's second factor is initialised to zero, so the module computes the same as its
  `Linear` until it is trained. The parameters of the `Linear` have the path of this module.
  """

  cfg: ModelConfig
  sharder: Sharder
  features: tuple[int, ...]
  kernel_names: tuple[str, ...]
  num_in: int = 1
  use_bias: bool = False

  base_class = Linear  # not a field

  def setup(self) -> None:
    lora_rank = self.cfg.lora.lora_rank
    names_in = self.kernel_names[: self.num_in]
    names_out = self.kernel_names[self.num_in :]
    self.base = self.base_class(
      self.cfg,
      self.sharder,
      self.features,
      self.kernel_names,
      num_in=self.num_in,
      use_bias=self.use_bias,
    )
    nn.share_scope(self, self.base)
    self.lora_a = Linear(
      self.cfg,
      self.sharder,
      features=(lora_rank,),
      kernel_names=(*names_in, "lora_rank"),
      num_in=self.num_in,
      is_quantized=False,
    )
    self.lora_b = Linear(
      self.cfg,
      self.sharder,
      features=self.features,
      kernel_names=("lora_rank", *names_out),
      zero_init=True,
      is_quantized=False,
    )

  def __call__(self, x: jax.Array) -> jax.Array:
    lora = self.cfg.lora
    y = self.base(x)
    change = self.lora_b(self.lora_a(x))
    scale = jnp.asarray(lora.lora_alpha / lora.lora_rank, x.dtype)
    return y + change * scale


def linear_class(cfg: ModelConfig) -> LinearClass:
  """The class of a model's linear layers: with adapters if their rank is set."""
  if cfg.lora.lora_rank:
    return LoraLinear
  return Linear


def merge_lora(params: Mapping[str, PyTree], lora_alpha: float) -> dict[str, PyTree]:
  """Adds the product of each adapter to its kernel; returns params without adapters.

  The sum is computed in float32 before it is rounded to the kernel's type.
  """
  merged: dict[str, PyTree] = {}
  for name, node in params.items():
    if isinstance(node, Mapping) and name not in ADAPTER:
      merged[name] = merge_lora(node, lora_alpha)
    elif name not in ADAPTER:
      merged[name] = node
  if ADAPTER[0] in params:
    # One adapter of a linear layer's kernel, or one of each projection of the routed experts.
    for name, a in params["lora_a"].items():
      merged[name] = _merged_kernel(params[name], a, params["lora_b"][name], lora_alpha)
  return merged


def _merged_kernel(
  kernel: jax.Array,
  a: jax.Array,
  b: jax.Array,
  lora_alpha: float,
) -> jax.Array:
  """kernel + a b lora_alpha / rank, where experts, scans and ensembles may be leading axes."""
  num_stacked = a.ndim + b.ndim - kernel.ndim - 2
  stacked = a.shape[:num_stacked]
  rank = a.shape[-1]
  dim = math.prod(a.shape[num_stacked:-1])
  num_features = math.prod(b.shape[num_stacked + 1 :])
  a_DR = _at_least_float32(a).reshape((*stacked, dim, rank))
  b_RF = _at_least_float32(b).reshape((*stacked, rank, num_features))
  change = (a_DR @ b_RF).reshape(kernel.shape) * (lora_alpha / rank)
  return (_at_least_float32(kernel) + change).astype(kernel.dtype)


def _at_least_float32(w: jax.Array) -> jax.Array:
  return w.astype(accumulator_dtype(w.dtype))


def drop_missing_modules(params: PyTree, saved: Collection[str]) -> PyTree:
  """`params` without those of optional modules that are not among the paths `saved` of a state."""
  kept = {}
  for path, leaf in flatten_dict(params).items():
    is_optional = not set(path).isdisjoint(OPTIONAL_MODULES)
    if not is_optional or "/".join(("params", *path)) in saved:
      kept[path] = leaf
  return unflatten_dict(kept)


def drop_modules(
  params: Mapping[str, PyTree],
  names: Sequence[str],
) -> dict[str, PyTree]:
  """`params` without the modules `names`."""
  kept = {}
  for path, leaf in flatten_dict(params).items():
    if set(path).isdisjoint(names):
      kept[path] = leaf
  return unflatten_dict(kept)


def add_missing_modules(
  params: Mapping[str, PyTree], fresh: Mapping[str, PyTree]
) -> dict[str, PyTree]:
  """`params`, completed with the optional modules that only `fresh` has.

  Args:
    fresh: the parameters of an untrained model of the same architecture.
  """
  completed = {}
  for path, leaf in flatten_dict(fresh).items():
    if not set(path).isdisjoint(OPTIONAL_MODULES):
      completed[path] = leaf
  completed.update(flatten_dict(params))
  return unflatten_dict(completed)
