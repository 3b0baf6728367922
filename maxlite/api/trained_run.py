"""A trained run in Python: its parameters and metrics, and what can be computed with them."""

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from maxlite.api.arguments import to_arguments
from maxlite.api.stepwise import (
  LossOfLogProbs,
  check_stepwise,
  cross_entropy,
  gradient_program,
  log_prob_program,
  update_program,
)
from maxlite.checkpoint.run_folder import RunFolder
from maxlite.config import Config, load_config, read_saved
from maxlite.config.command_line import CommandLine
from maxlite.config.config_field import KeyValue
from maxlite.config.model_function import EXECUTION
from maxlite.config.read_keys import check_typed
from maxlite.config.saved import MACHINE_KEYS
from maxlite.config.schema import GenerateConfig, HostsConfig, flatten
from maxlite.data.batch import Batch, DeviceBatch, HostBatch, checked_batch, checked_experts
from maxlite.ensemble.run_members import train_members_of
from maxlite.errors import UserError
from maxlite.hf.load_model import LoadedModel
from maxlite.inference.generation import Completer
from maxlite.metrics.step_row import Row, step_row
from maxlite.metrics.writers import METRICS, read_rows
from maxlite.models.routes import route_shape
from maxlite.runs.evaluate_run import evaluate_held_out
from maxlite.runs.open_run import open_weights
from maxlite.runs.run import train_model
from maxlite.runs.saved_run import check_saved, run_folder
from maxlite.sharding.pytree import PyTree
from maxlite.step.train_state import TrainState, averaged_params
from maxlite.storage.json_values import JsonObject
from maxlite.training.callbacks import Callback
from maxlite.training.loss import run_forward
from maxlite.training.program import Program, with_routes
from maxlite.training.trainer import open_trainer


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Run:
  """A run at one step; its parameters are in memory, sharded as in training."""

  config: Config
  program: Program
  step: int  # the step that gave the parameters
  params: PyTree
  ema_params: PyTree | None = None  # moving averages; None without `ema_decay`
  stopped: str = ""  # why training ended before the last step; empty if it did not
  gradients: PyTree | None = None  # by `forward_backward` since the last update; None: zero
  state: TrainState | None = None  # after `update`; None: a new one

  def __repr__(self) -> str:
    """A line for notebooks: the step, the last losses and the folder, without the parameters."""
    parts = [f"step {self.step} of {self.config.run.steps}"]
    last: JsonObject = {}
    for row in self.rows:
      last |= row
    for name in ("loss", "eval_loss"):
      if last.get(name) is not None:
        parts.append(f"{name} {last[name]:.4f}")
    num_parameters = sum(leaf.size for leaf in jax.tree.leaves(self.params))
    parts.append(f"{num_parameters:,} parameters")
    if self.stopped:
      parts.append(f"stopped: {self.stopped}")
    return f"<Run {self.config.run.run_name!r}: {', '.join(parts)}, in {self.folder}>"

  @property
  def folder(self) -> Path:
    return run_folder(self.config).directory

  @property
  def model(self) -> LoadedModel:
    """`model.apply(params, tokens_BT)` returns logits_BTV."""
    return LoadedModel(self.config.model, self.program.model, self.program.sharder)

  @property
  def rows(self) -> list[JsonObject]:
    """The logged rows, oldest first; None is a value that was not finite."""
    return read_rows(run_folder(self.config).metrics, METRICS)

  @property
  def metrics(self) -> dict[str, np.ndarray]:
    """By name, the values of all logged rows [rows], float64; NaN where a row has none."""
    rows = self.rows
    names: dict[str, None] = {}  # in the order of their first rows
    for row in rows:
      names |= dict.fromkeys(row)
    metrics = {}
    for name in names:
      metrics[name] = np.array([row.get(name) for row in rows], np.float64)  # None is NaN
    return metrics

  def evaluate(self, eval_steps: int = -1) -> dict[str, float]:
    """The result of `maxlite.evaluate` on `eval_steps` batches; -1: all."""
    num_batches = self._with(eval_steps=eval_steps).observe.eval_steps
    losses, _ = evaluate_held_out(
      self.config, self.program, self.params, self.ema_params, num_batches
    )
    return losses

  def generate(self, prompts: Sequence[str], **keys: KeyValue) -> list[str]:
    """The completions of `prompts`, by the moving averages if the run keeps them.

    Args:
      **keys: keys of sampling, such as `max_new_tokens` and `decode_sampling_temperature`; see
        docs/config.md. Also `max_target_length` and keys of how the model is computed, such as
        `dtype`.

    Raises:
      UserError: a key is wrong, a prompt is too long, or the run has no tokenizer.
    """
    if isinstance(prompts, str):  # every character would be a prompt
      raise UserError("generate(...) takes a list of prompts: write [prompt]")
    cfg = self._with(**keys)
    read = EXECUTION | flatten(GenerateConfig()).keys() | {"max_target_length"}
    others = sorted(keys.keys() - (read - {"return_expert_ids"}))  # it returns texts
    if others:
      raise UserError(f"generate(...) does not read {', '.join(others)}: give it to open_run(...)")
    params = self.params
    if self.ema_params is not None:
      params = self.ema_params
    return Completer(cfg, self.program, prompts).complete(params)

  def with_routes(self, batch: Batch | ArrayLike) -> HostBatch:
    """Return a batch with the experts that the run's routers choose for its tokens.

    `train_on` replays them, here or on another machine, whose rounding may choose others.

    Args:
      batch: as of `train_on`.

    Raises:
      UserError: the model has no experts; or as `train_on`.
    """
    if not self.config.model.family.is_moe:
      raise UserError(
        f"with_routes(...): decoder_block={self.config.model.decoder_block} has no experts: open "
        "the run of a mixture"
      )
    checked = self._checked(batch).replace(expert_BTNK=None)
    model = self.program.model

    @jax.jit
    def choose(params: PyTree, batch: DeviceBatch) -> PyTree:
      return run_forward(model, params, batch, None, drafts=False, records_experts=True).expert_BTNK

    expert_BTNK = choose(self.params, self.program.place(checked))
    return checked.replace(expert_BTNK=np.asarray(expert_BTNK))

  def forward(self, batch: Batch | ArrayLike) -> np.ndarray:
    """Return log_prob_BT [nats] of the targets of a batch.

    Args:
      batch: as of `train_on`.
    """
    placed = self.program.place(self._checked(batch))
    return np.asarray(log_prob_program(self.program)(self.params, placed))

  def forward_backward(
    self, batch: Batch | ArrayLike, loss: LossOfLogProbs = cross_entropy
  ) -> tuple["Run", float, np.ndarray]:
    """Add the gradient of a loss, which the next `update` applies.

    Args:
      batch: as of `train_on`.
      loss: a function of log_prob_BT of the targets and of the batch; by default the sum of the
        cross-entropy over tokens. Each function is compiled once.

    Returns:
      The run with the gradient, the loss, and log_prob_BT.

    Raises:
      UserError: a step of the run is more than a loss and an update; or as `train_on`.
    """
    check_stepwise(self.program)
    placed = self.program.place(self._checked(batch))
    gradient = gradient_program(self.program, loss)
    gradients, value, log_prob_BT = gradient(self.params, self.gradients, placed)
    return dataclasses.replace(self, gradients=gradients), float(value), np.asarray(log_prob_BT)

  def update(self) -> tuple["Run", Row]:
    """Take a step of the run's optimizer with the gradients of `forward_backward`.

    The first update starts from a new state of the optimizer, as `train_on` does.

    Returns:
      The run after the step, without gradients, and a row of metrics.

    Raises:
      UserError: there is no gradient.
    """
    if self.gradients is None:
      raise UserError("update() has no gradients: call forward_backward(...) first")
    state = self.state
    if state is None:
      params = jax.tree.map(jnp.copy, self.params)
      state = self.program.init(self.config.run.init_weights_seed, params)
    state, metrics = update_program(self.program)(state, self.gradients)
    after = dataclasses.replace(
      self,
      step=self.step + 1,
      params=state.params,
      ema_params=averaged_params(state),
      stopped="",
      gradients=None,
      state=state,
    )
    return after, step_row(int(state.step), jax.device_get(metrics))

  def train_on(self, batches: Iterable[Batch | ArrayLike]) -> tuple["Run", list[Row]]:
    """Train on given batches in memory: a step per batch, from a new state of the optimizer.

    The files of the run do not change. Keys of `open_run`, such as `learning_rate` and `steps`,
    determine the optimizer and its schedule.

    Args:
      batches: each a `maxlite.Batch`, or token ids [B, T] of which each row is one document. B is
        `per_device_batch_size` times the number of devices, T is `max_target_length`. All of them
        or none have the experts of their tokens, which the steps then replay.

    Returns:
      The run after the steps, and a row of metrics per step.

    Raises:
      UserError: the run has phases, or a batch has another shape or unknown token ids.
    """
    if self.program.spec.phases is not None:
      raise UserError("train_on(...) does not support phases: open a run without them")
    if isinstance(batches, Batch):  # its fields would be batches
      raise UserError("train_on(...) takes batches: write [batch]")
    params = jax.tree.map(jnp.copy, self.params)
    state = self.program.init(self.config.run.init_weights_seed, params)
    trainer = None
    replays = False
    rows: list[Row] = []
    for batch in batches:
      checked = self._checked(batch)
      has_routes = checked.expert_BTNK is not None
      if trainer is None:
        replays = has_routes
        program = with_routes(self.program) if replays else self.program
        trainer = open_trainer(self.config, program, state)
      if has_routes != replays:
        raise UserError(
          "train_on(...): some batches have the experts of their tokens and others do not: give "
          "all of them with_routes(...), or none"
        )
      placed = self.program.place(checked)
      metrics = trainer.step(self.program.with_extra_inputs(placed))
      state = trainer.state  # which makes the metrics final
      rows.append(step_row(len(rows) + 1, jax.device_get(metrics)))
    after = dataclasses.replace(
      self,
      step=self.step + len(rows),
      params=state.params,
      ema_params=averaged_params(state),
      stopped="",
    )
    return after, rows

  def _checked(self, batch: Batch | ArrayLike) -> HostBatch:
    """Return the rows of `batch` on this host; UserError unless they fit the trainer."""
    if not isinstance(batch, Batch):
      batch = Batch.of(batch)
    expert_BTNK = batch.expert_BTNK
    batch = checked_batch(batch, self.config.model.vocab_size)
    if batch.tokens_BT.shape != self.program.batch_shape:
      raise UserError(
        f"a batch has the shape {batch.tokens_BT.shape}, but the run trains on "
        f"{self.program.batch_shape}: open it with per_device_batch_size and max_target_length "
        "to match"
      )
    if expert_BTNK is not None:
      model = self.config.model
      shape = (*self.program.batch_shape, *route_shape(model))
      experts = checked_experts(expert_BTNK, shape, model.moe.num_experts, batch.segment_BT > 0)
      batch = batch.replace(expert_BTNK=experts)
    return batch

  def _with(self, **keys: KeyValue) -> Config:
    """The config with other values of `keys`."""
    return load_config(to_arguments(keys), defaults=flatten(self.config), needs_data=False)


def train_config(cfg: Config, callbacks: Sequence[Callback] = ()) -> Run | dict[str, Run]:
  """See `maxlite.train`."""
  if jax.process_count() > 1 or cfg.hosts != HostsConfig():
    raise UserError("maxlite.train(...) trains in one process: use python -m maxlite.train")
  for callback in callbacks:
    if not isinstance(callback, Callback):
      fix = "write a subclass of maxlite.Callback, and pass an instance of it"
      raise UserError(f"callbacks: {callback!r} is not a Callback: {fix}")
  if cfg.ensemble.is_set:
    if callbacks:
      raise UserError("callbacks are not supported by ensembles: leave them out")
    train_members_of(cfg)
    return _open_run(run_folder(cfg), {}, cfg)
  program, end = train_model(cfg, callbacks)
  return Run(
    config=cfg,
    program=program,
    step=end.step,
    params=end.state.params,
    ema_params=averaged_params(end.state),
    stopped=end.reason,
  )


def open_run(path: str | Path, **overrides: KeyValue) -> Run | dict[str, Run]:
  """Open a run folder with a checkpoint; one of an ensemble gives {name: Run}.

  Args:
    **overrides: keys of the config to change, such as `load_checkpoint="best"`. Keys of code and of
      this machine, such as `plugins`, come from here only, unless `trust_plugins=True`.
      `member="best"`, or the name of a member, opens only that run of an ensemble.

  Raises:
    UserError: there is no such run, it has no checkpoint, or a key would change its model.
  """
  folder = RunFolder(os.path.expanduser(str(path).rstrip("/")))
  if not folder.config.exists():
    raise UserError(f"{path} is not a run folder: it has no config.yml")
  member = overrides.pop("member", "")
  if member:
    return open_run(folder.member(member).place, **overrides)
  of_machine = {key: value for key, value in overrides.items() if key in MACHINE_KEYS}
  return _open_run(folder, overrides, load_config(to_arguments(of_machine), needs_data=False))


def _open_run(
  folder: RunFolder, overrides: Mapping[str, KeyValue], command: Config
) -> Run | dict[str, Run]:
  """`open_run`, with the keys of this machine from `command`."""
  names = folder.member_names()
  if not names:
    return _open_solo_run(folder, overrides, command)
  runs = {}
  for name in names:
    runs[name] = _open_solo_run(folder.member(name), overrides, command)
  return runs


def _open_solo_run(folder: RunFolder, overrides: Mapping[str, KeyValue], command: Config) -> Run:
  """`_open_run` of a folder that is not an ensemble's."""
  parent, name = os.path.split(folder.place)
  values = {"base_output_directory": parent, "run_name": name, "member": "", **overrides}
  saved = read_saved(folder.config, command)
  cfg = load_config(to_arguments(values), defaults=saved, needs_data=False)
  check_saved(folder, cfg)
  given = CommandLine.split(to_arguments(overrides)).typed
  check_typed("maxlite.open_run", given, cfg, saved)
  program, params, averages, step = open_weights(cfg)
  return Run(cfg, program, step, params, averages)
