"""The environment of libtpu on machines without a TPU, where it prints errors but is not needed.

The extra `tpu` installs it, also to compile ahead of time. JAX loads it with its first device, so
the environment is set before JAX is imported.
"""

import glob
import importlib.util
import os
from collections.abc import MutableMapping
from pathlib import Path

# The topology of one host, in place of a query of the metadata server. It is not used.
NO_TPU_ENVIRONMENT = {
  "TPU_SKIP_MDS_QUERY": "1",
  "TPU_WORKER_HOSTNAMES": "localhost",
  "TPU_ACCELERATOR_TYPE": "v5p-8",
}
_GOOGLE = "0x1ae0"  # PCI vendor
_OTHER_CLASSES = ("0x01", "0x02")  # PCI classes of Google's disks and network cards


def quiet_libtpu(environment: MutableMapping[str, str] = os.environ) -> None:
  """Set the environment, unless this machine has a TPU or the environment describes one."""
  is_described = any(name.startswith(("TPU_", "MEGASCALE_")) for name in environment)
  is_requested = "tpu" in environment.get("JAX_PLATFORMS", "")
  is_forced = "JAX_FORCE_TPU_INIT" in environment
  if is_described or is_requested or is_forced:
    return
  if importlib.util.find_spec("libtpu") is not None and not has_tpu():
    environment.update(NO_TPU_ENVIRONMENT)


def has_tpu(root: str = "/") -> bool:
  """Whether the machine may have a TPU; `root` is the folder of its `dev` and `sys`."""
  if any(glob.glob(f"{root}/dev/{pattern}") for pattern in ("accel[0-9]*", "vfio/[0-9]*")):
    return True
  for vendor in glob.glob(f"{root}/sys/bus/pci/devices/*/vendor"):
    device = Path(vendor).parent
    is_other = _read(device / "class").startswith(_OTHER_CLASSES)
    if _read(device / "vendor") == _GOOGLE and not is_other:
      return True
  return False


def _read(path: Path) -> str:
  try:
    return path.read_text().strip()
  except OSError:
    return ""
