"""Ensembles on several processes: the results of one process, and those of no interruption."""

import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
from support.ensemble_runs import MOE, SIZES, TINY, checksums, rows_of
from support.host_runs import ROOT, Launch, run

from maxlite.ensemble.selection.population import LINEAGE
from maxlite.metrics.writers import read_rows

pytestmark = pytest.mark.slow  # real processes
PAIR = "{name: slow, learning_rate: 1e-3}, {name: fast, learning_rate: 1e-2, init_weights_seed: 1}"
KEYS = TINY | {"run_name": "ens", "checkpoint_period": 2, "ensemble_data": "independent"}
ONE_EACH = {
  "ici_ensemble_parallelism": 2,
  "ici_fsdp_parallelism": 1,
  "ensemble_strategy": "stacked",
}
POPULATION = {
  **KEYS,
  **ONE_EACH,
  "members": f"[{PAIR}]",
  "steps": 6,
  "learning_rate_schedule_steps": 6,
  "checkpoint_period": 1,
  "pbt_period": 2,
  "pbt_fraction": 0.5,
  "pbt_hyperparameters": "{learning_rate: [0.5, 2]}",
}
LAST_BITS = 2e-5  # relative; float32 sums in a different order


@pytest.fixture
def folder(tmp_path, request):
  """With multiple processes Orbax rejects brackets in its path."""
  return tmp_path / re.sub(r"\W+", "_", request.node.name)


@pytest.fixture(scope="module")
def on_two_hosts(tmp_path_factory):
  """(folder, output) of members on one device each, of two processes."""
  folder = tmp_path_factory.mktemp("two_hosts")
  keys = KEYS | ONE_EACH
  return folder, run(folder, processes=2, devices=1, members=f"[{PAIR}]", **keys)


@pytest.fixture(scope="module")
def one_population(tmp_path_factory):
  folder = tmp_path_factory.mktemp("one_population")
  run(folder, processes=1, devices=2, **POPULATION)
  return folder


def entries_of(folder):
  """The leaderboard's rows without the speed."""
  text = (folder / "ens/members.jsonl").read_text()
  return re.sub(r'"tokens_per_second": [\d.]+', "", text)


def assert_equal_rows(folder, other, names, rtol, num_steps=4):
  for name in names:
    rows = rows_of(folder, name)
    expected = rows_of(other, name)
    steps = list(range(1, num_steps + 1))
    assert [row["step"] for row in rows] == steps
    assert [row["step"] for row in expected] == steps
    for row, there in zip(rows, expected, strict=True):
      assert row.keys() == there.keys()
      for key in row:
        np.testing.assert_allclose(row[key], there[key], rtol=rtol, atol=1e-3 * rtol, err_msg=key)


def test_members_on_two_hosts_equal_those_on_one_bit_for_bit(on_two_hosts, folder):
  one = run(folder, processes=1, devices=2, members=f"[{PAIR}]", **KEYS | ONE_EACH)
  there, output = on_two_hosts
  for name in ("slow", "fast"):
    assert rows_of(there, name) == rows_of(folder, name)
    for step in (2, 4):
      assert checksums(there, name, step) == checksums(folder, name, step)
  assert not re.search(r"^\[1\] (step|maxlite|Leader)", output, re.M)
  assert entries_of(there) == entries_of(folder)
  assert "greedy selection" in one


@pytest.mark.parametrize(
  ("strategy", "members", "names", "degree"),
  [
    ("stacked", PAIR, ("slow", "fast"), 2),  # a host holds one member
    ("fused", f"{PAIR}, {SIZES}", ("slow", "fast", "deep"), 1),  # and half of each
  ],
)
def test_sharded_members_on_two_hosts_equal_those_on_one(folder, strategy, members, names, degree):
  keys = KEYS | {"members": f"[{members}]", "ensemble_strategy": strategy}
  keys |= {"global_batch_size": 16, "ici_ensemble_parallelism": degree}
  run(folder / "2", processes=2, devices=4, **keys)
  run(folder / "1", processes=1, devices=8, **keys)
  assert_equal_rows(folder / "2", folder / "1", names, LAST_BITS)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_ensemble_resumes_bit_for_bit(on_two_hosts, folder, number):
  """After SIGTERM to one host at a step boundary, and after the loss of a host."""
  keys = KEYS | ONE_EACH | {"members": f"[{PAIR}]"}
  restarts = 0
  if number == signal.SIGKILL:
    restarts = 1
  saving = keys | {"checkpoint_period": 1}
  endless = Launch(folder, processes=2, devices=1, restarts=restarts, **saving)
  endless.wait_for(r"^\[0\] step 1/")
  os.kill(endless.process_id(1), number)
  code = endless.wait()
  if number == signal.SIGTERM:
    assert code == 128 + signal.SIGTERM, endless.output
    stopped = int(re.search(r"stopped after step (\d) of 4", endless.output)[1])
    output = run(folder, processes=2, devices=1, **keys)
    assert f"resuming from the checkpoints of step {stopped}: slow, fast" in output
  else:
    assert code == 0, endless.output
    assert "process 0 exits: process 1 died" in endless.output
  expected_folder, _ = on_two_hosts
  for name in ("slow", "fast"):
    assert rows_of(folder, name) == rows_of(expected_folder, name)
    assert checksums(folder, name) == checksums(expected_folder, name)


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_population_on_two_hosts_equals_that_on_one_bit_for_bit(
  one_population, folder, is_killed
):
  """Bit for bit, also if a host is lost after the first exchange."""
  launch = Launch(folder, processes=2, devices=1, restarts=1, **POPULATION)
  if is_killed:
    launch.wait_for(r"^\[0\] step 3/")
    os.kill(launch.process_id(1), signal.SIGKILL)
  assert launch.wait() == 0, launch.output
  assert is_killed == ("process 0 exits: process 1 died" in launch.output)
  lineage = read_rows(folder / "ens" / LINEAGE)
  assert lineage == read_rows(one_population / "ens" / LINEAGE)
  assert [row["step"] for row in lineage] == [2, 4]
  for name in ("slow", "fast"):
    assert rows_of(folder, name) == rows_of(one_population, name)
    for step in (2, 4, 6):
      assert checksums(folder, name, step) == checksums(one_population, name, step)


def copies_in(folder):
  """(step, member, its donor, hyperparameters after) of every copy; losses are approximate."""
  rows = read_rows(folder / "ens" / LINEAGE)
  return [(row["step"], row["member"], row["from"], row["after"]) for row in rows]


def test_a_population_of_sharded_members_on_two_hosts_equals_that_on_one(folder):
  keys = POPULATION | {"ici_fsdp_parallelism": 4, "global_batch_size": 16}
  run(folder / "2", processes=2, devices=4, **keys)
  run(folder / "1", processes=1, devices=8, **keys)
  copies = copies_in(folder / "2")
  assert copies == copies_in(folder / "1")
  assert [step for step, *_ in copies] == [2, 4]
  assert_equal_rows(folder / "2", folder / "1", ["slow", "fast"], LAST_BITS, num_steps=6)


def test_halving_leaves_one_member_on_two_hosts(folder):
  keys = KEYS | ONE_EACH | {"asha_reduction_factor": 2, "asha_min_steps": 2}
  keys |= {"members": f"[{PAIR}]"}
  output = run(folder / "2", processes=2, devices=1, **keys)
  run(folder / "1", processes=1, devices=2, **keys)
  assert "slow is stopped at step 2 by halving" in output
  assert_equal_rows(folder / "2", folder / "1", ["fast"], LAST_BITS)


SUBMESH = KEYS | {
  "ensemble_strategy": "submesh",
  "members": f"[{PAIR}, {SIZES}, {MOE}]",
  "global_batch_size": 16,
  "checkpoint_period": 1,
}


@pytest.fixture(scope="module")
def one_submesh(tmp_path_factory):
  """One process with a device for every process of the others."""
  folder = tmp_path_factory.mktemp("one_submesh")
  run(folder, processes=1, devices=2, **SUBMESH)
  return folder


@pytest.mark.parametrize("number", [None, signal.SIGTERM, signal.SIGKILL])
def test_separate_processes_equal_one_process_bit_for_bit(one_submesh, folder, number):
  """Without an interruption, after SIGTERM to one process, and after the loss of one."""
  restarts = 0
  if number == signal.SIGKILL:
    restarts = 1
  launch = Launch(folder, processes=2, devices=1, restarts=restarts, **SUBMESH)
  if number:
    launch.wait_for(r"^\[1\] step 1/")
    os.kill(launch.process_id(1), number)
  code = launch.wait()
  if number == signal.SIGTERM:
    assert code == 128 + signal.SIGTERM, launch.output
    assert re.search(r"^\[1\] .*stopped after step \d of 4", launch.output, re.M)
    assert "Leaderboard" not in launch.output
    run(folder, processes=2, devices=1, **SUBMESH)
  else:
    assert code == 0, launch.output
  for name in ("slow", "fast", "deep", "moe"):
    assert rows_of(folder, name) == rows_of(one_submesh, name)
    for step in (3, 4):
      assert checksums(folder, name, step) == checksums(one_submesh, name, step)
  assert entries_of(folder) == entries_of(one_submesh)


@pytest.mark.parametrize(
  "keys",
  [
    "depth_width.yml JAX_NUM_CPU_DEVICES=8 ensemble_strategy=fused per_device_batch_size=1",
    "seeds.yml JAX_NUM_CPU_DEVICES=2 ensemble_strategy=stacked ici_ensemble_parallelism=2",
  ],
  ids=lambda keys: keys.split()[0],
)
def test_collectives_of_many_sharded_members_do_not_deadlock(tmp_path, keys):
  """XLA:CPU would start those of independent members or batches in another order on each device."""
  file, devices, *keys = keys.split()
  keys += ["steps=3", "jax_cache_dir=", f"base_output_directory={tmp_path}"]
  command = [sys.executable, "-m", "maxlite.train", f"configs/ensemble/{file}", *keys]
  environment = os.environ | {"JAX_NUM_CPU_DEVICES": devices.split("=")[1]}
  del environment["NPROC"]  # users do not set it
  ended = subprocess.run(
    command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False
  )
  assert ended.returncode == 0, ended.stderr
