"""Start-up of a run with multiple processes: process discovery, rendezvous, JAX's initialization.

The rendezvous (rendezvous.py) precedes `jax.distributed.initialize`, which ends a process with a
stack trace if another one is missing. Afterwards the heartbeat (heartbeat.py) detects lost
processes.
"""

import contextlib
import dataclasses
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import jax
from jax.experimental import multihost_utils

from maxlite.config.schema import HostsConfig
from maxlite.distributed.config_check import config_fingerprint
from maxlite.distributed.heartbeat import Heartbeat
from maxlite.distributed.jax_private import detect_cluster
from maxlite.distributed.rendezvous import TOKEN, ProcessSpec, bind_address, rendezvous
from maxlite.errors import UserError
from maxlite.storage.json_values import Json

T = TypeVar("T")
# Environment variables of Open MPI.
_OPEN_MPI_SIZE = "OMPI_COMM_WORLD_SIZE"
_OPEN_MPI_RANK = "OMPI_COMM_WORLD_RANK"
_OPEN_MPI_LOCAL_SIZE = "OMPI_COMM_WORLD_LOCAL_SIZE"
_OPEN_MPI_LOCAL_RANK = "OMPI_COMM_WORLD_LOCAL_RANK"
_OPEN_MPI = (_OPEN_MPI_SIZE, _OPEN_MPI_RANK, _OPEN_MPI_LOCAL_SIZE, _OPEN_MPI_LOCAL_RANK)
# Environment variables of SLURM.
_SLURM_SIZE = "SLURM_NTASKS"
_SLURM_RANK = "SLURM_PROCID"
_SLURM_LOCAL_SIZES = "SLURM_STEP_TASKS_PER_NODE"
_SLURM_LOCAL_RANK = "SLURM_LOCALID"
_SLURM_NODES = "SLURM_STEP_NODELIST"  # set only within a step, which srun starts
_SLURM_JOB = "SLURM_JOB_ID"
_SLURM = (
  _SLURM_SIZE,
  _SLURM_RANK,
  _SLURM_LOCAL_SIZES,
  _SLURM_LOCAL_RANK,
  _SLURM_NODES,
  _SLURM_JOB,
)
_POD_INDEX = "JOB_COMPLETION_INDEX"  # set in an indexed Kubernetes job
# Settings that the program depends on, which all processes must compile alike.
_JAX_SETTINGS = (
  "jax_enable_x64",
  "jax_default_matmul_precision",
  "jax_default_prng_impl",
  "jax_threefry_partitionable",
)
# The port is derived from the job id.
_FIRST_PORT = 61440
_NUM_PORTS = 4096


_MAX_REASON = 500  # characters in a message
_ALONE = ProcessSpec(address="", num_processes=1, process_id=0)


@dataclasses.dataclass(frozen=True)
class LaunchEnvironment:
  """What the launcher's environment variables specify; -1 and empty: not specified.

  `local_size` is the number of processes on this host, and `local_id` the index of this one there.
  """

  num_processes: int = -1
  process_id: int = -1
  address: str = ""
  local_size: int = 1
  local_id: int = 0


@dataclasses.dataclass(frozen=True)
class SeparateProcesses:
  """This process and the others of a run in which JAX runs in each as if it were alone.

  `all_gather` returns the JSON values of all processes, in order of process id.
  """

  process_id: int
  num_processes: int
  all_gather: Callable[[Json], list[Json]]


@contextlib.contextmanager
def distributed_runtime(
  hosts: HostsConfig,
  values: Mapping[str, object],
  *,
  separate: bool = False,
) -> Iterator[SeparateProcesses | None]:
  """Connect this process to the other processes of its run while the context is open.

  Enter it before JAX initialises its devices. By default, SLURM, Open MPI, Kubernetes and Cloud TPU
  are detected, and without any of them the process is alone. If a process is lost or fails, all
  others exit (heartbeat.py).

  With `separate`, JAX runs in every process as if it were alone, on the devices of the process.
  Yields None without it, and if there are no other processes.

  Args:
    hosts: how to find the other processes.
    values: the resolved config, flat, on which all processes must agree (config_check.py).
    separate: whether JAX runs in every process as if it were alone.

  Raises:
    UserError: the processes do not find each other in time, or do not agree on their number, their
      config or their versions.
  """
  environment = read_environment(os.environ)
  timeout = hosts.jax_distributed_initialization_timeout
  max_silence = hosts.jax_distributed_heartbeat_timeout_seconds
  spec = resolve_process(hosts, environment)
  if spec is None:
    spec = detect_process(environment.address, timeout)
  if spec.num_processes == 1:
    yield None
    return
  devices = local_devices(environment, os.environ)
  settings = {name: getattr(jax.config, name) for name in _JAX_SETTINGS}
  fingerprint = config_fingerprint(values, settings)
  peers = rendezvous(spec, timeout, os.environ.get(TOKEN, ""), fingerprint)
  with Heartbeat(spec.process_id, peers, max_silence) as heartbeat:
    if separate:
      _show_devices(devices)
      yield SeparateProcesses(spec.process_id, spec.num_processes, heartbeat.all_gather)
      return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
      spec.address,
      spec.num_processes,
      spec.process_id,
      local_device_ids=devices,
      cluster_detection_method="deactivate",
      coordinator_bind_address=bind_address(spec),
      initialization_timeout=timeout,
      # A fallback if our heartbeat, which is faster and names the lost process, hangs.
      heartbeat_timeout_seconds=2 * max_silence,
    )
    yield None


def _show_devices(indices: list[int] | None) -> None:
  """Hide all other GPUs from JAX, as `jax.distributed.initialize` does.

  Args:
    indices: the GPUs of this process; empty: all; None: those of JAX's environment variable.
  """
  if indices is None:
    ids = os.environ["JAX_LOCAL_DEVICE_IDS"]
  else:
    ids = ",".join(str(index) for index in indices)
  if ids:
    jax.config.update("jax_cuda_visible_devices", ids)
    jax.config.update("jax_rocm_visible_devices", ids)


def describe_process(peers: SeparateProcesses | None = None) -> str:
  """Return one line about this process and its devices; empty for a single process."""
  if peers:
    index = peers.process_id
    count = peers.num_processes
  else:
    index = jax.process_index()
    count = jax.process_count()
  if count == 1:
    return ""
  return (
    f"process {index} of {count}: {jax.local_device_count()} of {jax.device_count()} devices, on "
    f"{socket.gethostname()} with process number {os.getpid()}"
  )


def barrier(name: str) -> None:
  """Return when all processes have called it with this `name`, which must be unique."""
  if jax.process_count() > 1:
    multihost_utils.sync_global_devices(name)


def process_0_first(function: Callable[[], T], name: str) -> T:
  """Call `function` on process 0 first; the other processes can use the files it wrote."""
  if jax.process_index() > 0:
    barrier(name)
  result = function()
  if jax.process_index() == 0:
    barrier(name)
  return result


def resolve_process(
  hosts: HostsConfig,
  environment: LaunchEnvironment,
) -> ProcessSpec | None:
  """Return this process according to the keys (empty or -1: not given) and the environment.

  Returns None if neither specifies it; `detect_process` may.

  Raises:
    UserError: the specification is incomplete or inconsistent.
  """
  num_processes = hosts.num_processes
  if num_processes == -1:
    num_processes = environment.num_processes
  if num_processes == 1:
    return _ALONE
  if not (hosts.coordinator_address or num_processes > 1 or hosts.process_id >= 0):
    return None
  address = hosts.coordinator_address or environment.address
  process_id = hosts.process_id
  if process_id == -1:
    process_id = environment.process_id
  if not re.fullmatch(r".+:\d{1,5}", address):
    raise UserError(
      f"coordinator_address={address or '(not given)'} for process_id={process_id} of "
      f"num_processes={num_processes}: write coordinator_address=HOST:PORT of process 0, the same "
      "for all"
    )
  if -1 in (num_processes, process_id):
    raise UserError(
      f"coordinator_address={address} with num_processes={num_processes} process_id={process_id}: "
      "the environment does not specify the missing one; write num_processes=N process_id=I, I "
      "from 0 to N-1"
    )
  if process_id >= num_processes:
    raise UserError(
      f"process_id={process_id} of num_processes={num_processes}: write a process_id from 0 to "
      f"{num_processes - 1}, or num_processes={process_id + 1}"
    )
  return ProcessSpec(address, num_processes, process_id)


def detect_process(address: str, timeout: int) -> ProcessSpec:
  """Return this process in a Kubernetes job or a Cloud TPU, as JAX detects it.

  In neither, the process is alone.

  Args:
    address: JAX_COORDINATOR_ADDRESS of the environment; empty: not set.
    timeout: for requests to the cluster, in seconds.

  Raises:
    UserError: the detection fails, is incomplete or takes longer than `timeout` seconds.
  """
  alone = "or num_processes=1 to train with one process"
  by_hand = f"write coordinator_address=HOST:PORT num_processes=N process_id=I, {alone}"
  try:
    found, num_processes, process_id = detect_cluster(address, timeout)
  except UserError:
    raise
  # The clients of Kubernetes and of the metadata server raise many types.
  except Exception as error:
    text = f"{type(error).__name__}: {error}"
    one_line = " ".join(text.split())
    reason = one_line[:_MAX_REASON]
    raise UserError(f"JAX does not find the other processes ({reason}): {by_hand}") from None
  if found is not None and num_processes is not None and process_id is not None:
    return ProcessSpec(found, num_processes, process_id)
  if address:
    raise UserError(
      f"JAX_COORDINATOR_ADDRESS={address} without the number of processes and the id of this one: "
      f"write num_processes=N process_id=I, {alone}"
    )
  if _POD_INDEX in os.environ:
    raise UserError(
      f"this is pod {os.environ[_POD_INDEX]} of an indexed job, and JAX needs the kubernetes "
      f"package to find the others: pip install 'jax[k8s]'; or {by_hand}"
    )
  return _ALONE


def read_environment(environment: Mapping[str, str]) -> LaunchEnvironment:
  """Return what the variables of SLURM, Open MPI or a Kubernetes job specify."""
  given_address = environment.get("JAX_COORDINATOR_ADDRESS", "")
  if all(name in environment for name in _SLURM):
    node = int(environment.get("SLURM_NODEID", "0"))
    return LaunchEnvironment(
      num_processes=int(environment[_SLURM_SIZE]),
      process_id=int(environment[_SLURM_RANK]),
      address=given_address or _slurm_address(environment),
      local_size=_tasks_of_node(environment[_SLURM_LOCAL_SIZES], node),
      local_id=int(environment[_SLURM_LOCAL_RANK]),
    )
  if all(name in environment for name in _OPEN_MPI):
    uri = environment.get("OMPI_MCA_orte_hnp_uri", "")
    return LaunchEnvironment(
      num_processes=int(environment[_OPEN_MPI_SIZE]),
      process_id=int(environment[_OPEN_MPI_RANK]),
      address=given_address or _open_mpi_address(uri),
      local_size=int(environment[_OPEN_MPI_LOCAL_SIZE]),
      local_id=int(environment[_OPEN_MPI_LOCAL_RANK]),
    )
  return LaunchEnvironment(
    process_id=int(environment.get(_POD_INDEX, -1)),
    address=given_address,
  )


def local_devices(
  launch: LaunchEnvironment,
  environment: Mapping[str, str],
) -> list[int] | None:
  """Return the indices of this process's GPUs among the visible ones.

  Processes on one host divide the visible GPUs evenly, unless each one sees only its own.

  Returns:
    The indices; empty: all; None: JAX's environment variable has them.

  Raises:
    UserError: the GPUs cannot be divided evenly.
  """
  if environment.get("JAX_LOCAL_DEVICE_IDS"):
    return None
  size = launch.local_size
  visible = environment.get("CUDA_VISIBLE_DEVICES", "")
  num_visible = 0
  if visible:
    num_visible = len(visible.split(","))
  if size == 1 or 0 < num_visible < size:
    return []
  if num_visible % size:
    raise UserError(
      f"{size} processes on this host cannot share {num_visible} GPUs "
      f"(CUDA_VISIBLE_DEVICES={visible}) evenly: start {num_visible} processes, or one"
    )
  per_process = max(num_visible // size, 1)
  first = launch.local_id * per_process
  return list(range(first, first + per_process))


def _tasks_of_node(tasks: str, node: int) -> int:
  """Return the number of tasks on a node; SLURM writes 4,4,2 as `4(x2),2`."""
  tasks_by_node: list[int] = []
  for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks):
    num_nodes = int(times or 1)
    tasks_by_node += [int(count)] * num_nodes
  return tasks_by_node[node]


def _slurm_address(environment: Mapping[str, str]) -> str:
  """Return the first node of the step; node lists are `a7`, `a7,b2` or `a[007-011,15],b2`."""
  found = re.match(r"([^,\[]+)(?:\[([^,\-\]]+))?", environment[_SLURM_NODES])
  assert found is not None
  host = found[1] + (found[2] or "")
  port = _port(int(environment[_SLURM_JOB]))
  return f"{host}:{port}"


def _open_mpi_address(uri: str) -> str:
  """Return the host of mpirun, on which process 0 runs too.

  It is empty for Open MPI 5, which has no URI.
  """
  found = re.match(r"(\d+)\..*?(?:tcp://([^,:]+)|tcp6://\[([^,\]]+))", uri)
  if found is None:
    return ""
  host = found[2] or found[3]
  job = int(found[1]) >> 12
  return f"{host}:{_port(job)}"


def _port(job: int) -> int:
  return _FIRST_PORT + job % _NUM_PORTS
