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
  params = {name: value.detach() for name, value in stacked.items()}
  adam = StackedAdam(params, rates)
  inputs = torch.tensor(x)
  targets = torch.tensor(y)
  if not targets.is_floating_point():
    inputs = inputs.long()
    targets = targets.long()

  def loss(params: dict, buffers: dict) -> torch.Tensor:
    outputs = functional_call(models[0], (params, buffers), (inputs,))
    if targets.is_floating_point():
      return torch.mean((outputs - targets) ** 2)
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())

  gradients_and_losses = vmap(grad_and_value(loss))

  @torch.no_grad()
  def run() -> torch.Tensor:
    for _ in range(num_steps):
      gradients, loss_Z = gradients_and_losses(params, buffers)
      adam.update(gradients)
    return loss_Z

  return run


class StackedAdam:
  """Adam for stacked parameters, which it updates in place, with a learning rate per member."""

  def __init__(
    self,
    params: dict[str, torch.Tensor],
    rates: Sequence[float],
  ) -> None:
    self._params = params
    self._first = {name: torch.zeros_like(value) for name, value in params.items()}
    self._second = {name: torch.zeros_like(value) for name, value in params.items()}
    self._rate_Z = torch.tensor(rates)
    self._count = 0

  def update(self, gradients: dict[str, torch.Tensor]) -> None:
    """Take a step."""
    self._count += 1
    rate_Z = self._rate_Z / (1 - B1**self._count)
    for name, gradient in gradients.items():
      first = self._first[name]
      second = self._second[name]
      first.lerp_(gradient, 1 - B1)
      second.mul_(B2).addcmul_(gradient, gradient, value=1 - B2)
      root = (second / (1 - B2**self._count)).sqrt_().add_(EPS)
      own_axes = [1] * (gradient.ndim - 1)
      rate = rate_Z.view([-1, *own_axes])
      self._params[name] -= rate * first / root


def mlp(sizes: Sequence[int]) -> nn.Module:
  """Linear layers of these sizes, with a ReLU between each two."""
  layers: list[nn.Module] = []
  for num_in, num_out in itertools.pairwise(sizes):
    layers += [nn.Linear(num_in, num_out), nn.ReLU()]
  return nn.Sequential(*layers[:-1])


class Decoder(nn.Module):
  """`TinyDecoder` of ensemble.py."""

  def __init__(
    self,
    vocab_size: int,
    width: int,
    depth: int,
    num_heads: int,
  ) -> None:
    super().__init__()
    self.embed = nn.Embedding(vocab_size, width)
    layers = [DecoderLayer(width, num_heads) for _ in range(depth)]
    self.layers = nn.ModuleList(layers)
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
    self.attention_norm = nn.RMSNorm(width)
    self.mlp_norm = nn.RMSNorm(width)
    self.qkv = nn.Linear(width, 3 * width, bias=False)
    self.out = nn.Linear(width, width, bias=False)
    self.mlp_in = nn.Linear(width, 4 * width, bias=False)
    self.mlp_out = nn.Linear(4 * width, width, bias=False)

  def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
    qkv_BTF = self.qkv(self.attention_norm(x_BTD))
    q_BTF, k_BTF, v_BTF = qkv_BTF.chunk(3, dim=-1)
    q_BHTC = self._split_heads(q_BTF)
    k_BHSC = self._split_heads(k_BTF)
    v_BHSC = self._split_heads(v_BTF)
    # The fused attention has no batching rule.
    *_, length, num_channels = q_BHTC.shape
    scores_BHTS = q_BHTC @ k_BHSC.mT / num_channels**0.5
    hidden_TS = torch.ones((length, length), dtype=torch.bool).triu(1)
    share_BHTS = scores_BHTS.masked_fill(hidden_TS, float("-inf")).softmax(-1)
    o_BHTC = share_BHTS @ v_BHSC
    o_BTF = o_BHTC.transpose(1, 2).flatten(2)
    x_BTD = x_BTD + self.out(o_BTF)
    h_BTF = self.mlp_in(self.mlp_norm(x_BTD))
    return x_BTD + self.mlp_out(nn.functional.silu(h_BTF))

  def _split_heads(self, x_BTF: torch.Tensor) -> torch.Tensor:
    x_BTHC = x_BTF.unflatten(-1, (self.num_heads, -1))
    return x_BTHC.transpose(1, 2)
