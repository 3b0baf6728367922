"""Which layers have experts, as the two keys of a plan that repeats."""

from collections.abc import Sequence


def moe_plan(has_experts: Sequence[bool]) -> tuple[int, int] | None:
  """(first_num_dense_layers, interleave_moe_layer_step) of these layers; None: there are none."""
  places = [layer for layer, has in enumerate(has_experts) if has]
  if not places:
    return None
  step = places[1] - places[0] if len(places) > 1 else 1
  num_dense = places[0] - step + 1
  if num_dense < 0 or places != list(range(places[0], len(has_experts), step)):
    return None
  if places[-1] != len(has_experts) - 1:
    return None
  return num_dense, step
