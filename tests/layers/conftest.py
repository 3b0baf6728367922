"""Meshes for the tests of layers."""

import math

import jax
import pytest

from maxlite.sharding import MESH_AXES, Sharder, build_mesh

MESHES = {
  "one device": {},
  "data fsdp tensor": {"data": 2, "fsdp": 2, "tensor": 2},
  "context expert fsdp": {"context": 2, "expert": 2, "fsdp": 2},
  "context tensor": {"context": 4, "tensor": 2},
}


@pytest.fixture(scope="session")
def sharders(build_sharder):
  """{name: Sharder} of MESHES."""
  return {name: build_sharder(degrees) for name, degrees in MESHES.items()}


@pytest.fixture(scope="session")
def build_sharder():
  """A function from {mesh axis: degree} (default 1) to a Sharder."""
  return _sharder


def _sharder(degrees):
  ici = [degrees.get(mesh_axis, 1) for mesh_axis in MESH_AXES]
  devices = jax.devices()[: math.prod(ici)]
  return Sharder(build_mesh(ici, (1,) * len(MESH_AXES), devices))
