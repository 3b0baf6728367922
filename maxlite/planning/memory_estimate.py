"""Memory of one device in a training step, estimated from shapes without a compiler."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxlite.config.schema import ModelConfig
from maxlite.models import Decoder
from maxlite.optim.labels import merge, split
from maxlite.sharding.host_memory import is_on_host
from maxlite.sharding.logical_axis_rules import Sharder
from maxlite.sharding.pytree import PyTree
from maxlite.sharding.sharding_report import ParameterSharding
from maxlite.training.feature import abstract_inputs
from maxlite.training.features.teacher import TEACHER
from maxlite.training.program import Objective, Program

FLOAT32_BYTES = 4


class MemoryEstimate(NamedTuple):
  """Bytes on one device, and in the host's memory for it.

  Attributes:
    parameters: the parameters.
    optimizer: the optimizer state, and the rest of the state.
    saved_activations: what the forward pass saves for the backward pass under the remat policy.
    gradients: the gradients, and their sum over micro-batches.
    layer_activations: the activations of one layer during its backward pass.
    layer_gradients: the gradients of the layer's largest activation, and of its largest one that is
      as wide as the model.
    gathered_weights: two kernels of a layer, and the gradient of one before it is scattered.
    unembedding: the gathered unembedding and its gradient until the end of the loss.
    logits: one chunk of logits and its gradient.
    teacher: parameters of the models that a loss follows.
    host_optimizer: the optimizer state in the host's memory.
    host_activations: saved activations in the host's memory.
  """

  parameters: float
  optimizer: float
  saved_activations: float
  gradients: float
  layer_activations: float
  layer_gradients: float
  gathered_weights: float
  unembedding: float
  logits: float
  teacher: float = 0.0
  host_optimizer: float = 0.0
  host_activations: float = 0.0

  @property
  def temporaries(self) -> float:
    """The peak: either in the loss, before the gradients of layers, or in the layers, after it."""
    in_loss = self.unembedding + self.logits
    in_layer = self.layer_activations + self.layer_gradients + self.gathered_weights
    return self.saved_activations + max(in_loss, self.gradients + in_layer)

  @property
  def total(self) -> float:
    """The peak on the device."""
    return self.parameters + self.optimizer + self.teacher + self.temporaries


class Activation(NamedTuple):
  """One array saved by the forward pass for the backward pass.

  Attributes:
    length: size of its leading axis: the number of layers if they are stacked.
    width: size of its last axis.
    num_bytes: bytes per shard.
  """

  length: int
  width: int
  num_bytes: float


def estimate_memory(program: Program, phase: int = 0) -> MemoryEstimate:
  """Estimate the memory of one device in a step of a phase."""
  model = program.spec.model
  state = program.abstract_state
  objective = program.objectives[phase]
  weight_bytes = jnp.dtype(model.dtype).itemsize
  parameters = bytes_per_device(state.params)
  on_host = [leaf for leaf in jax.tree.leaves(state) if is_on_host(leaf)]
  host_optimizer = bytes_per_device(on_host)
  saved_bytes = _total(_activations(program, objective, model))
  host_activations = 0.0
  if model.remat_policy == "offload":  # only the inputs of the layers stay on the device
    full_remat = dataclasses.replace(model, remat_policy="full")
    host_activations = saved_bytes - _total(_activations(program, objective, full_remat))
  save_all = dataclasses.replace(model, remat_policy="none", remat_saved_names=())
  in_layers = _activations(program, objective, save_all)
  layer_bytes = _total(in_layers) / (model.base_num_decoder_layers + model.mtp_num_layers)
  vocab = model.vocab_size // program.sharder.whole_beside_rows("vocab").num_shards("vocab")
  tokens = math.prod(objective.batch_shape) // num_token_shards(program.sharder)
  chunk_tokens = min(tokens, program.spec.training.logits_chunk_tokens)
  return MemoryEstimate(
    parameters=parameters,
    optimizer=bytes_per_device(state) - parameters - host_optimizer,
    saved_activations=saved_bytes - host_activations,
    gradients=_gradient_bytes(state.params, objective),
    layer_activations=layer_bytes,
    layer_gradients=_layer_gradient_bytes(in_layers, model),
    gathered_weights=_largest_kernel(program) * (2 * weight_bytes + FLOAT32_BYTES),
    unembedding=model.base_emb_dim * vocab * (weight_bytes + FLOAT32_BYTES),
    logits=2 * FLOAT32_BYTES * chunk_tokens * vocab,
    teacher=bytes_per_device(abstract_inputs(program.features).get(TEACHER)),
    host_optimizer=host_optimizer,
    host_activations=host_activations,
  )


def _total(activations: Sequence[Activation]) -> float:
  return sum(activation.num_bytes for activation in activations)


def _gradient_bytes(params: PyTree, objective: Objective) -> int:
  """Bytes of the gradients of the trained parameters, and of their sums over micro-batches."""
  trained, _ = split(params, objective.labels)
  num_bytes = bytes_per_device(trained)
  if objective.spec.gradient_accumulation_steps > 1:
    num_bytes += bytes_per_device(jax.tree.map(_at_least_float32, trained))
  return num_bytes


def _at_least_float32(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
  return leaf.update(dtype=np.promote_types(leaf.dtype, np.float32))


def _layer_gradient_bytes(in_layers: Sequence[Activation], model: ModelConfig) -> float:
  """Bytes of the gradients of the largest activation, and of the largest of the model's width."""
  largest = 0.0
  largest_of_model_width = 0.0
  for activation in in_layers:
    num_bytes = activation.num_bytes
    if model.scan_layers:
      num_bytes /= activation.length
    largest = max(largest, num_bytes)
    if activation.width == model.base_emb_dim:
      largest_of_model_width = max(largest_of_model_width, num_bytes)
  return largest + largest_of_model_width


def num_token_shards(sharder: Sharder) -> int:
  """Number of devices that a batch's tokens are divided over."""
  return sharder.num_shards("activation_batch") * sharder.num_shards("activation_length")


def bytes_per_device(tree: PyTree) -> int:
  """Bytes on one device of a pytree of ShapeDtypeStructs with shardings."""
  num_bytes = 0
  for leaf in jax.tree.leaves(tree):
    shard_shape = leaf.sharding.shard_shape(leaf.shape)
    num_bytes += math.prod(shard_shape) * leaf.dtype.itemsize
  return num_bytes


def activations(
  residuals_of: Callable[[int], PyTree], rows: int, num_shards: int
) -> list[Activation]:
  """The activations that a forward pass over `rows` rows saves for its backward pass.

  Args:
    residuals_of: rows -> pytree of the shapes that are saved. Those that grow with the rows are
      activations, the others weights.
    rows: number of rows of a batch.
    num_shards: number of devices that the rows are divided over.
  """
  # Not from `rows` on: with one row per device, some operations save fewer arrays.
  twice = jax.tree.leaves(residuals_of(2 * rows))
  three_times = jax.tree.leaves(residuals_of(3 * rows))
  found: list[Activation] = []
  for leaf, larger in zip(twice, three_times, strict=True):
    if larger.size > leaf.size:
      growth = larger.size - leaf.size
      activation = Activation(
        length=_size_for_rows(leaf.shape[0], larger.shape[0]),
        width=_size_for_rows(leaf.shape[-1], larger.shape[-1]),
        num_bytes=growth * leaf.dtype.itemsize / num_shards,
      )
      found.append(activation)
  return found


def _size_for_rows(twice: int, three_times: int) -> int:
  """The size of an axis for a number of rows, from those for twice and three times as many."""
  if twice == three_times:
    return twice
  return three_times - twice


def _activations(program: Program, objective: Objective, cfg: ModelConfig) -> list[Activation]:
  """The activations that a model of `cfg` saves on a device for one micro-batch."""
  model = Decoder(cfg, program.sharder)
  rows, length = objective.batch_shape
  rows_per_micro = rows // objective.spec.gradient_accumulation_steps

  def residuals(params: PyTree, tokens_BT: jax.Array) -> PyTree:
    trained, frozen = split(params, objective.labels)

    def hidden(trained: PyTree) -> jax.Array:
      variables = {"params": merge(trained, frozen)}
      inputs = (tokens_BT, tokens_BT, tokens_BT)
      x_BTD, _ = model.apply(variables, *inputs, method=model.hidden)
      if not cfg.mtp_num_layers:
        return x_BTD
      y_BTJD, _ = model.apply(variables, x_BTD, *inputs, method=model.mtp_hidden)
      return jnp.concatenate([x_BTD[:, :, None], y_BTJD], axis=2)

    _, backward = jax.vjp(hidden, trained)
    return backward

  def residuals_of(rows: int) -> PyTree:
    tokens_BT = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    return jax.eval_shape(residuals, program.abstract_state.params, tokens_BT)

  return activations(residuals_of, rows_per_micro, num_token_shards(program.sharder))


def _largest_kernel(program: Program) -> float:
  """Parameters of the largest kernel of a layer on one device after the all-gather over `fsdp`."""
  largest = 0.0
  for parameter in program.parameters:
    stack, _, _ = parameter.path.partition("/")
    if "layers" in stack:
      largest = max(largest, _gathered_size(parameter, program.sharder))
  return largest


def _gathered_size(parameter: ParameterSharding, sharder: Sharder) -> float:
  """Elements of a parameter of one layer on one device after the all-gather over `fsdp`."""
  num_shards = 1
  for name in parameter.names:
    if name not in ("embed", "embed_no_exp"):
      num_shards *= sharder.num_shards(name)
  shape = parameter.shape
  if "layers" in parameter.names:
    shape = shape[1:]
  return math.prod(shape) / num_shards
