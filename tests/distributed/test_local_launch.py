"""tools/launch/local.py with processes of a small module."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

LOCAL = Path(__file__).parents[2] / "tools/launch/local.py"
MODULE = """
import os, signal, sys, time
words = dict(word.split("=", 1) for word in sys.argv[1:])
rank, count = int(words["process_id"]), int(words["num_processes"])
print("number", os.getpid(), "of", count, os.environ["JAX_NUM_CPU_DEVICES"], flush=True)
act = words.get(f"act{rank}", "end")
if act in ("child", "orphan"):
  import subprocess
  child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
  print("number", child.pid, "is a child", flush=True)
if act == "polite":
  signal.signal(signal.SIGTERM, lambda *_: (print("terminating"), sys.exit(143)))
if act == "deaf":
  signal.signal(signal.SIGTERM, signal.SIG_IGN)
if act == "once" and os.path.exists(words["file"]):
  act = "end"
elif act == "once":
  open(words["file"], "w").close()
  act = "7"
print("ready", flush=True)
if act.isdigit():
  sys.exit(int(act))
if act == "kill":
  os.kill(os.getpid(), signal.SIGKILL)
if act not in ("end", "orphan"):
  time.sleep(60)
print("unfinished line", end="")
"""


class Run:
  def __init__(self, folder, *options, **acts):
    (folder / "acting.py").write_text(MODULE)
    words = [f"{name}={act}" for name, act in acts.items()]
    command = [sys.executable, LOCAL, "--module", "acting", *map(str, options), "--", *words]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    self.log = folder / "log"
    with self.log.open("w") as log:
      self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

  def end(self):
    """(exit code, output), after checking that no process is left."""
    code = self.process.wait(30)
    deadline = time.monotonic() + 5
    while (left := [n for n in self.numbers() if is_running(n)]) and time.monotonic() < deadline:
      time.sleep(0.02)
    assert not left
    return code, self.log.read_text()

  def wait_for_ready(self, times):
    deadline = time.monotonic() + 20
    while self.log.read_text().count("ready") < times:
      assert time.monotonic() < deadline, self.log.read_text()
      time.sleep(0.02)

  def numbers(self):
    return [int(number) for number in re.findall(r"number (\d+)", self.log.read_text())]


def is_running(number):
  status = Path(f"/proc/{number}/status")
  return status.exists() and not re.search(r"State:\s+[ZX]", status.read_text())


def test_output_is_prefixed_with_the_rank(tmp_path):
  code, text = Run(tmp_path, "--processes", 3, "--devices", 2).end()
  assert code == 0
  for rank in range(3):
    assert re.search(rf"^\[{rank}\] number \d+ of 3 2$", text, re.M)
    assert f"[{rank}] unfinished line\n" in text


@pytest.mark.parametrize(
  ("acts", "code"),
  [
    ({"act1": "7", "act0": "sleep"}, 7),
    ({"act1": "kill", "act0": "deaf"}, 128 + signal.SIGKILL),
    ({"act0": "75", "act1": "9"}, 9),  # 75: it exited because its peer was lost
    ({"act0": "child", "act1": "3"}, 3),
    ({"act0": "orphan", "act1": "3"}, 3),
  ],
  ids=str,
)
def test_if_one_fails_all_end_and_its_exit_code_is_returned(tmp_path, acts, code):
  run = Run(tmp_path, "--grace", 0.5, **acts)
  found, text = run.end()
  assert found == code
  assert f"ended with code {code}" in text


def test_restarts_with_fewer_processes_but_not_of_wrong_commands(tmp_path):
  file = tmp_path / "file"
  code, text = Run(tmp_path, "--processes", "3,2", "--restarts", 2, act2="once", file=file).end()
  assert code == 0
  assert [len(re.findall(f"of {count} 1", text)) for count in (3, 2)] == [3, 2]
  assert text.count("restart ") == 1
  code, text = Run(tmp_path, "--restarts", 2, "--grace", 0.5, act0="5").end()
  assert (code, text.count("restart ")) == (5, 2)
  code, text = Run(tmp_path, "--restarts", 2, "--grace", 0.5, act0="2").end()
  assert (code, text.count("restart ")) == (2, 0)  # the command is wrong


def test_a_signal_is_forwarded_to_all_and_a_second_one_kills(tmp_path):
  run = Run(tmp_path, "--restarts", 3, act0="polite", act1="polite")
  run.wait_for_ready(2)
  run.process.send_signal(signal.SIGTERM)
  code, text = run.end()
  assert (code, text.count("terminating"), text.count("restart ")) == (128 + signal.SIGTERM, 2, 0)
  run = Run(tmp_path, act0="deaf", act1="deaf")
  run.wait_for_ready(2)
  run.process.send_signal(signal.SIGTERM)
  time.sleep(0.2)
  assert run.process.poll() is None
  run.process.send_signal(signal.SIGTERM)
  assert run.end()[0] == 128 + signal.SIGKILL


def test_no_process_outlives_a_killed_launcher(tmp_path):
  if sys.platform != "linux":
    pytest.skip("only Linux signals the end of the parent process")
  run = Run(tmp_path, act0="deaf", act1="sleep")
  run.wait_for_ready(2)
  run.process.kill()
  assert run.end()[0] == -signal.SIGKILL
