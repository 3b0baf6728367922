"""Modules added to a trained model (LoRA adapters, draft heads), and merging of adapters."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

ADAPTER = ("lora_a", "lora_b")
# Modules that can be added to a model that was trained without them.
OPTIONAL_MODULES = (*ADAPTER, "draft_head")
OPTIONAL_MODULE_KEYS = {"lora_rank", "num_draft_heads"}  # the config keys that add them


def merge_lora(params: Mapping[str, Any], lora_alpha: float) -> dict[str, Any]:
  """Adds the product of each adapter to its kernel; returns params without adapters.

  The sum is computed in float32 before it is rounded to the kernel's type.

  Source: Hu et al., LoRA (2021), section 4.1.
  """
  merged = {
    name: merge_lora(node, lora_alpha) if isinstance(node, Mapping) else node
    for name, node in params.items()
    if name not in ADAPTER
  }
  if ADAPTER[0] in params:
    adapter = (params[name]["kernel"] for name in ADAPTER)
    merged["kernel"] = _merged(params["kernel"], *adapter, lora_alpha)
  return merged


def drop_modules(
  params: Mapping[str, Any], names: Sequence[str] = OPTIONAL_MODULES
) -> dict[str, Any]:
  """`params` without the modules `names`."""
  leaves = flatten_dict(params).items()
  return unflatten_dict({path: leaf for path, leaf in leaves if not set(path) & set(names)})


def add_missing_modules(params: Mapping[str, Any], fresh: Mapping[str, Any]) -> dict[str, Any]:
  """`params`, completed with the optional modules that only `fresh` (of the same model) has."""
  optional = {p: leaf for p, leaf in flatten_dict(fresh).items() if set(p) & set(OPTIONAL_MODULES)}
  return unflatten_dict(optional | flatten_dict(params))


def _merged(kernel: jax.Array, a: jax.Array, b: jax.Array, lora_alpha: float) -> jax.Array:
  """kernel + a b lora_alpha / rank, where scans and ensembles may have stacked leading axes."""
  num_stacked = a.ndim + b.ndim - kernel.ndim - 2
  stacked, rank = a.shape[:num_stacked], a.shape[-1]
  float32 = lambda w: w.astype(jnp.promote_types(w.dtype, jnp.float32))
  a_DR = float32(a).reshape(*stacked, math.prod(a.shape[num_stacked:-1]), rank)
  b_RF = float32(b).reshape(*stacked, rank, math.prod(b.shape[num_stacked + 1 :]))
  change = (a_DR @ b_RF).reshape(kernel.shape) * (lora_alpha / rank)
  return (float32(kernel) + change).astype(kernel.dtype)
