"""`python -m maxlite.ensemble export RUN member=NAME [run_name=NEW]`: a member as a solo run.

`member=NAME,NAME,...` exports their soup, a model with the mean of their parameters.

`python -m maxlite.ensemble worker RUN BATCH_SIZE LAST_STEP NAME ...` is a worker of `processes`.
"""

import dataclasses
import fnmatch
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from maxlite.checkpoint.run_folder import RunFolder
from maxlite.config import Config, read_saved, save_resolved
from maxlite.config.config_field import KeyValue
from maxlite.config.members import members_of
from maxlite.config.raw_values import show
from maxlite.config.schema import KEYS, MESH_AXES, MeshConfig, RunConfig, build, flatten
from maxlite.config.values import suggest
from maxlite.ensemble.report.soups import write_soup
from maxlite.ensemble.run.ensemble_run import run_ensemble
from maxlite.errors import UserError, exit_on_user_error, write_line
from maxlite.storage.file_io import irregularity, new_folder

_USAGE = (
  "usage: python -m maxlite.ensemble export RUN_FOLDER member=NAME[,NAME...] [run_name=NEW] "
  "[trust_plugins=true]"
)
_EXPORT_KEYS = {"member", "run_name", "trust_plugins"}


def main(arguments: Sequence[str]) -> int:
  """Run a subcommand and return the exit code."""
  with exit_on_user_error("maxlite.ensemble"):
    if arguments[:1] == ["export"]:
      return _export(arguments[1:])
    if arguments[:1] == ["worker"]:
      folder, batch_size, last_step, *names = arguments[1:]
      return _train_members(Path(folder), int(batch_size), int(last_step), names)
    raise UserError(_USAGE)


def _export_keys(arguments: Sequence[str]) -> dict[str, str]:
  """The values that follow the folder, by key; raise UserError if they are not those of _USAGE."""
  given = {}
  for argument in arguments[1:]:
    key, separator, value = argument.partition("=")
    if separator:
      given[key] = value
  if "member" not in given or not given.keys() <= _EXPORT_KEYS:
    raise UserError(_USAGE)
  return given


def _export(arguments: Sequence[str]) -> int:
  """Write a member, or the mean of several, to a run folder next to the ensemble's."""
  given = _export_keys(arguments)
  names = given["member"].split(",")
  new_name = given.get("run_name", names[0])
  folder = Path(arguments[0])
  if not folder.name or folder.name == "..":
    folder = folder.resolve()
  ensemble = _read_config(folder, trust_plugins=given.get("trust_plugins") == "true")
  # The folder may have been moved, or be a stranger's, whose config names any other folder.
  place = dataclasses.replace(
    ensemble.run, base_output_directory=str(folder.parent), run_name=folder.name
  )
  ensemble = dataclasses.replace(ensemble, run=place)
  members = {member.name: member.config for member in members_of(ensemble)}
  for name in names:
    if name not in members:
      remedy = suggest(name, members)
      raise UserError(f"{arguments[0]} has no member {name}; {remedy}")
  chosen = {name: members[name] for name in names}
  _require_one_model(chosen)
  cfg = members[names[0]]
  folder_of_members = Path(cfg.run.base_output_directory)
  sources = []
  for name in names:
    source = folder_of_members / name
    if not (source / "checkpoints").is_dir():
      raise UserError(f"{source} has no checkpoint: train the ensemble first")
    sources.append(source)
  root = ensemble.run.base_output_directory
  target = Path(root) / new_name
  if target.exists():
    raise UserError(f"{target} exists: write run_name=ANOTHER_NAME")
  if len(sources) > 1:
    folders = [RunFolder(source) for source in sources]
    write_soup(folders, target / "checkpoints" / "0")
    training = dataclasses.replace(cfg.training, ema_decay=0.0)
    cfg = dataclasses.replace(cfg, training=training)
  else:
    with new_folder(target) as unfinished:
      shutil.copytree(sources[0], unfinished, ignore=_configs_in, dirs_exist_ok=True)
  run = dataclasses.replace(
    cfg.run,
    run_name=new_name,
    base_output_directory=root,
  )
  mesh = _solo_mesh(cfg.mesh)
  cfg = dataclasses.replace(cfg, run=run, mesh=mesh)
  config_file = target / "config.yml"
  save_resolved(cfg, config_file)
  write_line(f"{target}: resume with python -m maxlite.train {config_file}", sys.stdout)
  return 0


def _configs_in(folder: str, names: Sequence[str]) -> set[str]:
  """The names that are not copied; raise UserError if a link or a special file would be."""
  for name in names:
    path = Path(folder, name)
    problem = irregularity(path, is_folder=path.is_dir())
    if problem or path.is_symlink():
      raise UserError(f"{path} {problem or 'is a link'}: replace it by a copy, or remove it")
  return {name for name in names if fnmatch.fnmatch(name, "config*.yml")}


def _require_one_model(members: Mapping[str, Config]) -> None:
  """Raise UserError if the members of a soup differ in a key that weights depend on."""
  first = next(iter(members))
  shaping_keys = {}
  for key, value in flatten(members[first].model).items():
    if KEYS[key].field.shapes_model:
      shaping_keys[key] = value
  for name, other in members.items():
    own = flatten(other.model)
    for key, value in shaping_keys.items():
      if value == own[key]:
        continue
      here = show(value)
      there = show(own[key])
      raise UserError(
        f"a soup has members of one model: {key} is {here} in {first}, and {there} in {name}"
      )


def _solo_mesh(mesh: MeshConfig) -> MeshConfig:
  """A mesh without members; `fsdp` takes the devices of the axis `ensemble`."""
  changes: dict[str, KeyValue] = {}
  for kind in ("ici", "dcn"):
    degrees = {}
    for axis in MESH_AXES:
      degrees[axis] = getattr(mesh, f"{kind}_{axis}_parallelism")
    ensemble_degree = degrees.pop("ensemble")
    if ensemble_degree != 1:
      changes[f"{kind}_ensemble_parallelism"] = 1
      if -1 not in degrees.values():
        changes[f"{kind}_fsdp_parallelism"] = -1
  return dataclasses.replace(mesh, **changes)


def _train_members(folder: Path, batch_size: int, last_step: int, names: Sequence[str]) -> int:
  """Train some of the members in this process up to a step."""
  cfg = _read_config(folder, trust_plugins=True)  # the parent's own run
  ensemble = dataclasses.replace(
    cfg.ensemble,
    ensemble_strategy="auto",
    ensemble_num_workers=0,
    asha_reduction_factor=0,
  )
  cfg = dataclasses.replace(cfg, ensemble=ensemble)
  return run_ensemble(cfg, names, batch_size, last_step)


def _read_config(folder: Path, *, trust_plugins: bool) -> Config:
  """The config of an ensemble's run folder.

  Raises:
    UserError: there is none, or it is of a run of one model.
  """
  path = folder / "config.yml"
  if not path.exists():
    raise UserError(f"{folder} is not a run folder: it has no config.yml")
  command = Config(run=RunConfig(trust_plugins=trust_plugins))
  values = read_saved(path, command)
  config: Config = build(Config, values | {"trust_plugins": False})
  if not config.ensemble.is_set:
    raise UserError(f"{folder} is a run of one model, not an ensemble")
  return config


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
