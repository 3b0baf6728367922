"""Options of XLA's compiler for training steps, by platform: collectives overlap other work.

docs/measurements/compiled.md has their effect. Without them XLA:TPU starts a collective and waits
for it.
"""

import contextlib
from collections.abc import Mapping

import jax
from jax.sharding import SingleDeviceSharding

from maxlite.errors import UserError

Options = dict[str, bool | int | float | str]

PLATFORM_OPTIONS: dict[str, Options] = {
  "tpu": {
    # The exchange of tokens proceeds during shared experts and gathers. Options that fuse gathers
    # with matmuls are left out: libtpu 0.0.50 refuses them on v5p, as possibly incorrect.
    "xla_tpu_enable_async_ragged_all_to_all": True,
  },
  "gpu": {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    "xla_gpu_enable_pipelined_all_gather": True,
    "xla_gpu_enable_pipelined_reduce_scatter": True,
    "xla_gpu_enable_pipelined_all_reduce": True,
  },
}

# With deterministic_reductions. XLA removes common subexpressions before it partitions a program,
# and only then: afterwards some simplifications, which round otherwise, apply on one device alone.
DETERMINISTIC_OPTIONS = {"xla_disable_hlo_passes": "cse"}


def compiler_options(device: jax.Device, platform: str, overrides: Mapping) -> Options:
  """The platform's options with `overrides`, without those that this compiler does not have.

  Raises:
    UserError: the compiler refuses an option in `overrides`.
  """
  own = {name: _parse(value) for name, value in overrides.items()}
  options = PLATFORM_OPTIONS.get(platform, {}) | own
  while options:
    try:
      _compile_nothing(device, options)
      break
    except jax.errors.JaxRuntimeError as error:
      refusal = " ".join(str(error).split())
      refused = next((name for name in options if f"'{name}'" in refusal), None)
      if refused is None or refused in overrides:
        raise UserError(f"compiler_options: {refusal}; see the options of this XLA") from error
      del options[refused]
    except (TypeError, ValueError) as error:  # the value's type is not the option's
      raise UserError(f"compiler_options: {own} has a value of a wrong type") from error
  return options


def _compile_nothing(device: jax.Device, options: Options) -> None:
  """Compile a program without work, to let the compiler check the options."""
  placement = SingleDeviceSharding(device)
  program = jax.jit(lambda: 0, out_shardings=placement, compiler_options=options)
  program.lower().compile()


def _parse(value: bool | int | float | str) -> bool | int | float | str:
  """The boolean or number that a text spells, or the value itself."""
  if not isinstance(value, str):
    return value
  if value in ("true", "false"):
    return value == "true"
  for convert in (int, float):
    with contextlib.suppress(ValueError):
      return convert(value)
  return value


def describe_options(options: Options, platform: str) -> list[str]:
  """A line per option that is set, and per option of the platform that this compiler lacks."""
  lines = [f"compiler option {name}={value}" for name, value in options.items()]
  missing = PLATFORM_OPTIONS.get(platform, {}).keys() - options.keys()
  for name in sorted(missing):
    lines.append(f"compiler option {name}: not in this XLA, left out")
  return lines
