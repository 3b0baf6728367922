"""Convert a trained model for generation: its config, layout and parameters."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.tree_util import KeyPath

from maxlite.config.schema import ModelConfig
from maxlite.errors import UserError
from maxlite.layers.lora import merge_lora
from maxlite.layers.transposed_linear import TRANSPOSED, TransposedLinear
from maxlite.models import Decoder
from maxlite.models.layer_stacks import layer_stacks
from maxlite.optim.labels import path_of
from maxlite.sharding import Sharder
from maxlite.sharding.pytree import PyTree

NOT_TRANSPOSED = (
  "kv_up",
  "router",
  "unembed",
  "draft_head",
  "indexer",
)  # with readers other than `Linear`


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
  inference_cfg = dataclasses.replace(
    cfg,
    moe=dataclasses.replace(
      cfg.moe,
      capacity_factor=-1.0,
      ragged_buffer_factor=-1.0,
      router_jitter=0.0,
    ),
    lora=dataclasses.replace(cfg.lora, lora_rank=0),
    scan_layers=False,
    remat_policy="none",
    quantization="",
  )
  linear = None
  if _transposes_kernels(cfg):
    linear = TransposedLinear
  return Decoder(inference_cfg, sharder, linear)


def inference_params(cfg: ModelConfig, params: PyTree) -> PyTree:
  """Convert `params` of a model of `cfg` to parameters of `inference_model`.

  Adapters are merged, stacked layers are unstacked, and matrices are cast to the activation dtype,
  as each use would cast them; routers and indexers, which may compute in another dtype, keep their
  own. On CPU, float32 kernels are transposed (`matmul_few_rows`).
  """
  if cfg.lora.lora_rank:
    params = merge_lora(params, cfg.lora.lora_alpha)
  params = _cast_matrices(cfg, params)
  if cfg.scan_layers:
    params = unstack_layers(cfg, params)
  if _transposes_kernels(cfg):
    params = _transpose(params)
  return params


def _cast_matrices(cfg: ModelConfig, params: PyTree) -> PyTree:
  """Cast the matrices of all modules except routers and indexers to the activation dtype."""
  dtype = jnp.dtype(cfg.dtype)
  stacks = {stack.name for stack in layer_stacks(cfg)}

  def cast(key_path: KeyPath, leaf: jax.Array) -> jax.Array:
    names = path_of(key_path).split("/")
    num_axes = leaf.ndim
    if cfg.scan_layers and names[0] in stacks:
      num_axes -= 1
    is_vector = num_axes <= 1 or names[-1] == "scale"  # of a norm over several axes
    if is_vector or "bias" in names[-1] or {"router", "indexer"} & set(names):
      return leaf
    return leaf.astype(dtype)

  return jax.tree_util.tree_map_with_path(cast, params)


def unstack_layers(cfg: ModelConfig, params: PyTree) -> PyTree:
  """Parameters of scanned layers as parameters of separate layers."""
  stacks = [stack.name for stack in layer_stacks(cfg)]
  unstacked: dict[str, PyTree] = {}
  for name, module in params.items():
    if name not in stacks:
      unstacked[name] = module
  for name in stacks:
    leaves, structure = jax.tree.flatten(params[name])
    leaves_by_layer = zip(*map(jnp.unstack, leaves), strict=True)
    for index, layer in enumerate(leaves_by_layer):
      unstacked[f"{name}_{index}"] = jax.tree.unflatten(structure, layer)
  return unstacked


def _transposes_kernels(cfg: ModelConfig) -> bool:
  """Whether decoding is faster with transposed kernels (layers/transposed_linear.py)."""
  return jax.default_backend() == "cpu" and cfg.dtype == "float32"


def _transpose(params: PyTree, name: str = "") -> PyTree:
  """Transpose the kernels of the module `name`, and of the modules in it."""
  if not isinstance(params, Mapping):
    return params
  if name in NOT_TRANSPOSED:
    return params
  if "kernel" not in params:
    return {child: _transpose(node, child) for child, node in params.items()}
  transposed: dict[str, PyTree] = {}
  for child, leaf in params.items():
    if child != "kernel":
      transposed[child] = leaf
  num_in = 2 if name == "out" else 1  # contracted axes
  kernel = params["kernel"]
  transposed[TRANSPOSED] = jnp.moveaxis(kernel, range(num_in), range(-num_in, 0))
  return transposed
