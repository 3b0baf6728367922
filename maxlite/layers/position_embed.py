"""Learned embeddings of positions."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from maxlite.config.schema import ModelConfig
from maxlite.errors import UserError
from maxlite.layers.embed import take_rows
from maxlite.layers.partitioned import partitioned
from maxlite.sharding import ROWS, Sharder


class PositionEmbed(nn.Module):
  """x_BTD: the embeddings of the positions of tokens in their documents, to be added to theirs.

  The table has the family's `position_offset` rows before that of the first position.

  Source: Radford et al., GPT (2018), section 3.1.

  Raises:
    UserError: rows are longer than the table.
  """

  cfg: ModelConfig
  sharder: Sharder

  @nn.compact
  def __call__(self, position_BT: jax.Array) -> jax.Array:
    num_positions = self.cfg.trainable_position_size
    if position_BT.shape[1] > num_positions:
      raise UserError(
        f"rows of {position_BT.shape[1]} tokens, but only trainable_position_size={num_positions} "
        f"positions have an embedding; write max_target_length={num_positions} or less"
      )
    offset = self.cfg.family.position_offset
    init = partitioned(nn.initializers.normal(0.02), ("position", "embed"))
    shape = (offset + num_positions, self.cfg.base_emb_dim)
    table_PD = self.param("embedding", init, shape, jnp.dtype(self.cfg.weight_dtype))
    # All-gathered along D first, for the same reason as in `Embed`.
    table_PD = self.sharder.constrain(table_PD.astype(self.cfg.dtype), ("position", None))
    x_BTD = take_rows(table_PD.shape[0], table_PD, position_BT + offset)
    return self.sharder.constrain(x_BTD, (*ROWS, "activation_embed"))
