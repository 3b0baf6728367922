"""Adapters on several devices: weights may be divided, rows may not."""

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from support.tiny_adapters import MIXTURE, bits_of, datum_of, model_on

from maxlite.adapters.decoding import AdapterDecoder, AdapterRequest
from maxlite.adapters.engine import AdamW, AdapterEngine, AdapterSpec
from maxlite.errors import UserError
from maxlite.inference.batcher import Batcher
from maxlite.inference.sampling import SamplingParams

SPECS = (AdapterSpec(rank=2, seed=1), AdapterSpec(rank=4, seed=2))


def engine_on(mesh, **keys):
  return AdapterEngine(*model_on(mesh, **keys), num_slots=2, max_rank=4, max_length=64)


def train(engine, slots):
  """(results, state) of each slot of `slots`, after two steps in which they share calls."""
  for slot in slots:
    engine.join(slot, engine.new_adapter(SPECS[slot]))
  results = {slot: [] for slot in slots}
  for n in range(2):
    rows = [(slot, datum_of(10 * slot + n + i, length=20)) for i in range(2) for slot in slots]
    for (slot, _), result in zip(rows, engine.forward_backward(rows), strict=True):
      results[slot].append(result)
    for slot in slots:
      engine.update(slot, AdamW(learning_rate=1e-2, eps=1e-3))
  return {slot: (results[slot], engine.leave(slot)) for slot in slots}


@pytest.mark.slow
@pytest.mark.parametrize("keys", [{}, MIXTURE], ids=["dense", "mixture"])
def test_divided_weights_give_the_numbers_of_one_device_whatever_the_neighbours(keys):
  engine = engine_on({"tensor": 2}, **keys)
  kernel = flatten_dict(engine.base_params)[("layers", "attention", "query", "kernel")]
  assert len(kernel.sharding.device_set) == 2
  together = train(engine, [0, 1])
  for slot, of_slot in together.items():
    assert bits_of(train(engine, [slot])[slot]) == bits_of(of_slot)
  one = train(engine_on({}, **keys), [0, 1])
  for want, got in zip(jax.tree.leaves(one), jax.tree.leaves(together), strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_decoding_with_divided_weights_gives_the_tokens_of_one_device():
  greedy = SamplingParams(temperature=0.0)
  tokens = []
  for mesh in ({}, {"tensor": 2}):
    engine = engine_on(mesh)
    decoder = AdapterDecoder(engine, num_rows=2)
    batcher = Batcher(decoder)
    requests = [
      AdapterRequest([1, 2, 3], 6, greedy, 0, decoder.factors(engine.new_adapter(spec)))
      for spec in SPECS
    ]
    events = batcher.add(requests)
    while not batcher.is_idle:
      events += batcher.step()
    tokens.append([(requests.index(event.request), event.token) for event in events])
  assert tokens[0] == tokens[1]


@pytest.mark.parametrize(
  "mesh", [{axis: 2} for axis in ("data", "fsdp", "expert", "context")], ids=str
)
def test_meshes_that_divide_rows_are_refused(mesh):
  with pytest.raises(UserError, match="set ici_tensor_parallelism=-1"):
    engine_on(mesh)
