"""Parameter counts, and FLOPs of a training step, from the sizes of the parameters.

`sizes` is the number of elements of every parameter, by path.
"""

import collections
import functools
import itertools
import re
from collections.abc import Collection, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax.linen import meta

from maxlite.config.schema import ModelConfig
from maxlite.models import Decoder
from maxlite.models.layer_stacks import layer_stacks, mtp_layer_spec
from maxlite.sharding import MESH_AXES, Sharder, build_mesh

BACKWARD_OVER_FORWARD = 2  # the backward pass has two multiplications for each of the forward pass
FLOPS_PER_MAC = 2  # one multiplication, one addition
DRAFTERS = ("draft_head", "mtp")  # which some losses do not use
MATRIX = r".*(/kernel|moe/w[io](_\d)?)"  # paths of matrices that tokens are multiplied with
EXPERT = r".*moe/w[io](_\d)?(_bias)?"


class Flops(NamedTuple):
  """FLOPs of one training step, over all devices.

  Attributes:
    total: all of them.
    attention: the part in attention scores and weighted values.
  """

  total: float
  attention: float


@functools.cache
def parameter_sizes(model: ModelConfig) -> dict[str, int]:
  """{path: number of elements} of a model's parameters, by an abstract initialization."""
  one = (1,) * len(MESH_AXES)
  mesh = build_mesh(one, one, jax.devices()[:1])
  decoder = Decoder(model, Sharder(mesh))
  tokens_BT = jnp.zeros((1, model.num_draft_heads + model.mtp_num_layers + 1), jnp.int32)
  variables = jax.eval_shape(decoder.init, jax.random.key(0), tokens_BT)
  params = meta.unbox(variables)["params"]
  sizes: dict[str, int] = {}
  for key_path, leaf in jax.tree_util.tree_leaves_with_path(params):
    path = jax.tree_util.keystr(key_path, simple=True, separator="/")
    sizes[path] = leaf.size
  return sizes


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
    model: the model's config.
    sizes: the number of elements of every parameter, by path.
    batch_shape: rows and positions of the batch.
    trained: paths of the trained parameters; None for all.
    logits: whether the gradient of the loss flows through the model's own logits.
    drafts: whether the loss uses the draft heads, or the layers of multi-token prediction.
  """
  if trained is None:
    trained = sizes.keys()
  gradients = _GradientFlow(model, trained)
  macs = 0.0
  for path, size in sizes.items():
    module, _, _ = path.partition("/")
    is_read = module != "unembed" and (drafts or module not in DRAFTERS)
    if is_read and re.fullmatch(MATRIX, path):
      backward = gradients.products(gradients.stage_of(path), path in trained)
      macs += (1 + backward) * _active(path, size, model)
  weight = "unembed/kernel"
  if model.logits_via_embedding:
    weight = "embed/embedding"
  # A trained embedding makes all later layers need gradients, but its lookup is not a product.
  products = 1
  if logits:
    others = [path for path in trained if path.partition("/")[0] not in DRAFTERS]
    products += _GradientFlow(model, others).products("unembed", weight in trained)
  if drafts:
    backward = gradients.products("unembed", weight in trained)
    products += (model.num_draft_heads + model.mtp_num_layers) * (1 + backward)
  macs += products * model.vocab_size * model.base_emb_dim
  rows, row_length = batch_shape
  macs += _mixer_macs_per_token(model, row_length, gradients, is_recurrent=True)
  flops_per_mac = FLOPS_PER_MAC * rows * row_length
  attention = _mixer_macs_per_token(model, row_length, gradients, is_recurrent=False)
  attention *= flops_per_mac
  if drafts and model.mtp_num_layers:
    mixer = mtp_layer_spec(model).mixer
    per_layer = mixer.macs_per_token(row_length) * gradients.passes("mtp")
    attention += flops_per_mac * model.mtp_num_layers * per_layer
  return Flops(flops_per_mac * macs + attention, attention)


class _GradientFlow:
  """Through which modules the gradients of a loss flow back to the parameters `trained`."""

  def __init__(self, model: ModelConfig, trained: Collection[str]):
    self._stacks = [stack.name for stack in layer_stacks(model)]
    # In forward order; an unscanned stack includes its numbered layers.
    outer = ("final_norm", "draft_head", "mtp", "unembed", "unembed_bias")
    self._stages = ["embed", "position_embed", "per_layer_embed", *self._stacks, *outer]
    trained_stages = (self._stages.index(self.stage_of(path)) for path in trained)
    self._first = min(trained_stages, default=len(self._stages))

  def stage_of(self, path: str) -> str:
    """The module that a parameter belongs to."""
    module, _, _ = path.partition("/")
    if module in self._stages:
      return module
    return re.sub(r"_\d+$", "", module)

  def reaches_input_of(self, stage: str) -> bool:
    """Whether gradients flow to the input of a stage; in a stack they flow through all layers."""
    index = self._stages.index(stage)
    if stage in self._stacks or stage == "mtp":
      return self._first <= index
    return self._first < index

  def products(self, stage: str, is_trained: bool) -> int:
    """Products of a matrix in the backward pass: for its input's gradient, and for its own."""
    return int(self.reaches_input_of(stage)) + int(is_trained)

  def passes(self, stage: str) -> int:
    """Forward passes that have as many products without parameters as the stage in a step."""
    if self.reaches_input_of(stage):
      return 1 + BACKWARD_OVER_FORWARD
    return 1


def _mixer_macs_per_token(
  model: ModelConfig, row_length: int, gradients: _GradientFlow, *, is_recurrent: bool
) -> float:
  """Products of mixers without parameters, over all layers.

  Those of attention are of queries with keys, and of scores with values.
  """
  total = 0.0
  for stack in layer_stacks(model):
    parts = itertools.chain(*(layer.mixer.parts for layer in stack.layers))
    counts = collections.Counter(part for part in parts if part.is_recurrent == is_recurrent)
    forward = sum(n * mixer.macs_per_token(row_length) for mixer, n in counts.items())
    total += forward * gradients.passes(stack.name)
  return total


def _active(path: str, size: int, model: ModelConfig) -> int:
  """Elements of a parameter that each token uses."""
  if not re.fullmatch(EXPERT, path):
    return size
  return size * model.moe.num_experts_per_tok // model.moe.num_experts
