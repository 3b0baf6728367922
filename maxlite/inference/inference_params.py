"""Convert a trained model for generation: its config, layout and parameters."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from maxlite.config.errors import UserError
from maxlite.config.schema import ModelConfig
from maxlite.layers.lora import merge_lora
from maxlite.layers.transposed_linear import TRANSPOSED, TransposedLinear
from maxlite.models import Decoder
from maxlite.sharding import Sharder

STACKS = ("dense_layers", "layers")  # parameters of the layers that a decoder scans over
NOT_TRANSPOSED = ("kv_up", "router", "unembed", "draft_head")  # with readers other than `Linear`


def inference_model(cfg: ModelConfig, sharder: Sharder) -> Decoder:
  """Build the decoder of `cfg` for generation.

  Layers are not scanned: each has its own weights and cache, because a scan would copy them out of
  the stack for every token. No expert drops a token.

  Raises:
    UserError: the mesh shards sequences; generation processes one position at a time.
  """
  if sharder.num_shards("activation_length") > 1:
    raise UserError(
      "generation cannot shard sequences over the context axis: set ici_context_parallelism=1 and "
      "dcn_context_parallelism=1 (and ici_fsdp_parallelism=-1 to use the devices)"
    )
  no_drops = {"capacity_factor": -1.0, "ragged_buffer_factor": -1.0}
  moe = dataclasses.replace(cfg.moe, **no_drops, router_jitter=0.0)
  lora = dataclasses.replace(cfg.lora, lora_rank=0)
  changes = {"scan_layers": False, "remat_policy": "none", "quantization": ""}
  cfg = dataclasses.replace(cfg, moe=moe, lora=lora, **changes)
  linear = TransposedLinear if _transposes_kernels(cfg) else None
  return Decoder(cfg, sharder, linear)


def inference_params(cfg: ModelConfig, params: Any) -> Any:
  """Convert `params` of a model of `cfg` to those of `inference_model`.

  Adapters are merged, stacked layers are unstacked, and matrices are cast to the activation dtype,
  as each use would cast them; the router, which may compute in another dtype, keeps its own. On
  CPU, float32 kernels are transposed (`matmul_few_rows`).
  """
  if cfg.lora.lora_rank:
    params = merge_lora(params, cfg.lora.lora_alpha)
  cast = lambda path, leaf: _cast(path, leaf, jnp.dtype(cfg.dtype), cfg.scan_layers)
  params = jax.tree_util.tree_map_with_path(cast, params)
  if cfg.scan_layers:
    params = _unstack(params)
  if _transposes_kernels(cfg):
    params = _transpose(params)
  return params


def _unstack(params: Any) -> Any:
  """Parameters of scanned layers as those of separate layers."""
  unstacked = {name: tree for name, tree in params.items() if name not in STACKS}
  for name in STACKS:
    leaves, tree = jax.tree.flatten(params.get(name, {}))
    for i, layer in enumerate(zip(*map(jnp.unstack, leaves), strict=True)):
      unstacked[f"{name}_{i}"] = jax.tree.unflatten(tree, layer)
  return unstacked


def _transposes_kernels(cfg: ModelConfig) -> bool:
  """Whether decoding is faster with transposed kernels (layers/transposed_linear.py)."""
  return jax.default_backend() == "cpu" and cfg.dtype == "float32"


def _transpose(params: Any, name: str = "") -> Any:
  """Transpose the kernels of the module `name`."""
  if not isinstance(params, Mapping):
    return params
  if name in NOT_TRANSPOSED or "kernel" not in params:
    return {name: _transpose(node, name) for name, node in params.items()}
  others = {name: leaf for name, leaf in params.items() if name != "kernel"}
  num_in = 2 if name == "out" else 1  # contracted axes
  return others | {TRANSPOSED: jnp.moveaxis(params["kernel"], range(num_in), range(-num_in, 0))}


def _cast(path: tuple, leaf: jax.Array, dtype: jnp.dtype, scanned: bool) -> jax.Array:
  names = [entry.key for entry in path]
  is_matrix = leaf.ndim - (scanned and names[0] in STACKS) > 1 and "bias" not in names[-1]
  return leaf.astype(dtype) if is_matrix and "router" not in names else leaf
