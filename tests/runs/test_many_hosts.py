"""A run with multiple processes equals one with a single process: numbers, checkpoints, files."""

import json
import re
import shutil

import pytest
from support.host_runs import LAST_BITS, LIGHT, largest_difference, run
from support.tiny_run import logged, start

# Compilation dominates, in each of up to eight processes on the same cores.
SPREAD = {key: LIGHT[key] for key in LIGHT if key != "decoder_block"}
SPREAD |= {"steps": 6, "global_batch_size": 16}
DENSE = {
  "decoder_block": "llama",
  "base_num_kv_heads": 4,
  "ici_fsdp_parallelism": 2,
  "ici_tensor_parallelism": -1,
}
MOE = {"ici_fsdp_parallelism": 2, "ici_expert_parallelism": -1, "sparse_matmul": True}


@pytest.fixture
def folder(runs_folder, request):
  """A separate folder per test; with multiple processes Orbax rejects brackets in its path."""
  return runs_folder / re.sub(r"\W+", "_", request.node.name)


@pytest.fixture(scope="module")
def on_two_hosts(runs_folder):
  """(folder, output) of a light run on two processes with one device each."""
  folder = runs_folder / "two_hosts"
  return folder, run(folder, processes=2, per_device_batch_size=8, **LIGHT)


def test_two_hosts_equal_one_and_one_resumes_from_their_checkpoint(on_two_hosts, folder):
  two_hosts, _ = on_two_hosts
  code, _ = start(folder, **LIGHT)
  assert code == 0
  assert 0 < largest_difference(two_hosts, folder) < LAST_BITS
  moved = folder.with_name("moved")
  shutil.copytree(two_hosts, moved)
  shutil.rmtree(moved / "run/checkpoints/4")
  code, output = start(moved, **LIGHT)
  assert code == 0
  assert "resuming from the checkpoint of step 2" in output
  assert largest_difference(moved, folder) < LAST_BITS


def test_only_process_0_writes_and_each_identifies_itself(on_two_hosts):
  folder, output = on_two_hosts
  names = {path.name for path in (folder / "run").iterdir()}
  assert names == {
    ".lock",
    "checkpoints",
    "config.yml",
    "curves.png",
    "metrics.jsonl",
    "run_id",
    "starts.jsonl",
  }
  assert [row["step"] for row in logged(folder)] == [1, 2, 3, 4]
  identity = r"^\[{0}\] process {0} of 2: 1 of 2 devices, on \S+ with process number \d+$"
  for rank in range(2):
    assert re.search(identity.format(rank), output, re.M)
  assert not re.search(r"^\[1\] (step|maxlite|eval)", output, re.M)
  assert len(re.findall(r"^\[0\] step", output, re.M)) == 4


@pytest.mark.slow
def test_process_0_decides_when_all_save_by_time(folder):
  keys = SPREAD | DENSE | {"log_period": 2, "checkpoint_period": 100}
  run(folder, processes=2, devices=2, **keys, checkpoint_period_minutes=1e-9)
  steps = {int(path.name) for path in (folder / "run/checkpoints").iterdir() if path.name.isdigit()}
  assert steps == {2, 4, 6}


@pytest.mark.slow
@pytest.mark.parametrize("keys", [DENSE, MOE], ids=["dense", "moe"])
def test_numbers_do_not_depend_on_the_distribution_of_devices_over_hosts(keys, folder):
  """Also when 1 host, or 2 with half the devices, resume from a checkpoint of 4 hosts."""
  base = folder / "1x8"
  keys = SPREAD | keys
  run(base, processes=1, devices=8, **keys)
  differences = {}
  for processes, devices in ((2, 4), (4, 2), (8, 1)):
    there = folder / f"{processes}x{devices}"
    run(there, processes=processes, devices=devices, **keys)
    differences[there.name] = largest_difference(there, base)
  for processes, devices in ((4, 2), (1, 8), (2, 2)):
    there = folder / f"4x2 to {processes}x{devices}"
    shutil.copytree(folder / "4x2", there)
    for step in (4, 6):
      shutil.rmtree(there / f"run/checkpoints/{step}")
    output = run(there, processes=processes, devices=devices, **keys)
    assert "resuming from the checkpoint of step 2" in output
    assert [row["step"] for row in logged(there)] == list(range(1, 7))
    differences[there.name] = largest_difference(there, base)
  print(json.dumps(differences))
  assert largest_difference(folder / "4x2 to 4x2", folder / "4x2") == 0
  assert max(differences.values()) < LAST_BITS
