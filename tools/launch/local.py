"""Starts a run of several processes on this machine.

  python tools/launch/local.py --processes 4 --devices 2 -- configs/base.yml steps=50

Each process has its share of the devices: simulated ones of the CPU, or with --platform gpu the
next so many GPUs. What they write is passed on with the process's number in front. When one fails,
the others have --grace seconds to say why they leave too, and then all are killed; with
--restarts N all start again, up to N times, and go on from the newest checkpoint. SIGINT and
SIGTERM go to all processes, a second one kills them. However this program ends, so do they.

--processes 4,2 starts four at first and two after a restart, as when a host is lost; give
global_batch_size, so that the run stays the same.

Returns the exit code of the first process that failed; 128 + N where signal N killed it.
"""

import argparse
import contextlib
import ctypes
import dataclasses
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType

PR_SET_PDEATHSIG = 1  # of Linux's prctl.h
ASKED_TO_STOP = (128 + signal.SIGINT, 128 + signal.SIGTERM)
WRONG_COMMAND = 2
LEFT_FOR_ANOTHER = os.EX_TEMPFAIL  # maxlite/distributed/heartbeat.py
SIMULATED = r"--xla_force_host_platform_device_count=\S*"


@dataclasses.dataclass
class Worker:
  """One process, and the line that it has begun to write."""

  rank: int
  process: subprocess.Popen
  begun: bytes = b""

  @property
  def code(self) -> int | None:
    """Exit code as a shell gives it; None while it runs."""
    code = self.process.poll()
    return 128 - code if code is not None and code < 0 else code


class Group:
  """Processes that live and end together."""

  def __init__(self, commands: Sequence[list[str]], environments: Sequence[dict[str, str]]):
    self._selector = selectors.DefaultSelector()
    self._width = len(str(len(commands) - 1))
    self.workers = []
    for rank, (command, environment) in enumerate(zip(commands, environments, strict=True)):
      process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
        process_group=0,  # Ctrl-C reaches it through this program alone
        preexec_fn=end_with_parent(),  # noqa: PLW1509 (this program has no threads)
      )
      assert process.stdout is not None
      os.set_blocking(process.stdout.fileno(), False)
      self.workers.append(Worker(rank, process))
      self._selector.register(process.stdout, selectors.EVENT_READ, self.workers[-1])

  def send(self, number: int) -> None:
    """SIGKILL is for all that a process started as well."""
    for worker in self.workers:
      with contextlib.suppress(ProcessLookupError):
        if number == signal.SIGKILL:
          os.killpg(worker.process.pid, number)
        elif worker.code is None:
          worker.process.send_signal(number)

  def wait(self, grace: float) -> int:
    """Passes output on until all have ended, `grace` seconds after the first fails at the latest.

    Returns the first failure's code, or 0.
    """
    failed: list[tuple[bool, int]] = []  # (whether it left for another, code)
    killed_at = float("inf")
    seen: set[int] = set()
    while len(seen) < len(self.workers):
      self._pass_on(timeout=0.1)
      for worker in self.workers:
        if worker.code is None or worker.rank in seen:
          continue
        seen.add(worker.rank)
        if worker.code:
          if worker.code not in ASKED_TO_STOP:  # those save first
            killed_at = min(killed_at, time.monotonic() + grace)
          failed.append((worker.code == LEFT_FOR_ANOTHER, worker.code))
          self._write(worker.rank, f"ended with code {worker.code}".encode())
      if time.monotonic() > killed_at:
        self.send(signal.SIGKILL)
        break
    for worker in self.workers:
      worker.process.wait()
    self.send(signal.SIGKILL)  # what they left behind
    self._pass_on(timeout=0)
    return min(failed, key=lambda found: found[0])[1] if failed else 0

  def _pass_on(self, timeout: float) -> None:
    for key, _ in self._selector.select(timeout):
      worker = key.data
      text = worker.process.stdout.read()
      if not text and text is not None:
        self._selector.unregister(worker.process.stdout)
        text = b"\n" if worker.begun else b""
      *lines, worker.begun = (worker.begun + (text or b"")).split(b"\n")
      for line in lines:
        self._write(worker.rank, line)

  def _write(self, rank: int, line: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):
      sys.stdout.buffer.write(f"[{rank:{self._width}}] ".encode() + line + b"\n")
      sys.stdout.buffer.flush()


def end_with_parent() -> Callable[[], None]:
  """What a new process does first: it is killed when this one ends, whatever ends that."""
  parent, libc = os.getpid(), ctypes.CDLL(None) if sys.platform == "linux" else None

  def in_child() -> None:
    if libc is not None:
      libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
      if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)

  return in_child


def environment_of(rank: int, platform: str, devices: int) -> dict[str, str]:
  """This environment with the devices of one process."""
  environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
  if platform == "gpu":
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    own = range(rank * devices, (rank + 1) * devices)
    names = [gpus[n] if n < len(gpus) and gpus[n] else str(n) for n in own]
    return environment | {"CUDA_VISIBLE_DEVICES": ",".join(names)}
  flags = re.sub(SIMULATED, "", environment.get("XLA_FLAGS", ""))
  own = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "XLA_FLAGS": flags.strip()}
  return environment | own


def free_port() -> int:
  with socket.create_server(("", 0)) as listener:
    return listener.getsockname()[1]


def launch(options: argparse.Namespace, num_processes: int, on_start: Callable) -> int:
  """One attempt; returns its exit code."""
  address = f"127.0.0.1:{free_port()}"
  told = [f"coordinator_address={address}", f"num_processes={num_processes}"]
  command = [sys.executable, "-m", options.module, *options.words]
  ranks = range(num_processes)
  group = Group(
    [[*command, *told, f"process_id={rank}"] for rank in ranks],
    [environment_of(rank, options.platform, options.devices) for rank in ranks],
  )
  on_start(group)
  try:
    return group.wait(options.grace)
  finally:
    group.send(signal.SIGKILL)


class Signals:
  """Passes SIGINT and SIGTERM on to the group of the moment."""

  def __init__(self) -> None:
    self.received: signal.Signals | None = None
    self._group: Group | None = None
    for number in (signal.SIGINT, signal.SIGTERM):
      signal.signal(number, self._handle)

  def attach(self, group: Group) -> None:
    self._group = group
    if self.received is not None:  # while it was started
      group.send(self.received)

  def _handle(self, number: int, frame: FrameType | None) -> None:
    del frame
    again, self.received = self.received is not None, signal.Signals(number)
    if self._group is not None:
      self._group.send(signal.SIGKILL if again else number)


def parse(argv: Sequence[str]) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
  )
  parser.add_argument("--processes", default="2", help="how many; N,M: M after a restart")
  parser.add_argument("--devices", type=int, default=1, help="of each process")
  parser.add_argument("--platform", choices=("cpu", "gpu"), default="cpu")
  parser.add_argument("--restarts", type=int, default=0, help="after a failure, at most")
  parser.add_argument("--grace", type=float, default=20.0, help="seconds [%(default)s]")
  parser.add_argument("--module", default="maxlite.train", help="[%(default)s]")
  parser.add_argument("words", nargs="*", help="after --: of the command line")
  options = parser.parse_args(argv)
  if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", options.processes):
    parser.error(f"--processes {options.processes}: write a number, or several as 4,2")
  options.processes = [int(number) for number in options.processes.split(",")]
  if options.devices < 1 or options.restarts < 0:
    parser.error("--devices is 1 or more, --restarts 0 or more")
  return options


def main() -> int:
  options, signals = parse(sys.argv[1:]), Signals()
  for attempt in range(options.restarts + 1):
    num_processes = options.processes[min(attempt, len(options.processes) - 1)]
    code = launch(options, num_processes, signals.attach)
    last = attempt == options.restarts or signals.received is not None
    if last or code in (0, WRONG_COMMAND, *ASKED_TO_STOP):
      break
    print(f"restart {attempt + 1} of {options.restarts} after code {code}", flush=True)
  return code


if __name__ == "__main__":
  sys.exit(main())
