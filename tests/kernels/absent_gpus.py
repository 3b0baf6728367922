"""Compilation of kernels for GPUs that this machine does not have."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from maxlite.planning.topology import parse_topology

needs_compiler = pytest.mark.skipif(
  importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs the jax-cuda13-plugin"
)


def trace_for_absent_gpu():
  """A context in which programs are traced for one H100."""
  from jax.experimental import topologies

  topology = topologies.get_topology_desc(**parse_topology("h100-1", 1).request(""))
  return jax.default_device(topology.devices[0])


def compile_gradients(function, shapes):
  """The program of a function's value and gradients for bfloat16 operands on the default device."""
  placement = SingleDeviceSharding(jax.config.jax_default_device)
  structs = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=placement) for shape in shapes]

  def gradients(*operands):
    result, vjp = jax.vjp(function, *operands)
    return result, vjp(jnp.ones_like(result))

  return jax.jit(gradients).lower(*structs).compile()


def count_kernels(compiled):
  return compiled.as_text().count('custom_call_target="mosaic_gpu')
