"""Processes on many hosts as one run: which of them this is, and how they come together.

All processes rendezvous (meeting.py) before JAX connects them, since JAX ends a process that misses
another with a trace of its own; afterwards they watch (watch.py) that none waits for the dead.
"""

import contextlib
import dataclasses
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import jax
from jax._src.clusters import ClusterEnv  # who asks Kubernetes and the Cloud TPU has no other name
from jax.experimental import multihost_utils

from maxlite.config.errors import UserError
from maxlite.distributed.heartbeat import Heartbeat
from maxlite.distributed.rendezvous import ProcessSpec, rendezvous

T = TypeVar("T")
# What starts processes: how many there are, which one this is; the last two, on its host.
_OPEN_MPI = tuple(
  f"OMPI_COMM_WORLD_{name}" for name in ("SIZE", "RANK", "LOCAL_SIZE", "LOCAL_RANK")
)
_SLURM = ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_LOCALID")
_SLURM_NODES = "SLURM_STEP_NODELIST"  # there only in a step, which srun starts
_POD_INDEX = "JOB_COMPLETION_INDEX"  # of an indexed Kubernetes job
_BY_HAND = "write coordinator_address=HOST:PORT num_processes=N process_id=I"
_FIRST_PORT, _NUM_PORTS = 61440, 4096  # a job's is chosen by its number


@dataclasses.dataclass(frozen=True)
class LaunchEnvironment:
  """What an environment tells of the processes; -1 and empty: nothing."""

  num_processes: int = -1
  process_id: int = -1
  address: str = ""
  local_size: int = 1  # processes on this host
  local_id: int = 0


@contextlib.contextmanager
def distributed_runtime(
  *,
  coordinator_address: str,
  num_processes: int,
  process_id: int,
  jax_distributed_initialization_timeout: int,
  jax_distributed_heartbeat_timeout_seconds: int,
) -> Iterator[None]:
  """While open, this process is one of the run's. To be entered before JAX is asked for a device.

  Arguments are the keys of the config; by default SLURM, Open MPI, Kubernetes and Cloud TPU are
  asked, and where none of them started this process it is alone. Where another process is lost,
  this one ends at once (watch.py); where this one fails, so do all others.

  Raises:
    UserError: the processes do not find each other in time, or do not agree on their number.
  """
  started = read_environment(os.environ)
  timeout = jax_distributed_initialization_timeout
  place = resolve_process(coordinator_address, num_processes, process_id, started)
  place = place or detect_process(started.address, timeout)
  if place.num_processes == 1:
    yield
    return
  devices = local_devices(started, os.environ)
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  peers = rendezvous(place, timeout)
  with Heartbeat(place.process_id, peers, jax_distributed_heartbeat_timeout_seconds):
    jax.distributed.initialize(
      place.address,
      place.num_processes,
      place.process_id,
      local_device_ids=devices,
      cluster_detection_method="deactivate",
      initialization_timeout=timeout,
      # The watch is quicker than JAX and tells who; this is for a watch that hangs.
      heartbeat_timeout_seconds=2 * jax_distributed_heartbeat_timeout_seconds,
    )
    yield


def describe_process() -> str:
  """Who this process is; empty where it is alone."""
  if jax.process_count() == 1:
    return ""
  return (
    f"process {jax.process_index()} of {jax.process_count()}: {jax.local_device_count()} of "
    f"{jax.device_count()} devices, on {socket.gethostname()} with process number {os.getpid()}"
  )


def barrier(name: str) -> None:
  """Returns when all processes have come to this point, which has a `name` of its own."""
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(name)


def process_0_first(do: Callable[[], T], name: str) -> T:
  """What `do()` returns, done by process 0 before the others, who find what it left on disk."""
  if jax.process_index() > 0:
    barrier(name)
  done = do()
  if jax.process_index() == 0:
    barrier(name)
  return done


def resolve_process(
  address: str, num_processes: int, process_id: int, started: LaunchEnvironment
) -> ProcessSpec | None:
  """This process's place by the keys (empty or -1: not given) and by what started it.

  None where neither tells: JAX may know more.

  Raises:
    UserError: only a part of it is told, or it contradicts itself.
  """
  if num_processes == 1:
    return ProcessSpec("", 1, 0)
  told = bool(address) or num_processes > 1 or process_id >= 0 or started.num_processes > 0
  if not told:
    return None
  address = address or started.address
  num_processes = started.num_processes if num_processes == -1 else num_processes
  process_id = started.process_id if process_id == -1 else process_id
  if num_processes == 1:
    return ProcessSpec("", 1, 0)
  if not re.fullmatch(r".+:\d{1,5}", address):
    raise UserError(
      f"coordinator_address={address or '(not given)'} for process_id={process_id} of "
      f"num_processes={num_processes}: write coordinator_address=HOST:PORT of process 0, the same "
      "for all"
    )
  if -1 in (num_processes, process_id):
    raise UserError(
      f"coordinator_address={address} with num_processes={num_processes} process_id={process_id}: "
      "nothing else tells how many processes there are and which of them this is; write "
      "num_processes=N process_id=I, I from 0 to N-1"
    )
  if process_id >= num_processes:
    raise UserError(
      f"process_id={process_id} of num_processes={num_processes}: write a process_id from 0 to "
      f"{num_processes - 1}, or num_processes={process_id + 1}"
    )
  return ProcessSpec(address, num_processes, process_id)


def detect_process(told: str, timeout: int) -> ProcessSpec:
  """This process's place in a Kubernetes job or a Cloud TPU; alone where it is in neither.

  `told` is the address that the environment names; empty: none.

  Raises:
    UserError: Kubernetes or the Cloud TPU do not tell it, or not in `timeout` seconds.
  """
  try:
    address, num_processes, process_id, _ = ClusterEnv.auto_detect_unset_distributed_params(
      told or None, None, None, None, None, timeout
    )
  # Whatever the clients of Kubernetes and of the metadata server raise.
  except Exception as error:
    why = f"{type(error).__name__}: {error}"
    raise UserError(
      f"JAX does not find the other processes ({' '.join(why.split())[:500]}): {_BY_HAND}, or "
      "num_processes=1 to train alone"
    ) from None
  if address is not None and num_processes is not None and process_id is not None:
    return ProcessSpec(address, num_processes, process_id)
  if told:
    raise UserError(
      f"JAX_COORDINATOR_ADDRESS={told}, but nothing tells how many processes there are and which "
      "of them this is: write num_processes=N process_id=I, or num_processes=1 to train alone"
    )
  if _POD_INDEX in os.environ:
    raise UserError(
      f"this is pod {os.environ[_POD_INDEX]} of an indexed job, whose others JAX finds by the "
      f"kubernetes package: pip install 'jax[k8s]'; or {_BY_HAND}, or num_processes=1 to train "
      "alone"
    )
  return ProcessSpec("", 1, 0)


def read_environment(environment: Mapping[str, str]) -> LaunchEnvironment:
  """What SLURM, Open MPI or a Kubernetes job say of this process."""
  address = environment.get("JAX_COORDINATOR_ADDRESS", "")
  if all(name in environment for name in (*_SLURM, _SLURM_NODES, "SLURM_JOB_ID")):
    size, rank, on_nodes, local_rank = (environment[name] for name in _SLURM)
    local_size = _per_node(on_nodes, int(environment.get("SLURM_NODEID", "0")))
    address = address or _slurm_address(environment)
    return LaunchEnvironment(int(size), int(rank), address, local_size, int(local_rank))
  if all(name in environment for name in _OPEN_MPI):
    count, index, on_host, among_them = (int(environment[name]) for name in _OPEN_MPI)
    address = address or _open_mpi_address(environment.get("OMPI_MCA_orte_hnp_uri", ""))
    return LaunchEnvironment(count, index, address, on_host, among_them)
  return LaunchEnvironment(process_id=int(environment.get(_POD_INDEX, -1)), address=address)


def local_devices(started: LaunchEnvironment, environment: Mapping[str, str]) -> list[int] | None:
  """Which GPUs of those that this process sees are its own; empty: all; None: JAX is told.

  Processes on one host share what they see, unless each sees only its own already.

  Raises:
    UserError: they cannot share it evenly.
  """
  if environment.get("JAX_LOCAL_DEVICE_IDS"):
    return None
  size, seen = started.local_size, environment.get("CUDA_VISIBLE_DEVICES", "")
  num_seen = len(seen.split(",")) if seen else 0
  if size == 1 or 0 < num_seen < size:
    return []
  if num_seen % size:
    raise UserError(
      f"{size} processes on this host do not share {num_seen} GPUs (CUDA_VISIBLE_DEVICES={seen}) "
      f"evenly: start {num_seen} processes, or one"
    )
  each = max(num_seen // size, 1)
  return list(range(started.local_id * each, (started.local_id + 1) * each))


def _per_node(tasks: str, node: int) -> int:
  """Tasks of a node; SLURM writes 4,4,2 as `4(x2),2`."""
  counts: list[int] = []
  for part in tasks.split(","):
    count, _, times = part.partition("(x")
    counts += [int(count)] * int(times.rstrip(")") or 1)
  return counts[node]


def _slurm_address(environment: Mapping[str, str]) -> str:
  """The first node of the step; nodes are written `a7`, `a7,b2` or `a[007-011,15],b2`."""
  found = re.match(r"([^,\[]+)(?:\[([^,\-\]]+))?", environment[_SLURM_NODES])
  assert found is not None
  return f"{found[1]}{found[2] or ''}:{_port(environment['SLURM_JOB_ID'])}"


def _open_mpi_address(uri: str) -> str:
  """The host that mpirun runs on, where process 0 is too; Open MPI 5 does not tell it."""
  found = re.match(r"(\d+)\..*?(?:tcp://([^,:]+)|tcp6://\[([^,\]]+))", uri)
  return f"{found[2] or found[3]}:{_port(str(int(found[1]) >> 12))}" if found else ""


def _port(job: str) -> int:
  return _FIRST_PORT + int(job) % _NUM_PORTS
