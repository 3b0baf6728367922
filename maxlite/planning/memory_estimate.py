"""Memory of one device in a training step, estimated from shapes without a compiler."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxlite.config.schema import ModelConfig
from maxlite.models import Decoder
from maxlite.optim.labels import merge, split
from maxlite.sharding.host_memory import is_on_host
from maxlite.sharding.logical_axis_rules import Sharder
from maxlite.training.objective import Objective
from maxlite.training.trainer import Trainer

FLOAT32_BYTES = 4


class MemoryEstimate(NamedTuple):
  """Bytes on one device, and in the host's memory for it."""

  parameters: float
  optimizer: float  # and the rest of the state
  saved_activations: float  # for the backward pass, under the model's remat policy
  gradients: float
  layer_activations: float  # of one layer, during its backward pass
  layer_gradients: float  # of the largest of these and of the largest of the model's width: MLPs
  gathered_weights: float  # two kernels of a layer, and the gradient of one before it is scattered
  unembedding: float  # gathered, and its gradient, until it is scattered at the end of the loss
  logits: float  # one chunk, and its gradient
  teacher: float = 0.0  # parameters of the models that a loss follows
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
    return self.parameters + self.optimizer + self.teacher + self.temporaries


class Activation(NamedTuple):
  """One array saved by the forward pass for the backward pass."""

  length: int  # of its leading axis: layers, if they are stacked
  width: int  # of its last axis
  num_bytes: float  # per shard


def estimate_memory(trainer: Trainer, phase: int = 0) -> MemoryEstimate:
  """Estimate the memory of one device in a step of a phase."""
  cfg, state, objective = trainer.cfg, trainer.abstract_state, trainer.objectives[phase]
  model, num_micro = cfg.model, objective.training.gradient_accumulation_steps
  save_all = dataclasses.replace(model, remat_policy="none", remat_saved_names=())
  weight_bytes = jnp.dtype(model.dtype).itemsize
  parameters = bytes_per_device(state.params)
  trained, _ = split(state.params, objective.labels)
  saved, in_layers = (_activations(trainer, objective, each) for each in (model, save_all))
  host_optimizer = bytes_per_device([x for x in jax.tree.leaves(state) if is_on_host(x)])
  saved_bytes, host_activations = sum(activation.num_bytes for activation in saved), 0.0
  if model.remat_policy == "offload":  # on the device are only the inputs of the layers
    full = _activations(trainer, objective, dataclasses.replace(model, remat_policy="full"))
    host_activations = saved_bytes - sum(activation.num_bytes for activation in full)
  num_layers = model.base_num_decoder_layers
  num_stacked = lambda activation: activation.length if model.scan_layers else 1
  largest = max((a.num_bytes / num_stacked(a) for a in in_layers), default=0.0)
  of_model_width = [a for a in in_layers if a.width == model.base_emb_dim]
  largest_of_model_width = max((a.num_bytes / num_stacked(a) for a in of_model_width), default=0.0)
  wide = lambda leaf: leaf.update(dtype=np.promote_types(leaf.dtype, np.float32))
  accumulated = jax.tree.map(wide, trained) if num_micro > 1 else ()
  vocab = model.vocab_size // trainer.sharder.num_shards("vocab")
  tokens = math.prod(objective.batch_shape) // num_token_shards(trainer.sharder)
  return MemoryEstimate(
    parameters=parameters,
    optimizer=bytes_per_device(state) - parameters - host_optimizer,
    saved_activations=saved_bytes - host_activations,
    gradients=bytes_per_device(trained) + bytes_per_device(accumulated),
    layer_activations=sum(activation.num_bytes for activation in in_layers) / num_layers,
    layer_gradients=largest + largest_of_model_width,
    gathered_weights=_largest_kernel(trainer) * (2 * weight_bytes + FLOAT32_BYTES),
    unembedding=model.base_emb_dim * vocab * (weight_bytes + FLOAT32_BYTES),
    logits=2 * FLOAT32_BYTES * min(tokens, cfg.training.logits_chunk_tokens) * vocab,
    teacher=bytes_per_device(trainer.teacher and trainer.teacher.with_params(None, abstract=True)),
    host_optimizer=host_optimizer,
    host_activations=host_activations,
  )


def num_token_shards(sharder: Sharder) -> int:
  """Number of devices that a batch's tokens are divided over."""
  return math.prod(map(sharder.num_shards, ("activation_batch", "activation_length")))


def bytes_per_device(tree: Any) -> int:
  """Bytes on one device of a pytree of ShapeDtypeStructs with shardings."""
  size = lambda leaf: math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
  return sum(map(size, jax.tree.leaves(tree)))


def activations(residuals_of: Callable[[int], Any], rows: int, num_shards: int) -> list[Activation]:
  """The activations that a forward pass over `rows` rows saves for its backward pass.

  Args:
    residuals_of: rows -> pytree of the shapes that are saved. Those that grow with the rows are
      activations, the others weights.
  """
  once, twice = (jax.tree.leaves(residuals_of(n)) for n in (rows, 2 * rows))
  return [
    Activation(
      leaf.shape[0], leaf.shape[-1], (larger.size - leaf.size) * leaf.dtype.itemsize / num_shards
    )
    for leaf, larger in zip(once, twice, strict=True)
    if larger.size > leaf.size
  ]


def _activations(trainer: Trainer, objective: Objective, cfg: ModelConfig) -> list[Activation]:
  """The activations that a model of `cfg` saves on a device for one micro-batch."""
  model = Decoder(cfg, trainer.sharder)
  rows, length = objective.batch_shape

  def residuals_of(rows: int) -> Any:
    tokens_BT = jax.ShapeDtypeStruct((rows, length), jnp.int32)

    def residuals(params: Any, tokens_BT: jax.Array) -> Any:
      inputs = (tokens_BT, tokens_BT, tokens_BT)
      forward = lambda params: model.apply({"params": params}, *inputs, method=model.hidden)[0]
      trained, frozen = split(params, objective.labels)
      return jax.vjp(lambda trained: forward(merge(trained, frozen)), trained)[1]

    return jax.eval_shape(residuals, trainer.abstract_state.params, tokens_BT)

  rows //= objective.training.gradient_accumulation_steps
  return activations(residuals_of, rows, num_token_shards(trainer.sharder))


def _largest_kernel(trainer: Trainer) -> float:
  """Parameters of the largest kernel of a layer on one device after the all-gather over `fsdp`."""
  num_weights = [0.0]
  for parameter in trainer.parameter_shardings:
    stack = parameter.path.split("/")[0]
    if "layers" in stack:
      sharded = [name for name in parameter.names if name not in ("embed", "embed_no_exp")]
      shards = math.prod(map(trainer.sharder.num_shards, sharded))
      shape = parameter.shape[1:] if "layers" in parameter.names else parameter.shape
      num_weights.append(math.prod(shape) / shards)
  return max(num_weights)
