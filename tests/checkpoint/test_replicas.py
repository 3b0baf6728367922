"""A differing replica is found on any device; shards are not compared with each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from support.corruption import corrupted

from maxlite.checkpoint.checksum import leaves_by_path
from maxlite.checkpoint.replicas import ReplicaCheck

MESH = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("data", "fsdp"))
SPECS = {"cut": ("fsdp",), "both": (("data", "fsdp"),), "rows": ("data",), "whole": (), "count": ()}


def state():
  rng = np.random.default_rng(0)
  arrays = {name: rng.normal(size=(8, 3)).astype(np.float32) for name in SPECS}
  arrays |= {"count": np.int32(7), "rows": arrays["rows"].astype(jnp.bfloat16)}
  placed = {}
  for name, array in arrays.items():
    sharding = NamedSharding(MESH, PartitionSpec(*SPECS[name]))
    placed[name] = jax.device_put(array, sharding)
  return placed


@pytest.fixture(scope="module")
def check():
  return ReplicaCheck(state())


def test_equal_replicas_give_no_message(check):
  assert check.difference(state()) == ""


@pytest.mark.parametrize(
  ("name", "device", "message"),
  [
    ("whole", 5, "whole is not the same on all devices that hold it: device 5 of process 0"),
    ("count", 0, "count is not the same on all devices that hold it: device 0 of process 0"),
    ("rows", 6, "rows is not the same on all devices that hold it: device 6 of process 0"),
    # Two replicas: there is no majority.
    ("cut", 1, "cut is not the same on all devices that hold it: device 1 of process 0, device 5"),
  ],
)
def test_a_flipped_bit_on_one_device_is_found(check, name, device, message):
  good = state()
  assert check.difference(good | {name: corrupted(good[name], device)}).startswith(message)


def test_an_array_without_replicas_is_not_compared(check):
  good = state()
  assert check.difference(good | {"both": corrupted(good["both"], 3)}) == ""


def test_the_first_array_is_named(check):
  good = state()
  bad = {name: corrupted(good[name], 2) for name in ("whole", "count")}
  assert check.difference(good | bad).startswith("count is")


def test_the_check_uses_no_collectives(check):
  """Hosts compare the checksums: on a faulty device collectives may fail too."""
  arrays = leaves_by_path(state()).values()
  text = check._checksums.lower(*arrays).compile().as_text()
  for collective in ("all-reduce", "all-gather", "collective-permute", "all-to-all"):
    assert collective not in text
