"""Plant the bugs of tests/mutants/mutants.yml that concern a step, and audit a config with each.

  python tools/inspect/audit_mutants.py [NAME ...]

The field `audit` of a bug is a config that uses what the bug breaks and, after `|`, the variant
with which the audit compares it; the checks of the reference always run. Prints what the audit
says first. The exit code is 1 if it finds nothing wrong with one of them.
"""

import argparse
import ast
import importlib
import os
import runpy
import shlex
import sys
import time
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 100  # of what is printed of a finding
MUTANTS = runpy.run_path(str(ROOT / "tools" / "inspect" / "mutants.py"))


def main() -> int:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("names", nargs="*", help="bugs to plant; default: all that have `audit`")
  options = parser.parse_args()
  from maxlite.audit import ENVIRONMENT

  os.environ.update(ENVIRONMENT)  # before JAX is imported
  from maxlite.kernels.xla_cpu import add_threads_for_collectives

  add_threads_for_collectives()
  missed = []
  for mutant in MUTANTS["chosen_mutants"](options.names):
    if not mutant.audit:
      continue
    start = time.perf_counter()
    found = findings(mutant)
    seconds = time.perf_counter() - start
    first = found[0][:WIDTH] if found else "NOT FOUND"
    print(f"{mutant.name:54} {seconds:3.0f} s  {first}", flush=True)
    if not found:
      missed.append(mutant.name)
  return int(bool(missed))


def findings(mutant: Any) -> list[str]:
  """What the audit of the bug's config says with the bug."""
  with planted(mutant):
    return findings_of(mutant.audit)


def findings_of(words: str) -> list[str]:
  """What the audit says; `words` are as in the field `audit`."""
  import jax

  from maxlite.auditing.audit_run import audit_spec
  from maxlite.training.spec import spec_of

  variant = words.partition("|")[2].split()
  variants = [variant_of(variant)] if variant else []
  jax.clear_caches()  # of what other code traced
  try:
    result = audit_spec(spec_of(config_of(words)), num_meshes=0, variants=variants)
  finally:
    jax.clear_caches()
  impossible = [row.reason for row in result.outcomes if row.comparison is None]
  if impossible:
    raise ValueError(f"{words} is not possible: {impossible[0]}")
  narrow = [line for line in result.remarks if "16-bit" in line]
  return [*map(str, result.differences), *result.mistakes, *narrow]


def config_of(words: str) -> Any:
  """The config of the words before `|`."""
  from maxlite.config import load_config

  settings = shlex.split(words.partition("|")[0])
  return load_config(["dataset_type=synthetic", "jax_cache_dir=", *settings])


def variant_of(words: list[str]) -> Any:
  """The variant of words such as expert=2, accumulation=3, rows=shuffled."""
  from maxlite.auditing.variants import AXES, Variant

  values = dict(word.split("=") for word in words)
  degrees = tuple(int(values.pop(axis, 1)) for axis in AXES)
  changes: dict[str, Any] = dict(values)
  if "accumulation" in changes:
    changes["accumulation"] = int(changes["accumulation"])
  if "strategy" in changes:
    changes["context"] = changes.pop("strategy")
  if "rows" in changes:
    changes["rows"] = changes["rows"].replace("-", " ")
  if "scan" in changes:
    changes["scan"] = changes["scan"] == "true"
  return Variant(degrees, **changes)


@contextmanager
def planted(mutant: Any) -> Iterator[None]:
  """The bug, in the modules of this process."""
  source = mutant.planted((ROOT / mutant.file).read_text())
  module = importlib.import_module(mutant.file.removesuffix(".py").replace("/", "."))
  name = mutant.at.partition("::")[2]
  assigned = _assigned_value(source, name)
  if assigned is not None:
    yield from _with_variable(module, name, ast.literal_eval(assigned))
    return
  code = compile(source, mutant.file, "exec")
  target: Any = module
  for part in name.split("."):
    code = next(
      each for each in code.co_consts if isinstance(each, types.CodeType) and each.co_name == part
    )
    target = getattr(target, part)
    while not isinstance(target, type) and hasattr(target, "__wrapped__"):
      target = target.__wrapped__
    if isinstance(target, types.FunctionType):
      break  # functions inside of it are constants of its code
  before = target.__code__
  target.__code__ = code
  try:
    yield
  finally:
    target.__code__ = before


def _assigned_value(source: str, name: str) -> ast.expr | None:
  """The expression that is assigned to a variable; None: the name is of something else."""
  for node in ast.parse(source).body:
    if name in MUTANTS["defined_names"](node):
      return getattr(node, "value", None)
  return None


def _with_variable(module: types.ModuleType, name: str, value: object) -> Iterator[None]:
  """A variable with this value, in all modules that import it."""
  old = getattr(module, name)
  holders = []
  for each in list(sys.modules.values()):
    if getattr(each, "__name__", "").startswith("maxlite") and vars(each).get(name) is old:
      holders.append(each)
  for each in holders:
    setattr(each, name, value)
  try:
    yield
  finally:
    for each in holders:
      setattr(each, name, old)


if __name__ == "__main__":
  sys.exit(main())
