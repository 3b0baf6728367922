"""The stacked models of ensemble.py with `torch.func`."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, grad_and_value, stack_module_state, vmap

# Hyperparameters of Adam.
B1 = 0.9
B2 = 0.999
EPS = 1e-8


def stacked_steps(
  build: Callable[[], nn.Module],
  rates: Sequence[float],
  x: np.ndarray,
  y: np.ndarray,
  num_steps: int,
) -> Callable[[], Any]:
  """A function that takes `num_steps` more Adam steps of a member per learning rate.

  The loss is the squared error of numbers `y`, or the cross-entropy of class ids `y`. Adam is
  written out, because `torch.optim` has no learning rate per member.
  """
  models = [build() for _ in rates]
  stacked, buffers = stack_module_state(models)
  params = {}
  first_moments = {}
  second_moments = {}
  for name, value in stacked.items():
    params[name] = value.detach()
    first_moments[name] = torch.zeros_like(value)
    second_moments[name] = torch.zeros_like(value)
  inputs = torch.tensor(x)
  targets = torch.tensor(y)
  if not targets.is_floating_point():
    inputs = inputs.long()
    targets = targets.long()
  rate_Z = torch.tensor(rates)
  count = 0

  def loss(params: dict, buffers: dict) -> torch.Tensor:
    outputs = functional_call(models[0], (params, buffers), (inputs,))
    if targets.is_floating_point():
      return torch.mean((outputs - targets) ** 2)
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())

  gradients_and_losses = vmap(grad_and_value(loss))

  @torch.no_grad()
  def run() -> torch.Tensor:
    nonlocal count
    for _ in range(num_steps):
      count += 1
      gradients, loss_Z = gradients_and_losses(params, buffers)
      for name, gradient in gradients.items():
        first = first_moments[name]
        second = second_moments[name]
        first.lerp_(gradient, 1 - B1)
        second.mul_(B2).addcmul_(gradient, gradient, value=1 - B2)
        root = (second / (1 - B2**count)).sqrt_().add_(EPS)
        own_axes = [1] * (gradient.ndim - 1)
        rate = (rate_Z / (1 - B1**count)).view([-1, *own_axes])
        params[name] -= rate * first / root
    return loss_Z

  return run


def mlp(sizes: Sequence[int]) -> nn.Module:
  """Linear layers of these sizes, with a ReLU between each two."""
  layers: list[nn.Module] = []
  for num_in, num_out in itertools.pairwise(sizes):
    layers += [nn.Linear(num_in, num_out), nn.ReLU()]
  return nn.Sequential(*layers[:-1])


class Decoder(nn.Module):
  """`TinyDecoder` of ensemble.py."""

  def __init__(self, vocab_size: int, width: int, depth: int, num_heads: int) -> None:
    super().__init__()
    self.embed = nn.Embedding(vocab_size, width)
    self.layers = nn.ModuleList(DecoderLayer(width, num_heads) for _ in range(depth))
    self.norm = nn.RMSNorm(width)
    self.unembed = nn.Linear(width, vocab_size, bias=False)

  def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
    x_BTD = self.embed(tokens_BT)
    for layer in self.layers:
      x_BTD = layer(x_BTD)
    return self.unembed(self.norm(x_BTD))


class DecoderLayer(nn.Module):
  """Pre-norm causal attention without positions, and an MLP."""

  def __init__(self, width: int, num_heads: int) -> None:
    super().__init__()
    self.num_heads = num_heads
    self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
    self.qkv = nn.Linear(width, 3 * width, bias=False)
    self.out = nn.Linear(width, width, bias=False)
    self.mlp_in = nn.Linear(width, 4 * width, bias=False)
    self.mlp_out = nn.Linear(4 * width, width, bias=False)

  def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
    qkv_BTF = self.qkv(self.norms[0](x_BTD))
    q_BTF, k_BTF, v_BTF = qkv_BTF.chunk(3, dim=-1)
    q_BHTC = self._split_heads(q_BTF)
    k_BHSC = self._split_heads(k_BTF)
    v_BHSC = self._split_heads(v_BTF)
    # The fused attention has no batching rule.
    scores_BHTS = q_BHTC @ k_BHSC.mT / q_BHTC.shape[-1] ** 0.5
    hidden_TS = torch.ones(scores_BHTS.shape[-2:], dtype=torch.bool).triu(1)
    share_BHTS = scores_BHTS.masked_fill(hidden_TS, float("-inf")).softmax(-1)
    o_BHTC = share_BHTS @ v_BHSC
    x_BTD = x_BTD + self.out(o_BHTC.transpose(1, 2).flatten(2))
    h_BTF = nn.functional.silu(self.mlp_in(self.norms[1](x_BTD)))
    return x_BTD + self.mlp_out(h_BTF)

  def _split_heads(self, x_BTF: torch.Tensor) -> torch.Tensor:
    return x_BTF.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
