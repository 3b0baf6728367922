"""Local checkpoints restore exactly one saved snapshot, or nothing."""

import resource
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from maxlite.checkpoint.local_checkpoints import LocalCheckpoints
from maxlite.checkpoint.run_folder import RunFolder
from maxlite.config.schema import CheckpointConfig
from maxlite.sharding import MESH_AXES, build_mesh

SPECS = {"a": jax.P("fsdp"), "b": jax.P(None, "tensor"), "c": jax.P(), "d": jax.P("fsdp", "tensor")}


def sharded(step, fsdp=4, tensor=2):
  """A state that depends on the step, with several dtypes, a scalar and replicas."""
  degrees = {"fsdp": fsdp, "tensor": tensor}
  mesh = build_mesh([degrees.get(axis, 1) for axis in MESH_AXES], (1,) * len(MESH_AXES))
  rng = np.random.default_rng(step)
  bits = rng.integers(2**16, size=(4, 4), dtype=np.uint16)
  host = {
    "a": rng.standard_normal(8).astype(np.float32),
    "b": jax.lax.bitcast_convert_type(bits, jnp.bfloat16),  # NaNs too
    "c": np.asarray(step, np.int32),
    "d": rng.integers(2, size=(8, 8)).astype(bool),
  }
  return {name: jax.device_put(host[name], NamedSharding(mesh, SPECS[name])) for name in host}


class Start:
  """A start of the run with local checkpoints in `folder`, and the lines it reports."""

  def __init__(self, folder, like=None, run_id="run", **keys):
    self.lines = []
    cfg = CheckpointConfig(local_checkpoint_directory=str(folder), **keys)
    like = sharded(0) if like is None else like
    abstract = jax.tree.map(
      lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), like
    )
    self.local = LocalCheckpoints(cfg, run_id, abstract, self.lines.append)

  def save(self, *steps):
    """Save these steps and wait until the last is written, as a later save would."""
    for step in steps:
      self.local.save(step, sharded(step), {"num_batches": step})
    self.local._writer.submit(lambda: None).result()
    return self

  def restored(self, newer_than=0):
    """Restore; return the step, after checking the state and data position, or None."""
    found = self.local.restore(newer_than)
    if found is None:
      return None
    state, data_state, step = found
    assert data_state == {"num_batches": step}
    jax.tree.map(assert_same_bits, state, sharded(step))
    return step


def assert_same_bits(leaf, expected):
  assert leaf.sharding == expected.sharding
  for shard, other in zip(leaf.addressable_shards, expected.addressable_shards, strict=True):
    assert shard.data.dtype == other.data.dtype
    assert np.asarray(shard.data).tobytes() == np.asarray(other.data).tobytes()


def flip_byte(path, where):
  data = bytearray(path.read_bytes())
  data[int(where * len(data))] ^= 1
  path.write_bytes(data)


def files(folder):
  return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_the_latest_is_restored_bitwise_and_two_are_kept(tmp_path):
  Start(tmp_path).save(1, 2, 3)
  assert [name.split("-")[0] for name in files(tmp_path)] == ["2", "3"]
  again = Start(tmp_path)
  assert again.restored() == 3
  assert again.lines == ["step 3 is complete in the local checkpoints"]
  assert [name.split("-")[0] for name in files(tmp_path)] == ["3"]


def test_the_state_may_be_donated_once_save_returns(tmp_path):
  local = Start(tmp_path).local
  state = sharded(1)
  local.save(1, state, {"num_batches": 1})
  change = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf ^ leaf, state), donate_argnums=0)
  change({"c": state["c"], "d": state["d"]})
  local._writer.submit(lambda: None).result()
  assert Start(tmp_path).restored() == 1


@pytest.mark.parametrize("where", [0.0, 0.1, 0.999])
def test_a_damaged_file_is_skipped(tmp_path, where):
  Start(tmp_path).save(1, 2)
  (newest,) = tmp_path.rglob("2-*")
  flip_byte(newest, where)
  assert Start(tmp_path).restored() == 1


def test_a_truncated_or_unfinished_file_is_skipped(tmp_path):
  Start(tmp_path).save(1, 2)
  (newest,) = tmp_path.rglob("2-*")
  newest.write_bytes(newest.read_bytes()[:-1])
  newest.rename(newest.with_suffix(".7.tmp"))
  again = Start(tmp_path)
  assert again.restored() == 1
  assert len(files(tmp_path)) == 1


def test_a_renamed_file_is_skipped(tmp_path):
  Start(tmp_path).save(1)
  (path,) = tmp_path.rglob("1-*")
  path.rename(path.with_name(path.name.replace("1-", "9-", 1)))
  assert Start(tmp_path).restored() is None


@pytest.mark.parametrize("degrees", [{"fsdp": 8, "tensor": 1}, {"fsdp": 2, "tensor": 4}], ids=str)
def test_another_mesh_uses_the_shared_checkpoint(tmp_path, degrees):
  """Also if the mesh has the same number of shards."""
  Start(tmp_path).save(1)
  again = Start(tmp_path, sharded(0, **degrees))
  assert again.restored() is None
  (line,) = again.lines
  assert "up to step 1, are incomplete on these hosts and this mesh: using the shared one" in line
  assert not files(tmp_path)


@pytest.mark.parametrize("shared", [2, 3])
def test_a_shared_checkpoint_of_the_same_or_a_later_step_takes_precedence(tmp_path, shared):
  Start(tmp_path).save(2)
  again = Start(tmp_path)
  assert again.restored(newer_than=shared) is None
  assert again.lines == []


def test_runs_do_not_share_local_checkpoints(tmp_path):
  Start(tmp_path).save(2)
  assert Start(tmp_path, run_id="other").restored() is None
  again = Start(tmp_path)
  assert again.restored() == 2
  again.local.remove()
  assert not files(tmp_path)


def test_a_recreated_run_has_another_id(tmp_path):
  folder = RunFolder(tmp_path / "run")
  first = folder.run_id()
  assert folder.run_id() == first
  shutil.rmtree(folder.directory)
  assert folder.run_id() != first


def test_a_full_disk_is_reported_and_the_last_checkpoint_stays(tmp_path):
  start = Start(tmp_path).save(1)
  limits = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
  try:
    start.save(2)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
  start.save(3, 4)
  (line,) = start.lines
  assert line.startswith("process 0 cannot write local checkpoints to ")
  assert line.endswith("File too large; continuing without them")
  assert Start(tmp_path).restored() == 1


def test_a_folder_that_cannot_be_created_raises(tmp_path):
  (tmp_path / "file").write_text("")
  with pytest.raises(ValueError, match=r"local_checkpoint_directory=.*Not a directory: name a"):
    Start(tmp_path / "file")
