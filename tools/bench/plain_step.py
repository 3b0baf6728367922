"""A whole training step of the dense model of step.py in bare Flax and Optax: a reference.

What a step needs at least, written as one would write it for one device: no config, mesh,
documents, padding, metrics or log. Attention is that of startup_bare.py.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from startup_bare import Attention

from maxlite.config import Config
from maxlite.config.schema import ModelConfig


class DenseDecoder(nn.Module):
  """Returns logits. Array names end in their axes: B sequences, T positions, D model, F hidden."""

  model: ModelConfig

  @nn.compact
  def __call__(self, tokens_BT: jax.Array) -> jax.Array:
    width = self.model.base_emb_dim
    hidden = self.model.base_mlp_dim
    x_BTD = nn.Embed(self.model.vocab_size, width)(tokens_BT)
    for _ in range(self.model.base_num_decoder_layers):
      attention = Attention(self.model.base_num_kv_heads)
      x_BTD = x_BTD + attention(nn.RMSNorm()(x_BTD))
      normed_BTD = nn.RMSNorm()(x_BTD)
      gate_BTF = nn.Dense(hidden, use_bias=False)(normed_BTD)
      up_BTF = nn.Dense(hidden, use_bias=False)(normed_BTD)
      down = nn.Dense(width, use_bias=False)
      x_BTD = x_BTD + down(nn.silu(gate_BTF) * up_BTF)
    unembed = nn.Dense(self.model.vocab_size, use_bias=False)
    return unembed(nn.RMSNorm()(x_BTD))


def whole_step(cfg: Config) -> Callable[[], None]:
  """A function that takes one step on random tokens and waits for its results."""
  decoder = DenseDecoder(cfg.model)
  clip = optax.clip_by_global_norm(cfg.optimizer.gradient_clipping_threshold)
  optimizer = optax.chain(clip, optax.adamw(1e-3, weight_decay=0.1))
  shape = (int(cfg.data.per_device_batch_size), cfg.data.max_target_length)
  rng = np.random.default_rng(0)
  tokens_BT = jnp.asarray(rng.integers(0, cfg.model.vocab_size, shape), jnp.int32)
  targets_BT = jnp.roll(tokens_BT, -1, axis=1)
  params = decoder.init(jax.random.key(0), tokens_BT)
  opt_state = optimizer.init(params)

  def loss_of(params: dict) -> jax.Array:
    logits_BTV = decoder.apply(params, tokens_BT)
    losses_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, targets_BT)
    return losses_BT.mean()

  def step(params: dict, opt_state: optax.OptState) -> tuple[dict, optax.OptState]:
    gradients = jax.grad(loss_of)(params)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  compiled = jax.jit(step, donate_argnums=(0, 1))

  def run() -> None:
    nonlocal params, opt_state
    params, opt_state = compiled(params, opt_state)
    jax.block_until_ready((params, opt_state))

  return run
