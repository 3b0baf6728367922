"""constraints.txt pins versions that fit the requirements in setup.py and each other."""

import ast
import re
import sys
from importlib.metadata import requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("test", "tpu", "hf", "notebook", "wandb")  # those that CI installs


def pins_of(python):
  """{package: version} of constraints.txt for a version of Python."""
  pins = {}
  for line in (ROOT / "constraints.txt").read_text().splitlines():
    if line.startswith("#"):
      continue
    requirement = Requirement(line)
    marker = requirement.marker
    if marker is None or marker.evaluate({"python_version": python}):
      name = canonicalize_name(requirement.name)
      assert name not in pins
      (pin,) = requirement.specifier
      assert pin.operator == "=="
      pins[name] = pin.version
  return pins


@pytest.fixture(scope="module", params=["3.11", "3.12", "3.14"])
def pins(request):
  return pins_of(request.param) | {"python": request.param}


@pytest.fixture(scope="module")
def declared():
  """The lists of requirements that setup.py passes to setuptools."""
  nodes = ast.walk(ast.parse((ROOT / "setup.py").read_text()))
  calls = (node for node in nodes if isinstance(node, ast.Call))
  (call,) = (node for node in calls if ast.unparse(node.func) == "setup")
  arguments = {keyword.arg: keyword.value for keyword in call.keywords}
  return {
    name: ast.literal_eval(arguments[name]) for name in ("install_requires", "extras_require")
  }


def test_every_requirement_is_pinned_within_its_range(pins, declared):
  extras = declared["extras_require"]
  lines = list(declared["install_requires"])
  for name in EXTRAS:
    lines += extras[name]
  for requirement in map(Requirement, lines):
    if requirement.marker and not requirement.marker.evaluate({"python_version": pins["python"]}):
      continue
    assert pins[canonicalize_name(requirement.name)] in requirement.specifier, requirement


def test_accelerator_extras_are_those_of_jax(declared):
  """So that their compilers match whatever version of JAX is installed."""
  for name in ("tpu", "cuda"):
    line = declared["extras_require"][name][0]
    assert re.fullmatch(rf"jax\[{name}\d*\]>=[\d.]+", line)


def test_newer_pythons_have_a_newer_jax():
  old = pins_of("3.11")
  new = pins_of("3.13")
  for name in ("jax", "jaxlib", "flax", "libtpu"):
    assert Version(old[name]) < Version(new[name])


def test_the_tpu_compiler_is_that_of_the_pinned_jax():
  pins = pins_of(f"{sys.version_info.major}.{sys.version_info.minor}")
  if version("jax") != pins["jax"]:
    pytest.skip("the requirements of the pinned JAX are not installed")
  needed = [Requirement(line) for line in requires("jax")]
  (libtpu,) = (requirement for requirement in needed if requirement.name == "libtpu")
  assert pins["libtpu"] in libtpu.specifier


def test_the_scripts_look_for_every_python_with_pins():
  script = (ROOT / "tools" / "venv.sh").read_text()
  assert "for minor in 14 13 12 11; do" in script
  assert re.search(r"Python 3.12 to 3.14", (ROOT / "constraints.txt").read_text())
