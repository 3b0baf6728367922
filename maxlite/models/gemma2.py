"""Gemma 2: every other layer attends locally; norms before and after each part.

Source: Gemma 2 (2024), section 2; zero-centred norms and the embedding's scale as published.
"""

from typing import ClassVar

from maxlite.models import block


class Block(block.Block):
  """The shared layer with those norms, without experts."""

  is_moe: ClassVar[bool] = False
  zero_centred_norms: ClassVar[bool] = True
  post_norms: ClassVar[bool] = True
  scaled_embedding: ClassVar[bool] = True
  global_layer_every: ClassVar[int] = 2
