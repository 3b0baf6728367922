"""Checksums do not depend on the sharding and change with any bit, in NumPy and compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from maxlite.checkpoint import checksum
from maxlite.checkpoint.checksum import chunk_checksum, tree_checksums, tree_hash
from maxlite.errors import UserError

SPECS = (P(), P("x"), P("y", "x"), P(None, ("x", "y")), P(("x", "y"), None))


@pytest.fixture(autouse=True, params=["numpy", "compiled"])
def place_of_computing(request, monkeypatch):
  if request.param == "compiled":
    monkeypatch.setattr(checksum, "MAX_SIZE_ON_HOST", -1)


def bits_of(dtype):
  return np.random.default_rng(0).integers(0, 256, (8, 8 * jnp.dtype(dtype).itemsize), np.uint8)


def array(dtype):
  x = bits_of(dtype).view(dtype)
  if dtype == jnp.bfloat16:  # unoptimized programs may change NaNs and subnormals
    x = bits_of(jnp.float32).view(np.int32).astype(dtype)
  return jnp.asarray(x)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint32", "int8"])
def test_sharding_does_not_change_the_checksum(dtype):
  x = array(jnp.dtype(dtype))
  mesh = jax.make_mesh((2, 4), ("x", "y"))
  placed = {str(spec): jax.device_put(x, NamedSharding(mesh, spec)) for spec in SPECS}
  assert len(set(tree_checksums(placed | {"one device": x}).values())) == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint32"])
def test_every_single_bit_changes_the_checksum(dtype):
  dtype = jnp.dtype(dtype)
  row = bits_of(dtype)[0]  # bytes
  damaged = {}
  for place in range(row.size):
    for bit in range(8):
      flipped = row.copy()
      flipped[place] ^= 1 << bit
      damaged[f"byte {place}, bit {bit}"] = jnp.asarray(flipped.view(dtype))
  undamaged = tree_checksums(jnp.asarray(row.view(dtype)))[""]
  assert undamaged not in tree_checksums(damaged).values()


def test_swapping_any_two_elements_changes_the_checksum():
  x = np.asarray([1, -1, 2, -2, 0.5, -0.5, 0, -0.0, 3, -3, 7, np.nan], np.float32)
  rows = {"whole": jnp.asarray(x)}
  for i in range(x.size):
    for j in range(i):
      swapped = x.copy()
      swapped[[i, j]] = swapped[[j, i]]
      rows[f"{i} {j}"] = jnp.asarray(swapped)
  checksums = tree_checksums(rows)
  assert len(set(checksums.values())) == len(checksums)


def test_transposing_changes_the_checksum():
  x = array(jnp.dtype("float32"))
  assert tree_checksums(x) != tree_checksums(x.T)


def test_checksums_of_chunks_add_up_to_that_of_the_array():
  x = np.asarray(array(jnp.dtype("float32")))
  chunks = [(x[:3], (0, 0)), (x[3:, :5], (3, 0)), (x[3:, 5:], (3, 5))]
  total = sum(chunk_checksum(chunk, start, x.shape) for chunk, start in chunks)
  assert total % 2**32 == tree_checksums(x)[""]


def test_the_hash_is_that_of_checkpoints_already_written():
  bits = bits_of(jnp.dtype("float32"))
  tree = {name: bits.view(name) for name in ("float32", "uint16", "int8", "float64", "int64")}
  tree |= {"bool": bits > 99, "scalar": np.float32(0.1), "empty": np.zeros((0, 4), np.float32)}
  with jax.enable_x64(True):
    assert tree_hash(tree)[:16] == "78a1b16f06bb7b54"


def test_names_are_paths_and_scalars_and_empty_arrays_have_checksums():
  tree = {"a": (jnp.int32(3), {"b": jnp.zeros((0, 4))}), "c": jnp.ones((3,), jnp.bool_)}
  assert list(tree_checksums(tree)) == ["a/0", "a/1/b", "c"]


def test_the_hash_depends_on_names_shapes_dtypes_and_bits():
  x = jnp.zeros((2, 3))
  trees = [
    {"a": x},
    {"b": x},
    {"a": x.reshape(3, 2)},
    {"a": x.astype(jnp.int32)},
    {"a": x.at[0, 0].set(-0.0)},
    {"a": x, "b": x},
  ]
  hashes = [tree_hash(tree) for tree in trees]
  assert len(set(hashes)) == len(trees)
  assert tree_hash({"a": jnp.zeros((2, 3))}) == hashes[0]


def test_two_arrays_of_one_name_are_refused():
  """One checksum would stand for both: a key may contain the separator of names."""
  one = jnp.zeros(2)
  assert list(tree_checksums({"a": {"b/c": one}, "a/b": {"d": one}})) == ["a/b/c", "a/b/d"]
  with pytest.raises(UserError, match="two arrays of the state are called a/b/c"):
    tree_checksums({"a": {"b/c": one}, "a/b": {"c": one}})
