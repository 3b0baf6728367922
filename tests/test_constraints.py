"""constraints.txt pins versions that fit the requirements in setup.py and each other."""

import ast
import re
from importlib.metadata import requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
EXTRAS = ("test", "tpu", "hf", "notebook", "wandb")  # those that CI installs


@pytest.fixture(scope="module")
def pins():
  """{package: version} of constraints.txt."""
  lines = (ROOT / "constraints.txt").read_text().splitlines()
  pairs = [line.split("==") for line in lines if not line.startswith("#")]
  return {canonicalize_name(name): pinned for name, pinned in pairs}


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
  lines = declared["install_requires"] + [line for name in EXTRAS for line in extras[name]]
  for requirement in map(Requirement, lines):
    assert pins[canonicalize_name(requirement.name)] in requirement.specifier, requirement


def test_accelerator_extras_are_those_of_jax(declared):
  """So that their compilers match whatever version of JAX is installed."""
  for name in ("tpu", "cuda"):
    (line,) = declared["extras_require"][name]
    assert re.fullmatch(rf"jax\[{name}\d*\]>=[\d.]+", line)


def test_the_tpu_compiler_is_that_of_the_pinned_jax(pins):
  if version("jax") != pins["jax"]:
    pytest.skip("the requirements of the pinned JAX are not installed")
  needed = [Requirement(line) for line in requires("jax")]
  (libtpu,) = (requirement for requirement in needed if requirement.name == "libtpu")
  assert pins["libtpu"] in libtpu.specifier
