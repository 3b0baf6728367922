"""Llama: pre-norm grouped-query attention and a gated MLP.

Source: Touvron et al., LLaMA (2023), section 2.2; Llama 2 (2023) for grouped queries.
"""

from typing import ClassVar

from maxlite.models import block


class Block(block.Block):
  """The shared layer without experts."""

  is_moe: ClassVar[bool] = False
