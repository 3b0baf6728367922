"""libtpu is silenced on machines without a TPU, and left alone on all others."""

import importlib.util

import pytest

from maxlite import libtpu_environment
from maxlite.libtpu_environment import NO_TPU_ENVIRONMENT, has_tpu, quiet_libtpu


@pytest.fixture
def environment(monkeypatch):
  """The environment of a process on a machine without a TPU, with libtpu installed."""
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "libtpu")
  monkeypatch.setattr(libtpu_environment, "has_tpu", lambda: False)
  return {"HOME": "/a"}


def test_libtpu_is_silenced_without_a_tpu(environment):
  quiet_libtpu(environment)
  assert environment == {"HOME": "/a"} | NO_TPU_ENVIRONMENT


@pytest.mark.parametrize(
  ("name", "value"),
  [
    ("TPU_NAME", "mine"),
    ("MEGASCALE_NUM_SLICES", "2"),
    ("JAX_PLATFORMS", "tpu,cpu"),
    ("JAX_FORCE_TPU_INIT", "1"),
  ],
)
def test_an_environment_that_describes_a_tpu_is_left_alone(environment, name, value):
  environment[name] = value
  quiet_libtpu(environment)
  assert environment == {"HOME": "/a", name: value}


def test_a_machine_with_a_tpu_or_without_libtpu_is_left_alone(environment, monkeypatch):
  with monkeypatch.context() as patch:
    patch.setattr(libtpu_environment, "has_tpu", lambda: True)
    quiet_libtpu(environment)
  monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
  quiet_libtpu(environment)
  assert environment == {"HOME": "/a"}


def test_tpus_are_found_by_their_devices(tmp_path):
  def add_device(name, vendor, kind):
    folder = tmp_path / "sys/bus/pci/devices" / name
    folder.mkdir(parents=True)
    (folder / "vendor").write_text(f"{vendor}\n")
    (folder / "class").write_text(f"{kind}\n")

  add_device("0", "0x1ae0", "0x020000")  # a network card of Google
  add_device("1", "0x10de", "0x030200")  # a GPU
  assert not has_tpu(str(tmp_path))
  add_device("2", "0x1ae0", "0x120000")
  assert has_tpu(str(tmp_path))
  (tmp_path / "v4/dev").mkdir(parents=True)
  (tmp_path / "v4/dev/accel0").touch()
  (tmp_path / "v5p/dev/vfio").mkdir(parents=True)
  (tmp_path / "v5p/dev/vfio/3").touch()
  assert has_tpu(str(tmp_path / "v4"))
  assert has_tpu(str(tmp_path / "v5p"))
