"""Peak speed of known accelerators, to say which share of it a run reaches."""

# Dense bfloat16 TFLOP/s of one JAX device, as published by the makers, by `jax.Device.device_kind`.
# A TPU v2 or v3 core is a device, two of them a chip; so is half a TPU7x chip.
PEAK_BF16_TFLOPS: dict[str, float] = {
  "TPU v2": 23.0,
  "TPU v3": 61.5,
  "TPU v4": 275.0,
  "TPU v5 lite": 197.0,
  "TPU v5e": 197.0,
  "TPU v5": 459.0,
  "TPU v5p": 459.0,
  "TPU v6 lite": 918.0,
  "TPU v6e": 918.0,
  "TPU7x": 1153.5,
  "NVIDIA A100-PCIE-40GB": 312.0,
  "NVIDIA A100 80GB PCIe": 312.0,
  "NVIDIA A100-SXM4-40GB": 312.0,
  "NVIDIA A100-SXM4-80GB": 312.0,
  "NVIDIA H100 PCIe": 756.0,
  "NVIDIA H100 NVL": 835.0,
  "NVIDIA H100 80GB HBM3": 989.4,
  "NVIDIA H200": 989.4,
  "NVIDIA H200 NVL": 835.0,
  "NVIDIA GH200 120GB": 989.4,
  "NVIDIA GH200 480GB": 989.4,
  "NVIDIA B200": 2250.0,
  "NVIDIA GB200": 2500.0,
  "NVIDIA L4": 121.0,
  "NVIDIA L40S": 362.0,
  "NVIDIA GeForce RTX 3090": 71.0,
  "NVIDIA GeForce RTX 4090": 165.2,
}


def peak_bf16_tflops(device_kind: str) -> float | None:
  """Peak dense bfloat16 TFLOP/s of one device of this kind; None where it is not known (a CPU)."""
  return PEAK_BF16_TFLOPS.get(device_kind)
