"""tools/venv.sh finds the newest Python that can create a virtual environment."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def write_command(path, works):
  """A stand-in for a Python: it prints its path, and fails if it does not work."""
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(f"#!/bin/sh\necho {path}\nexit {0 if works else 127}\n")
  path.chmod(0o755)


def call(function, folder, **variables):
  script = f"PATH={folder}/bin; source {ROOT}/tools/venv.sh; {function}"
  environment = {"HOME": str(folder)} | variables
  return subprocess.run(
    ["/bin/bash", "-c", script], env=environment, capture_output=True, text=True, check=False
  )


@pytest.mark.parametrize(
  ("works", "found"),
  [
    ({"bin/python3.11": True}, "bin/python3.11"),
    ({"bin/python3.11": True, "bin/python3.12": True}, "bin/python3.12"),
    # A shim of pyenv for a version that is installed but not chosen fails.
    (
      {
        "bin/python3.11": True,
        "bin/python3.13": False,
        ".pyenv/versions/3.13.0/bin/python3": True,
        ".pyenv/versions/3.9.18/bin/python3": True,
      },
      ".pyenv/versions/3.13.0/bin/python3",
    ),
    # Without ensurepip.
    ({"bin/python3.12": False, "bin/python3.11": True}, "bin/python3.11"),
  ],
)
def test_the_newest_python_that_works_is_found(works, found, tmp_path):
  for name, is_whole in works.items():
    write_command(tmp_path / name, is_whole)
  assert call("newest_python", tmp_path).stdout.strip() == str(tmp_path / found)


def test_a_machine_without_python_gets_one_line(tmp_path):
  (tmp_path / "bin").mkdir()
  result = call("newest_python", tmp_path)
  assert (result.returncode, result.stdout) == (1, "")
  assert result.stderr.startswith("no Python 3.11 to 3.14; install one, or name it: PYTHON=")


def test_a_named_python_is_the_only_candidate(tmp_path):
  write_command(tmp_path / "bin/python3.12", True)
  write_command(tmp_path / "bin/mine", True)
  assert call("newest_python", tmp_path, PYTHON="mine").stdout.strip() == f"{tmp_path}/bin/mine"
  result = call("newest_python", tmp_path, PYTHON="nope")
  assert (result.returncode, result.stdout) == (1, "")
  assert "PYTHON=nope is not a command" in result.stderr


def test_ci_runs_tests_that_exist():
  named = re.findall(r"tests/[\w/.]*\w", (ROOT / ".ci" / "run").read_text())
  assert len(named) >= 5
  assert [path for path in named if not (ROOT / path).exists()] == []
