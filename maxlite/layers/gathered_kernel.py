"""Gathering of the kernels of linear layers over the mesh axes that also shard the batch."""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name

from maxlite.kernels.numerics import accumulator_dtype
from maxlite.sharding import ROWS, Sharder
from maxlite.sharding.collectives import gather_weight, pvary

# Axes of kernels after which an axis of the activations is named.
SHARDED_FEATURES = ("q_heads", "kv_heads", "kv", "mlp")
_GATHERED = "gathered_kernel"


class GatherPlan(NamedTuple):
  """How the kernel of a linear layer is gathered, and the shardings around its matmul."""

  sharder: Sharder
  num_in: int
  gathered: tuple[tuple[str, ...], ...]  # by axis of the kernel: the mesh axes gathered over
  summed: tuple[str, ...]  # mesh axes over which contracted axes stay sharded
  x_spec: jax.P
  kernel_spec: jax.P
  y_spec: jax.P


def plan_gather(
  sharder: Sharder,
  kernel_names: tuple[str, ...],
  num_in: int,
  kernel_shape: tuple[int, ...],
  lead: tuple[int, ...],
) -> GatherPlan | None:
  """The plan for a kernel with these logical axes; None if no axis has to be gathered.

  An axis of the kernel is either gathered, or sharded like that axis of the activations. Other
  combinations, and axes that do not divide over their shards, are left to XLA (None).

  Args:
    lead: the axes of the activations before those that are contracted.
  """
  kernel_axes = [sharder.mesh_axes(name) for name in kernel_names]
  names = [f"activation_{name}" if name in SHARDED_FEATURES else None for name in kernel_names]
  activation_axes = [sharder.mesh_axes(name) for name in names]
  gathered = tuple(
    () if own == activation else own
    for own, activation in zip(kernel_axes, activation_axes, strict=True)
  )
  sizes = zip((*ROWS, *kernel_names), (*lead[: len(ROWS)], *kernel_shape), strict=False)
  whole = all(size % sharder.num_shards(name) == 0 for name, size in sizes)
  mixed = any(own and activation for own, activation in zip(gathered, activation_axes, strict=True))
  if len(lead) < len(ROWS) or mixed or not whole or not any(gathered):
    return None
  rows = (*ROWS, *(None,) * (len(lead) - len(ROWS)))
  return GatherPlan(
    sharder,
    num_in,
    gathered,
    tuple(axis for axes in activation_axes[:num_in] for axis in axes),
    sharder.spec((*rows, *names[:num_in])),
    sharder.spec(kernel_names),
    sharder.spec((*rows, *names[num_in:])),
  )


def multiply_gathered(
  plan: GatherPlan, multiply: Callable[..., jax.Array], x: jax.Array, kernel: jax.Array
) -> jax.Array:
  """multiply(x, kernel, num_in) on each shard's rows, with the kernel gathered in x's type.

  The gradient of the kernel is summed over shards by a reduce-scatter in its own type. XLA's own
  choice is a ring of permutes with float32 accumulators, or an all-reduce of the whole gradient.
  """

  def on_shard(x: jax.Array, kernel: jax.Array) -> jax.Array:
    # Also orders the gradients: the kernel's is scattered before the backward pass proceeds.
    x, kernel = pvary(*jax.lax.optimization_barrier((x, kernel)))
    for axis, mesh_axes in enumerate(plan.gathered):
      kernel = gather_weight(kernel, x.dtype, mesh_axes, axis)
    kernel = checkpoint_name(kernel, _GATHERED)
    if not plan.summed:
      return multiply(x, kernel, plan.num_in)
    partial_sums = multiply(x, kernel, plan.num_in, accumulator_dtype(x.dtype))
    return jax.lax.psum(partial_sums, plan.summed).astype(x.dtype)

  # The backward pass gathers the kernel again instead of saving it for every layer.
  policy = jax.checkpoint_policies.save_anything_except_these_names(_GATHERED)
  return jax.shard_map(
    jax.checkpoint(on_shard, policy=policy),
    mesh=plan.sharder.mesh,
    in_specs=(plan.x_spec, plan.kernel_spec),
    out_specs=plan.y_spec,
    check_vma=plan.sharder.check_vma,
  )(x, kernel)
