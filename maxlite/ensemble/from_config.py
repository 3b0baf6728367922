"""Decoders from configs as members: the Trainer that each would have alone, as a `Program`."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from maxlite.config import Config
from maxlite.config.members import MemberConfig
from maxlite.config.schema import MESH_AXES
from maxlite.data.batch import Batch
from maxlite.ensemble.member_program import Program, traced_once
from maxlite.training.state import TrainState, averaged_params
from maxlite.training.step import build_eval_step
from maxlite.training.trainer import Trainer, build_trainer


class Decoders:
  """Members' programs on whatever devices a strategy gives each of them, built and traced once.

  Wherever a member runs, its batch has as many rows as if it had all devices to itself.
  """

  def __init__(self, devices: Sequence[jax.Device], num_rows: int, num_bytes_V: Any):
    """`num_rows`: of a batch."""
    self.devices = devices
    self._num_bytes_V = num_bytes_V
    self._num_rows = num_rows
    self._programs: dict[Any, Program] = {}

  def programs(
    self, members: Sequence[MemberConfig], devices: Sequence[jax.Device]
  ) -> list[Program]:
    """Per member, the program for these devices; members that differ in their seed share it."""
    return [
      dataclasses.replace(
        self._program(member, devices),
        name=member.name,
        seed=member.config.run.init_weights_seed,
      )
      for member in members
    ]

  def _program(self, member: MemberConfig, devices: Sequence[jax.Device]) -> Program:
    cfg = member.config
    if len(devices) < len(self.devices):
      cfg = on_devices(cfg, devices, self._num_rows)
    key = (_without_seeds(cfg), tuple(devices))
    if key not in self._programs:
      trainer = build_trainer(cfg, devices)
      trainer.check_devices()
      self._programs[key] = _program_of(trainer, self._num_bytes_V)
    return self._programs[key]


def on_devices(cfg: Config, devices: Sequence[jax.Device], num_rows: float) -> Config:
  """`cfg` for a member that gets these of the devices, and all of a batch."""
  degrees = {"ici_ensemble_parallelism": 1}
  if len(devices) == 1:
    degrees = {f"{kind}_{axis}_parallelism": 1 for kind in ("ici", "dcn") for axis in MESH_AXES}
  return dataclasses.replace(
    cfg,
    mesh=dataclasses.replace(cfg.mesh, **degrees),
    data=dataclasses.replace(
      cfg.data, per_device_batch_size=num_rows / len(devices), global_batch_size=0
    ),
  )


def _without_seeds(cfg: Config) -> Config:
  """What a program depends on."""
  run = dataclasses.replace(cfg.run, run_name="", base_output_directory="", init_weights_seed=0)
  data = dataclasses.replace(cfg.data, data_shuffle_seed=0, data_sampling="shuffle")
  return dataclasses.replace(cfg, run=run, data=data)


def _program_of(trainer: Trainer, num_bytes_V: Any) -> Program:
  cfg, model, spread = trainer.cfg, trainer.model, trainer.mesh.size > 1
  sums = build_eval_step(model, cfg.training, jnp.asarray(num_bytes_V))
  step = trainer.build_step(stays_diverged=True)

  def predict(state: TrainState, batch: Batch) -> jax.Array:
    inputs = (batch.tokens_BT, batch.segment_BT, batch.position_BT)
    return jax.nn.log_softmax(model.apply({"params": state.params}, *inputs))

  def evaluate(state: TrainState, batch: Batch) -> dict:
    found, averages = sums(state.params, batch), averaged_params(state)
    return found if averages is None else found | {"ema": sums(averages, batch)}

  return Program(
    name="",
    seed=0,
    init=traced_once(trainer.init),
    step=traced_once(step),
    predict=traced_once(predict),
    evaluate=traced_once(evaluate),
    shardings=trainer.state_shardings if spread else None,
    batch_sharding=trainer.batch_sharding if spread else None,
    flops=trainer.flops_per_step,
  )
