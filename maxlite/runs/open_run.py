"""The parts of a run: its hosts, folder, data, checkpoints, writers, and trained parameters."""

import contextlib
import dataclasses
import platform
import textwrap
from collections.abc import Container, Iterator, Sequence
from importlib.metadata import version

import jax
from rich.console import Console

from maxlite import __version__
from maxlite.checkpoint.local_checkpoints import LocalCheckpoints
from maxlite.checkpoint.manager import Checkpoints, Restored
from maxlite.checkpoint.run_folder import Changes, RunFolder
from maxlite.config import Config, public_values, read_values
from maxlite.config.mixture import has_prompts
from maxlite.config.phases import reads_same_documents
from maxlite.config.raw_values import show
from maxlite.config.rollouts import rollout_sizes
from maxlite.config.schema import MESH_AXES, DataConfig, HostsConfig, MeshConfig, build
from maxlite.data.batch import local_rows
from maxlite.data.loader import DataLoader, open_data
from maxlite.distributed.initialize import (
  SeparateProcesses,
  barrier,
  describe_process,
  distributed_runtime,
  process_0_first,
)
from maxlite.distributed.object_collectives import all_gather_object
from maxlite.errors import UserError, exit_on_user_error
from maxlite.kernels.xla_cpu import enable_compilation_cache, keep_freed_memory
from maxlite.metrics.best_loss import LOSSES, BestLoss
from maxlite.metrics.waits import Report, print_to_stderr, report_wait
from maxlite.metrics.writers import (
  EXPERT_LOAD,
  METRICS,
  ConsoleWriter,
  JsonConsole,
  JsonConsoleWriter,
  JsonlWriter,
  TensorBoardWriter,
  Tracker,
  WandbWriter,
  Writer,
  Writers,
  open_console,
  read_rows,
)
from maxlite.registry import CALLBACKS
from maxlite.runs.saved_run import run_folder, token_cache
from maxlite.sharding.mesh import build_mesh
from maxlite.sharding.pytree import PyTree
from maxlite.step.train_state import TrainState, averaged_params
from maxlite.training.callbacks import Callback, CallbackContext
from maxlite.training.model_weights import checkpoint_step, read_parameters
from maxlite.training.program import Program, build_program, check_devices, mesh_degrees
from maxlite.training.spec import data_by_objective, spec_of


@contextlib.contextmanager
def join_hosts(cfg: Config, program: str) -> Iterator[tuple[Config, SeparateProcesses | None]]:
  """Connect the processes of one run while the context is open (distributed/initialize.py).

  Yields a config that is the same on all processes, without the keys that identify this one; and
  the processes of an ensemble with `submesh`, of which each trains its own members.
  """
  with contextlib.ExitStack() as stack:
    with exit_on_user_error(program):
      separate = cfg.ensemble.is_set and cfg.ensemble.ensemble_strategy == "submesh"
      values = public_values(cfg)
      with report_wait("waiting for the other processes of the run"):
        peers = stack.enter_context(distributed_runtime(cfg.hosts, values, separate=separate))
    yield dataclasses.replace(cfg, hosts=HostsConfig()), peers


def open_program(cfg: Config, devices: Sequence[jax.Device] | None = None) -> Program:
  """Build the program of `cfg` on `devices`, by default on all, after setting up this process."""
  keep_freed_memory()
  enable_compilation_cache(cfg.run.jax_cache_dir)
  process = describe_process()
  if process:
    open_console(log_format=cfg.observe.log_format).print(process)
  program = build_program(spec_of(cfg), devices, cfg)
  check_devices(program)
  return program


def open_saved_program(cfg: Config) -> Program:
  """`open_program` of a run that was trained, perhaps on more devices than there are here.

  If the devices do not make the mesh of its training, it gets one with `fsdp` only; a mesh of the
  command line must fit.
  """
  ici = mesh_degrees(cfg.mesh, "ici")
  dcn = mesh_degrees(cfg.mesh, "dcn")
  try:
    build_mesh(ici, dcn)
  except UserError:
    saved = build(MeshConfig, read_values(run_folder(cfg).config))
    if cfg.mesh != saved or jax.process_count() > 1:
      raise
  else:
    return open_program(cfg)
  rules = cfg.mesh.logical_axis_rules
  smaller = dataclasses.replace(
    cfg, mesh=MeshConfig(logical_axis_rules=rules, sharding_tolerance=1.0)
  )
  try:
    program = open_program(smaller)
  except UserError:  # a batch or an axis of the model that the devices do not divide
    program = open_program(smaller, jax.devices()[:1])
  degrees = []
  for axis, within, between in zip(MESH_AXES, ici, dcn, strict=True):
    if within != 1:
      degrees.append(f"ici_{axis}_parallelism={within}")
    if between not in (1, -1):
      degrees.append(f"dcn_{axis}_parallelism={between}")
  print_to_stderr(
    f"the mesh of the run, {' '.join(degrees)}, does not fit the devices here: using "
    f"{program.mesh.size} of {jax.device_count()} with ici_fsdp_parallelism=-1"
  )
  return program


def open_run_data(
  cfg: Config,
  program: Program,
  data: DataConfig | None = None,
  batch_shape: tuple[int, int] | None = None,
) -> DataLoader:
  """Open the data of the run, or other `data` (no held-out data), sharded for the mesh."""
  data = data or cfg.data
  batch_shape = batch_shape or program.batch_shape
  num_rows = batch_shape[0]
  rows = local_rows(program.batch_sharding, batch_shape)
  if has_prompts(data):  # of which all hosts write the completions together
    num_rows = rollout_sizes(cfg, data, num_rows).num_prompts
    rows = range(num_rows)

  def open_sharded() -> DataLoader:
    return open_data(
      data,
      vocab_size=cfg.model.vocab_size,
      global_batch_size=num_rows,
      rows=rows,
      cache_directory=token_cache(cfg),
      evaluates=reads_same_documents(cfg.data, data),
    )

  return process_0_first(open_sharded, "the data is tokenized")


def open_objective_data(cfg: Config, program: Program, data: DataLoader) -> dict[str, DataLoader]:
  """By objective, the run's `data`, or its own."""
  data_of = data_by_objective(cfg)
  opened = {data.cfg: data}
  for objective in program.objectives:
    own = data_of[objective.name]
    if own not in opened:
      try:
        opened[own] = open_run_data(cfg, program, own, objective.batch_shape)
      except UserError as error:
        raise UserError(f"phase {objective.name}: {error}") from None
  return {name: opened[own] for name, own in data_of.items()}


def lock_folder(folder: RunFolder) -> None:
  """Lock the folder from process 0; if it cannot, raise UserError on all processes."""
  refusal = ""
  try:
    if jax.process_index() == 0:
      folder.lock()
  except UserError as error:
    refusal = str(error)
  refusal = all_gather_object(refusal)[0]
  if refusal:
    raise UserError(refusal)


def identify_run(folder: RunFolder, checkpoints: Checkpoints) -> str:
  """Return the id of the run, which its checkpoints carry; process 0 creates it.

  A folder without an id gets the one of its latest checkpoint.
  """
  run_id = str(all_gather_object(folder.saved_run_id())[0])
  if not run_id:
    saved = checkpoints.saved_run_id()
    created = ""
    if jax.process_index() == 0:
      created = folder.run_id(saved)
    run_id = str(all_gather_object(created)[0])
  checkpoints.run_id = run_id
  return run_id


def open_checkpoints(cfg: Config, folder: RunFolder, report: Report) -> Checkpoints | None:
  """Open the checkpoints; None if they are disabled.

  Raises:
    UserError: a run without checkpoints would overwrite an earlier run.
  """
  if cfg.checkpoint.enable_checkpointing:
    return Checkpoints(cfg.checkpoint, folder.checkpoints, report, cfg.model, cfg.run.allow_changes)
  if any(folder.directory.glob("[!.]*")):
    raise UserError(
      f"{folder.place} holds an earlier run, which enable_checkpointing=false would start anew "
      "and overwrite: choose another run_name or move the folder away"
    )
  return None


def open_local_checkpoints(
  cfg: Config,
  program: Program,
  folder: RunFolder,
  checkpoints: Checkpoints | None,
  report: Report,
) -> LocalCheckpoints | None:
  """Identify the run, and open the checkpoints on local disks; None if they are disabled."""
  if checkpoints is None:
    return None
  run_id = identify_run(folder, checkpoints)
  if not cfg.checkpoint.local_checkpoint_directory:
    return None
  return LocalCheckpoints(cfg.checkpoint, run_id, program.abstract_state, report)


def restore(
  program: Program, checkpoints: Checkpoints | None, local: LocalCheckpoints | None
) -> Restored | None:
  """Restore the latest checkpoint, from local checkpoints if those are newer."""
  if checkpoints is None:
    return None
  if local is not None:
    restored = local.restore(newer_than=checkpoints.latest_step() or 0)
    if restored is not None:
      checkpoints.remove_unfinished()
      return restored
  return checkpoints.restore(program.abstract_state)


def first_state(
  cfg: Config, program: Program, restored: Restored | None, console: Console
) -> TrainState:
  """The state before the first step of this process."""
  seed = cfg.run.init_weights_seed
  if restored is None:
    params = None
    if cfg.checkpoint.load_parameters_path:
      params = read_parameters(cfg, program)
    return program.init(seed, params)
  state, data_state, step = restored
  if data_state is None:
    console.print("starting from the weights of step 0, with a new optimizer state")
    return program.init(seed, state["params"])
  console.print(f"resuming from the checkpoint of step {step}")
  return state


def save_config(cfg: Config, folder: RunFolder, changes: Changes | None) -> None:
  """Save the config of the run from process 0, once all processes have opened the run."""
  barrier("the run is open")  # before the first file is written
  if jax.process_index() == 0:
    folder.save_config(cfg, changes)


def save_start(
  cfg: Config, program: Program, folder: RunFolder, changes: Changes | None, done: int
) -> None:
  """Save the config, and add to starts.jsonl the versions and devices that train from `done` on."""
  save_config(cfg, folder, changes)
  if jax.process_index() > 0:
    return
  packages = {name: version(name) for name in ("jax", "jaxlib", "flax", "optax", "numpy")}
  mesh = {axis: size for axis, size in program.mesh.shape.items() if size > 1}
  start = JsonlWriter(folder.starts, resume_step=done - 1)
  start.write(
    {
      "step": done,
      "maxlite": __version__,
      "python": platform.python_version(),
      **packages,
      "devices": f"{program.mesh.size} x {program.mesh.devices.flat[0].device_kind}",
      "mesh": " ".join(f"{axis}={size}" for axis, size in mesh.items()),
    }
  )
  start.close()


def open_best_loss(
  cfg: Config, folder: RunFolder, done: int, data: DataLoader, checkpoints: Checkpoints | None
) -> BestLoss:
  """The lowest held-out loss up to step `done`.

  Raises:
    UserError: the run needs it and has no held-out data.
  """
  patience = cfg.observe.early_stopping_patience
  keeps_best = cfg.checkpoint.keep_best_checkpoint
  if data.source.eval is None and (patience or keeps_best):
    key = "early_stopping_patience" if patience else "keep_best_checkpoint"
    raise UserError(f"{key} needs held-out data: set eval_fraction above 0")
  rows = []
  for row in read_rows(folder.metrics, METRICS):
    if row["step"] <= done:
      rows.append({name: row[name] for name in ("step", *LOSSES) if name in row})
  best = BestLoss(patience, all_gather_object(rows)[0])  # the same on all processes
  if checkpoints is not None and keeps_best:
    checkpoints.kept_step = lambda: best.step
  return best


def open_callbacks(
  cfg: Config,
  program: Program,
  others: Sequence[Callback],
  writers: Writers,
  first_step: int,
) -> list[Callback]:
  """Start the callbacks of the config, and `others`."""
  callbacks = [CALLBACKS[name]() for name in cfg.run.callbacks]
  callbacks += others
  context = CallbackContext(cfg, run_folder(cfg).directory, program, writers, first_step)
  for callback in callbacks:
    callback.on_start(context)
  return callbacks


def open_writers(
  cfg: Config, program: Program, folder: RunFolder, done: int, console: Console
) -> Writers:
  """Open the writers of process 0, which drop rows after step `done`."""
  if jax.process_index() > 0:
    return Writers([])
  objectives = [objective.name for objective in program.objectives]
  writers: list[Writer] = [JsonlWriter(folder.metrics, done, METRICS)]
  if isinstance(console, JsonConsole):
    writers.append(JsonConsoleWriter(console))
  else:
    writers.append(ConsoleWriter(cfg.run.steps, done, console, objectives))
  observe = cfg.observe
  if observe.metrics_port:
    from maxlite.metrics.prometheus import PrometheusWriter  # only a run with an endpoint needs it

    endpoint = PrometheusWriter(
      observe.metrics_host, observe.metrics_port, cfg.run.run_name, console.print
    )
    writers.append(endpoint)
  expert_load = None
  if cfg.model.family.is_moe:
    expert_load = JsonlWriter(folder.expert_load, done, EXPERT_LOAD)
  trackers = open_trackers(cfg, folder, done)
  return Writers(
    writers,
    expert_load,
    trackers,
    upload=folder.upload,
    uploads_rows=folder.mirror is not None,
  )


def open_trackers(cfg: Config, folder: RunFolder, done: int) -> list[Tracker]:
  """Open the trackers of a run whose config is saved; UserError if W&B cannot be used."""
  trackers: list[Tracker] = []
  if cfg.observe.enable_tensorboard:
    code = textwrap.indent(folder.config.read_text("utf-8"), "    ")
    trackers.append(TensorBoardWriter(folder.tensorboard, done, code))
  if cfg.observe.wandb_project_name:
    wandb = WandbWriter(
      folder.directory,
      _wandb_values(cfg),
      project=cfg.observe.wandb_project_name,
      name=cfg.run.run_name,
      id=folder.run_id(),
    )
    trackers.append(wandb)
  return trackers


def _wandb_values(cfg: Config) -> dict[str, object]:
  """The values of all keys; those that hold others are shown as text."""
  values: dict[str, object] = {}
  for key, value in public_values(cfg).items():
    if isinstance(value, Container):
      values[key] = show(value)
    else:
      values[key] = value
  return values


def open_trained(cfg: Config) -> tuple[Program, PyTree]:
  """Load the checkpoint `load_checkpoint` of the run named by `cfg`: (program, parameters).

  The parameters are their moving averages if the run keeps them.
  """
  program, params, averages, _ = open_weights(cfg)
  if averages is not None:
    params = averages
  return program, params


def open_weights(cfg: Config) -> tuple[Program, PyTree, PyTree, int]:
  """Load a checkpoint: (program, parameters, their moving averages or None, step)."""
  program = open_saved_program(cfg)
  folder = run_folder(cfg)
  checkpoints = Checkpoints(
    cfg.checkpoint, folder.checkpoints, print_to_stderr, cfg.model, cfg.run.allow_changes
  )
  checkpoints.run_id = folder.saved_run_id()
  state = program.abstract_state
  wanted = {"params": state.params}
  if state.ema is not None:
    wanted["ema"] = state.ema
  which = checkpoint_step(folder, cfg.checkpoint.load_checkpoint)
  with report_wait("reading the checkpoint"):
    parts, step = checkpoints.restore_parts(wanted, which)
  averages = averaged_params(state.replace(**parts))
  return program, parts["params"], averages, step
