"""The multi-host context of the entry points."""

import contextlib
import dataclasses
from collections.abc import Iterator

from maxlite.config import Config, exit_on_user_error
from maxlite.config.schema import HostsConfig
from maxlite.distributed.initialize import SeparateProcesses, distributed_runtime


@contextlib.contextmanager
def join_hosts(cfg: Config, program: str) -> Iterator[tuple[Config, SeparateProcesses | None]]:
  """Connects the processes of one run while the context is open (distributed/initialize.py).

  Yields a config that is the same on all processes, without the keys that identify this one; and
  the processes of an ensemble with `submesh`, of which each trains its own members.
  """
  with contextlib.ExitStack() as stack:
    with exit_on_user_error(program):
      separate = cfg.ensemble.is_set and cfg.ensemble.ensemble_strategy == "submesh"
      peers = stack.enter_context(distributed_runtime(cfg.hosts, separate=separate))
    yield dataclasses.replace(cfg, hosts=HostsConfig()), peers
