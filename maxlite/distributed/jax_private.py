"""The only import of a private module of JAX: its cluster detection.

`jax.distributed.initialize` detects Kubernetes and Cloud TPU only while it connects the processes,
but the rendezvous needs the result before that. JAX has no public API for the detection alone.
"""

from typing import Any

import jax

from maxlite.errors import UserError

ClusterEnv: Any  # private, so without a public type
try:
  from jax._src.clusters import ClusterEnv
except ImportError:
  ClusterEnv = None


def detect_cluster(address: str, timeout: int) -> tuple[str | None, int | None, int | None]:
  """Detect the other processes of a Kubernetes job or a Cloud TPU.

  Args:
    address: overrides the detected address if not empty.
    timeout: for requests to the cluster, in seconds.

  Returns:
    (coordinator address, number of processes, process id); None where nothing is detected.

  Raises:
    UserError: this version of JAX has no such cluster detection.
  """
  if ClusterEnv is None:
    raise UserError(
      f"jax {jax.__version__} has no jax._src.clusters.ClusterEnv to detect other processes: write "
      "coordinator_address=HOST:PORT num_processes=N process_id=I, or num_processes=1 for one "
      "process, or install a version of jax in constraints.txt"
    )
  detect = ClusterEnv.auto_detect_unset_distributed_params
  return detect(address or None, None, None, None, None, timeout)[:3]
