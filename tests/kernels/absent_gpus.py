"""Compilation of kernels for GPUs that this machine does not have."""

import importlib.util
import os
import pathlib

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

# A GpuTargetConfigProto in text form, from XLA's sources.
TARGET_CONFIG = os.environ.get("MAXLITE_GPU_TARGET_CONFIG", "")
needs_compiler = pytest.mark.skipif(
  not TARGET_CONFIG or importlib.util.find_spec("jax_cuda13_plugin") is None,
  reason="needs the jax-cuda13-plugin, and a target config that MAXLITE_GPU_TARGET_CONFIG names",
)


def trace_for_absent_gpu():
  """A context in which programs are traced for the GPU that the target config describes."""
  from jax.experimental import topologies

  target = pathlib.Path(TARGET_CONFIG).expanduser().read_text()
  topology = topologies.get_topology_desc(platform="cuda", target_config=target, topology="1x1x1")
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
