"""The device mesh, and the sharding table from logical axes to mesh axes."""

from maxlite.sharding.logical_axis_rules import DEFAULT_RULES, ROWS, Sharder
from maxlite.sharding.mesh import MESH_AXES, build_mesh

__all__ = ["DEFAULT_RULES", "MESH_AXES", "ROWS", "Sharder", "build_mesh"]
