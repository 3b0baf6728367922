"""The dense model of step.py in idiomatic eager PyTorch."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from maxlite.config import Config
from maxlite.config.schema import ModelConfig


class Block(nn.Module):
  """Pre-norm attention with rotary positions, and a gated MLP."""

  def __init__(self, cfg: ModelConfig):
    super().__init__()
    width = cfg.base_emb_dim
    heads = cfg.base_num_query_heads * cfg.head_dim
    self.num_heads = cfg.base_num_query_heads
    self.attention_norm = nn.RMSNorm(width, eps=cfg.normalization_layer_epsilon)
    self.mlp_norm = nn.RMSNorm(width, eps=cfg.normalization_layer_epsilon)
    self.query = nn.Linear(width, heads, bias=False)
    self.key = nn.Linear(width, heads, bias=False)
    self.value = nn.Linear(width, heads, bias=False)
    self.out = nn.Linear(heads, width, bias=False)
    self.gate = nn.Linear(width, cfg.base_mlp_dim, bias=False)
    self.up = nn.Linear(width, cfg.base_mlp_dim, bias=False)
    self.down = nn.Linear(cfg.base_mlp_dim, width, bias=False)

  def forward(
    self,
    x_BTD: torch.Tensor,
    cos_TC: torch.Tensor,
    sin_TC: torch.Tensor,
  ) -> torch.Tensor:
    normed_BTD = self.attention_norm(x_BTD)
    q_BHTC = self._split_heads(self.query(normed_BTD))
    k_BHSC = self._split_heads(self.key(normed_BTD))
    v_BHSC = self._split_heads(self.value(normed_BTD))
    q_BHTC = rotate(q_BHTC, cos_TC, sin_TC)
    k_BHSC = rotate(k_BHSC, cos_TC, sin_TC)
    o_BHTC = F.scaled_dot_product_attention(q_BHTC, k_BHSC, v_BHSC, is_causal=True)
    o_BTF = o_BHTC.transpose(1, 2).flatten(-2)
    x_BTD = x_BTD + self.out(o_BTF)
    normed_BTD = self.mlp_norm(x_BTD)
    gate_BTF = F.silu(self.gate(normed_BTD))
    up_BTF = self.up(normed_BTD)
    return x_BTD + self.down(gate_BTF * up_BTF)

  def _split_heads(self, x_BTF: torch.Tensor) -> torch.Tensor:
    x_BTHC = x_BTF.unflatten(-1, (self.num_heads, -1))
    return x_BTHC.transpose(1, 2)


class Decoder(nn.Module):
  """Embedding, blocks, norm and unembedding; returns logits_BTV."""

  def __init__(self, cfg: ModelConfig, length: int):
    super().__init__()
    self.embed = nn.Embedding(cfg.vocab_size, cfg.base_emb_dim)
    blocks = [Block(cfg) for _ in range(cfg.base_num_decoder_layers)]
    self.blocks = nn.ModuleList(blocks)
    self.final_norm = nn.RMSNorm(cfg.base_emb_dim, eps=cfg.normalization_layer_epsilon)
    self.unembed = nn.Linear(cfg.base_emb_dim, cfg.vocab_size, bias=False)
    num_angles = cfg.head_dim // 2
    exponent_C = torch.arange(num_angles) / num_angles
    position_T1 = torch.arange(length)[:, None]
    angle_TC = position_T1 / cfg.rope.rope_max_timescale**exponent_C
    self.cos_TC = angle_TC.cos()
    self.sin_TC = angle_TC.sin()

  def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
    x_BTD = self.embed(tokens_BT)
    for block in self.blocks:
      x_BTD = block(x_BTD, self.cos_TC, self.sin_TC)
    return self.unembed(self.final_norm(x_BTD))


def rotate(
  x: torch.Tensor,
  cos_TC: torch.Tensor,
  sin_TC: torch.Tensor,
) -> torch.Tensor:
  """Rotate the pairs of channels (c, c + C / 2) of queries or keys by their angles."""
  left, right = x.chunk(2, dim=-1)
  rotated = [
    left * cos_TC - right * sin_TC,
    right * cos_TC + left * sin_TC,
  ]
  return torch.cat(rotated, dim=-1)


def torch_step(cfg: Config) -> Callable[[], Any]:
  """A training step of the dense model on one batch: forward, backward, clipping, AdamW."""
  length = cfg.data.max_target_length
  model = Decoder(cfg.model, length)
  optimizer = torch.optim.AdamW(
    model.parameters(),
    lr=cfg.optimizer.learning_rate,
    betas=(cfg.optimizer.adam_b1, cfg.optimizer.adam_b2),
    weight_decay=cfg.optimizer.adam_weight_decay,
  )
  rows = int(cfg.data.per_device_batch_size)
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, cfg.model.vocab_size, (rows, length))
  tokens_BT = torch.from_numpy(tokens)
  targets_BT = tokens_BT.roll(-1, 1)

  def step() -> float:
    optimizer.zero_grad()
    logits_BTV = model(tokens_BT)
    loss = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), cfg.optimizer.gradient_clipping_threshold)
    optimizer.step()
    return loss.item()

  return step
