"""DeepSeek-V2: multi-head latent attention; shared experts beside the routed ones.

Source: DeepSeek-V2 (2024), section 2.
"""

from typing import ClassVar

from maxlite.models import block


class Block(block.Block):
  """The shared layer with latent attention."""

  latent_attention: ClassVar[bool] = True
