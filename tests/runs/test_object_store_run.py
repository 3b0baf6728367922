"""Runs on an object store: equal to local ones, resumed, damaged, and taken over."""

import jax.numpy as jnp
import pytest
from support.host_runs import run
from support.tiny_run import STEPS, logged, parameter_hash, start

from maxlite.checkpoint.manager import Checkpoints
from maxlite.checkpoint.run_folder import RunFolder
from maxlite.config.schema import CheckpointConfig
from maxlite.errors import UserError
from maxlite.storage.mirror import RunMirror, open_mirror
from maxlite.storage.object_store import download, filesystem, list_files, upload

NAMES = {"a": "alpha", "b": "beta", "c": "gamma"}  # of sources, and what they repeat


def start_on(store, folder, **keys):
  """(output, rows of metrics.jsonl on the store) of one start, which sees only the store."""
  open_mirror.cache_clear()
  code, output = start(folder, base_output_directory=store, **keys)
  assert code == 0
  return output, rows_on(store, folder)


def rows_on(store, folder):
  """The rows of metrics.jsonl on the store, without timings; `folder` receives a copy."""
  download(f"{store}/run/metrics.jsonl", folder / "run/metrics.jsonl")
  return logged(folder)


def copy_to(store, folder):
  """Copy a local run to the store, as `aws s3 cp --recursive` does."""
  copies = []
  for file in folder.rglob("*"):
    if file.is_file():
      name = file.relative_to(folder).as_posix()
      copies.append((file, f"{store}/{name}"))
  upload(copies)


@pytest.fixture
def store(request):
  """The URI of a new bucket of the fixture that the test names."""
  return request.getfixturevalue(request.param)


@pytest.mark.slow
@pytest.mark.parametrize("store", ["bucket", "gcs_bucket"], indirect=True)
def test_a_run_on_a_store_is_resumed_and_equals_a_local_run(finished, folder, store):
  output, rows = start_on(store, folder, steps=4)
  assert rows == logged(finished[0])[:4]
  output, rows = start_on(store, folder)
  assert "resuming from the checkpoint of step 4" in output
  assert f"{store}/run: metrics.jsonl, curves.png" in output
  assert parameter_hash(output) == parameter_hash(finished[1])
  assert rows == logged(finished[0])
  names = {file.name for file in list_files(f"{store}/run") if "checkpoints" not in file.uri}
  assert {"config.yml", "config.1.yml", "metrics.jsonl", "curves.png"} <= names


@pytest.mark.slow
@pytest.mark.parametrize("store", ["bucket", "gcs_bucket"], indirect=True)
def test_a_copied_run_falls_back_from_damaged_and_unfinished_checkpoints(finished, folder, store):
  copy_to(store, finished[0])
  run = f"{store}/run"
  files = filesystem(store)
  for file in list_files(f"{run}/checkpoints/{STEPS}/state"):
    if "/d/" in file.uri:  # of arrays
      content = files.cat_file(file.uri)
      files.pipe_file(file.uri, content[: len(content) // 2])
  files.pipe_file(f"{run}/checkpoints/10/state/d/part", b"of a killed save")
  output, rows = start_on(store, folder)
  assert f"checkpoint {run}/checkpoints/{STEPS} is damaged: " in output
  assert "resuming from the checkpoint of step 6" in output
  assert f"is kept as {run}/checkpoints_damaged/{STEPS}" in output
  assert parameter_hash(output) == parameter_hash(finished[1])
  assert rows == logged(finished[0])
  assert not list_files(f"{run}/checkpoints/10")
  assert list_files(f"{run}/checkpoints_damaged/{STEPS}")


def test_a_save_that_was_killed_before_its_last_object_is_not_a_checkpoint(bucket):
  checkpoints = RunFolder(f"{bucket}/run").checkpoints
  opened = Checkpoints(CheckpointConfig(), checkpoints, report=pytest.fail)
  for step in (2, 4):
    opened.save(step, {"weight": jnp.ones(3)}, {})
  opened.wait()
  last = f"{checkpoints}/4/commit_success.txt"
  assert opened.latest_step() == 4
  filesystem(last).rm(last)
  assert opened.latest_step() == 2


def test_the_process_that_starts_last_continues_alone(bucket):
  first = RunMirror(f"{bucket}/run")
  second = RunMirror(f"{bucket}/run")
  first.lock()
  (first.directory / "metrics.jsonl").write_text("first")
  first.upload()
  second.lock()
  (first.directory / "metrics.jsonl").write_text("again")
  with pytest.raises(UserError, match=rf"{bucket}/run has been taken over by process \d+ on "):
    first.upload()
  second.upload()
  assert filesystem(bucket).cat_file(f"{bucket}/run/metrics.jsonl") == b"first"


@pytest.mark.slow
def test_two_hosts_on_s3_equal_one_over_a_mixture_on_s3(folder, bucket):
  entries = []
  for name, word in NAMES.items():
    path = f"{bucket}/{name}.txt"
    text = "".join(f"{word} {n}\n" for n in range(300))
    filesystem(bucket).pipe_file(path, text.encode())
    entries.append(f"{{name: {name}, path: '{path}', type: text, weight: 1}}")
  keys = {
    "dataset_mixture": f"[{', '.join(entries)}]",
    "decoder_block": "llama",
    "base_num_decoder_layers": 1,
    "gradient_accumulation_steps": 1,
    "ema_decay": 0,
    "steps": 4,
  }
  rows = {}
  for count in (1, 2):
    here = folder / f"hosts{count}"
    uri = f"{bucket}/hosts{count}"
    options = {"processes": count, "devices": 8 // count, "base_output_directory": uri}
    output = run(here, **options, **keys)
    assert "read of a: " in output
    rows[count] = rows_on(uri, here)
  keys["steps"] = 6
  output = run(here, **options, **keys)
  assert "resuming from the checkpoint of step 4" in output
  for row, expected in zip(rows[2], rows[1], strict=True):
    assert row == pytest.approx(expected, rel=2e-5)
