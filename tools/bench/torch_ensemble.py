"""The stacked MLPs of ensemble.py with `torch.func`."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.func import functional_call, grad_and_value, stack_module_state, vmap

B1, B2, EPS = 0.9, 0.999, 1e-8


def stacked_steps(
  sizes: Sequence[int], rates: Sequence[float], x_BD: np.ndarray, y_BD: np.ndarray, num_steps: int
) -> Callable[[], Any]:
  """A function that takes `num_steps` more Adam steps of a member per learning rate.

  Adam is written out, because `torch.optim` has no learning rate per member.
  """
  models = [mlp(sizes) for _ in rates]
  params, buffers = stack_module_state(models)
  params = {name: value.detach() for name, value in params.items()}
  first = {name: torch.zeros_like(value) for name, value in params.items()}
  second = {name: torch.zeros_like(value) for name, value in params.items()}
  x, y = torch.tensor(x_BD), torch.tensor(y_BD)
  rate_Z = torch.tensor(rates)
  count = 0

  def loss(params: dict, buffers: dict) -> torch.Tensor:
    return torch.mean((functional_call(models[0], (params, buffers), (x,)) - y) ** 2)

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
