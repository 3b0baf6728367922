"""A tiny decoder with slots for adapters, and random data for every loss."""

import math

import jax
import numpy as np
from flax.linen import meta
from flax.traverse_util import flatten_dict, unflatten_dict

from maxlite.adapters.datum import MIN_LENGTH, NEEDS, Datum
from maxlite.adapters.engine import AdapterEngine
from maxlite.config.schema import DEFAULTS, Config, build
from maxlite.models import Decoder
from maxlite.optim.labels import logical_names
from maxlite.sharding import MESH_AXES, Sharder, build_mesh

VOCAB = 48
MAX_RANK = 4
KEYS = {
  "decoder_block": "llama",
  "vocab_size": VOCAB,
  "base_emb_dim": 16,
  "base_num_decoder_layers": 2,
  "base_num_query_heads": 4,
  "base_num_kv_heads": 2,
  "head_dim": 4,
  "base_mlp_dim": 32,
  "dtype": "float32",
}
MIXTURE = {
  "decoder_block": "mixtral",
  "num_experts": 4,
  "base_moe_mlp_dim": 8,
  "sparse_matmul": False,
}


def model_of(**keys):
  """(config of the model, sharder, parameters) of a random base; drawing them compiles nothing."""
  return model_on({}, **keys)


def model_on(mesh, **keys):
  """As `model_of`, on a mesh with these degrees."""
  cfg = build(Config, DEFAULTS | KEYS | keys).model
  degrees = tuple(mesh.get(axis, 1) for axis in MESH_AXES)
  devices = jax.devices()[: math.prod(degrees)]
  sharder = Sharder(build_mesh(degrees, (1,) * len(MESH_AXES), devices))
  tokens = np.zeros((len(devices), 4), np.int32)
  boxed = jax.eval_shape(Decoder(cfg, sharder).init, jax.random.key(0), tokens)["params"]
  names = flatten_dict(logical_names(boxed))
  rng = np.random.default_rng(3)
  params = {}
  for path, leaf in flatten_dict(meta.unbox(boxed)).items():
    values = np.ones(leaf.shape, np.float32)
    if path[-1] != "scale":
      values = np.float32(rng.normal(size=leaf.shape) / np.sqrt(cfg.base_emb_dim))
    params[path] = jax.device_put(values, sharder.sharding(names[path]))
  return cfg, sharder, unflatten_dict(params)


def engine_of(num_slots=3, max_rank=MAX_RANK, **keys):
  return AdapterEngine(*model_of(**keys), num_slots=num_slots, max_rank=max_rank, max_length=64)


def datum_of(seed, loss="cross_entropy", length=0, **options):
  """Random tokens with all that the loss reads; logprobs are near those of a random model.

  Without `length` it is random, up to the second of the lengths to which rows are padded.
  """
  rng = np.random.default_rng(seed)
  length = length or int(rng.integers(1, 2 * MIN_LENGTH + 1))
  ids = rng.integers(0, VOCAB, (2, length))
  inputs = {}
  for name in NEEDS[loss]:
    inputs[name] = rng.normal(size=length).astype(np.float32)
  if "logprobs" in inputs:
    inputs["logprobs"] = inputs["logprobs"] / 10 - np.float32(np.log(VOCAB))
  if "sequence_ratio_mask" in inputs:
    inputs["sequence_ratio_mask"] = (inputs["sequence_ratio_mask"] > 0).astype(np.float32)
  return Datum(ids[0], ids[1], loss, inputs, options)


def bits_of(tree):
  return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]
