"""Mixtral: Llama with a mixture of experts in place of the MLP.

Source: Jiang et al., Mixtral of Experts (2024), section 2.
"""

from maxlite.models import block


class Block(block.Block):
  """The shared layer as it is."""
