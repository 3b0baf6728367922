"""gpt-oss: a mixture with biases everywhere, attention sinks and every other layer local.

Source: gpt-oss-120b and gpt-oss-20b Model Card (2025), section 2.
"""

from typing import ClassVar

from maxlite.models import block


class Block(block.Block):
  """The shared layer with sinks and biases; those of experts are expert_bias."""

  qkv_bias: ClassVar[bool] = True
  out_bias: ClassVar[bool] = True
  sinks: ClassVar[bool] = True
  router_bias: ClassVar[bool] = True
  global_layer_every: ClassVar[int] = 2
