"""Qwen2 and 2.5: Llama with biases in the projections to queries, keys and values.

Source: Qwen2 Technical Report (2024), section 2.2.1.
"""

from typing import ClassVar

from maxlite.models import block


class Block(block.Block):
  """The shared layer with those biases, without experts."""

  is_moe: ClassVar[bool] = False
  qkv_bias: ClassVar[bool] = True
