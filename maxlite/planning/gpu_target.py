"""Figures of GPUs that XLA compiles for, and their text as XLA reads it.

Source: the target configs that XLA publishes (openxla/xla, xla/backends/gpu/target_config/specs:
a100_sxm_80, h100_sxm, h200, b200 and gb200, read in November 2026), without their rates of
arithmetic units: jax 0.12.0.1 compiles the steps of docs/measurements/gpu.md to the same programs.
"""

from typing import NamedTuple


class GpuTarget(NamedTuple):
  """What XLA's compiler reads about a GPU.

  Attributes:
    capability: major number of its CUDA compute capability; the minor one is 0.
    cores: streaming multiprocessors.
    fpus: floating-point units of a core.
    core_bytes: shared memory of a core; a block can have 1,024 less.
    clock_ghz: its highest clock.
    memory_bytes: size of its memory.
    bytes_per_second: bandwidth of its memory.
    l2_bytes: size of its L2 cache.
  """

  capability: int
  cores: int
  fpus: int
  core_bytes: int
  clock_ghz: float
  memory_bytes: int
  bytes_per_second: int
  l2_bytes: int


_H100 = GpuTarget(
  capability=9,
  cores=132,
  fpus=128,
  core_bytes=233_472,
  clock_ghz=1.98,
  memory_bytes=84_942_979_072,
  bytes_per_second=3_352_320_000_000,
  l2_bytes=52_428_800,
)
_B200 = GpuTarget(
  capability=10,
  cores=148,
  fpus=128,
  core_bytes=233_472,
  clock_ghz=1.965,
  memory_bytes=191_514_411_008,
  bytes_per_second=7_672_320_000_000,
  l2_bytes=132_644_864,
)
# By `jax.Device.device_kind`.
GPU_TARGETS = {
  "NVIDIA A100-SXM4-80GB": GpuTarget(
    capability=8,
    cores=108,
    fpus=64,
    core_bytes=167_936,
    clock_ghz=1.41,
    memory_bytes=85_100_068_864,
    bytes_per_second=2_039_040_000_000,
    l2_bytes=41_943_040,
  ),
  "NVIDIA H100 80GB HBM3": _H100,
  "NVIDIA H200": _H100._replace(memory_bytes=151_397_597_184, bytes_per_second=4_800_000_000_000),
  "NVIDIA B200": _B200,
  "NVIDIA GB200": _B200._replace(
    cores=152,
    clock_ghz=2.062,
    memory_bytes=197_897_748_480,
    bytes_per_second=7_928_064_000_000,
    l2_bytes=135_528_448,
  ),
}


def target_config_of(device_kind: str) -> str:
  """The GpuTargetConfigProto of a GPU, in text format."""
  gpu = GPU_TARGETS[device_kind]
  extension = "NONE"
  if gpu.capability >= 9:
    extension = "ACCELERATED_FEATURES"  # such as Hopper's wgmma: compute capability 9.0a
  return f"""\
gpu_device_info {{
  cuda_compute_capability {{ major: {gpu.capability} feature_extension: {extension} }}
  core_count: {gpu.cores}
  fpus_per_core: {gpu.fpus}
  clock_rate_ghz: {gpu.clock_ghz}
  shared_memory_per_core: {gpu.core_bytes}
  shared_memory_per_block_optin: {gpu.core_bytes - 1024}
  shared_memory_per_block: 49152
  device_memory_size: {gpu.memory_bytes}
  memory_bandwidth: {gpu.bytes_per_second}
  l2_cache_size: {gpu.l2_bytes}
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  device_address_bits: 64
  device_vendor: "NVIDIA Corporation"
  name: "{device_kind}"
  driver_version: "13.0.0"
  runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{device_kind}"
"""
