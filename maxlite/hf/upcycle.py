"""A mixture of experts that starts as the dense model it is made of.

Every expert is a copy of the dense MLP, and the chosen experts' weights sum to one, so that the
layer computes what the MLP did, whichever experts a token goes to. The router is drawn at random:
experts see different tokens from the first step on and grow apart.

Source: Komatsuzaki et al., Sparse Upcycling (2022), section 3.
"""

import functools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from maxlite.checkpoint.chunked_array import ChunkedArray, Index
from maxlite.checkpoint.parameters import StoredParameters
from maxlite.config import Config, load_config
from maxlite.config.errors import UserError
from maxlite.config.raw_values import show
from maxlite.config.schema import flatten
from maxlite.hf.hf_config import EXECUTION

# decoder_block of the dense model: that of the mixture, and its router.
MIXTURES = {
  "llama": {"decoder_block": "mixtral", "router": "softmax_topk"},
  "qwen3": {"decoder_block": "qwen3_moe", "router": "topk_softmax"},
}
# What makes the weights of the chosen experts sum to one, and nothing else be added.
KEYS = {
  "norm_topk_prob": True,
  "routed_scaling_factor": 1.0,
  "shared_experts": 0,
  "first_num_dense_layers": 0,
  "interleave_moe_layer_step": 1,
  "expert_bias": False,
  "mlp_activations_limit": 0.0,
}
# A mixture's parameter ends so: the dense model's, in the same layer, ends so.
SOURCES = {
  "moe/wi_0": "mlp/wi_0/kernel",
  "moe/wi_1": "mlp/wi_1/kernel",
  "moe/wo": "mlp/wo/kernel",
  "moe_norm/scale": "mlp_norm/scale",
}
EXPERTS = ("moe/wi_0", "moe/wi_1", "moe/wo")
ROUTER = "moe/router/kernel"
FREE = {"num_experts", "num_experts_per_tok"}


def upcycled_config(dense: Config, argv: Sequence[str], run_name: str) -> Config:
  """The config of the mixture, the run `run_name`; `argv` sets keys beyond those of `dense`.

  Raises:
    UserError: the dense model's family has no mixture, or `argv` changes more than experts.
  """
  block = dense.model.decoder_block
  if block not in MIXTURES:
    raise UserError(f"decoder_block={block} cannot be upcycled, only {', '.join(MIXTURES)} can")
  keys = {
    "base_moe_mlp_dim": dense.model.base_mlp_dim,
    "model_name": "",
    **KEYS,
    **MIXTURES[block],
  }
  defaults = flatten(dense) | keys
  cfg = load_config([*argv, f"run_name={run_name}"], defaults=defaults, needs_data=False)
  now, before = flatten(cfg.model), flatten(dense.model) | keys
  for name in set(now) - EXECUTION - FREE:
    if now[name] != before[name]:
      raise UserError(
        f"{name}={show(now[name])}: an upcycled model keeps {name}={show(before[name])}; of what "
        f"shapes the model, {' and '.join(sorted(FREE))} alone are yours to choose"
      )
  return cfg


def upcycled_streams(
  stored: StoredParameters, params: Mapping[str, Any], cfg: Config
) -> dict[str, ChunkedArray]:
  """{path: ChunkedArray} of the mixture's `params`, {path: shape and type}."""
  streams = {}
  for path, leaf in params.items():
    shape, dtype = tuple(leaf.shape), np.dtype(leaf.dtype)
    num_layers = shape[0] if cfg.model.scan_layers and path.startswith("layers/") else 0
    if path.endswith(ROUTER):
      parts = functools.partial(_random, path, shape, dtype, cfg.run.init_weights_seed)
      streams[path] = ChunkedArray(shape, dtype, shape, parts)
    else:
      ours = next((end for end in SOURCES if path.endswith(end)), "")
      source = path.removesuffix(ours) + SOURCES.get(ours, "")
      num_experts = cfg.model.moe.num_experts if ours in EXPERTS else 0
      parts = functools.partial(_copies, stored, source, num_layers, num_experts)
      fixed = (num_layers > 0) + (num_experts > 0)
      streams[path] = ChunkedArray(shape, dtype, (1,) * fixed + shape[fixed:], parts)
  return streams


def _random(
  path: str, shape: tuple[int, ...], dtype: np.dtype, seed: int
) -> Iterator[tuple[Index, np.ndarray]]:
  """A router, small enough to come in one part: normal, of the size that training starts with."""
  draw = np.random.default_rng([seed, zlib.crc32(path.encode())])
  values = draw.normal(0, shape[-2] ** -0.5, shape)
  yield tuple(slice(0, size) for size in shape), values.astype(dtype)


def _copies(
  stored: StoredParameters, source: str, num_layers: int, num_experts: int
) -> Iterator[tuple[Index, np.ndarray]]:
  """The parts of a dense parameter, layer by layer; once for every expert, if there are any."""
  shape = stored.leaves[source]["shape"]
  layers: list[Index] = [(slice(n, n + 1),) for n in range(num_layers)] or [()]
  for layer in layers:
    whole = tuple(slice(0, size) for size in shape[len(layer) :])
    part = stored.read(source, (*layer, *whole))
    if not num_experts:
      yield (*layer, *whole), part
    for e in range(num_experts):
      yield (*layer, slice(e, e + 1), *whole), np.expand_dims(part, len(layer))
