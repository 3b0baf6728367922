"""The decoder: one module for all model families."""

from maxlite.models.decoder import Decoder

__all__ = ["Decoder"]
