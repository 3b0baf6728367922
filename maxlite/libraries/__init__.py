"""Models of any module library as pure functions of their arrays."""

from maxlite.libraries.as_model import as_model
from maxlite.libraries.function_model import FunctionModel
from maxlite.libraries.linen_model import LinenModel
from maxlite.libraries.model import Model, Setting, Variables

__all__ = ["FunctionModel", "LinenModel", "Model", "Setting", "Variables", "as_model"]
