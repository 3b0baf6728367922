"""Keeps the members of a vmapped convolution apart on CPUs.

The gradient of a grouped convolution's kernel is a convolution with `batch_group_count`. `jax.vmap`
multiplies that count by the number of members, and XLA:CPU (jaxlib 0.10.2 to 0.12, the pass
convolution_group_converter) expands the groups to one dense convolution in which each group is
multiplied by zeros for all others. Zero times NaN is NaN, so a NaN of one member reaches them all.

The same sums as a convolution with `feature_group_count` are computed group by group.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import batching


@functools.cache
def keep_members_apart() -> None:
  """Replace the batching rule of convolutions with batch groups, for the whole process.

  JAX has no narrower place: members call `jax.lax` themselves. Only vmapped convolutions with batch
  groups change whose two operands are batched, on CPUs; the values agree within rounding.
  """
  rules = getattr(batching, "fancy_primitive_batchers", {})  # a future JAX may not have it
  convolution = jax.lax.conv_general_dilated_p
  if convolution in rules:
    rules[convolution] = functools.partial(_batch, rules[convolution])


def _batch(
  rule_of_jax: Callable[..., tuple[jax.Array, int]],
  axis_data: object,
  operands: Sequence[jax.Array],
  axes: Sequence[int | None],
  **params: Any,
) -> tuple[jax.Array, int]:
  """(result, its axis of members); `axes` are the operands' axes, None for a shared one."""
  x_axis, kernel_axis = axes
  if params["batch_group_count"] == 1 or x_axis is None or kernel_axis is None:
    return rule_of_jax(axis_data, operands, axes, **params)

  def in_batch_groups(x: jax.Array, kernel: jax.Array) -> jax.Array:
    y, axis = rule_of_jax(axis_data, (x, kernel), axes, **params)
    return jnp.moveaxis(y, axis, 0)

  def in_feature_groups(x: jax.Array, kernel: jax.Array) -> jax.Array:
    dimensions = params["dimension_numbers"]
    groups = params["batch_group_count"]
    x = jnp.moveaxis(x, x_axis, 0)
    x = x.transpose(0, *(1 + axis for axis in dimensions.lhs_spec))
    members, rows, features, *space = x.shape
    x = x.reshape(members, groups, rows // groups, features, *space)
    x = jnp.moveaxis(x, 1, 2).reshape(members, rows // groups, groups * features, *space)
    changed = params | {
      "dimension_numbers": dimensions._replace(lhs_spec=tuple(range(x.ndim - 1))),
      "feature_group_count": groups,
      "batch_group_count": 1,
    }
    y, axis = rule_of_jax(axis_data, (x, kernel), (0, kernel_axis), **changed)
    return jnp.moveaxis(y, axis, 0)

  y = jax.lax.platform_dependent(*operands, cpu=in_feature_groups, default=in_batch_groups)
  return y, 0
