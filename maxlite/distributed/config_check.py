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
_MAX_NAMES = 8  # differences in a message
_MAX_SHOWN = 120  # characters of a value in a message
_CONTEXT = 40  # of these characters, those before the first that differs


def config_fingerprint(
  values: Mapping[str, object],
  settings: Mapping[str, object],
) -> dict[str, str]:
  """Return {name: value} of versions, settings of JAX and keys, which all processes must share.

  Args:
    values: the resolved config, flat.
    settings: those of JAX, by name.
  """
  fingerprint = {"maxlite": f"{__version__} (source {_source_digest()})"}
  for package in _PACKAGES:
    fingerprint[package] = importlib.metadata.version(package)
  for name, setting in settings.items():
    fingerprint[name] = show(setting)
  for name in _XLA_VARIABLES:
    flags = _HOST_FLAGS.sub("", os.environ.get(name, ""))
    fingerprint[name] = " ".join(flags.split())
  for name, value in values.items():
    is_of_run = KEYS[name].section not in _OTHER_SECTIONS
    if is_of_run and name not in PER_HOST_KEYS:
      fingerprint[name] = show(value)
  return fingerprint


def digest(fingerprint: Mapping[str, str]) -> str:
  """Return the hexadecimal SHA-256 of a fingerprint."""
  text = json.dumps(fingerprint, sort_keys=True)
  return hashlib.sha256(text.encode()).hexdigest()


def parse_fingerprint(text: bytes) -> dict[str, str]:
  """Return the fingerprint that another process has sent as JSON; empty if it is something else."""
  try:
    fingerprint = json.loads(text)
  except (ValueError, RecursionError):
    return {}
  if not isinstance(fingerprint, dict):
    return {}
  parsed = {}
  for name, value in fingerprint.items():
    if not isinstance(value, str):
      return {}
    parsed[show(name)] = value if value.isprintable() else repr(value)
  return parsed


def describe_difference(
  own: Mapping[str, str],
  others: Mapping[str, str],
  process_id: int,
) -> str:
  """Return the error for a fingerprint of process 0 that differs from that of another process.

  Args:
    own: the fingerprint of process 0.
    others: those of the other process.
    process_id: that of the other process.
  """
  ours = []
  theirs = []
  for name in own.keys() | others.keys():
    own_fact = own.get(name)
    other_fact = others.get(name)
    if own_fact != other_fact:
      ours.append(_describe_fact(name, own_fact, other_fact))
      theirs.append(_describe_fact(name, other_fact, own_fact))
  return (
    f"process_id={process_id} was started with {_list(theirs)}, process_id=0 with {_list(ours)}: "
    "start all processes with the same config and versions"
  )


def _describe_fact(name: str, fact: str | None, other: str | None) -> str:
  """Return a fact of one process, of which the other has another value; None: it is missing."""
  if fact is None:
    fact = "(missing)"
  return f"{name}={_shorten(fact, other or '')}"


def _shorten(text: str, other: str) -> str:
  """Return `text`, or its part around the first character in which it differs from `other`."""
  if len(text) <= _MAX_SHOWN:
    return text
  first = _first_difference(text, other)
  start = max(first - _CONTEXT, 0)
  end = start + _MAX_SHOWN
  return f"...{text[start:end]}..."


def _first_difference(text: str, other: str) -> int:
  """Return the index of the first character that differs, or at which the shorter text ends."""
  shorter = min(len(text), len(other))
  for n in range(shorter):
    if text[n] != other[n]:
      return n
  return shorter


def _list(shown: list[str]) -> str:
  """Join the first differences, in order, and the number of the others."""
  first = sorted(shown)[:_MAX_NAMES]
  text = " ".join(first)
  num_more = len(shown) - len(first)
  if num_more:
    text += f" and {num_more} more"
  return text


def _source_digest() -> str:
  """Return a digest of the package's modules, which may differ at the same version."""
  root = Path(__file__).parents[1]
  content = hashlib.sha256()
  for path in sorted(root.rglob("*.py")):
    name = path.relative_to(root).as_posix()
    content.update(name.encode())
    source = hashlib.sha256(path.read_bytes())
    content.update(source.digest())
  return content.hexdigest()[:12]
