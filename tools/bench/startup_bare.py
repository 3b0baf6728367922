"""One training step of the default model in bare JAX, Flax and Optax: the reference of startup.py.

  python tools/bench/startup_bare.py

The same layers, shapes and optimizer as `python -m maxlite.train configs/base.yml`, and what a
script needs at least: no config, data, mesh, log, checkpoint or plot. Layers are a Python loop,
experts `jax.lax.ragged_dot`, attention is written out, and parameters are drawn by one program.
Array names end in their axes: B sequences, T and S positions, D model, H heads, C head channels,
F hidden, E experts, K experts per token, V vocabulary, A assignments of tokens to experts.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

NUM_ROWS = 8
LENGTH = 256
VOCABULARY = 320
WIDTH = 256
NUM_LAYERS = 4
NUM_HEADS = 8
NUM_KV_HEADS = 4
HEAD_DIM = 32
NUM_EXPERTS = 8
EXPERTS_PER_TOKEN = 2
HIDDEN = 384
BALANCE_WEIGHT = 0.01


def rotate(x_BTHC: jax.Array) -> jax.Array:
  """Rotary position embedding."""
  half = HEAD_DIM // 2
  frequency_C = 10000.0 ** (-jnp.arange(half) / half)
  angle_TC = jnp.arange(LENGTH)[:, None] * frequency_C
  sin_T1C = jnp.sin(angle_TC)[:, None, :]
  cos_T1C = jnp.cos(angle_TC)[:, None, :]
  first, second = jnp.split(x_BTHC, 2, axis=-1)
  rotated_first = first * cos_T1C - second * sin_T1C
  rotated_second = second * cos_T1C + first * sin_T1C
  return jnp.concatenate([rotated_first, rotated_second], axis=-1)


class Attention(nn.Module):
  num_kv_heads: int = NUM_KV_HEADS

  @nn.compact
  def __call__(self, x_BTD: jax.Array) -> jax.Array:
    query = nn.DenseGeneral((NUM_HEADS, HEAD_DIM), use_bias=False, name="query")(x_BTD)
    key = nn.DenseGeneral((self.num_kv_heads, HEAD_DIM), use_bias=False, name="key")(x_BTD)
    value = nn.DenseGeneral((self.num_kv_heads, HEAD_DIM), use_bias=False, name="value")(x_BTD)
    heads_per_kv = NUM_HEADS // self.num_kv_heads
    key_BSHC = jnp.repeat(rotate(key), heads_per_kv, axis=2)
    value_BSHC = jnp.repeat(value, heads_per_kv, axis=2)
    logits_BHTS = jnp.einsum("bthc,bshc->bhts", rotate(query), key_BSHC) / HEAD_DIM**0.5
    mask_TS = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
    weights_BHTS = jax.nn.softmax(jnp.where(mask_TS, logits_BHTS, -1e30))
    out_BTHC = jnp.einsum("bhts,bshc->bthc", weights_BHTS, value_BSHC)
    return nn.DenseGeneral(WIDTH, axis=(-2, -1), use_bias=False, name="out")(out_BTHC)


class Experts(nn.Module):
  """Top-k experts without dropped tokens; returns (output, load-balancing loss)."""

  @nn.compact
  def __call__(self, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_TD = x_BTD.reshape(-1, WIDTH)
    num_tokens = x_TD.shape[0]
    logits_TE = nn.Dense(NUM_EXPERTS, use_bias=False, name="router")(x_TD)
    gate_TE = jax.nn.softmax(logits_TE)
    gate_TK, expert_TK = jax.lax.top_k(gate_TE, EXPERTS_PER_TOKEN)
    gate_TK = gate_TK / gate_TK.sum(axis=-1, keepdims=True)
    expert_A = expert_TK.reshape(-1)
    order_A = jnp.argsort(expert_A)
    size_E = jnp.bincount(expert_A, length=NUM_EXPERTS)
    init = nn.initializers.lecun_normal(batch_axis=0)
    wi_0_EDF = self.param("wi_0", init, (NUM_EXPERTS, WIDTH, HIDDEN))
    wi_1_EDF = self.param("wi_1", init, (NUM_EXPERTS, WIDTH, HIDDEN))
    wo_EFD = self.param("wo", init, (NUM_EXPERTS, HIDDEN, WIDTH))
    x_AD = x_TD[order_A // EXPERTS_PER_TOKEN]
    gate_AF = jax.nn.silu(jax.lax.ragged_dot(x_AD, wi_0_EDF, size_E))
    up_AF = jax.lax.ragged_dot(x_AD, wi_1_EDF, size_E)
    y_AD = jax.lax.ragged_dot(gate_AF * up_AF, wo_EFD, size_E)
    y_AD = y_AD * gate_TK.reshape(-1)[order_A][:, None]
    y_TD = jnp.zeros_like(x_TD).at[order_A // EXPERTS_PER_TOKEN].add(y_AD)
    share_E = size_E / (num_tokens * EXPERTS_PER_TOKEN)
    balance = NUM_EXPERTS * jnp.sum(share_E * gate_TE.mean(axis=0))
    return y_TD.reshape(x_BTD.shape), balance


class Decoder(nn.Module):
  """Returns (logits, load-balancing loss of all layers)."""

  @nn.compact
  def __call__(self, tokens_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_BTD = nn.Embed(VOCABULARY, WIDTH)(tokens_BT)
    balance = jnp.zeros(())
    for _ in range(NUM_LAYERS):
      x_BTD = x_BTD + Attention()(nn.RMSNorm()(x_BTD))
      y_BTD, of_layer = Experts()(nn.RMSNorm()(x_BTD))
      x_BTD = x_BTD + y_BTD
      balance = balance + of_layer
    logits_BTV = nn.Dense(VOCABULARY, use_bias=False, name="unembed")(nn.RMSNorm()(x_BTD))
    return logits_BTV, balance


MODEL = Decoder()
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(2e-3, weight_decay=0.1))


@jax.jit
def init(seed: jax.Array) -> tuple[dict, optax.OptState]:
  tokens_BT = jnp.zeros((NUM_ROWS, LENGTH), jnp.int32)
  params = MODEL.init(jax.random.key(seed), tokens_BT)["params"]
  return params, TX.init(params)


def loss_of(params: dict, tokens_BT: jax.Array, targets_BT: jax.Array) -> jax.Array:
  logits_BTV, balance = MODEL.apply({"params": params}, tokens_BT)
  losses_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, targets_BT)
  return losses_BT.mean() + BALANCE_WEIGHT * balance


@jax.jit
def train_step(
  params: dict, opt_state: optax.OptState, tokens_BT: jax.Array, targets_BT: jax.Array
) -> tuple[dict, optax.OptState, jax.Array]:
  loss, gradients = jax.value_and_grad(loss_of)(params, tokens_BT, targets_BT)
  updates, opt_state = TX.update(gradients, opt_state, params)
  return optax.apply_updates(params, updates), opt_state, loss


def main() -> int:
  params, opt_state = init(np.uint32(0))
  num_parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
  print(f"{num_parameters:,} parameters")
  tokens = np.random.default_rng(0).integers(0, VOCABULARY, (NUM_ROWS, LENGTH + 1), np.int32)
  params, opt_state, loss = train_step(params, opt_state, tokens[:, :-1], tokens[:, 1:])
  print(f"step 1 loss {float(loss):.4f}")
  return 0


if __name__ == "__main__":
  sys.exit(main())
