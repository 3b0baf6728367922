"""Steps that replay given experts are the same for every way to compute them."""

import jax
import numpy as np
import pytest
from support.slow_cases import slow
from support.tiny import (
  LENGTH,
  ROWS,
  assert_same_steps,
  build,
  config_of,
  mesh_keys,
  take_steps,
  uneven_batch,
)

from maxlite.models.routes import route_shape
from maxlite.training.program import with_routes

KEYS = {
  "decoder_block": "mixtral",
  "base_num_decoder_layers": 2,
  "scan_layers": True,
  "global_batch_size": ROWS,
  "load_balance_loss_weight": 0.1,
}
RAGGED = {"sparse_matmul": "true"}
RING = RAGGED | {"use_ring_of_experts": "true"}
ACCUMULATE = {"gradient_accumulation_steps": 4}
REMAT = {"remat_policy": "full"}
CASES = [
  ("expert=2 context=2", RAGGED | ACCUMULATE | REMAT),
  slow("data=2 expert=4", RING | {"gradient_accumulation_steps": 2}),
  slow("data=2 fsdp=2 context=2", RAGGED | {"context_parallel_strategy": "ring"}),
  slow("fsdp=2 expert=2 tensor=2", RAGGED | REMAT),
  slow("expert=4", {"capacity_factor": 4}),
  slow("", {"remat_policy": "custom", "remat_saved_names": "[moe_route]", **RAGGED}),
]


def program_of(mesh="", **keys):
  degrees = mesh_keys(mesh)
  num_devices = int(np.prod(list(degrees.values())))
  cfg = config_of(**{**KEYS, **degrees, **keys})
  return with_routes(build(cfg, jax.devices()[:num_devices]))


def batches_of(program):
  """Packed rows with random experts, and anything at padding."""
  draw = np.random.default_rng(0)
  batches = []
  for seed in range(2):
    batch = uneven_batch(seed)
    num_layers, num_chosen = route_shape(program.spec.model)
    score = draw.uniform(size=(ROWS, LENGTH, num_layers, 4))
    expert_BTNK = np.argsort(score, axis=-1)[..., :num_chosen].astype(np.int32)
    expert_BTNK[batch.segment_BT == 0] = 0
    batches.append(batch.replace(expert_BTNK=expert_BTNK))
  return batches


@pytest.fixture(scope="module")
def one_device():
  """(state before, batches, the steps) of one device and the dense dispatch."""
  program = program_of()
  before = jax.device_get(program.init(0))
  batches = batches_of(program)
  return before, batches, take_steps(program, before, batches)


@pytest.mark.parametrize(("mesh", "keys"), CASES)
def test_given_experts_make_the_same_steps(one_device, mesh, keys):
  before, batches, want = one_device
  for batch, row in zip(batches, want[1], strict=True):
    given = batch.expert_BTNK[batch.segment_BT > 0]
    for layer, load_E in enumerate(row["expert_load"]):
      np.testing.assert_array_equal(load_E, np.bincount(given[:, layer].ravel(), minlength=4))
  assert_same_steps(take_steps(program_of(mesh, **keys), before, batches), want)
