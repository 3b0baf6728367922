"""A command on all hosts of a run."""

import contextlib
import dataclasses
from collections.abc import Iterator

from maxlite.config import Config, exit_on_user_error
from maxlite.config.schema import HostsConfig, flatten
from maxlite.distributed.initialize import distributed_runtime


@contextlib.contextmanager
def join_hosts(cfg: Config, program: str) -> Iterator[Config]:
  """While open, this process and those that `cfg` tells of are one run (distributed/initialize.py).

  The config that comes back is the same on all of them: which one this is, is no part of the run.
  """
  with contextlib.ExitStack() as stack:
    with exit_on_user_error(program):
      stack.enter_context(distributed_runtime(**flatten(cfg.hosts)))
    yield dataclasses.replace(cfg, hosts=HostsConfig())
