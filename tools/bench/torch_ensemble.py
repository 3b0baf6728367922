"""The stacked models of ensemble.py with `torch.func`."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, grad_and_value, stack_module_state, vmap

B1, B2, EPS = 0.9, 0.999, 1e-8


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
  params, buffers = stack_module_state(models)
  params = {name: value.detach() for name, value in params.items()}
  first = {name: torch.zeros_like(value) for name, value in params.items()}
  second = {name: torch.zeros_like(value) for name, value in params.items()}
  inputs, targets = torch.tensor(x), torch.tensor(y)
  if not targets.is_floating_point():
    inputs, targets = inputs.long(), targets.long()
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
        first[name].lerp_(gradient, 1 - B1)
        second[name].mul_(B2).addcmul_(gradient, gradient, value=1 - B2)
        root = (second[name] / (1 - B2**count)).sqrt_().add_(EPS)
        rate = (rate_Z / (1 - B1**count)).view(-1, *[1] * (gradient.ndim - 1))
        params[name] -= rate * first[name] / root
    return loss_Z

  return run


def mlp(sizes: Sequence[int]) -> nn.Module:
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
  def __init__(self, width: int, num_heads: int) -> None:
    super().__init__()
    self.num_heads = num_heads
    self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
    self.qkv = nn.Linear(width, 3 * width, bias=False)
    self.out = nn.Linear(width, width, bias=False)
    self.mlp_in = nn.Linear(width, 4 * width, bias=False)
    self.mlp_out = nn.Linear(4 * width, width, bias=False)

  def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
    qkv = self.qkv(self.norms[0](x_BTD)).chunk(3, dim=-1)
    q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in qkv)
    scores_BHTS = q @ k.mT / q.shape[-1] ** 0.5  # the fused attention has no batching rule
    hidden_TS = torch.ones(scores_BHTS.shape[-2:], dtype=torch.bool).triu(1)
    o_BHTC = scores_BHTS.masked_fill(hidden_TS, float("-inf")).softmax(-1) @ v
    x_BTD = x_BTD + self.out(o_BHTC.transpose(1, 2).flatten(2))
    h_BTF = nn.functional.silu(self.mlp_in(self.norms[1](x_BTD)))
    return x_BTD + self.mlp_out(h_BTF)
