"""Members of different structure as vectors, one per device of a compiled step."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from families import largest_error

from maxlite.ensemble import Member
from maxlite.ensemble.engines.engine_base import EngineRequest
from maxlite.ensemble.engines.switched import SwitchEngine
from maxlite.ensemble.members.member import call_model
from maxlite.ensemble.members.model_programs import build_programs
from maxlite.ensemble.members.program import abstract_tree
from maxlite.errors import UserError

BATCH = np.ones((4, 3), np.float32)


class MLP(nn.Module):
  widths: tuple[int, ...]
  dtype: jnp.dtype = jnp.float32  # of the parameters

  @nn.compact
  def __call__(self, x_BD):
    for width in self.widths:
      x_BD = nn.Dense(width, dtype=jnp.float32, param_dtype=self.dtype)(x_BD)
    return x_BD


MODELS = (MLP((5,)), MLP((4, 2)), MLP((3, 3), jnp.bfloat16))


def loss(model, x_BD):
  return jnp.mean(model(x_BD))


def request_of(models, num_devices):
  members = [Member(model, optax.adam(0.1), name=f"m{z}") for z, model in enumerate(models)]
  programs = build_programs(members, loss, call_model, BATCH)
  return EngineRequest(
    num_members=len(programs),
    program=lambda z, _: programs[z],
    batch=abstract_tree(BATCH),
    devices=jax.devices()[:num_devices],
  )


def numbered(abstract):
  """A tree whose arrays have different values everywhere."""
  leaves, structure = jax.tree.flatten(abstract)
  values = []
  for n, leaf in enumerate(leaves):
    values.append((np.arange(leaf.size) + 7 * n).reshape(leaf.shape).astype(leaf.dtype))
  return jax.tree.unflatten(structure, values)


def test_states_of_different_structure_and_types_are_kept_as_vectors():
  engine = SwitchEngine(request_of(MODELS, len(MODELS)))
  states = [numbered(abstract) for abstract in engine.abstract]
  packed = engine.pack(states)
  returned = engine.unpack(packed)
  assert jax.tree.structure(returned) == jax.tree.structure(states)
  assert jax.tree.map(lambda x: x.dtype, returned) == jax.tree.map(lambda x: x.dtype, states)
  assert largest_error(returned, states) == 0
  assert largest_error(engine.take(packed, 1), states[1]) == 0


def test_a_device_holds_one_member_in_vectors_of_the_longest_one():
  engine = SwitchEngine(request_of(MODELS, len(MODELS)))
  packed = engine.pack([numbered(abstract) for abstract in engine.abstract])
  assert {"bfloat16", "float32"} <= set(packed)
  for dtype, vectors_ZL in packed.items():
    lengths = []
    for abstract in engine.abstract:
      lengths.append(sum(x.size for x in jax.tree.leaves(abstract) if str(x.dtype) == dtype))
    assert vectors_ZL.shape == (len(MODELS), max(lengths))
    shards = [shard.data.shape for shard in vectors_ZL.addressable_shards]
    assert shards == [(1, max(lengths))] * len(MODELS)
  assert engine.step_cost().num_programs == 1


def test_fewer_devices_than_members_are_refused():
  with pytest.raises(UserError, match="there are 3 members and 2 devices"):
    SwitchEngine(request_of(MODELS, 2))
