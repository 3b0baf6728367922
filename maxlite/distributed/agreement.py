"""What all processes of a run must have in common: the config, the versions, JAX's settings.

Processes that differ in it would train on different numbers without a message, wait for each other
forever, or end in an abort of XLA.
"""

import hashlib
import importlib.metadata
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maxlite import __version__
from maxlite.config.raw_values import show
from maxlite.config.schema import KEYS, ConvertConfig, HostsConfig, PlanConfig, ServeConfig

# The processes of a run identify themselves by the first section; they read none of the others.
_OTHER_SECTIONS = (HostsConfig, ServeConfig, PlanConfig, ConvertConfig)
# Caches and checkpoints on the disks of a host, which may be elsewhere on another one.
PER_HOST_KEYS = ("jax_cache_dir", "local_checkpoint_directory", "token_cache_directory")
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")
_XLA_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_HOST_FLAGS = re.compile(r"--xla_(dump|force_host_platform_device_count)\S*")  # may differ
_MAX_NAMES = 8  # of differences in a message
_MAX_SHOWN = 120  # characters of a value in it
_CONTEXT = 40  # of these, before the first character that differs


def common_facts(values: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, str]:
  """Return {name: value} of versions, settings of JAX and keys, which all processes must share.

  Args:
    values: the resolved config, flat.
    settings: of JAX.
  """
  facts = {"maxlite": f"{__version__} (source {_source_digest()})"}
  for package in _PACKAGES:
    facts[package] = importlib.metadata.version(package)
  for name, setting in settings.items():
    facts[name] = show(setting)
  for name in _XLA_VARIABLES:
    flags = _HOST_FLAGS.sub("", os.environ.get(name, ""))
    facts[name] = " ".join(flags.split())
  for name, value in values.items():
    if KEYS[name].section not in _OTHER_SECTIONS and name not in PER_HOST_KEYS:
      facts[name] = show(value)
  return facts


def digest(facts: Mapping[str, str]) -> str:
  """Return the hexadecimal SHA-256 of facts."""
  return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def parse_facts(text: bytes) -> dict[str, str]:
  """Return the facts that another process has sent as JSON; empty if it is something else."""
  try:
    facts = json.loads(text)
  except (ValueError, RecursionError):
    return {}
  if not isinstance(facts, dict):
    return {}
  parsed = {}
  for name, value in facts.items():
    if not isinstance(value, str):
      return {}
    parsed[show(name)] = value if value.isprintable() else repr(value)
  return parsed


def describe_difference(own: Mapping[str, str], others: Mapping[str, str], process_id: int) -> str:
  """Return the error for facts of process 0 (`own`) that differ from those of another process."""
  ours, theirs = [], []
  for name in own.keys() | others.keys():
    if own.get(name) != others.get(name):
      ours.append(f"{name}=" + _shorten(own.get(name, "(missing)"), others.get(name, "")))
      theirs.append(f"{name}=" + _shorten(others.get(name, "(missing)"), own.get(name, "")))
  return (
    f"process_id={process_id} was started with {_list(theirs)}, process_id=0 with {_list(ours)}: "
    "start all processes with the same config and versions"
  )


def _shorten(text: str, other: str) -> str:
  """Return `text`, or its part around the first character in which it differs from `other`."""
  if len(text) <= _MAX_SHOWN:
    return text
  first = 0
  while first < min(len(text), len(other)) and text[first] == other[first]:
    first += 1
  start = max(first - _CONTEXT, 0)
  return f"...{text[start : start + _MAX_SHOWN]}..."


def _list(shown: list[str]) -> str:
  text = " ".join(sorted(shown)[:_MAX_NAMES])
  more = len(shown) - _MAX_NAMES
  return f"{text} and {more} more" if more > 0 else text


def _source_digest() -> str:
  """Return a digest of the package's modules, which may differ at the same version."""
  root = Path(__file__).parents[1]
  content = hashlib.sha256()
  for path in sorted(root.rglob("*.py")):
    content.update(path.relative_to(root).as_posix().encode())
    content.update(hashlib.sha256(path.read_bytes()).digest())
  return content.hexdigest()[:12]
