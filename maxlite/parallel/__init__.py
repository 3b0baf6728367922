"""Devices as a mesh, and the one table that says which array axis lies on which mesh axis."""

from maxlite.parallel.mesh import MESH_AXES, build_mesh
from maxlite.parallel.rules import DEFAULT_RULES, Sharder

__all__ = ["DEFAULT_RULES", "MESH_AXES", "Sharder", "build_mesh"]
