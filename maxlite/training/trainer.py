"""Wiring: from a Config to mesh, model, optimizer and compiled steps; alone it knows them all."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.linen import meta
from jax.sharding import Mesh, NamedSharding

from maxlite.config.errors import UserError
from maxlite.config.phases import PhaseConfig
from maxlite.config.schema import Config, DataConfig, MeshConfig, TrainingConfig
from maxlite.data.batch import Batch, to_global
from maxlite.layers.lora import add_missing_modules
from maxlite.layers.moe.dispatch import choose_dispatch
from maxlite.metrics.flops import train_flops_per_step
from maxlite.models import Decoder
from maxlite.optim import build_optimizer, build_schedule, with_schedule_steps
from maxlite.optim.partition import logical_names, path_of, state_names
from maxlite.phases.phase_programs import PhasePrograms, switch_step
from maxlite.sharding import MESH_AXES, Sharder, build_mesh
from maxlite.sharding.all_to_all import check_all_to_all
from maxlite.sharding.sharding_report import ParameterSharding, check_sharded, parameter_sharding
from maxlite.training.phase_plan import Turns
from maxlite.training.state import TrainState, init_state
from maxlite.training.step import Part, all_parameters, build_eval_step, build_train_step


@dataclasses.dataclass(frozen=True, eq=False)
class Trainer:
  """Everything a run needs but its data and its folder."""

  cfg: Config
  mesh: Mesh
  sharder: Sharder
  model: Decoder
  tx: optax.GradientTransformation
  schedule: optax.Schedule
  placements: list[ParameterSharding]
  abstract_state: TrainState  # ShapeDtypeStructs with their shardings
  global_batch_size: int  # rows
  turns: Turns | None = None  # of a run that has phases
  phase_part: Part | None = None  # what one of the `phases` trains

  @property
  def is_moe(self) -> bool:
    return self.cfg.model.family.is_moe

  @property
  def batch_shape(self) -> tuple[int, int]:
    return self.global_batch_size, self.cfg.data.max_target_length

  @property
  def exchanges(self) -> bool:
    """Whether tokens go to their experts by the ragged all-to-all."""
    ragged = choose_dispatch(self.cfg.model.moe) == "ragged"
    return self.is_moe and ragged and self.sharder.num_shards("exp") > 1

  def check_devices(self) -> None:
    """Raises UserError if a collective that accelerators are known to get wrong is wrong here."""
    if self.exchanges and self.sharder.platform != "cpu":
      check_all_to_all(self.mesh, self.sharder.mesh_axes("exp"))

  @functools.cached_property
  def batch_sharding(self) -> NamedSharding:
    return self.sharder.sharding(("activation_batch", "activation_length"))

  @functools.cached_property
  def state_shardings(self) -> TrainState:
    return jax.tree.map(lambda leaf: leaf.sharding, self.abstract_state)

  @functools.cached_property
  def step(self) -> Callable[[TrainState, Batch], tuple[TrainState, dict]]:
    """The step as a pure function."""
    return self.build_step()

  def build_step(
    self, *, stays_diverged: bool = False
  ) -> Callable[[TrainState, Batch], tuple[TrainState, dict]]:
    """The step as one pure function, of all phases where there are any (`build_train_step`)."""
    if self.turns is not None:
      steps = {
        name: phase.build_step(stays_diverged=stays_diverged) for name, phase in self.phases.items()
      }
      return switch_step(steps, self.turns.schedule, self.abstract_state, self.abstract_batch)
    cfg = self.cfg
    return build_train_step(
      self.model, self.part, cfg.training, cfg.model.moe, stays_diverged=stays_diverged
    )

  @functools.cached_property
  def part(self) -> Part:
    """What a step trains."""
    return self.phase_part or all_parameters(self.tx, self.schedule)

  @functools.cached_property
  def train_step(self) -> Callable[[TrainState, Batch], tuple[TrainState, dict]]:
    """Compiled step; the state given to it is gone afterwards."""
    if self.turns is not None:
      return self.phase_programs.step
    whole = self.sharder.sharding(())
    return jax.jit(
      self.step,
      in_shardings=(self.state_shardings, self.batch_sharding),
      out_shardings=(self.state_shardings, whole),
      donate_argnums=0,
    )

  @functools.cached_property
  def phase_programs(self) -> PhasePrograms:
    """The phases' steps, all compiled.

    Raises:
      UserError: a phase waits for a metric that its step does not report.
    """
    assert self.turns is not None
    return PhasePrograms(
      {name: phase.step for name, phase in self.phases.items()},
      self.turns.schedule,
      self.cfg.phasing.phase_strategy,
      self.abstract_state,
      {name: phase.abstract_batch for name, phase in self.phases.items()},
    )

  @functools.cached_property
  def phases(self) -> dict[str, "Trainer"]:
    """By phase, the trainer whose steps are all of that phase; empty where there are none."""
    return {
      phase.name: dataclasses.replace(
        self,
        cfg=dataclasses.replace(self.cfg, data=phase.data, training=phase.training),
        global_batch_size=_phase_batch_size(phase, self.sharder),
        turns=None,
        phase_part=self.turns.part(n),
      )
      for n, phase in enumerate(self.turns.phases if self.turns else ())
    }

  @property
  def flops_per_step(self) -> list[float]:
    """Over all devices; by phase, where there are any."""
    rows, length = self.batch_shape
    if self.turns is not None:
      tokens = {name: math.prod(phase.batch_shape) for name, phase in self.phases.items()}
      return self.turns.flops(self.abstract_state.params, tokens, length)
    return [train_flops_per_step(self.cfg.model, rows * length, length).total]

  @property
  def abstract_batch(self) -> Batch:
    """Shapes, types and sharding of a batch."""
    of = lambda field: jnp.float32 if field.name == "weight_BT" else jnp.int32
    place = functools.partial(jax.ShapeDtypeStruct, self.batch_shape, sharding=self.batch_sharding)
    return Batch(**{field.name: place(dtype=of(field)) for field in dataclasses.fields(Batch)})

  def place(self, batch: Batch) -> Batch:
    """The global batch of which `batch` (numpy) is this host's part."""
    return to_global(batch, self.batch_sharding, self.batch_shape)

  def next_batch(self, stream: Any, state: TrainState) -> Batch:
    """The global batch of the step that is due, from a TrainStream, or PhaseStreams of phases."""
    if self.turns is None:
      return self.place(next(stream))
    phase = self.phase_programs.phase(state)
    return self.phases[phase].place(stream.take(phase))

  def eval_step(self, num_bytes_V: Any) -> Callable[[Any, Batch], dict]:
    """Compiled evaluation step."""
    return jax.jit(build_eval_step(self.model, self.cfg.training, jnp.asarray(num_bytes_V)))

  def init(self, seed: jax.Array) -> TrainState:
    """The state before the first step, as a pure function of the seed."""
    params = meta.unbox(_init_params(self.model, seed, self.batch_shape))
    rng = jax.random.fold_in(jax.random.key(seed), 1)
    ema_decay = self.cfg.training.ema_decay
    return _with_optimizer(params, self.tx, self.turns, jax.random.key_data(rng), ema_decay)

  def start_from(self, params: Any) -> TrainState:
    """The state before the first step, from `params` on its mesh, which are gone afterwards.

    Adapters and draft heads that they lack are new.
    """

    def start(params: Any, seed: jax.Array) -> TrainState:
      fresh = meta.unbox(_init_params(self.model, seed, self.batch_shape))
      rng = jax.random.key_data(jax.random.fold_in(jax.random.key(seed), 1))
      params, ema_decay = add_missing_modules(params, fresh), self.cfg.training.ema_decay
      return _with_optimizer(params, self.tx, self.turns, rng, ema_decay)

    start = jax.jit(start, out_shardings=self.state_shardings, donate_argnums=0)
    return start(params, jnp.uint32(self.cfg.run.init_weights_seed))

  def init_state(self) -> TrainState:
    """The state before the first step, each leaf made where it lies."""
    init = jax.jit(self.init, out_shardings=self.state_shardings)
    return init(jnp.uint32(self.cfg.run.init_weights_seed))


def build_trainer(cfg: Config, devices: Sequence[jax.Device] | None = None) -> Trainer:
  """The Trainer of `cfg` on `devices`, which need only be described; by default on all there are.

  Raises:
    UserError: mesh, batch and model do not fit together.
  """
  mesh = build_mesh(mesh_degrees(cfg.mesh, "ici"), mesh_degrees(cfg.mesh, "dcn"), devices)
  sharder = Sharder(mesh, dict(cfg.mesh.logical_axis_rules))
  global_batch_size = _global_batch_size(cfg.data, cfg.training, sharder)
  model = Decoder(cfg.model, sharder)
  batch_shape = (global_batch_size, cfg.data.max_target_length)
  # Shapes come of a model on one device: on the mesh, what does not fit would fail in JAX's words.
  one = Sharder(build_mesh((1,) * len(MESH_AXES), (1,) * len(MESH_AXES), [mesh.devices.flat[0]]))
  whole = Decoder(cfg.model, one)
  boxed = jax.eval_shape(lambda seed: _init_params(whole, seed, batch_shape), jnp.uint32(0))
  names = logical_names(boxed)
  params = meta.unbox(boxed)
  placements = _placements(params, names, sharder)
  check_sharded(placements, sharder, cfg.mesh.sharding_tolerance)
  optimizer_cfg = with_schedule_steps(cfg.optimizer, cfg.run.steps)
  tx = build_optimizer(optimizer_cfg, names)
  turns = Turns(cfg, params, names) if cfg.phasing.phases else None
  trainer = Trainer(
    cfg=cfg,
    mesh=mesh,
    sharder=sharder,
    model=model,
    tx=tx,
    schedule=build_schedule(optimizer_cfg),
    placements=placements,
    abstract_state=_abstract_state(params, names, tx, turns, sharder, cfg.training.ema_decay),
    global_batch_size=global_batch_size,
    turns=turns,
  )
  for each in (trainer, *trainer.phases.values()):  # whose batches are checked as they are made
    _check_topology(each)
  return trainer


def _check_topology(trainer: Trainer) -> None:
  """Raises UserError for the slices of TPU v5e that XLA has no ragged all-to-all for."""
  kind, num_devices = trainer.mesh.devices.flat[0].device_kind, trainer.mesh.size
  if trainer.exchanges and kind in ("TPU v5 lite", "TPU v5e") and num_devices > 16:
    raise UserError(
      f"{num_devices} chips of {kind}: XLA has no ragged all-to-all for slices above 4x4; write "
      "use_ring_of_experts=true, or ici_expert_parallelism=1"
    )


def mesh_degrees(cfg: MeshConfig, group: str) -> list[int]:
  """The degrees of `group`, "ici" or "dcn", in the order of the mesh axes."""
  return [getattr(cfg, f"{group}_{mesh_axis}_parallelism") for mesh_axis in MESH_AXES]


def _phase_batch_size(phase: PhaseConfig, sharder: Sharder) -> int:
  try:
    return _global_batch_size(phase.data, phase.training, sharder)
  except ValueError as error:
    raise UserError(f"phase {phase.name}: {error}") from None


def _global_batch_size(data: DataConfig, training: TrainingConfig, sharder: Sharder) -> int:
  """Rows of a step over all devices, checked against the mesh."""
  num_devices = sharder.mesh.size
  rows = data.global_batch_size or data.per_device_batch_size * num_devices
  num_micro = training.gradient_accumulation_steps
  multiple = sharder.num_shards("activation_batch") * num_micro
  if rows != round(rows) or round(rows) % multiple:
    nearest = max(round(rows / multiple), 1) * multiple
    given = f"per_device_batch_size={data.per_device_batch_size:g} x {num_devices} devices = "
    fix = f"per_device_batch_size={nearest / num_devices:g} ({nearest} rows)"
    if data.global_batch_size:
      given, fix = "global_batch_size: ", f"global_batch_size={nearest}"
    raise UserError(
      f"{given}{rows:g} rows do not divide by {multiple} ({multiple // num_micro} shards of the "
      f"batch x gradient_accumulation_steps={num_micro}); the nearest that does is {fix}"
    )
  length, shards = data.max_target_length, sharder.num_shards("activation_length")
  if length % shards:
    raise UserError(
      f"max_target_length={length} does not divide by the {shards} shards of the context axis: "
      f"set it to {math.ceil(length / shards) * shards}, or change ici_context_parallelism"
    )
  return round(rows)


def _init_params(model: Decoder, seed: jax.Array, batch_shape: tuple[int, int]) -> Any:
  tokens_BT = jnp.zeros(batch_shape, jnp.int32)
  key = jax.random.fold_in(jax.random.key(seed), 0)
  return model.init(
    {"params": key},
    tokens_BT,
    tokens_BT,
    tokens_BT,
    method=model.hidden_and_unembedding,
  )["params"]


def _placements(params: Any, names: Any, sharder: Sharder) -> list[ParameterSharding]:
  leaves = jax.tree_util.tree_leaves_with_path(params)
  return [
    parameter_sharding(path_of(key_path), leaf, leaf_names, sharder)
    for (key_path, leaf), leaf_names in zip(leaves, jax.tree.leaves(names), strict=True)
  ]


def _with_optimizer(
  params: Any, tx: Any, turns: Turns | None, rng: jax.Array, ema_decay: float
) -> TrainState:
  """The state before the first step."""
  if turns is None:
    averaged = params if ema_decay else None
    return init_state(params, tx.init(params), rng, averaged=averaged)
  opt_state, clock = turns.init(params)
  return init_state(params, opt_state, rng, clock, turns.trained(params) if ema_decay else None)


def _abstract_state(
  params: Any, names: Any, tx: Any, turns: Turns | None, sharder: Sharder, ema_decay: float
) -> TrainState:
  """Shapes, types and shardings of the whole state."""
  rng = jax.ShapeDtypeStruct((2,), jnp.uint32)
  init = lambda params, rng: _with_optimizer(params, tx, turns, rng, ema_decay)
  state = jax.eval_shape(init, params, rng)
  axes = TrainState(
    step=jax.P(),
    params=names,
    opt_state=state_names(state.opt_state, params, names),
    rng=jax.P(None),
    skipped=jax.P(),
    skipped_in_a_row=jax.P(),
    clock=jax.tree.map(lambda leaf: jax.P(*(None,) * leaf.ndim), state.clock),
    ema=state_names(state.ema, params, names),
  )
  return jax.tree.map(
    lambda leaf, names: jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=sharder.sharding(names)
    ),
    state,
    axes,
  )
