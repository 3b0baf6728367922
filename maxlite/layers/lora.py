"""Low-rank adapters of linear layers, folded into the kernels beside them."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

ADAPTERS = ("lora_a", "lora_b")


def merge_lora(params: Mapping[str, Any], lora_alpha: float) -> dict[str, Any]:
  """`params` of a model with adapters as those of one without, which computes the same.

  Products are summed in float32 before they are rounded to the kernel's type.

  Source: Hu et al., LoRA (2021), section 4.1.
  """
  merged = {
    name: merge_lora(node, lora_alpha) if isinstance(node, Mapping) else node
    for name, node in params.items()
    if name not in ADAPTERS
  }
  if ADAPTERS[0] in params:
    adapter = (params[name]["kernel"] for name in ADAPTERS)
    merged["kernel"] = _merged(params["kernel"], *adapter, lora_alpha)
  return merged


def without_adapters(params: Mapping[str, Any]) -> dict[str, Any]:
  """`params` of the same model before it was given adapters."""
  return {
    name: without_adapters(node) if isinstance(node, Mapping) else node
    for name, node in params.items()
    if name not in ADAPTERS
  }


def with_adapters(params: Mapping[str, Any], fresh: Mapping[str, Any]) -> dict[str, Any]:
  """`params`, and of `fresh`, the parameters of a model with adapters, what they lack of those."""
  given = {
    name: with_adapters(node, fresh[name]) if isinstance(node, Mapping) else node
    for name, node in params.items()
  }
  return {name: fresh[name] for name in ADAPTERS if name in fresh} | given


def _merged(kernel: jax.Array, a: jax.Array, b: jax.Array, lora_alpha: float) -> jax.Array:
  """kernel + a b lora_alpha / rank, each under the axes that scans and ensembles stack."""
  num_stacked = a.ndim + b.ndim - kernel.ndim - 2
  stacked, rank = a.shape[:num_stacked], a.shape[-1]
  float32 = lambda w: w.astype(jnp.promote_types(w.dtype, jnp.float32))
  a_DR = float32(a).reshape(*stacked, math.prod(a.shape[num_stacked:-1]), rank)
  b_RF = float32(b).reshape(*stacked, rank, math.prod(b.shape[num_stacked + 1 :]))
  change = (a_DR @ b_RF).reshape(kernel.shape) * (lora_alpha / rank)
  return (float32(kernel) + change).astype(kernel.dtype)
