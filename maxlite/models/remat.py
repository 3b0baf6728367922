"""Rematerialization: which activations the forward pass saves."""

from typing import Any

import jax
from flax import linen as nn

from maxlite.config.schema import ModelConfig
from maxlite.sharding import Sharder
from maxlite.sharding.host_memory import HOST_MEMORY

# Saved by remat_policy=minimal and offload. moe_route and moe_rows are not matmul outputs; moe_rows
# is as large as mlpwo. Both are saved only by remat_policy=custom.
MATMUL_OUTPUTS = (
  "query_latent",
  "kv_latent",
  "query_proj",
  "key_proj",
  "value_proj",
  "attention_out",
  "out_proj",
  "router_logits",
  "mlpwi",
  "mlpwo",
)


def saved_by_remat(cfg: ModelConfig) -> tuple[str, ...] | None:
  """Names of the activations that the forward pass saves; None: all of them."""
  if cfg.remat_policy == "none":
    return None
  if cfg.remat_policy == "full":
    return ()
  if cfg.remat_policy == "custom":
    return cfg.remat_saved_names
  return MATMUL_OUTPUTS


def remat(layer: type[nn.Module], cfg: ModelConfig, sharder: Sharder) -> type[nn.Module]:
  """`layer` with rematerialization by cfg.remat_policy."""
  names = saved_by_remat(cfg)
  if names is None:
    return layer
  if cfg.remat_policy == "offload":
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
      names_which_can_be_saved=[],
      names_which_can_be_offloaded=list(names),
      offload_src="device",
      offload_dst=HOST_MEMORY,
    )
  else:
    policy = jax.checkpoint_policies.save_only_these_names(*names)
  # Passed on to jax.checkpoint, which also takes a tuple; Flax's type is older.
  prevent_cse: Any = _prevent_cse(cfg, sharder)
  return nn.remat(layer, policy=policy, prevent_cse=prevent_cse)


def _prevent_cse(cfg: ModelConfig, sharder: Sharder) -> bool | tuple[bool, ...]:
  """Whether XLA must not reuse the forward pass in the backward pass; or which inputs prevent it.

  In a loop it cannot. GPUs unroll the scan. There, weights that no device gathers are excepted:
  their casts to the type of activations are reused, and slices of stacked weights are not copied.
  """
  if cfg.scan_layers and sharder.platform != "gpu":
    return False
  if cfg.scan_layers and sharder.num_shards("embed") == 1:
    variables, keys, x_BTD, inputs = False, False, True, False
    return variables, keys, x_BTD, inputs
  return True
