"""Losses and gradients equal the dense reference for every mesh, dispatch, backend and routing.

The fast test uses one mesh; layers/moe/test_moe_block.py has every dispatch. The slow test covers
every mesh of eight devices with every dispatch, and cycles through the other choices:

  tools/test.sh -m slow tests/contracts/test_moe_net.py
"""

import itertools
import math

import numpy as np
import pytest
from moe_net import DISPATCHES, FAMILIES, ROUTINGS, Net, Variant
from support.slow_cases import slow

from maxlite.sharding import MESH_AXES

BACKENDS = ("tiled", "ragged_dot", "reference")
TOLERANCE = 1e-10
MESHES = [
  (1, *degrees)
  for degrees in itertools.product((1, 2, 4, 8), repeat=len(MESH_AXES) - 1)
  if math.prod(degrees) == 8
]
CHOICES = list(itertools.product(BACKENDS, FAMILIES, (False, True), (True, False), (1, 3)))


def mesh(**degrees: int) -> tuple[int, ...]:
  return tuple(degrees.get(axis, 1) for axis in MESH_AXES)


VARIANTS = [
  Variant(mesh(expert=4, fsdp=2), "ragged", "tiled", "mixtral"),
  slow(Variant(mesh(expert=4, fsdp=2), "ragged", "tiled", "deepseek", True, True, 3)),
  slow(
    Variant(
      mesh(expert=2, tensor=2, context=2),
      "all_gather",
      "ragged_dot",
      "mixtral with adapters",
      remat=False,
      scan=False,
      context="ring",
    )
  ),
]


def full() -> list[Variant]:
  """Every mesh with every dispatch; the i-th has the i-th of the shuffled other choices."""
  order = np.random.default_rng(0).permutation(len(CHOICES))
  turns = itertools.cycle(CHOICES[i] for i in order)
  strategies = itertools.cycle(("ring", "ulysses", "all_gather"))
  variants = []
  for degrees, dispatch in itertools.product(MESHES, DISPATCHES):
    num_shards = degrees[MESH_AXES.index("context")]
    # Eight shards have one position each; the ring needs two.
    context = {1: "all_gather", 8: "ulysses"}.get(num_shards) or next(strategies)
    variants.append(Variant(degrees, dispatch, *next(turns), context=context))
  return variants


@pytest.fixture(scope="module")
def net() -> Net:
  return Net()


def check(net: Net, variant: Variant, routing: str) -> None:
  got = net.results_of(variant, routing)
  want = net.oracle_of(variant.family, routing)
  assert set(got) == set(want)
  square = 0.0
  for name, value in got.items():
    if name.startswith("gradient of"):
      square += np.sum(np.square(value))
  np.testing.assert_allclose(got["grad_norm"], np.sqrt(square), rtol=TOLERANCE)
  for name, value in want.items():
    atol = TOLERANCE * np.abs(value).max()
    label = f"{variant}: {name}"
    np.testing.assert_allclose(got[name], value, rtol=TOLERANCE, atol=atol, err_msg=label)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_step_equals_the_dense_reference(variant, routing, net):
  check(net, variant, routing)


@pytest.mark.slow
@pytest.mark.parametrize("variant", full(), ids=str)
def test_every_mesh_and_dispatch_equals_the_dense_reference(variant, net):
  for routing in ROUTINGS:
    check(net, variant, routing)


@pytest.mark.parametrize("family", ["mixtral", slow("deepseek")])
def test_the_routings_match_their_names(family, net):
  load = {name: net.oracle_of(family, name)["expert_load"] for name in ROUTINGS}
  assert (load["uniform"] > 0).all()
  assert (load["hot"] > 0).sum() == 2 * 3
  assert not load["empty"][:, [0, 3, 6]].any()
  assert not load["a shard that gets nothing"][:, [4, 5]].any()
