"""Gathering of the kernels of linear layers over the mesh axes that also shard the batch."""

import functools
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from maxlite.kernels.numerics import accumulator_dtype
from maxlite.sharding import ROWS, Sharder
from maxlite.sharding.collectives import gather_weight, pvary

MeshAxes = tuple[str, ...]

# Axes of kernels after which an axis of the activations is named.
SHARDED_FEATURES = ("q_heads", "kv_heads", "kv", "mlp")
_GATHERED = "gathered_kernel"


class Multiply(Protocol):
  """The product of the last `num_in` axes of x with the first axes of a kernel (linear.py)."""

  def __call__(
    self,
    x: jax.Array,
    kernel: jax.Array,
    num_in: int,
    out_dtype: jnp.dtype | None = None,
  ) -> jax.Array: ...


class GatherPlan(NamedTuple):
  """How the kernel of a linear layer is gathered, and the shardings around its matmul."""

  sharder: Sharder
  num_in: int  # Contracted axes of the kernel, the first ones.
  gathered: tuple[MeshAxes, ...]  # By axis of the kernel: the mesh axes that it is gathered over.
  summed: MeshAxes  # The mesh axes over which contracted axes stay sharded.
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
    lead: sizes of the axes of the activations before those that are contracted.
  """
  if len(lead) < len(ROWS) or not _divides(sharder, kernel_names, kernel_shape, lead):
    return None
  names = [_activation_name(name) for name in kernel_names]
  gathered: list[MeshAxes] = []
  for kernel_name, name in zip(kernel_names, names, strict=True):
    kernel_axes = sharder.mesh_axes(kernel_name)
    activation_axes = sharder.mesh_axes(name)
    if kernel_axes == activation_axes:
      gathered.append(())
    elif activation_axes and kernel_axes:
      return None
    else:
      gathered.append(kernel_axes)
  if not any(gathered):
    return None
  summed: list[str] = []
  for name in names[:num_in]:
    summed.extend(sharder.mesh_axes(name))
  rows = [*ROWS, *[None] * (len(lead) - len(ROWS))]
  return GatherPlan(
    sharder=sharder,
    num_in=num_in,
    gathered=tuple(gathered),
    summed=tuple(summed),
    x_spec=sharder.spec(rows + names[:num_in]),
    kernel_spec=sharder.spec(kernel_names),
    y_spec=sharder.spec(rows + names[num_in:]),
  )


def _activation_name(kernel_name: str) -> str | None:
  """The logical name of the axis of activations that corresponds to an axis of a kernel."""
  if kernel_name in SHARDED_FEATURES:
    return f"activation_{kernel_name}"
  return None


def _divides(
  sharder: Sharder,
  kernel_names: tuple[str, ...],
  kernel_shape: tuple[int, ...],
  lead: tuple[int, ...],
) -> bool:
  """Whether the rows and all axes of the kernel divide over their shards."""
  names = ROWS + kernel_names
  sizes = lead[: len(ROWS)] + kernel_shape
  return all(size % sharder.num_shards(name) == 0 for name, size in zip(names, sizes, strict=True))


def multiply_gathered(
  plan: GatherPlan,
  multiply: Multiply,
  x: jax.Array,
  kernel: jax.Array,
) -> jax.Array:
  """multiply(x, kernel, num_in) on each shard's rows, with the kernel gathered in x's type.

  The gradient of the kernel is summed over shards by a reduce-scatter in its own type. XLA's own
  choice is a ring of permutes with float32 accumulators, or an all-reduce of the whole gradient.
  """
  # The backward pass gathers the kernel again instead of saving it for every layer.
  policy = jax.checkpoint_policies.save_anything_except_these_names(_GATHERED)
  on_shard = functools.partial(_gather_and_multiply, plan, multiply)
  sharded = jax.shard_map(
    jax.checkpoint(on_shard, policy=policy, prevent_cse=not plan.sharder.gather_by_permutes),
    mesh=plan.sharder.mesh,
    in_specs=(plan.x_spec, plan.kernel_spec),
    out_specs=plan.y_spec,
    check_vma=plan.sharder.check_vma,
  )
  return sharded(x, kernel)


def _gather_and_multiply(
  plan: GatherPlan,
  multiply: Multiply,
  x: jax.Array,
  kernel: jax.Array,
) -> jax.Array:
  """The product on one shard."""
  # Before the barrier, so that the sum of x's gradient over shards comes after it: XLA:TPU adds the
  # gradients of layers with the same input before it sums them.
  x, kernel = pvary(x, kernel)
  by_permutes = plan.sharder.gather_by_permutes
  if not by_permutes:  # The permutes of a kernel may begin before x is computed.
    # Also orders the gradients: the kernel's is scattered before the backward pass proceeds.
    x, kernel = jax.lax.optimization_barrier((x, kernel))
  for axis, mesh_axes in enumerate(plan.gathered):
    kernel = gather_weight(kernel, x.dtype, mesh_axes, axis, by_permutes)
  kernel = checkpoint_name(kernel, _GATHERED)
  if not plan.summed:
    return multiply(x, kernel, plan.num_in)
  partial_sums = multiply(x, kernel, plan.num_in, accumulator_dtype(x.dtype))
  return jax.lax.psum(partial_sums, plan.summed).astype(x.dtype)
