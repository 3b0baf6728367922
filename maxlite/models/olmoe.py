"""OLMoE: Mixtral with queries and keys normalised over all heads at once.

Source: Muennighoff et al., OLMoE (2024), section 2 and appendix B.
"""

from typing import ClassVar

from maxlite.models import block


class Block(block.Block):
  """The shared layer with QK-norm over the whole projection."""

  qk_norm: ClassVar[str] = "projection"
