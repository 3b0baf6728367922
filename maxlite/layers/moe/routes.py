"""The experts of every token as data: the variable collection `routes`.

A router applied with the collection mutable but empty stores the experts of its tokens. Applied
with experts in the collection, it replays them: it does not choose, and computes their weights from
its live logits. Any other forward pass has no such collection. As a cache, it goes through
`Module.apply`; models/routes.py converts it from and to one array for all layers.
"""

import jax
from flax import linen as nn

COLLECTION = "routes"
EXPERTS = "experts"


def given(router: nn.Module) -> jax.Array | None:
  """The expert_BTK that `router` replays; None: it chooses."""
  if not router.has_variable(COLLECTION, EXPERTS):
    return None
  return router.get_variable(COLLECTION, EXPERTS)


def record(router: nn.Module, expert_BTK: jax.Array) -> None:
  """Store the experts of the tokens of `router` if the collection is mutable."""
  if router.is_mutable_collection(COLLECTION) and not router.is_initializing():
    router.put_variable(COLLECTION, EXPERTS, expert_BTK)
