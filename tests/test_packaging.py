"""Packages built from a clone, in fresh virtual environments."""

import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BUILD = (
  "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
)

pytest.importorskip("setuptools", "70.1", reason="older ones cannot build wheels without others")


def install(kind, folder):
  """Python of a new virtual environment with the wheel of a clone, `folder`/maxlite."""
  for part in ("maxlite", "configs"):
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / part, folder / "maxlite" / part, ignore=ignored)
  for name in ("setup.py", "pyproject.toml", "README.md"):
    shutil.copy(ROOT / name, folder / "maxlite")
  command = [sys.executable, "-W", "ignore", "-c", BUILD, kind, str(folder)]
  subprocess.run(command, cwd=folder / "maxlite", check=True, stdout=subprocess.DEVNULL)
  venv.create(folder / "venv", symlinks=True)
  (wheel,) = folder.glob("*.whl")
  (packages,) = (folder / "venv").glob("lib/python*/site-packages")
  zipfile.ZipFile(wheel).extractall(packages)
  return folder / "venv" / "bin" / "python"


def run(python, folder, code):
  """The output of a script in `folder`."""
  script = folder / "script.py"
  script.write_text(code)
  command = [python, script]
  result = subprocess.run(command, cwd=folder, env={}, check=True, capture_output=True, text=True)
  return result.stdout.strip()


@pytest.mark.parametrize("kind", ["build_editable", "build_wheel"])
def test_a_script_beside_a_clone_imports_the_package(kind, tmp_path):
  """The clone's folder, maxlite, must not be found as a namespace package."""
  python = install(kind, tmp_path)
  found = Path(
    run(python, tmp_path, "import maxlite; print(maxlite.__version__, maxlite.__file__)").split()[
      -1
    ]
  )
  in_clone = tmp_path / "maxlite" in found.parents
  assert found.name == "__init__.py"
  assert in_clone == (kind == "build_editable")
  configs = found.parents[1 if in_clone else 0] / "configs"
  written = {path.relative_to(configs) for path in configs.rglob("*.*")}
  assert written == {path.relative_to(ROOT / "configs") for path in (ROOT / "configs").rglob("*.*")}
  data = [path.relative_to(ROOT / "maxlite") for path in (ROOT / "maxlite").rglob("*.*")]
  data = [path for path in data if path.suffix not in (".py", ".pyc")]
  assert Path("config/maxtext/keys.yml") in data
  assert [path for path in data if not (found.parent / path).is_file()] == []
