"""Qwen3: Llama with the queries and keys of every head normalised.

Source: Qwen3 Technical Report (2025), section 2.
"""

from typing import ClassVar

from maxlite.models import block


class Block(block.Block):
  """The shared layer with QK-norm over the channels of a head, without experts."""

  is_moe: ClassVar[bool] = False
  qk_norm: ClassVar[str] = "head"
