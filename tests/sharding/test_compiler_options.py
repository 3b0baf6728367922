"""The options of the compiler: what the config adds, and what a compiler does not have."""

import jax
import pytest
from support.tiny import build

from maxlite.config import load_config
from maxlite.sharding import compiler_options

KNOWN = {"xla_cpu_enable_fast_math": False}


def options(platform, overrides):
  return compiler_options.compiler_options(jax.devices()[0], platform, overrides)


def test_the_config_adds_to_the_platforms_options_and_replaces_them(monkeypatch):
  monkeypatch.setitem(compiler_options.PLATFORM_OPTIONS, "cpu", {"xla_cpu_use_xnnpack": False})
  added = options("cpu", KNOWN)
  assert added == {"xla_cpu_use_xnnpack": False} | KNOWN
  assert options("cpu", {"xla_cpu_use_xnnpack": True}) == {"xla_cpu_use_xnnpack": True}
  lines = compiler_options.describe_options(KNOWN, "cpu")
  assert lines == [
    "compiler option xla_cpu_enable_fast_math=False",
    "compiler option xla_cpu_use_xnnpack: not in this XLA, left out",
  ]


def test_only_options_of_the_config_must_exist(monkeypatch):
  table = {"xla_of_another_version": True, "xla_of_another_version_too": 1} | KNOWN
  monkeypatch.setitem(compiler_options.PLATFORM_OPTIONS, "cpu", table)
  assert options("cpu", {}) == KNOWN
  with pytest.raises(ValueError, match=r"compiler_options: .*No such compile option: 'xla_nope'"):
    options("cpu", {"xla_nope": True})
  with pytest.raises(ValueError, match=r"compiler_options: .*not a valid bool value"):
    options("cpu", {"xla_cpu_enable_fast_math": "maybe"})
  with pytest.raises(ValueError, match=r"compiler_options: .*has a value of a wrong type"):
    options("cpu", {"xla_cpu_enable_fast_math": ("yes", "no")})


def test_numbers_are_given_as_text():
  ratio = "xla_gpu_auto_spmd_partitioning_memory_budget_ratio"
  overrides = {ratio: "0.5", "xla_backend_optimization_level": "2"}
  assert list(options("cpu", overrides).values()) == [0.5, 2]


def test_the_training_step_is_compiled_with_them():
  def program(value):
    return build(
      load_config(["configs/base.yml", f"compiler_options={{xla_{value}}}"], needs_data=False)
    )

  known = program("cpu_enable_fast_math: true")
  assert known.compiler_options == {"xla_cpu_enable_fast_math": True}
  with pytest.raises(ValueError, match="No such compile option: 'xla_nope'"):
    program("nope: 1").compile()
