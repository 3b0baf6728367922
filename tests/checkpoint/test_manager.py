"""Checkpoints restore the saved bits, and damaged ones are never restored."""

import errno
import functools
import logging
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import struct
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.corruption import corrupted

from maxlite.checkpoint import orbax_io, repeated_read
from maxlite.checkpoint.checksum import tree_hash
from maxlite.checkpoint.manager import Checkpoints, CheckpointWriteError
from maxlite.checkpoint.orbax_io import MIN_SLICE_BYTES
from maxlite.config import load_config
from maxlite.config.schema import CheckpointConfig
from maxlite.errors import UserError


@struct.dataclass
class State:
  step: jax.Array
  params: dict
  opt_state: optax.OptState
  rng: jax.Array


def mesh_of(*shape):
  return jax.make_mesh(shape, ("x", "y"))


def sharding_of(mesh, leaf):
  return NamedSharding(mesh, P("x", "y") if leaf.ndim == 2 else P())


def make_state(step, mesh, width=8):
  kernel = jax.random.normal(jax.random.key(step), (8, width))
  params = {"layer": {"kernel": kernel, "scale": jnp.full((4,), step, jnp.bfloat16)}}
  tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
  state = State(jnp.int32(step), params, tx.init(params), jnp.asarray([1, step], jnp.uint32))
  return jax.device_put(state, jax.tree.map(lambda leaf: sharding_of(mesh, leaf), state))


def abstract(state, mesh):
  return jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding_of(mesh, leaf)),
    state,
  )


def open_checkpoints(folder, reports=None, **keys):
  report = reports.append if reports is not None else pytest.fail
  return Checkpoints(CheckpointConfig(**keys), folder, report)


def save_steps(folder, steps, **keys):
  checkpoints = open_checkpoints(folder, **keys)
  for step in steps:
    checkpoints.save(step, make_state(step, mesh_of(2, 4)), {"epoch": 0, "row": 10 * step})
  checkpoints.close()


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
  """A folder with checkpoints of steps 1 and 2; tests modify copies of it."""
  folder = tmp_path_factory.mktemp("run") / "checkpoints"
  save_steps(folder, [1, 2])
  return folder


@pytest.fixture
def folder(two_steps, tmp_path):
  return shutil.copytree(two_steps, tmp_path / "checkpoints")


def assert_restores(checkpoints, step, mesh_shape=(2, 4)):
  expected = make_state(step, mesh_of(2, 4))
  target = abstract(expected, mesh_of(*mesh_shape))
  state, data_state, restored_step = checkpoints.restore(target)
  assert (restored_step, data_state) == (step, {"epoch": 0, "row": 10 * step})
  assert jax.tree.structure(state) == jax.tree.structure(expected)
  assert tree_hash(state) == tree_hash(expected)
  assert all(
    leaf.sharding == sharding_of(mesh_of(*mesh_shape), leaf) for leaf in jax.tree.leaves(state)
  )


def test_a_checkpoint_is_not_read_by_another_function(tmp_path):
  """One changed bit of config.yml changed what a checkpoint computed."""

  def opened(*argv, allow_changes=()):
    model = load_config(argv).model
    return Checkpoints(CheckpointConfig(), tmp_path, pytest.fail, model, allow_changes)

  writer = opened()
  writer.save(1, make_state(1, mesh_of(2, 4)), {"epoch": 0, "row": 10})
  writer.close()
  assert_restores(opened("dtype=bfloat16", "remat_policy=full"), 1)
  changed = ["rope_max_timescale=50000"]
  message = r"saved with rope_max_timescale=10000.0, .* write allow_changes=\[rope_max_timescale\]"
  with pytest.raises(UserError, match=message):
    assert_restores(opened(*changed), 1)
  with pytest.raises(UserError, match=message):
    opened(*changed).stored()
  assert_restores(opened(*changed, allow_changes=["rope_max_timescale"]), 1)


@pytest.mark.parametrize("mesh_shape", [(2, 4), (8, 1), (1, 8)])
def test_restore_is_bitwise_identical_on_any_mesh(two_steps, mesh_shape):
  assert_restores(open_checkpoints(two_steps), 2, mesh_shape)


def test_restore_from_a_missing_folder_gives_none_and_creates_nothing(tmp_path):
  checkpoints = open_checkpoints(tmp_path / "none")
  assert checkpoints.restore(abstract(make_state(1, mesh_of(2, 4)), mesh_of(2, 4))) is None
  checkpoints.wait()
  checkpoints.close()
  assert checkpoints.latest_step() is None
  assert not (tmp_path / "none").exists()


def test_restores_only_the_parameters(folder):
  shutil.rmtree(folder / "1")
  expected = make_state(2, mesh_of(2, 4))
  params, step = restore_params(open_checkpoints(folder), abstract(expected, mesh_of(8, 1)))
  assert step == 2
  assert tree_hash(params) == tree_hash(expected.params)


def test_the_saved_arrays_may_be_donated_while_they_are_written(tmp_path):
  checkpoints = open_checkpoints(tmp_path / "checkpoints")
  state = make_state(1, mesh_of(2, 4))
  checkpoints.save(1, state, {"epoch": 0, "row": 10})
  jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + leaf, tree), donate_argnums=0)(state)
  checkpoints.close()
  assert_restores(open_checkpoints(tmp_path / "checkpoints"), 1)


def restore_params(checkpoints, abstract_state):
  parts, step = checkpoints.restore_parts({"params": abstract_state.params})
  return parts["params"], step


def all_files(folder):
  return sorted(path.relative_to(folder) for path in (folder / "2").rglob("*") if path.is_file())


def test_a_flipped_byte_in_any_file_is_harmless_or_costs_one_checkpoint(two_steps, tmp_path):
  rng = np.random.default_rng(0)
  num_damaged = 0
  for i, path in enumerate(all_files(two_steps)):
    folder = shutil.copytree(two_steps, tmp_path / str(i) / "checkpoints")
    content = bytearray((folder / path).read_bytes())
    content[rng.integers(len(content))] ^= 1 << rng.integers(8)
    (folder / path).write_bytes(content)
    reports = []
    found = open_checkpoints(folder, reports).restore(
      abstract(make_state(1, mesh_of(2, 4)), mesh_of(2, 4))
    )
    state, data_state, step = found
    assert step == (1 if reports else 2), path
    assert data_state == {"epoch": 0, "row": 10 * step}, path
    assert tree_hash(state) == tree_hash(make_state(step, mesh_of(2, 4))), path
    assert (folder.parent / "checkpoints_damaged" / "2").exists() == (step == 1)
    num_damaged += step == 1
  assert num_damaged >= 3


@pytest.mark.parametrize("damage", ["truncate", "empty", "remove"])
@pytest.mark.parametrize("part", ["state/**/d/*", "state/manifest.ocdbt", "manifest/metadata"])
def test_a_damaged_checkpoint_is_reported_moved_and_the_previous_one_restored(folder, part, damage):
  for path in (folder / "2").glob(part):
    content = path.read_bytes()
    path.unlink()
    if damage != "remove":
      path.write_bytes(content[: len(content) // 2] if damage == "truncate" else b"")
  left = all_files(folder)
  reports = []
  assert_restores(open_checkpoints(folder, reports), 1)
  assert len(reports) == 2
  assert f"checkpoint {folder}/2 is damaged: " in reports[0]
  assert reports[0].endswith("; falling back to 1")
  assert all("\n" not in report for report in reports)
  assert not (folder / "2").exists()
  kept = folder.parent / "checkpoints_damaged"
  assert [path.relative_to(kept) for path in sorted(kept.rglob("*")) if path.is_file()] == left


def test_arrays_of_another_step_count_as_damage(folder):
  shutil.rmtree(folder / "2/state")
  shutil.copytree(folder / "1/state", folder / "2/state")
  reports = []
  assert_restores(open_checkpoints(folder, reports), 1)
  assert "are not those that were saved" in reports[0]


def test_a_modified_data_state_counts_as_damage(folder):
  path = folder / "2/manifest/metadata"
  path.write_text(path.read_text().replace('"row": 20', '"row": 21'))
  assert_restores(open_checkpoints(folder, []), 1)


def test_a_damaged_step_can_be_saved_again_twice(folder):
  for name in ("2", "2.1"):
    (folder / "2/state/manifest.ocdbt").write_bytes(b"")
    checkpoints = open_checkpoints(folder, reports := [])
    assert_restores(checkpoints, 1)
    assert reports[1].endswith(f"checkpoints_damaged/{name}")
    checkpoints.save(2, make_state(2, mesh_of(2, 4)), {"epoch": 0, "row": 20})
    checkpoints.close()
  assert_restores(open_checkpoints(folder), 2)


def test_damage_to_all_checkpoints_raises_and_moves_nothing(folder):
  for step in ("1", "2"):
    (folder / step / "manifest/metadata").unlink()
  for _ in range(2):
    with pytest.raises(ValueError, match=r"all checkpoints in .* are damaged \(steps 2, 1\)"):
      assert_restores(open_checkpoints(folder, []), 1)
  assert sorted(path.name for path in folder.iterdir()) == ["1", "2"]


@pytest.mark.parametrize("only_params", [False, True])
def test_another_model_raises_with_the_first_difference(folder, only_params):
  other = abstract(make_state(1, mesh_of(2, 4), width=16), mesh_of(2, 4))
  checkpoints = open_checkpoints(folder)
  message = r"params/layer/kernel is float32\[8, 8\] in it and float32\[8, 16\] here"
  with pytest.raises(ValueError, match=message if only_params else "kernel is"):
    restore_params(checkpoints, other) if only_params else checkpoints.restore(other)
  assert sorted(path.name for path in folder.iterdir()) == ["1", "2"]


def test_another_optimizer_raises_with_a_leaf(folder):
  state = make_state(1, mesh_of(2, 4))
  other = abstract(state.replace(opt_state=optax.sgd(1e-3).init(state.params)), mesh_of(2, 4))
  with pytest.raises(ValueError, match=r"opt_state/.* is .* in it and missing here"):
    open_checkpoints(folder).restore(other)


def test_a_renamed_checkpoint_is_moved_aside(folder):
  (folder / "2").rename(folder / "99")
  assert_restores(open_checkpoints(folder, reports := []), 1)
  assert reports[0] == (
    f"checkpoint {folder}/99 is damaged: it was saved as step 2, and its folder was renamed; "
    "falling back to 1"
  )
  assert (folder.parent / "checkpoints_damaged/99").is_dir()


def test_a_checkpoint_of_another_run_is_moved_aside(tmp_path):
  for run, step in (("a", 1), ("b", 2)):
    checkpoints = open_checkpoints(tmp_path / run)
    checkpoints.run_id = run
    checkpoints.save(step, make_state(step, mesh_of(2, 4)), {"epoch": 0, "row": 10 * step})
    checkpoints.close()
  shutil.copytree(tmp_path / "b/2", tmp_path / "a/2")
  checkpoints = open_checkpoints(tmp_path / "a", reports := [])
  assert checkpoints.saved_run_id() == "b"
  checkpoints.run_id = "a"
  assert_restores(checkpoints, 1)
  assert "2 is damaged: it is of another run (run_id b, here a)" in reports[0]


@pytest.mark.parametrize("restores", [True, False])
def test_a_changed_run_id_is_named_instead_of_damage(tmp_path, restores):
  """As if a bit of the file run_id had flipped."""
  folder = tmp_path / "checkpoints"
  for step in (3, 4):
    checkpoints = open_checkpoints(folder)
    checkpoints.run_id = "aaaa"
    checkpoints.save(step, make_state(step, mesh_of(2, 4)), {"epoch": 0, "row": 10 * step})
    checkpoints.close()
  checkpoints = open_checkpoints(folder)
  checkpoints.run_id = "aaab"
  state = abstract(make_state(1, mesh_of(2, 4)), mesh_of(2, 4))
  read = functools.partial(checkpoints.restore, state)
  if not restores:
    read = functools.partial(checkpoints.restore_parts, {"params": state.params})
  with pytest.raises(UserError, match=r"are of the run aaaa, and the file run_id says aaab: if"):
    read()
  assert sorted(path.name for path in folder.iterdir()) == ["3", "4"]


def test_a_run_id_of_a_checkpoint_that_is_no_name_is_refused(tmp_path):
  """A folder of this name would be removed at the end of the run."""
  checkpoints = open_checkpoints(tmp_path / "checkpoints")
  checkpoints.run_id = "../../x"
  checkpoints.save(1, make_state(1, mesh_of(2, 4)), {"epoch": 0, "row": 10})
  checkpoints.close()
  with pytest.raises(UserError, match=r"is of a run with the id '../../x': move it away"):
    open_checkpoints(tmp_path / "checkpoints").saved_run_id()


@pytest.mark.parametrize("name", ["state", "manifest"])
def test_a_linked_folder_in_a_checkpoint_is_damage(folder, tmp_path, name):
  (folder / "2" / name).rename(tmp_path / name)
  (folder / "2" / name).symlink_to(tmp_path / name)
  assert_restores(open_checkpoints(folder, reports := []), 1)
  assert f"2 is damaged: {name} is a link to" in reports[0]


@pytest.mark.parametrize("name", ["_CHECKPOINT_METADATA", "manifest/metadata", "state/_METADATA"])
def test_a_file_that_is_read_whole_has_a_limit(folder, name):
  os.truncate(folder / "2" / name, 1 << 36)  # sparse
  assert_restores(open_checkpoints(folder, reports := []), 1)
  assert f"2 is damaged: {name} has 68,719,476,736 bytes" in reports[0]


def test_what_orbax_logs_of_a_damaged_file_is_escaped(caplog):
  logging.getLogger("absl").error("file content: %s", "\x1b]0;x\x07")
  assert caplog.messages == ["file content: \\x1b]0;x\\x07"]


def test_folders_that_are_not_named_like_a_step_are_ignored(folder):
  for name in ("00099", "\N{SUPERSCRIPT TWO}", "\N{ARABIC-INDIC DIGIT THREE}"):
    (folder / name).mkdir()
  checkpoints = open_checkpoints(folder)
  assert_restores(checkpoints, 2)
  checkpoints.save(3, make_state(3, mesh_of(2, 4)), {"epoch": 0, "row": 30})
  checkpoints.close()
  assert_restores(open_checkpoints(folder), 3)


@pytest.mark.parametrize("part", ["manifest/metadata", "state/_METADATA"])
def test_a_pipe_in_a_checkpoint_does_not_block(folder, part):
  (folder / "2" / part).unlink()
  os.mkfifo(folder / "2" / part)
  assert_restores(open_checkpoints(folder, reports := []), 1)
  assert f"2 is damaged: {part} is not a file; falling back to 1" in reports[0]


def test_a_folder_that_cannot_be_opened_is_an_error_of_writing(tmp_path):
  checkpoints = open_checkpoints(tmp_path / "checkpoints")
  (tmp_path / "checkpoints").symlink_to("checkpoints")  # a loop
  with pytest.raises(CheckpointWriteError, match="no checkpoint can be written to"):
    checkpoints.save(1, make_state(1, mesh_of(2, 4)), {})


def fail_first(monkeypatch, owner, name, faults):
  """Have the first calls of a reader of Orbax raise an error each, or return a changed result."""
  read = getattr(owner, name)
  left = list(faults)

  def faulty(*args, **keys):
    fault = left.pop(0) if left else None
    if isinstance(fault, Exception):
      raise fault
    result = read(*args, **keys)
    return fault(result) if fault else result

  monkeypatch.setattr(owner, name, faulty)


def flip_kernel(state):
  layer = state.params["layer"]
  params = {"layer": layer | {"kernel": corrupted(layer["kernel"], 3)}}
  return state.replace(params=params)


def flip_step(state):
  return state.replace(step=state.step + 1)


DENIED = PermissionError(errno.EACCES, "Permission denied", "metadata")
UNAVAILABLE = ValueError("UNAVAILABLE: Error reading: HTTP response code: 503")


@pytest.fixture
def no_pauses(monkeypatch):
  monkeypatch.setattr(repeated_read, "_PAUSES", (0,) * 4)


@pytest.mark.parametrize("error", [DENIED, UNAVAILABLE, ConnectionResetError(), ValueError("flip")])
def test_a_read_that_fails_once_is_repeated(folder, monkeypatch, no_pauses, error):
  fail_first(monkeypatch, ocp.JsonCheckpointHandler, "restore", [error])
  fail_first(monkeypatch, ocp.PyTreeCheckpointHandler, "restore", [error, flip_kernel, flip_step])
  assert_restores(open_checkpoints(folder), 2)


DIFFERENT = [ValueError(f"checksum {n}") for n in range(9)]


@pytest.mark.parametrize("errors", [9 * [DENIED], 9 * [UNAVAILABLE], DIFFERENT])
def test_errors_of_the_environment_move_nothing(folder, monkeypatch, no_pauses, errors):
  fail_first(monkeypatch, ocp.PyTreeCheckpointHandler, "restore", errors)
  with pytest.raises(UserError, match="2 cannot be read, also repeatedly, but is not known to be"):
    assert_restores(open_checkpoints(folder), 2)
  assert sorted(path.name for path in folder.parent.iterdir()) == ["checkpoints"]


def test_bits_that_are_wrong_twice_are_damage(folder, monkeypatch, no_pauses):
  faults = [flip_kernel, flip_step, flip_kernel]
  fail_first(monkeypatch, ocp.PyTreeCheckpointHandler, "restore", faults)
  assert_restores(open_checkpoints(folder, reports := []), 1)
  assert "the bits of params/layer/kernel are not those that were saved" in reports[0]


def test_restore_parts_skips_damage_without_modifying_the_folder(folder):
  (folder / "2/state/manifest.ocdbt").write_bytes(b"")
  (folder / "3.orbax-checkpoint-tmp").mkdir()
  before = sorted(folder.rglob("*"))
  expected = make_state(1, mesh_of(2, 4))
  checkpoints = open_checkpoints(folder, reports := [])
  params, step = restore_params(checkpoints, abstract(expected, mesh_of(2, 4)))
  assert (step, tree_hash(params)) == (1, tree_hash(expected.params))
  assert len(reports) == 1
  assert sorted(folder.rglob("*")) == before


def test_restore_parts_of_a_missing_checkpoint_raises(tmp_path):
  target = abstract(make_state(1, mesh_of(2, 4)), mesh_of(2, 4))
  with pytest.raises(ValueError, match=r"there is no checkpoint in .*: train first"):
    restore_params(open_checkpoints(tmp_path / "none"), target)


def test_keeps_the_latest_and_those_of_the_keep_period(tmp_path):
  keys = {"max_num_checkpoints_to_keep": 2, "checkpoint_keep_period": 3}
  save_steps(tmp_path / "checkpoints", range(1, 9), **keys)
  assert sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir()) == [3, 6, 7, 8]


@pytest.mark.parametrize("async_checkpointing", [True, False])
def test_saving_a_step_again_keeps_the_first(folder, async_checkpointing):
  before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
  save_steps(folder, [2, 2], async_checkpointing=async_checkpointing)
  assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_saving_another_state_of_a_saved_step_raises(folder):
  checkpoints = open_checkpoints(folder)
  with pytest.raises(ValueError, match="2 holds another state of this step and is kept"):
    checkpoints.save(2, make_state(1, mesh_of(2, 4)), {"epoch": 0, "row": 20})
  checkpoints.close()


def test_saving_a_damaged_step_keeps_both(folder):
  (folder / "2/manifest/metadata").unlink()
  checkpoints = open_checkpoints(folder, reports := [])
  checkpoints.save(2, make_state(2, mesh_of(2, 4)), {"epoch": 0, "row": 20})
  checkpoints.close()
  assert "rewriting it" in reports[0]
  assert_restores(open_checkpoints(folder), 2)
  assert (folder.parent / "checkpoints_damaged/2").is_dir()


@pytest.mark.parametrize("min_slice_bytes", [MIN_SLICE_BYTES, 4])
def test_replicas_write_slices_of_large_arrays_only(tmp_path, monkeypatch, min_slice_bytes):
  """Orbax compiles a program for each slice."""
  monkeypatch.setattr(orbax_io, "MIN_SLICE_BYTES", min_slice_bytes)
  state = jax.device_put({"x": np.arange(8.0, dtype=np.float32)}, NamedSharding(mesh_of(2, 4), P()))
  compiled = []
  checkpoints = open_checkpoints(tmp_path)

  def listen(event, *_, fun_name="", **__):
    compiled.append(fun_name)

  jax.monitoring.register_event_duration_secs_listener(listen)
  checkpoints.save(1, state, {})
  checkpoints.close()
  jax.monitoring.unregister_event_duration_listener(listen)
  assert ("jit(slice)" in compiled) == (min_slice_bytes == 4)
  assert tree_hash(open_checkpoints(tmp_path).restore(state)[0]) == tree_hash(state)


SCRIPT_START = """
import sys
sys.path[:0] = sys.argv[1:3]
import conftest
import test_manager as t
folder, argument = t.Path(sys.argv[3]), sys.argv[4]
"""

# The write fails as on a full disk. Orbax then abandons its other threads, which print tracebacks
# at any later time, hence a separate process.
FILL_DISK = """
import resource
checkpoints = t.open_checkpoints(folder)
checkpoints.save(1, t.make_state(1, t.mesh_of(2, 4)), {"epoch": 0, "row": 10})
checkpoints.wait()
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
checkpoints.save(2, t.make_state(2, t.mesh_of(2, 4)), {"epoch": 0, "row": 20})
state = t.make_state(3, t.mesh_of(2, 4))
try:
  checkpoints.save(3, state, {}) if argument == "save" else getattr(checkpoints, argument)()
except t.CheckpointWriteError as error:
  print(error)
"""

SAVE_UNTIL_KILLED = """
import itertools, os, signal, threading
checkpoints = t.open_checkpoints(folder, max_num_checkpoints_to_keep=2)
for step in itertools.count(1):
  state = t.make_state(step, t.mesh_of(2, 4))
  if step == 4:
    threading.Timer(float(argument), os.kill, (os.getpid(), signal.SIGKILL)).start()
  print(step, flush=True)
  checkpoints.save(step, state, {"epoch": 0, "row": 10 * step})
"""


def start_process(script, folder, argument):
  here = Path(__file__).parent
  command = [sys.executable, "-c", SCRIPT_START + script, here, here.parent, folder, argument]
  pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
  return subprocess.Popen(command, text=True, **pipes)


@pytest.mark.slow
def test_a_failed_write_surfaces_at_the_next_call(tmp_path):
  folders = {call: tmp_path / call / "checkpoints" for call in ("save", "wait", "close")}
  processes = [start_process(FILL_DISK, folder, call) for call, folder in folders.items()]
  for folder, process in zip(folders.values(), processes, strict=True):
    assert "File too large" in process.communicate()[0]
    assert_restores(open_checkpoints(folder, []), 1)


def test_killing_a_process_during_a_save_loses_no_finished_checkpoint(tmp_path):
  folders = [tmp_path / str(i) / "checkpoints" for i in range(2)]
  processes = [
    start_process(SAVE_UNTIL_KILLED, folder, str(0.03 * i)) for i, folder in enumerate(folders)
  ]
  for folder, process in zip(folders, processes, strict=True):
    started = int(process.communicate()[0].split()[-1])
    assert process.returncode == -signal.SIGKILL
    checkpoints = open_checkpoints(folder, reports := [])
    _, _, step = checkpoints.restore(abstract(make_state(1, mesh_of(2, 4)), mesh_of(2, 4)))
    assert started - 2 <= step <= started
    assert reports == []
    assert all(path.name.isdigit() for path in folder.iterdir())
    assert not (folder.parent / "checkpoints_damaged").exists()
    assert_restores(checkpoints, step)
    checkpoints.save(step + 1, make_state(step + 1, mesh_of(2, 4)), {"epoch": 0, "row": 0})
    checkpoints.close()
    assert checkpoints.latest_step() == step + 1
