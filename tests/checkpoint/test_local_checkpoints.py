"""Local checkpoints restore exactly one saved snapshot, or nothing."""

import hashlib
import json
import os
import resource
import shutil
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from maxlite.checkpoint.local_checkpoints import LocalCheckpoints
from maxlite.checkpoint.manifest import seal_manifest
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


def file_of_step(folder, step):
  (path,) = folder.rglob(f"{step}-*.slices")
  return path


ODD_FILES = {
  "pipe": os.mkfifo,
  "device": lambda path: path.symlink_to("/dev/zero"),
  "link": lambda path: path.symlink_to(path.with_name("copy")),
  "loop": lambda path: path.symlink_to(path.name),
  "folder": lambda path: path.mkdir(),
  "sparse": lambda path: (path.touch(), os.truncate(path, 1 << 40)),
  "deep": lambda path: path.write_text("[" * 100_000 + "\n"),
  "number": lambda path: path.write_text("9" * 10_000 + "\n"),
  "list": lambda path: path.write_text(
    json.dumps({"body": [1], "sha256": hashlib.sha256(b"[1]").hexdigest()}) + "\n"
  ),
  "body": lambda path: path.write_text(json.dumps(seal_manifest({"data": 1})) + "\n"),
}


@pytest.mark.parametrize("kind", ODD_FILES)
def test_what_is_no_checkpoint_is_skipped(tmp_path, kind):
  Start(tmp_path).save(1, 2)
  path = file_of_step(tmp_path, 2)
  path.rename(path.with_name("copy"))
  ODD_FILES[kind](path)
  start = Start(tmp_path)
  assert start.restored() == 1
  start.save(3, 4)
  assert Start(tmp_path).restored() == 4


def test_a_longer_file_with_its_checksum_is_skipped(tmp_path):
  """Its bytes are those of another state."""
  Start(tmp_path).save(1, 2)
  path = file_of_step(tmp_path, 2)
  line, _, data = path.read_bytes().partition(b"\n")
  body = json.loads(line)["body"]
  data += b"more"
  manifest = seal_manifest(body | {"crc32": zlib.crc32(data)})
  path.write_bytes(json.dumps(manifest).encode() + b"\n" + data)
  assert Start(tmp_path).restored() == 1


@pytest.mark.parametrize("name", ["5" * 5000, "٣", "1-a-b.slices.d", "-1-a-b.slices", "x"])
def test_files_of_other_names_are_left_alone(tmp_path, name):
  Start(tmp_path).save(1)
  folder = file_of_step(tmp_path, 1).parent
  other = folder / f"{name[:200]}-{'a'}-{'b'}.slices" if name.startswith("5") else folder / name
  other.touch()
  start = Start(tmp_path)
  assert start.restored() == 1
  start.save(2, 3)
  assert other.exists()


def test_a_file_is_not_written_through_a_link(tmp_path, monkeypatch):
  (tmp_path / "victim").write_text("precious")
  start = Start(tmp_path / "local").save(1)
  name = file_of_step(tmp_path, 1).name.replace("1-", "2-", 1)
  temporary = (tmp_path / "local" / "run" / name).with_suffix(f".{os.getpid()}.tmp")
  temporary.symlink_to(tmp_path / "victim")
  start.save(2)
  assert Start(tmp_path / "local").restored() == 2
  assert (tmp_path / "victim").read_text() == "precious"
