"""Topology names and their devices."""

import importlib.util

import pytest
from jax.experimental.topologies import get_topology_desc

from maxlite.metrics.chips import CHIPS
from maxlite.planning.gpu_target import GPU_TARGETS
from maxlite.planning.topology import KINDS, parse_topology
from maxlite.sharding.mesh import MESH_AXES, build_mesh, dcn_degrees


@pytest.mark.parametrize(
  ("name", "generation", "chips", "devices", "grid"),
  [
    ("v4-8", "v4", 4, 4, "v4:2x2x1"),
    ("v5p-64", "v5p", 32, 32, "v5p:2x4x4"),
    ("v5p-256", "v5p", 128, 128, "v5p:4x4x8"),
    ("v5e-16", "v5e", 16, 16, "v5e:4x4"),
    ("v5litepod-8", "v5e", 8, 8, "v5e:2x4"),
    ("v6e-64", "v6e", 64, 64, "v6e:8x8"),
    ("v6e-1", "v6e", 1, 1, "v6e:1x1"),
    ("tpu7x-64", "tpu7x", 32, 64, "tpu7x:2x4x4"),
  ],
)
def test_slices(name, generation, chips, devices, grid):
  topology = parse_topology(name, 1)
  assert (topology.generation, topology.chips, topology.num_devices) == (generation, chips, devices)
  assert topology.request("")["topology_name"] == grid
  assert parse_topology(name, 3).num_devices == 3 * devices


def test_the_target_config_of_a_gpu_is_published_or_a_file(tmp_path):
  topology = parse_topology("h200-8", 1)
  assert topology.num_devices == 8
  assert "device_memory_size: 151397597184\n" in topology.request("")["target_config"]
  path = tmp_path / "other.txtpb"
  path.write_text("gpu_device_info {}")
  assert topology.request(str(path))["target_config"] == "gpu_device_info {}"
  with pytest.raises(ValueError, match="no such file"):
    topology.request(str(tmp_path / "absent"))


@pytest.mark.parametrize("kind", sorted(GPU_TARGETS))
def test_the_published_figures_agree_with_the_table_of_chips(kind):
  gpu = GPU_TARGETS[kind]
  chip = CHIPS[kind]
  assert gpu.memory_bytes == pytest.approx(chip.hbm_bytes, rel=0.08)
  assert gpu.bytes_per_second == pytest.approx(chip.hbm_bytes_per_second, rel=0.01)


@pytest.mark.skipif(
  not importlib.util.find_spec("jax_cuda13_plugin"), reason="the CUDA plugin is not installed"
)
@pytest.mark.parametrize("generation", [name for name, k in KINDS.items() if k.platform == "cuda"])
def test_xla_reads_the_target_config(generation):
  topology = parse_topology(f"{generation}-8", 2)
  devices = get_topology_desc(**topology.request("")).devices
  assert len(devices) == topology.num_devices
  assert {device.device_kind for device in devices} == {topology.kind.device_kind}
  capability = GPU_TARGETS[topology.kind.device_kind].capability
  assert {device.compute_capability for device in devices} == {f"{capability}.0"}


@pytest.mark.parametrize(
  ("name", "fix"),
  [("v5p", "v5p-N"), ("v9-8", "h200-N"), ("v5p-7", "v5p-16"), ("v6e-512", "v6e-256")],
)
def test_an_unknown_topology_is_an_error_that_lists_the_known(name, fix):
  with pytest.raises(ValueError, match=f"compile_topology={name}.*{fix}") as raised:
    parse_topology(name, 1)
  assert "\n" not in str(raised.value)


@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="libtpu is not installed")
@pytest.mark.parametrize("generation", [name for name, k in KINDS.items() if k.platform == "tpu"])
def test_the_table_agrees_with_libtpu(generation, monkeypatch):
  monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
  monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
  topology = parse_topology(f"{generation}-8", 1)
  devices = get_topology_desc(**topology.request("")).devices
  assert len(devices) == topology.num_devices
  assert {device.device_kind for device in devices} == {topology.kind.device_kind}


@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="libtpu is not installed")
def test_dcn_axes_span_slices(monkeypatch):
  monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
  monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
  devices = get_topology_desc(**parse_topology("v5e-4", 4).request("")).devices
  ici = dict.fromkeys(MESH_AXES, 1) | {"data": 2, "fsdp": -1}
  dcn = dict.fromkeys(MESH_AXES, 1) | {"data": 2, "expert": -1}
  mesh = build_mesh(list(ici.values()), list(dcn.values()), devices)
  assert [size for size in mesh.devices.shape if size > 1] == [4, 2, 2]
  assert dcn_degrees(mesh) == {"data": 2, "expert": 2}
