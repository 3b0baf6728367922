"""The types of JSON values."""

from typing import Any, TypeAlias

# Any value that the json module reads or writes. Types of Python cannot express it without a cast
# at every use of a part.
Json: TypeAlias = Any
JsonObject: TypeAlias = dict[str, Json]
