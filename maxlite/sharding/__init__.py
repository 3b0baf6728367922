"""The device mesh, and the sharding table from logical axes to mesh axes."""

from maxlite.sharding.mesh import MESH_AXES, build_mesh
from maxlite.sharding.rules import DEFAULT_RULES, Sharder

__all__ = ["DEFAULT_RULES", "MESH_AXES", "Sharder", "build_mesh"]
