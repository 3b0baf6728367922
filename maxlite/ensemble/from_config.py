"""Members from configs: the program of each one is that of the Trainer of its solo run."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from maxlite.config import Config
from maxlite.config.members import MemberConfig
from maxlite.config.schema import MESH_AXES
from maxlite.data.batch import Batch
from maxlite.ensemble.member_program import MemberProgram, trace_once
from maxlite.step.train_state import TrainState, averaged_params
from maxlite.training.evaluation import build_eval_step
from maxlite.training.model_weights import read_parameters
from maxlite.training.trainer import Trainer, build_trainer


class ConfigPrograms:
  """The programs of members on given devices, each built and traced once.

  On any devices, a member's batch has `batch_size` rows.
  """

  def __init__(self, devices: Sequence[jax.Device], batch_size: int, num_bytes_V: np.ndarray):
    self._devices, self._batch_size, self._num_bytes_V = devices, batch_size, num_bytes_V
    self._programs: dict[tuple, MemberProgram] = {}

  def build(self, member: MemberConfig, devices: Sequence[jax.Device]) -> MemberProgram:
    """A member's program for these devices; members that differ in seeds only share functions."""
    program, seed = self._program(member.config, devices), member.config.run.init_weights_seed
    return dataclasses.replace(program, name=member.name, seed=seed)

  def _program(self, cfg: Config, devices: Sequence[jax.Device]) -> MemberProgram:
    if len(devices) < len(self._devices):
      cfg = _on_devices(cfg, len(devices), self._batch_size)
    key = (_without_seeds(cfg), tuple(devices))
    if key not in self._programs:
      trainer = build_trainer(cfg, devices)
      trainer.check_devices()
      self._programs[key] = _trainer_program(trainer, self._num_bytes_V)
    return self._programs[key]


def _on_devices(cfg: Config, num_devices: int, batch_size: int) -> Config:
  """The config of a member on some of the devices, with the whole batch."""
  degrees = {"ici_ensemble_parallelism": 1}
  if num_devices == 1:
    degrees = {f"{kind}_{axis}_parallelism": 1 for kind in ("ici", "dcn") for axis in MESH_AXES}
  rows = {"per_device_batch_size": batch_size / num_devices, "global_batch_size": 0}
  return dataclasses.replace(
    cfg,
    mesh=dataclasses.replace(cfg.mesh, **degrees),
    data=dataclasses.replace(cfg.data, **rows),
  )


def _without_seeds(cfg: Config) -> Config:
  """The part of a config that affects the program."""
  run = dataclasses.replace(cfg.run, run_name="", base_output_directory="", init_weights_seed=0)
  data = dataclasses.replace(cfg.data, data_shuffle_seed=0, data_sampling="shuffle")
  return dataclasses.replace(cfg, run=run, data=data)


def _trainer_program(trainer: Trainer, num_bytes_V: np.ndarray) -> MemberProgram:
  cfg, model, is_sharded = trainer.cfg, trainer.model, trainer.mesh.size > 1
  eval_step = build_eval_step(model, cfg.training, jnp.asarray(num_bytes_V))

  def predict(state: TrainState, batch: Batch) -> jax.Array:
    inputs = (batch.tokens_BT, batch.segment_BT, batch.position_BT)
    return jax.nn.log_softmax(model.apply({"params": state.params}, *inputs))

  def evaluate(state: TrainState, batch: Batch) -> dict:
    sums, averages = eval_step(state.params, batch), averaged_params(state)
    return sums if averages is None else sums | {"ema": eval_step(averages, batch)}

  def init_from_file(seed: np.ndarray) -> TrainState:
    init = jax.jit(trainer.init, out_shardings=trainer.state_shardings)
    return init(seed, read_parameters(trainer))

  return MemberProgram(
    name="",
    seed=0,
    init=trace_once(trainer.init),
    step=trace_once(trainer.build_step(freeze_diverged=True)),
    predict=trace_once(predict),
    evaluate=trace_once(evaluate),
    sharder=trainer.sharder,
    shardings=trainer.state_shardings if is_sharded else None,
    batch_sharding=trainer.batch_sharding if is_sharded else None,
    init_from_file=init_from_file if cfg.checkpoint.load_parameters_path else None,
    flops=trainer.flops_per_step,
  )
