"""Devices as a mesh, and the one table that says which array axis lies on which mesh axis."""

from maxlite.sharding.mesh import MESH_AXES, build_mesh
from maxlite.sharding.rules import DEFAULT_RULES, Sharder

__all__ = ["DEFAULT_RULES", "MESH_AXES", "Sharder", "build_mesh"]
