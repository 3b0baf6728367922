"""What a training step needs of a machine that need not be there: compiled, counted, told."""

import dataclasses
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from maxlite.config import Config, exit_with_one_line
from maxlite.data.batch import Batch
from maxlite.models import build_model
from maxlite.observe import memory
from maxlite.observe.chips import CHIPS
from maxlite.observe.collectives import Collective, collectives
from maxlite.observe.cost import hbm_bytes, matmul_flops
from maxlite.observe.flops import train_flops_per_step
from maxlite.observe.hlo import Module, parse
from maxlite.observe.memory import MemoryEstimate
from maxlite.observe.roofline import step_bounds
from maxlite.parallel.topology import Topology, parse_topology
from maxlite.training.setup import Trainer, build_trainer


@dataclasses.dataclass(frozen=True)
class Compiled:
  """One compiled train step."""

  module: Module
  memory: Any  # jax's CompiledMemoryStats, of one device
  seconds: float  # that compiling took

  @property
  def total_bytes(self) -> float:
    m = self.memory
    kept = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
    return kept + m.temp_size_in_bytes + m.generated_code_size_in_bytes


def run_plan(cfg: Config) -> int:
  """Prints the plan of `cfg` and returns 0, or 1 where the step does not compile or not fit."""
  console = Console(highlight=False, markup=False, soft_wrap=True)
  with exit_with_one_line("maxlite.plan"):
    topology, missing, devices = _devices(cfg)
    trainer = build_trainer(cfg, devices)
  kind = topology.kind.device_kind if topology else trainer.mesh.devices.flat[0].device_kind
  _introduce(trainer, kind, console)
  estimate = estimate_memory(trainer)
  compiled = None
  if missing:
    console.print(f"estimate only: compiling for {cfg.plan.compile_topology} needs {missing}")
  else:
    try:
      compiled = compile_step(trainer, cfg.plan.save_hlo)
    except jax.errors.JaxRuntimeError as error:
      console.print(f"does not compile: {' '.join(str(error).split())}")
  fits = _tell_memory(estimate, compiled, kind, console)
  if compiled:
    _tell_work(trainer, compiled, kind, console)
  return 0 if fits and (compiled or missing) else 1


def _devices(cfg: Config) -> tuple[Topology | None, str, list[jax.Device] | None]:
  """(what is planned for, what is missing to compile for it, its devices; None: those at hand)."""
  if not cfg.plan.compile_topology:
    return None, "", None
  topology = parse_topology(cfg.plan.compile_topology, cfg.plan.compile_topology_num_slices)
  missing = topology.missing(cfg.plan.gpu_target_config)
  if not missing:
    return topology, "", topology.describe(cfg.plan.gpu_target_config)
  if topology.num_slices > 1:
    raise ValueError(f"compile_topology_num_slices={topology.num_slices} needs {missing}")
  # Shapes are all that an estimate needs, and a CPU can stand in for any number of devices.
  jax.config.update("jax_num_cpu_devices", topology.num_devices)
  return topology, missing, None


def compile_step(trainer: Trainer, save_hlo: str = "") -> Compiled:
  """The trainer's real step, compiled for its devices; its text is left in the folder `save_hlo`.

  Raises:
    jax.errors.JaxRuntimeError: the compiler gives up, for want of memory or of an operation.
  """
  dtypes = {"weight_BT": jnp.float32}
  batch = Batch(
    **{
      field.name: jax.ShapeDtypeStruct(
        trainer.batch_shape, dtypes.get(field.name, jnp.int32), sharding=trainer.batch_sharding
      )
      for field in dataclasses.fields(Batch)
    }
  )
  start = time.perf_counter()
  program = trainer.train_step.lower(trainer.abstract_state, batch).compile()
  seconds = time.perf_counter() - start
  text = program.as_text()
  if save_hlo:
    folder = Path(save_hlo).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train_step.hlo.txt").write_text(text)
  return Compiled(parse(text), program.memory_analysis(), seconds)


def estimate_memory(trainer: Trainer) -> MemoryEstimate:
  """Memory of one device by shapes alone."""
  cfg, sharder, state = trainer.cfg, trainer.sharder, trainer.abstract_state
  everything = dataclasses.replace(cfg.model, remat_policy="none", remat_save=())
  num_layers = cfg.model.base_num_decoder_layers
  layers = [p for p in trainer.placements if p.path.startswith("layers")]
  expert_shards = sharder.num_shards("exp")
  gathered = sum(
    np.prod(p.shape) / sharder.num_shards("mlp") / (expert_shards if "exp" in p.names else 1)
    for p in layers
  )
  rows, length = trainer.batch_shape
  tokens = rows * length // _num_token_shards(trainer)
  vocab = cfg.model.vocab_size // sharder.num_shards("vocab")
  chunk = min(tokens, cfg.training.logits_chunk_tokens)
  parameters = memory.bytes_per_device(state.params)
  itemsize = jnp.dtype(cfg.model.dtype).itemsize
  return MemoryEstimate(
    parameters=parameters,
    optimizer=memory.bytes_per_device(state) - parameters,
    gradients=parameters * (2 if cfg.training.gradient_accumulation_steps > 1 else 1),
    saved_activations=_activations(trainer, cfg.model),
    layer=_activations(trainer, everything) / num_layers
    + gathered / num_layers * (itemsize + 4),
    logits=4 * vocab * (chunk + cfg.model.base_emb_dim) + itemsize * vocab * cfg.model.base_emb_dim,
  )


def _num_token_shards(trainer: Trainer) -> int:
  names = ("activation_batch", "activation_length")
  return int(np.prod([trainer.sharder.num_shards(name) for name in names]))


def _activations(trainer: Trainer, model_cfg: Any) -> float:
  """Bytes per device that the model keeps for its backward pass, of one micro-batch."""
  model = build_model(model_cfg, trainer.sharder)
  length = trainer.cfg.data.max_target_length

  def residuals_of(rows: int) -> Any:
    tokens_BT = jax.ShapeDtypeStruct((rows, length), jnp.int32)

    def hidden(params: Any, tokens_BT: jax.Array) -> jax.Array:
      inputs = (tokens_BT, tokens_BT, tokens_BT)
      return model.apply({"params": params}, *inputs, method=model.hidden)[0]

    keep = lambda params, tokens_BT: jax.vjp(lambda p: hidden(p, tokens_BT), params)[1]
    return jax.eval_shape(keep, trainer.abstract_state.params, tokens_BT)

  rows = trainer.global_batch_size // trainer.cfg.training.gradient_accumulation_steps
  return memory.activation_bytes(residuals_of, rows, _num_token_shards(trainer))


def _introduce(trainer: Trainer, kind: str, console: Console) -> None:
  cfg = trainer.cfg
  degrees = [f"{axis}={size}" for axis, size in trainer.mesh.shape.items() if size > 1]
  rows, length = trainer.batch_shape
  name = cfg.run.model_name or cfg.model.decoder_block
  console.print(
    f"{name} on {trainer.mesh.size} x {kind}, {' x '.join(degrees) or 'no sharding'}; "
    f"{rows} x {length} tokens per step, remat_policy={cfg.model.remat_policy}"
  )


def _tell_memory(
  estimate: MemoryEstimate, compiled: Compiled | None, kind: str, console: Console
) -> bool:
  """Prints the table of memory and returns whether a device has as much."""
  m = compiled.memory if compiled else None
  state = estimate.parameters + estimate.optimizer
  rows = [
    ("parameters", estimate.parameters, m and estimate.parameters),
    ("optimizer state", estimate.optimizer, m and estimate.optimizer),
    ("batch, padding of arrays", 0.0, m and m.argument_size_in_bytes - state),
    ("temporaries", estimate.temporaries, m and m.temp_size_in_bytes),
    ("  gradients", estimate.gradients, None),
    ("  saved activations", estimate.saved_activations, None),
    ("  one layer at work", estimate.layer, None),
    ("  logits", estimate.logits, None),
    ("program", 0.0, m and m.generated_code_size_in_bytes),
    ("total", estimate.total, compiled and compiled.total_bytes),
  ]
  console.print(f"\n{'GB per device':<26}{'estimate':>10}" + ("  compiled" if compiled else ""))
  for name, guess, exact in rows:
    line = f"{name:<26}{guess / 1e9:>10.3f}"
    console.print(line + (f"{exact / 1e9:>10.3f}" if exact is not None else ""))
  total = compiled.total_bytes if compiled else estimate.total
  hbm = CHIPS[kind].hbm_bytes if kind in CHIPS else None
  if hbm is None:
    return True
  verdict = "fits" if total <= hbm else "does not fit"
  console.print(f"{verdict}: {total / hbm:.1%} of {hbm / 1e9:.1f} GB")
  return total <= hbm


def _tell_work(trainer: Trainer, compiled: Compiled, kind: str, console: Console) -> None:
  """Prints FLOPs, collectives and the least time of a step."""
  flops = matmul_flops(compiled.module)
  rows, length = trainer.batch_shape
  model = trainer.cfg.model
  needed = train_flops_per_step(model, rows * length, length).total
  needed /= trainer.mesh.size
  console.print(
    f"\nmatmuls per step and device: {flops.total / 1e12:.3f} TFLOP compiled, "
    f"{needed / 1e12:.3f} needed by the model ({flops.total / needed:.2f} x)"
  )
  if flops.kernels_unknown:
    console.print(f"  without {flops.kernels_unknown} kernels that do not state their FLOPs")
  if compiled.module.unknown_loops:
    console.print(f"  {compiled.module.unknown_loops} loops of unknown length count once")
  found = collectives(compiled.module, dict(trainer.mesh.shape))
  _tell_collectives(found, console)
  if kind in CHIPS:
    _tell_bounds(compiled, kind, flops.total, needed, found, console)
  console.print(f"\ncompiled in {compiled.seconds:.0f} s")


def _tell_collectives(found: list[Collective], console: Console) -> None:
  console.print(f"\n{'collective':<20}{'mesh axes':<24}{'per step':>9}{'GB':>9}{'GB sent':>9}")
  for c in found:
    axes = " x ".join(c.mesh_axes)
    line = f"{c.kind:<20}{axes:<24}{c.count:>9.0f}"
    console.print(f"{line}{c.payload_bytes / 1e9:>9.3f}{c.sent_bytes / 1e9:>9.3f}")


def _tell_bounds(
  compiled: Compiled,
  kind: str,
  flops: float,
  needed: float,
  found: list[Collective],
  console: Console,
) -> None:
  bounds = step_bounds(CHIPS[kind], flops, hbm_bytes(compiled.module), found)
  console.print("\na step takes at least (each by itself, at the published peak of the chip)")
  for bound in bounds:
    unit = "TFLOP" if bound.resource == "matmuls" else "TB"
    amount = f"{bound.amount / 1e12:.3f} {unit} at {bound.rate / 1e12:g} {unit}/s"
    console.print(f"  {bound.resource:<10}{bound.seconds * 1e3:>10.2f} ms   {amount}")
  longest = max(bounds, key=lambda bound: bound.seconds)
  mfu = needed / (CHIPS[kind].bf16_tflops * 1e12) / longest.seconds
  console.print(f"  so MFU is at most {mfu:.1%}, if all overlap and {longest.resource} bind")
