"""Parameter counts, and FLOPs of a training step, from the sizes of the parameters.

`sizes` is the number of elements of every parameter, by path.
"""

import functools
import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax.linen import meta

from maxlite.config.schema import ModelConfig
from maxlite.models import Decoder
from maxlite.sharding import MESH_AXES, Sharder, build_mesh

BACKWARD_OVER_FORWARD = 2  # the backward pass has two multiplications for each of the forward pass
FLOPS_PER_MAC = 2  # one multiplication, one addition
# In forward order; an unscanned stack includes its numbered layers.
STAGES = ("embed", "dense_layers", "layers", "final_norm", "draft_head", "unembed")
STACKS = ("dense_layers", "layers")
MATRIX = r".*(/kernel|moe/w[io](_\d)?)"  # paths of matrices that tokens are multiplied with
EXPERT = r".*moe/w[io](_\d)?(_bias)?"


class Flops(NamedTuple):
  """FLOPs of one training step, over all devices."""

  total: float
  attention: float  # the part of `total` in attention scores and weighted values


@functools.cache
def parameter_sizes(model: ModelConfig) -> dict[str, int]:
  """`sizes` of a model, by an abstract initialization."""
  one = (1,) * len(MESH_AXES)
  decoder = Decoder(model, Sharder(build_mesh(one, one, jax.devices()[:1])))
  tokens_BT = jnp.zeros((1, model.num_draft_heads + 1), jnp.int32)
  variables = jax.eval_shape(decoder.init, jax.random.key(0), tokens_BT)
  leaves = jax.tree_util.tree_leaves_with_path(meta.unbox(variables)["params"])
  path_of = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
  return {path_of(key_path): leaf.size for key_path, leaf in leaves}


def active_parameter_count(sizes: Mapping[str, int], model: ModelConfig) -> int:
  """Number of parameters used per token: all except the experts that are not chosen."""
  return sum(_active(path, size, model) for path, size in sizes.items())


def train_flops(
  model: ModelConfig,
  sizes: Mapping[str, int],
  batch_shape: tuple[int, int],
  trained: Collection[str] | None = None,
  *,
  logits: bool = True,
  drafts: bool = False,
) -> Flops:
  """FLOPs of one step on a batch [rows, row length] that trains the parameters `trained`.

  Counts the matmuls: projections, MLP or active experts, router and logits (tied or not), and
  causal attention at half of its square, less what sliding windows exclude. Does not count the
  embedding lookup, elementwise operations and rematerialization. A matrix has a forward product,
  one for its gradient if it is trained, and one for the gradient of its input if that depends on a
  trained parameter. Gradients flow through frozen layers: all layers of a stack need them if
  anything in the stack or before it is trained.

  Args:
    trained: paths; None: all.
    logits: whether the gradient of the loss flows through the model's own logits.
    drafts: whether the loss uses the draft heads.
  """
  trained = sizes.keys() if trained is None else trained
  first = min(map(_stage, trained))
  unread = ("unembed",) if drafts else ("unembed", "draft_head")
  macs = 0
  for path, size in sizes.items():
    if re.fullmatch(MATRIX, path) and path.split("/")[0] not in unread:
      passes = 1 + _needs_input_gradient(STAGES[_stage(path)], first) + (path in trained)
      macs += passes * _active(path, size, model)
  weight = "embed/embedding" if model.logits_via_embedding else "unembed/kernel"
  # A trained embedding makes all later layers need gradients, but its lookup is not a product.
  backward = _needs_input_gradient("unembed", first) + (weight in trained)
  passes = 1 + logits * backward + drafts * model.num_draft_heads * (1 + backward)
  macs += passes * model.vocab_size * model.base_emb_dim
  flops_per_mac = FLOPS_PER_MAC * batch_shape[0] * batch_shape[1]
  attention = flops_per_mac * _attention_macs_per_token(model, batch_shape[1], first)
  return Flops(flops_per_mac * macs + attention, attention)


def _attention_macs_per_token(model: ModelConfig, row_length: int, first: int) -> float:
  """Products of queries with keys, and of scores with values, over all layers."""
  mla, num_layers = model.mla, model.base_num_decoder_layers
  channels = 2 * model.head_dim
  if model.family.latent_attention:
    channels = mla.qk_nope_head_dim + mla.qk_rope_head_dim + mla.v_head_dim
  every = model.family.global_layer_every
  num_local = num_layers - (num_layers // every if every else 0)
  window = min(model.sliding_window_size or row_length, row_length)
  hidden = (row_length - window) ** 2 / (2 * row_length)  # mean number of keys outside the window
  keys_per_query = num_layers * row_length / 2 - num_local * hidden  # summed over layers
  dense = model.layer_plan[0] / num_layers
  needed = sum(
    share * _needs_input_gradient(stack, first)
    for stack, share in zip(STACKS, (dense, 1 - dense), strict=True)
  )
  forward = model.base_num_query_heads * channels * keys_per_query
  return forward * (1 + BACKWARD_OVER_FORWARD * needed)


def _stage(path: str) -> int:
  return STAGES.index(re.sub(r"_\d+$", "", path.split("/", maxsplit=1)[0]))


def _needs_input_gradient(stage: str, first: int) -> bool:
  index = STAGES.index(stage)
  return first < index or (stage in STACKS and first == index)


def _active(path: str, size: int, model: ModelConfig) -> int:
  """Elements of a parameter that each token uses."""
  moe = model.moe
  is_expert = re.fullmatch(EXPERT, path)
  return size * moe.num_experts_per_tok // moe.num_experts if is_expert else size
