"""Sparse upcycling: initialize a mixture of experts from a dense model.

Every expert is a copy of the dense MLP and the weights of the selected experts sum to one, so the
layer initially computes the same function for any routing. The router is initialized randomly:
experts receive different tokens from the first step and diverge.

Source: Komatsuzaki et al., Sparse Upcycling (2022), section 3.
"""

import functools
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import numpy as np

from maxlite.checkpoint.chunked_array import ChunkedArray, Index, whole
from maxlite.checkpoint.parameters import StoredParameters
from maxlite.config import Config, load_config
from maxlite.config.model_function import EXECUTION
from maxlite.config.raw_values import show
from maxlite.config.schema import flatten
from maxlite.errors import UserError
from maxlite.storage.json_values import JsonObject

# decoder_block of the dense model: decoder_block and router of the mixture.
MIXTURES = {
  "llama": {"decoder_block": "mixtral", "router": "softmax_topk"},
  "qwen3": {"decoder_block": "qwen3_moe", "router": "topk_softmax"},
}
# The weights of the selected experts sum to one, nothing else is added, and adapters are merged.
KEYS = {
  "lora_rank": 0,
  "norm_topk_prob": True,
  "routed_scaling_factor": 1.0,
  "shared_experts": 0,
  "first_num_dense_layers": 0,
  "interleave_moe_layer_step": 1,
  "mlp_only_layers": (),
  "expert_bias": False,
  "mlp_activations_limit": 0.0,
}
# End of the mixture's parameter path: end of the dense model's, in the same layer.
SOURCES = {
  "moe/wi_0": "mlp/wi_0/kernel",
  "moe/wi_1": "mlp/wi_1/kernel",
  "moe/wo": "mlp/wo/kernel",
  "moe_norm/scale": "mlp_norm/scale",
}
EXPERTS = ("moe/wi_0", "moe/wi_1", "moe/wo")
ROUTER = "moe/router/kernel"
FREE = {"num_experts", "num_experts_per_tok"}
Read = Callable[[str, Index], np.ndarray]


def upcycled_config(dense: Config, argv: Sequence[str], run_name: str) -> Config:
  """Return the config of the mixture, with the run name `run_name` and the keys in `argv`.

  Raises:
    UserError: the dense model's family has no mixture, or `argv` changes more than the experts.
  """
  block = dense.model.decoder_block
  if block not in MIXTURES:
    raise UserError(f"decoder_block={block} cannot be upcycled, only {', '.join(MIXTURES)} can")
  keys: JsonObject = {"base_moe_mlp_dim": dense.model.base_mlp_dim, "model_name": ""}
  keys |= KEYS
  keys |= MIXTURES[block]
  defaults = flatten(dense) | keys
  cfg = load_config([*argv, f"--run_name={run_name}"], defaults=defaults, needs_data=False)
  now = flatten(cfg.model)
  before = flatten(dense.model) | keys
  for name in set(now) - EXECUTION - FREE:
    if now[name] != before[name]:
      raise UserError(
        f"{name}={show(now[name])}: an upcycled model keeps {name}={show(before[name])}; of the "
        f"keys that shape the model, only {' and '.join(sorted(FREE))} can be set"
      )
  return cfg


def upcycled_params(
  stored: StoredParameters, read: Read, params: Mapping[str, jax.ShapeDtypeStruct], cfg: Config
) -> dict[str, ChunkedArray]:
  """Return {path: ChunkedArray} for the mixture's `params`, {path: abstract array}.

  `read` reads the parameters in `stored`, with their adapters merged.
  """
  upcycled = {}
  for path, leaf in params.items():
    if path.endswith(ROUTER):
      upcycled[path] = _router(path, leaf, cfg.run.init_weights_seed)
    else:
      upcycled[path] = _copy(path, leaf, stored, read, cfg)
  return upcycled


def _router(path: str, leaf: jax.ShapeDtypeStruct, seed: int) -> ChunkedArray:
  """Return a random router with the shape and type of `leaf`."""
  shape = tuple(leaf.shape)
  dtype = np.dtype(leaf.dtype)
  chunks = functools.partial(_random_router, path, shape, dtype, seed)
  return ChunkedArray(shape, dtype, shape, chunks)


def _copy(
  path: str, leaf: jax.ShapeDtypeStruct, stored: StoredParameters, read: Read, cfg: Config
) -> ChunkedArray:
  """Return the mixture's parameter `path`, copied from the dense model's."""
  shape = tuple(leaf.shape)
  num_layers = 0
  if cfg.model.scan_layers and path.startswith("layers/"):
    num_layers = shape[0]
  suffix = _mixture_suffix(path)
  source = path.removesuffix(suffix) + SOURCES.get(suffix, "")
  num_experts = 0
  if suffix in EXPERTS:
    num_experts = cfg.model.moe.num_experts
  source_shape = tuple(stored.leaves[source]["shape"])
  chunks = functools.partial(_copies, read, source, source_shape, num_layers, num_experts)
  num_stacked = (num_layers > 0) + (num_experts > 0)
  chunk_shape = (1,) * num_stacked + shape[num_stacked:]
  return ChunkedArray(shape, np.dtype(leaf.dtype), chunk_shape, chunks)


def _mixture_suffix(path: str) -> str:
  """Return the end of `path` that SOURCES lists; empty if both models have the same path."""
  for suffix in SOURCES:
    if path.endswith(suffix):
      return suffix
  return ""


def _random_router(
  path: str, shape: tuple[int, ...], dtype: np.dtype, seed: int
) -> Iterator[tuple[Index, np.ndarray]]:
  """Yield a router in one chunk, with the standard deviation of training's initialization."""
  rng = np.random.default_rng([seed, zlib.crc32(path.encode())])
  yield whole(shape), rng.normal(0, shape[-2] ** -0.5, shape).astype(dtype)


def _copies(
  read: Read, source: str, shape: tuple[int, ...], num_layers: int, num_experts: int
) -> Iterator[tuple[Index, np.ndarray]]:
  """Yield a dense parameter layer by layer, repeated for every expert if there are any."""
  layers: list[Index] = [()]
  if num_layers:
    layers = [(slice(n, n + 1),) for n in range(num_layers)]
  for layer in layers:
    rest = whole(shape[len(layer) :])
    part = read(source, (*layer, *rest))
    if not num_experts:
      yield (*layer, *rest), part
    for e in range(num_experts):
      yield (*layer, slice(e, e + 1), *rest), np.expand_dims(part, len(layer))
