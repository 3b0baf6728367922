"""What the layers of a decoder get besides the residual stream."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from flax import linen as nn

from maxlite.layers.keys_values import KeysValues
from maxlite.layers.layer_specs import MixerSpec
from maxlite.layers.rope import RopeTables


class LayerInputs(NamedTuple):
  """The same for all layers, except for the two fields at the end.

  In the inputs of a stack or a unit these have a leading axis that counts its layers; in a stack of
  units two axes, which count units and the layers of a unit.
  """

  segment_BT: jax.Array
  rope: Mapping[str, RopeTables] = {}  # by the name of the RopeSpec
  query_scale_BT: jax.Array | None = None  # None: queries are not scaled
  position_BT: jax.Array | None = None  # in the document; None: no layer attends within chunks
  key_bias_BTH: jax.Array | None = None  # added to the scores of keys (layers/alibi.py)
  # Of layers of earlier stacks, by what these call them: `writes` of AttentionSpec.
  keys_values: Mapping[str, KeysValues] = {}
  # Of scanned layers that differ: whether the layer is its `mixer`, and not what that has
  # `otherwise`. None: all layers are alike.
  is_first: jax.Array | None = None
  per_layer_BTP: jax.Array | None = None  # the layer's embedding of each token (PerLayerEmbed)

  def tables_of(self, mixer: MixerSpec) -> RopeTables:
    """The rotary embedding of a mixer that has one."""
    assert mixer.rope is not None, mixer
    return self.rope[mixer.rope.name]

  def of_layer(self, i: int) -> "LayerInputs":
    """Those of element `i` of the leading axis."""
    is_first, per_layer_BTP = jax.tree.map(lambda x: x[i], (self.is_first, self.per_layer_BTP))
    return self._replace(is_first=is_first, per_layer_BTP=per_layer_BTP)


_SAME: Any = nn.broadcast  # typed as the fields, in whose places the axes are
_BY_LAYER: Any = 0
# How a scan over layers treats the fields.
SCAN_AXES = LayerInputs(_SAME, _SAME, _SAME, _SAME, _SAME, _SAME, _BY_LAYER, _BY_LAYER)
