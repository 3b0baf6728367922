"""The decoder layer that all families share; each says in what its own differs."""

from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from maxlite.config.schema import ModelConfig
from maxlite.layers.attention import Attention
from maxlite.layers.mla import LatentAttention
from maxlite.layers.mlp import MLP
from maxlite.layers.moe.block import MoeBlock
from maxlite.layers.norm import RMSNorm
from maxlite.layers.rope import score_factor
from maxlite.parallel import Sharder


class Block(nn.Module):
  """(y_BTD, sums): attention, then an MLP or (`moe`) a mixture of experts, each after a norm.

  `sums` is {"moe": RouterSums} of a mixture and {} of an MLP.
  """

  cfg: ModelConfig
  sharder: Sharder
  moe: bool
  is_moe: ClassVar[bool] = True  # whether the family's layers, but for the dense ones, are mixtures
  latent_attention: ClassVar[bool] = False
  qk_norm: ClassVar[str] = ""  # as of layers/attention.py

  @classmethod
  def num_rope_channels(cls, cfg: ModelConfig) -> int:
    """Channels of a head that are rotated."""
    return cfg.mla.qk_rope_head_dim if cls.latent_attention else cfg.head_dim

  @nn.compact
  def __call__(
    self, x_BTD: jax.Array, segment_BT: jax.Array, rope: tuple[jax.Array, jax.Array]
  ) -> tuple[jax.Array, dict]:
    attention = self._latent_attention() if self.latent_attention else self._attention()
    x_BTD += attention(self._norm("attention_norm")(x_BTD), segment_BT, rope)
    cfg, weight_dtype = self.cfg, jnp.dtype(self.cfg.weight_dtype)
    if not self.moe:
      mlp = MLP(
        cfg.base_mlp_dim,
        cfg.mlp_activations,
        weight_dtype,
        self.sharder,
        lora=cfg.lora,
        name="mlp",
      )
      return x_BTD + mlp(self._norm("mlp_norm")(x_BTD)), {}
    moe = MoeBlock(cfg.moe, cfg.mlp_activations, weight_dtype, self.sharder, cfg.lora, name="moe")
    y_BTD, sums = moe(self._norm("moe_norm")(x_BTD), segment_BT)
    return x_BTD + y_BTD, {"moe": sums}

  def _attention(self) -> Attention:
    cfg = self.cfg
    return Attention(
      cfg.base_num_query_heads,
      cfg.base_num_kv_heads,
      cfg.head_dim,
      cfg.head_dim**-0.5 * score_factor(cfg.rope),
      self.qk_norm,
      cfg.normalization_layer_epsilon,
      cfg.attention,
      cfg.attention_block_q,
      jnp.dtype(cfg.weight_dtype),
      self.sharder,
      cfg.lora,
      name="attention",
    )

  def _latent_attention(self) -> LatentAttention:
    cfg = self.cfg
    channels = cfg.mla.qk_nope_head_dim + cfg.mla.qk_rope_head_dim
    return LatentAttention(
      cfg.mla,
      cfg.base_num_query_heads,
      channels**-0.5 * score_factor(cfg.rope),
      cfg.attention,
      cfg.attention_block_q,
      jnp.dtype(cfg.weight_dtype),
      self.sharder,
      cfg.lora,
      name="attention",
    )

  def _norm(self, name: str) -> RMSNorm:
    cfg = self.cfg
    return RMSNorm(cfg.normalization_layer_epsilon, jnp.dtype(cfg.weight_dtype), name=name)
