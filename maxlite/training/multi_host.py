"""The multi-host context of the entry points."""

import contextlib
import dataclasses
from collections.abc import Iterator

from maxlite.config import Config, exit_on_user_error
from maxlite.config.schema import HostsConfig, flatten
from maxlite.distributed.initialize import distributed_runtime


@contextlib.contextmanager
def join_hosts(cfg: Config, program: str) -> Iterator[Config]:
  """Connects the processes of one run while the context is open (distributed/initialize.py).

  Yields a config that is the same on all processes: without the keys that identify this one.
  """
  with contextlib.ExitStack() as stack:
    with exit_on_user_error(program):
      stack.enter_context(distributed_runtime(**flatten(cfg.hosts)))
    yield dataclasses.replace(cfg, hosts=HostsConfig())
