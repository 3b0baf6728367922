"""What a training step needs of machines that need not be there: compiled, counted and told."""

import dataclasses
import math
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console

from maxlite.config import Config, exit_on_user_error
from maxlite.config.errors import UserError
from maxlite.config.schema import ModelConfig
from maxlite.metrics.chips import CHIPS
from maxlite.metrics.plots.timeline import timeline_lines
from maxlite.models import Decoder
from maxlite.optim.partition import path_of
from maxlite.planning import plan_report
from maxlite.planning.comm_estimate import StepShape, expected_collectives
from maxlite.planning.hlo import Module, parse
from maxlite.planning.hlo_collectives import Collective, collectives
from maxlite.planning.hlo_cost import hbm_bytes, matmul_flops
from maxlite.planning.memory import Activation, MemoryEstimate, activations, bytes_per_device
from maxlite.planning.roofline import step_bounds
from maxlite.planning.topology import parse_topology
from maxlite.sharding.mesh import MESH_AXES, dcn_degrees, resolve_degrees
from maxlite.training.trainer import Trainer, build_trainer, mesh_degrees

_FLOAT32_BYTES = 4
_TPU_LANES = 128


@dataclasses.dataclass(frozen=True)
class Compiled:
  """One compiled train step."""

  module: Module
  memory: Any  # jax's CompiledMemoryStats, of one device
  seconds: float  # that compiling took


@dataclasses.dataclass(frozen=True)
class Target:
  """A trainer of described devices, and what of them its mesh may not tell."""

  trainer: Trainer
  kind: str  # jax.Device.device_kind
  slices: Mapping[str, int]  # mesh axes that lie across slices, with their degree between them
  missing: str = ""  # what compiling for them needs
  grid: tuple[int, ...] = ()  # of chips, of a slice of TPUs


def run_plan(cfg: Config, *, compiles: bool = True) -> int:
  """Prints the plan of `cfg` and returns 0, or 1 where the step does not compile or not fit.

  Unless it `compiles`, all that is told is by arithmetic.
  """
  console = Console(highlight=False, markup=False, soft_wrap=True)
  with exit_on_user_error("maxlite.plan"):
    target = build_target(cfg, compiles=compiles)
  if target.missing:
    console.print(
      f"estimate only: compiling for {cfg.plan.compile_topology} needs {target.missing}"
    )
    compiles = False
  trainer = target.trainer
  flops = trainer.flops_per_step
  if trainer.turns is None:
    return 0 if _plan_step(target, flops[0], console, compiles=compiles) else 1
  lines, works = trainer.turns.describe_phases(), []
  for n, phase in enumerate(trainer.phases.values()):
    console.print(lines[n])
    of_phase = dataclasses.replace(target, trainer=phase)
    works.append(_plan_step(of_phase, flops[n], console, compiles=compiles, n=n))
  return 0 if all(works) else 1


def _plan_step(
  target: Target, flops: float, console: Console, *, compiles: bool, n: int = 0
) -> bool:
  """Prints the plan of one step, which needs so many `flops`; whether it compiles and fits.

  `n` is the number of the phase whose step it is.
  """
  trainer = target.trainer
  console.print(_title(trainer, target.kind))
  compiled = None
  if compiles:
    try:
      compiled = compile_step(trainer, trainer.cfg.plan.save_hlo, n)
    except jax.errors.JaxRuntimeError as error:
      console.print(f"does not compile: {' '.join(str(error).split())}")
  estimate = estimate_memory(trainer)
  console.print("", *plan_report.memory_lines(estimate, compiled and compiled.memory), sep="\n")
  needed = compiled.memory.peak_memory_in_bytes if compiled else estimate.total
  fits = _tell_fit(needed, target.kind, console)
  for lines in _work(target, compiled, flops):
    console.print("", *lines, sep="\n")
  if compiled:
    console.print(f"\ncompiled in {compiled.seconds:.0f} s")
  return fits and bool(compiled or not compiles)


def run_phase_plan(cfg: Config) -> int:
  """Prints what each phase of `cfg` trains and when; nothing is compiled. Returns 0."""
  console = Console(highlight=False, markup=False, soft_wrap=True)
  with exit_on_user_error("maxlite.plan"):
    turns = build_trainer(cfg).turns
    if turns is None:
      raise UserError("the config has no phases; write phases=[{name: all, train: .*, steps: 1}]")
  spans = turns.spans(cfg.run.steps)
  console.print(*turns.describe(cfg.run.steps), "", sep="\n")
  if spans:
    console.print(*timeline_lines(spans), sep="\n")
  else:
    console.print("when phases end by a condition, the run alone tells whose turn it is")
  return 0


def build_target(cfg: Config, *, compiles: bool) -> Target:
  """What `cfg` plans for: devices to compile for, else as many of this machine's CPU as stand-ins.

  Raises:
    UserError: the devices, mesh, batch and model do not fit together.
  """
  if not cfg.plan.compile_topology:
    trainer = build_trainer(cfg)
    kind = trainer.mesh.devices.flat[0].device_kind
    return Target(trainer, kind, dcn_degrees(trainer.mesh))
  topology = parse_topology(cfg.plan.compile_topology, cfg.plan.compile_topology_num_slices)
  kind = topology.kind.device_kind
  missing = topology.missing(cfg.plan.gpu_target_config) if compiles else ""
  if compiles and not missing:
    trainer = build_trainer(cfg, topology.describe(cfg.plan.gpu_target_config))
    return Target(trainer, kind, dcn_degrees(trainer.mesh), grid=topology.grid)
  # Shapes are all that an estimate needs, and a CPU can stand in for any number of devices.
  if jax.config.values["jax_num_cpu_devices"] < topology.num_devices:
    jax.config.update("jax_num_cpu_devices", topology.num_devices)
  degrees = (mesh_degrees(cfg.mesh, group) for group in ("ici", "dcn"))
  sizes, slices = resolve_degrees(*degrees, topology.num_devices, topology.num_slices)
  joined = {f"ici_{axis}_parallelism": size for axis, size in zip(MESH_AXES, sizes, strict=True)}
  joined |= {f"dcn_{axis}_parallelism": 1 for axis in MESH_AXES}
  cfg = dataclasses.replace(cfg, mesh=dataclasses.replace(cfg.mesh, **joined))
  trainer = build_trainer(cfg, jax.devices()[: topology.num_devices])
  return Target(trainer, kind, slices, missing, topology.grid)


def compile_step(trainer: Trainer, save_hlo: str = "", n: int = 0) -> Compiled:
  """The trainer's real step, compiled for its devices; its text is left in the folder `save_hlo`.

  `n` is the number of the phase whose step it is.

  Raises:
    jax.errors.JaxRuntimeError: the compiler gives up, for want of memory or of an operation.
  """
  start = time.perf_counter()
  program = trainer.train_step.lower(trainer.abstract_state, trainer.abstract_batch).compile()
  seconds = time.perf_counter() - start
  text = program.as_text()
  if save_hlo:
    folder = Path(save_hlo).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"train_step{f'_{n}' * (n > 0)}.hlo.txt").write_text(text)
  return Compiled(parse(text), program.memory_analysis(), seconds)


def estimate_memory(trainer: Trainer) -> MemoryEstimate:
  """Memory of one device in a step, by shapes alone: no compiler is asked."""
  cfg, state = trainer.cfg, trainer.abstract_state
  model, num_micro = cfg.model, cfg.training.gradient_accumulation_steps
  keep_all = dataclasses.replace(model, remat_policy="none", remat_saved_names=())
  compute_bytes = jnp.dtype(model.dtype).itemsize
  parameters = bytes_per_device(state.params)
  trained, _ = trainer.part.split(state.params)
  num_logits, num_unembedding = _logit_sizes(trainer)
  saved, in_layers = _activations(trainer, model), _activations(trainer, keep_all)
  return MemoryEstimate(
    parameters=parameters,
    optimizer=bytes_per_device(state) - parameters,
    saved_activations=sum(kept.num_bytes for kept in saved),
    gradients=bytes_per_device(trained) * (1 if num_micro == 1 else 2),
    layer_activations=sum(kept.num_bytes for kept in in_layers) / model.base_num_decoder_layers,
    layer_gradient=max((_of_one_layer(kept, model) for kept in in_layers), default=0.0),
    layer_weights=_largest_layer(trainer) * (compute_bytes + _FLOAT32_BYTES),
    unembedding=num_unembedding * (compute_bytes + _FLOAT32_BYTES),
    logits=2 * _FLOAT32_BYTES * num_logits,
  )


def _of_one_layer(kept: Activation, model: ModelConfig) -> float:
  return kept.num_bytes / (kept.length if model.scan_layers else 1)


def _activations(trainer: Trainer, cfg: ModelConfig) -> list[Activation]:
  """What a model of `cfg` keeps on a device for the backward pass of one micro-batch."""
  model = Decoder(cfg, trainer.sharder)
  rows, length = trainer.batch_shape

  def residuals_of(rows: int) -> Any:
    tokens_BT = jax.ShapeDtypeStruct((rows, length), jnp.int32)

    def keep(params: Any, tokens_BT: jax.Array) -> Any:
      inputs = (tokens_BT, tokens_BT, tokens_BT)
      run = lambda params: model.apply({"params": params}, *inputs, method=model.hidden)[0]
      trained, frozen = trainer.part.split(params)
      return jax.vjp(lambda trained: run(trainer.part.join(trained, frozen)), trained)[1]

    return jax.eval_shape(keep, trainer.abstract_state.params, tokens_BT)

  rows //= trainer.cfg.training.gradient_accumulation_steps
  return activations(residuals_of, rows, _num_token_shards(trainer))


def _num_token_shards(trainer: Trainer) -> int:
  names = ("activation_batch", "activation_length")
  return math.prod(trainer.sharder.num_shards(name) for name in names)


def _largest_layer(trainer: Trainer) -> float:
  """Weights of the largest layer on one device, gathered: cut by `expert` and `tensor` only."""
  num_weights: dict[str, float] = defaultdict(float)
  for placement in trainer.placements:
    scanned = "layers" in placement.names
    kept = [name for name in placement.names if name not in ("embed", "embed_no_exp")]
    shards = math.prod(trainer.sharder.num_shards(name) for name in kept)
    stack = placement.path.split("/")[0]
    if "layers" in stack:
      shape = placement.shape[1:] if scanned else placement.shape
      num_weights[stack] += math.prod(shape) / shards
  return max(num_weights.values())


def _logit_sizes(trainer: Trainer) -> tuple[int, int]:
  """(logits of a chunk, weights of the unembedding) on one device."""
  rows, length = trainer.batch_shape
  tokens = rows * length // _num_token_shards(trainer)
  cfg = trainer.cfg
  vocab = cfg.model.vocab_size // trainer.sharder.num_shards("vocab")
  return min(tokens, cfg.training.logits_chunk_tokens) * vocab, cfg.model.base_emb_dim * vocab


def _title(trainer: Trainer, kind: str) -> str:
  cfg = trainer.cfg
  degrees = [f"{axis}={size}" for axis, size in trainer.mesh.shape.items() if size > 1]
  rows, length = trainer.batch_shape
  return (
    f"{cfg.run.model_name or cfg.model.decoder_block} on {trainer.mesh.size} x {kind}, "
    f"{' x '.join(degrees) or 'no sharding'}; {rows} x {length} tokens per step, "
    f"remat_policy={cfg.model.remat_policy}"
  )


def _tell_fit(needed: float, kind: str, console: Console) -> bool:
  """Whether a device of this kind has as much memory; said, where its memory is known.

  A compiler for TPUs refuses by itself what fits only without gaps between the arrays.
  """
  hbm = CHIPS[kind].hbm_bytes if kind in CHIPS else None
  if hbm is None:
    return True
  fits = needed <= hbm
  verdict = "fits" if fits else "does not fit"
  console.print(f"{verdict}: {needed / hbm:.1%} of the {hbm / plan_report.GB:.1f} GB of a device")
  return fits


def estimate_traffic(target: Target) -> list[Collective]:
  """What a device sends in a step, by shapes alone: no compiler is asked."""
  trainer = target.trainer
  trained, _ = trainer.part.split(trainer.abstract_state.params)
  step = StepShape(
    model=trainer.cfg.model,
    sharder=trainer.sharder,
    placements=trainer.placements,
    trained={path_of(path) for path, _ in jax.tree_util.tree_leaves_with_path(trained)},
    tokens=math.prod(trainer.batch_shape) // _num_token_shards(trainer),
    num_micro=trainer.cfg.training.gradient_accumulation_steps,
    slices=target.slices,
    lanes=_TPU_LANES if target.grid else 1,
    grid=target.grid,
  )
  return expected_collectives(step)


def _work(target: Target, compiled: Compiled | None, needed: float) -> list[list[str]]:
  """Paragraphs about what a step computes and moves; `needed` are its FLOPs on all devices."""
  mesh, kind = target.trainer.mesh, target.kind
  needed /= mesh.size
  guessed = estimate_traffic(target)
  found, done, moved, paragraphs = guessed, needed, None, []
  if compiled:
    module = compiled.module
    flops = matmul_flops(module)
    paragraphs.append(plan_report.matmul_lines(flops, needed, module.unknown_loops))
    found = collectives(module, dict(mesh.shape), target.slices)
    done = max(flops.total, needed)  # some kernels do not state theirs
    moved = hbm_bytes(module)
  paragraphs.append(plan_report.traffic_lines(guessed, found if compiled else None))
  paragraphs.append(plan_report.collective_lines(found))
  if kind in CHIPS:
    bounds = step_bounds(CHIPS[kind], done, moved, found)
    paragraphs.append(plan_report.bound_lines(bounds, needed / done if compiled else None))
  return [lines for lines in paragraphs if lines]
