"""Starts a run with multiple processes on this machine.

  python tools/launch/local.py --processes 4 --devices 2 -- configs/base.yml steps=50

Each process gets its share of the devices: simulated CPU devices, or with --platform gpu the next
GPUs. The output of the processes is prefixed with their ids. If one fails, the others have --grace
seconds to report the reason, then all are killed. With --restarts N, all restart up to N times
and resume from the latest checkpoint. SIGINT and SIGTERM are forwarded to all processes; a second
one kills them. The processes end when this program ends, for any reason.

--processes 4,2 starts four processes, and two after a restart, as after the loss of a host; set
global_batch_size, so that the run is the same.

Exit code: that of the first process that failed; 128 + N if signal N killed it.
"""

import argparse
import contextlib
import ctypes
import dataclasses
import os
import re
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType

PR_SET_PDEATHSIG = 1  # of Linux's prctl.h
STOP_CODES = (128 + signal.SIGINT, 128 + signal.SIGTERM)
WRONG_COMMAND = 2
EXIT_PEER_LOST = os.EX_TEMPFAIL  # maxlite/distributed/heartbeat.py
SIMULATED = r"--xla_force_host_platform_device_count=\S*"


@dataclasses.dataclass
class LaunchedProcess:
  """A process, and the unfinished last line of its output."""

  rank: int
  process: subprocess.Popen
  partial: bytes = b""

  @property
  def code(self) -> int | None:
    """Exit code as in a shell; None while it runs."""
    code = self.process.poll()
    if code is not None and code < 0:
      return 128 - code  # a signal killed it
    return code


class ProcessGroup:
  """Processes that run and end together."""

  def __init__(self, commands: Sequence[list[str]], environments: Sequence[dict[str, str]]):
    self._selector = selectors.DefaultSelector()
    self._width = len(str(len(commands) - 1))
    self.workers: list[LaunchedProcess] = []
    for rank, (command, environment) in enumerate(zip(commands, environments, strict=True)):
      self._start(rank, command, environment)

  def _start(
    self,
    rank: int,
    command: list[str],
    environment: dict[str, str],
  ) -> None:
    process = subprocess.Popen(
      command,
      stdin=subprocess.DEVNULL,
      stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
      env=environment,
      process_group=0,  # Ctrl-C reaches it only through this program
      preexec_fn=end_with_parent(),  # noqa: PLW1509 (this program has no threads)
    )
    assert process.stdout is not None
    os.set_blocking(process.stdout.fileno(), False)
    worker = LaunchedProcess(rank, process)
    self.workers.append(worker)
    self._selector.register(process.stdout, selectors.EVENT_READ, worker)

  def send(self, number: int) -> None:
    """Sends a signal to all; SIGKILL also to their children."""
    for worker in self.workers:
      with contextlib.suppress(ProcessLookupError):
        if number == signal.SIGKILL:
          os.killpg(worker.process.pid, number)
        elif worker.code is None:
          worker.process.send_signal(number)

  def wait(self, grace: float) -> int:
    """Forwards output until all have ended, at most `grace` seconds after the first failure.

    Returns the exit code of the first failure, or 0.
    """
    failed: list[int] = []  # exit codes in the order of the failures
    killed_at = float("inf")
    seen: set[int] = set()
    while len(seen) < len(self.workers):
      self._forward_output(timeout=0.1)
      for worker in self.workers:
        code = worker.code
        if code is None or worker.rank in seen:
          continue
        seen.add(worker.rank)
        if code != 0:
          failed.append(code)
          self._write(worker.rank, f"ended with code {code}".encode())
        if code != 0 and code not in STOP_CODES:  # stopped processes save first
          killed_at = min(killed_at, time.monotonic() + grace)
      if time.monotonic() > killed_at:
        self.send(signal.SIGKILL)
        break
    for worker in self.workers:
      worker.process.wait()
    self.send(signal.SIGKILL)  # their remaining children
    self._forward_output(timeout=0)
    return first_cause(failed)

  def _forward_output(self, timeout: float) -> None:
    for key, _ in self._selector.select(timeout):
      worker = key.data
      text = worker.process.stdout.read()
      if text is None:  # there is no output yet
        continue
      if text == b"":  # the process closed its output
        self._selector.unregister(worker.process.stdout)
        if worker.partial:
          text = b"\n"
      *lines, worker.partial = (worker.partial + text).split(b"\n")
      for line in lines:
        self._write(worker.rank, line)

  def _write(self, rank: int, line: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):
      prefix = f"[{rank:{self._width}}] ".encode()
      sys.stdout.buffer.write(prefix + line + b"\n")
      sys.stdout.buffer.flush()


def first_cause(failed: Sequence[int]) -> int:
  """The first of these exit codes that is not caused by a peer, if any; 0 if there is none."""
  for code in failed:
    if code != EXIT_PEER_LOST:
      return code
  if failed:
    return EXIT_PEER_LOST
  return 0


def end_with_parent() -> Callable[[], None]:
  """A function for a new process that has it killed when this one ends for any reason."""
  parent = os.getpid()
  libc = None
  if sys.platform == "linux":
    libc = ctypes.CDLL(None)

  def in_child() -> None:
    if libc is None:
      return
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
      os._exit(128 + signal.SIGKILL)

  return in_child


def process_environment(
  rank: int,
  platform: str,
  devices: int,
  token: str,
) -> dict[str, str]:
  """The environment of one process, with its devices."""
  environment = dict(os.environ)
  environment["PYTHONUNBUFFERED"] = "1"
  environment["MAXLITE_COORDINATOR_TOKEN"] = token
  if platform == "gpu":
    own = range(rank * devices, (rank + 1) * devices)
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(gpu_name, own))
  else:
    flags = re.sub(SIMULATED, "", environment.get("XLA_FLAGS", ""))
    environment["XLA_FLAGS"] = flags.strip()
    environment["JAX_PLATFORMS"] = "cpu"
    environment["JAX_NUM_CPU_DEVICES"] = str(devices)
  return environment


def gpu_name(number: int) -> str:
  """The name of GPU `number` of this machine, as CUDA_VISIBLE_DEVICES lists them."""
  names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
  if number < len(names) and names[number]:
    return names[number]
  return str(number)


def free_port() -> int:
  with socket.create_server(("", 0)) as listener:
    return listener.getsockname()[1]


def launch(
  options: argparse.Namespace,
  num_processes: int,
  on_start: Callable[[ProcessGroup], None],
) -> int:
  """One attempt; returns its exit code."""
  command = [
    sys.executable,
    "-m",
    options.module,
    *options.arguments,
    f"coordinator_address=127.0.0.1:{free_port()}",
    f"num_processes={num_processes}",
  ]
  token = secrets.token_hex(16)
  commands = []
  environments = []
  for rank in range(num_processes):
    commands.append([*command, f"process_id={rank}"])
    environments.append(process_environment(rank, options.platform, options.devices, token))
  group = ProcessGroup(commands, environments)
  on_start(group)
  try:
    return group.wait(options.grace)
  finally:
    group.send(signal.SIGKILL)


class SignalForwarder:
  """Forwards SIGINT and SIGTERM to the current group."""

  def __init__(self) -> None:
    self.received: signal.Signals | None = None
    self._group: ProcessGroup | None = None
    for number in (signal.SIGINT, signal.SIGTERM):
      signal.signal(number, self._handle)

  def attach(self, group: ProcessGroup) -> None:
    self._group = group
    if self.received is not None:  # received while the group was starting
      group.send(self.received)

  def _handle(self, number: int, frame: FrameType | None) -> None:
    del frame
    is_second = self.received is not None
    self.received = signal.Signals(number)
    if self._group is None:
      return
    if is_second:
      self._group.send(signal.SIGKILL)
    else:
      self._group.send(number)


def parse(argv: Sequence[str]) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    description=__doc__,
    formatter_class=argparse.RawDescriptionHelpFormatter,
    allow_abbrev=False,
  )
  parser.add_argument("--processes", default="2", help="number; N,M: M after a restart")
  parser.add_argument("--devices", type=int, default=1, help="per process")
  parser.add_argument("--platform", choices=("cpu", "gpu"), default="cpu")
  parser.add_argument("--restarts", type=int, default=0, help="maximum after failures")
  parser.add_argument("--grace", type=float, default=20.0, help="seconds [%(default)s]")
  parser.add_argument("--module", default="maxlite.train", help="[%(default)s]")
  parser.add_argument("arguments", nargs="*", help="after --: arguments of the module")
  options = parser.parse_args(argv)
  if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", options.processes):
    parser.error(f"--processes {options.processes}: write a number, or several as 4,2")
  options.processes = [int(number) for number in options.processes.split(",")]
  if options.devices < 1 or options.restarts < 0:
    parser.error("--devices is 1 or more, --restarts 0 or more")
  return options


def main() -> int:
  options = parse(sys.argv[1:])
  signals = SignalForwarder()
  for attempt in range(options.restarts + 1):
    num_processes = options.processes[min(attempt, len(options.processes) - 1)]
    code = launch(options, num_processes, signals.attach)
    last = attempt == options.restarts or signals.received is not None
    if last or code in (0, WRONG_COMMAND, *STOP_CODES):
      break
    print(f"restart {attempt + 1} of {options.restarts} after code {code}", flush=True)
  return code


if __name__ == "__main__":
  sys.exit(main())
