"""Gemma 3: Gemma 2 with QK-norm, and five local layers to a global one.

Source: Gemma 3 Technical Report (2025), section 2.
"""

from typing import ClassVar

from maxlite.models import gemma2


class Block(gemma2.Block):
  """Gemma 2's layer with QK-norm over the channels of a head."""

  qk_norm: ClassVar[str] = "head"
  global_layer_every: ClassVar[int] = 6
