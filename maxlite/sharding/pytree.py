"""The type of trees of arrays."""

from typing import Any

# Any tree of arrays, or of objects that describe arrays such as jax.ShapeDtypeStruct. The types of
# Python cannot express it.
PyTree = Any
