"""`ensemble_executor=ray` on a local cluster of several nodes, one of which is lost."""

import os
import sys
import threading
import time
from pathlib import Path

import pytest
from support.ensemble_runs import ALIKE, TINY, checksums, rows_of, start
from support.host_runs import children

from maxlite.ensemble.selection.asha import JOURNAL
from maxlite.ensemble.workers.worker_process import available_cores
from maxlite.metrics.writers import read_rows

ray = pytest.importorskip("ray", reason="Ray is an optional extra: pip install maxlite[ray]")
from ray.cluster_utils import Cluster  # noqa: E402 (only if Ray is installed)

STEPS = 60
KEYS = TINY | {"steps": STEPS, "learning_rate_schedule_steps": STEPS, "eval_interval": 20}
KEYS |= {"ensemble_strategy": "processes", "ensemble_num_workers": 2, "checkpoint_period": 4}


@pytest.fixture
def cluster(monkeypatch):
  """A head without cores, and three nodes of one core."""
  monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
  made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
  for _ in range(3):
    made.add_node(num_cpus=1)
  ray.init(address=made.address, log_to_driver=False, logging_level="error")
  yield made
  ray.shutdown()
  made.shutdown()


def lose_a_node(cluster: Cluster, log: Path, lost: list[str]) -> None:
  """Kill the node of a worker without notice once a member has taken some steps."""
  deadline = time.monotonic() + 300
  while not log.exists() or log.read_text().count("\n") < 12:
    assert time.monotonic() < deadline
    time.sleep(0.05)
  node = next(node for node in cluster.worker_nodes if runs_a_worker(raylet_of(node)))
  cluster.remove_node(node, allow_graceful=False)
  lost.append(node.node_id)


def raylet_of(node) -> int:
  return node.all_processes["raylet"][0].process.pid


def runs_a_worker(process: int) -> bool:
  """Whether `process` or one that it started is a worker of an ensemble."""
  command = Path(f"/proc/{process}/cmdline").read_bytes()
  if b"maxlite.ensemble\0worker" in command:
    return True
  return any(map(runs_a_worker, children(process)))


@pytest.mark.slow
# Ray forks, and JAX, which other tests in this process have started, warns of that.
@pytest.mark.filterwarnings(
  "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"
)
def test_members_of_a_lost_node_move_and_end_with_the_same_results(cluster, tmp_path):
  lost: list[str] = []
  metrics = tmp_path / "ray/ens/members/slow/metrics.jsonl"
  loser = threading.Thread(target=lose_a_node, args=(cluster, metrics, lost))
  loser.start()
  code, output = start(tmp_path / "ray", f"[{ALIKE}]", ensemble_executor="ray", **KEYS)
  loser.join()
  assert (code, len(lost)) == (0, 1), output
  logs = [log.read_text() for log in sorted((tmp_path / "ray/ens/workers").glob("*.log"))]
  assert sum("resuming from the checkpoints of step" in log for log in logs) == 1
  assert start(tmp_path / "local", f"[{ALIKE}]", **KEYS)[0] == 0
  for name in ("slow", "fast"):
    assert rows_of(tmp_path / "ray", name) == rows_of(tmp_path / "local", name)
    there = checksums(tmp_path / "local", name, STEPS)
    assert checksums(tmp_path / "ray", name, STEPS) == there


@pytest.mark.slow
@pytest.mark.filterwarnings(
  "ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning"
)
def test_asynchronous_halving_on_ray_equals_that_of_local_workers(cluster, tmp_path):
  keys = KEYS | {"ensemble_num_workers": 1, "asha_reduction_factor": 2, "asha_min_steps": 20}
  cluster.add_node(num_cpus=len(available_cores()))  # the only worker takes as many
  journals = []
  for executor in ("ray", "local"):
    folder = tmp_path / executor
    code, output = start(folder, f"[{ALIKE}]", ensemble_executor=executor, **keys)
    assert code == 0, output
    journals.append([row | {"time": 0} for row in read_rows(folder / "ens" / JOURNAL)])
  assert journals[0] == journals[1]
  assert [row["decision"] for row in journals[0]].count("promote") == 2
  for name in ("slow", "fast"):
    assert rows_of(tmp_path / "ray", name) == rows_of(tmp_path / "local", name)
