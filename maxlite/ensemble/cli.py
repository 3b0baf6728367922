"""What `python -m maxlite.ensemble` can be told."""

import dataclasses
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from maxlite.config import Config, exit_on_user_error, read_saved, save_resolved
from maxlite.config.errors import UserError
from maxlite.config.members import members_of
from maxlite.config.schema import MESH_AXES, MeshConfig, build
from maxlite.config.values import did_you_mean

_USAGE = "usage: python -m maxlite.ensemble export RUN_FOLDER member=NAME [run_name=NEW_NAME]"


def main(arguments: Sequence[str]) -> int:
  """The exit code of `arguments`, the words after `python -m maxlite.ensemble`."""
  with exit_on_user_error("maxlite.ensemble"):
    if arguments[:1] == ["export"]:
      return _export(arguments[1:])
    if arguments[:1] == ["worker"]:
      return _work(arguments[1:])
    raise UserError(_USAGE)


def _export(arguments: Sequence[str]) -> int:
  """Copies a member's folder to where a run of its own would be, and prints where that is."""
  given = dict(word.split("=", 1) for word in arguments[1:] if "=" in word)
  if not arguments or "member" not in given or given.keys() - {"member", "run_name"}:
    raise UserError(_USAGE)
  ensemble = _read(Path(arguments[0]))
  members = {member.name: member for member in members_of(ensemble)}
  name = given["member"]
  if name not in members:
    hint = did_you_mean(name, members) or f"choose one of {', '.join(members)}"
    raise UserError(f"{arguments[0]} has no member {name}; {hint}")
  source = Path(members[name].config.run.base_output_directory) / name
  if not (source / "checkpoints").is_dir():
    raise UserError(f"{source} has no checkpoint: train the ensemble first")
  cfg = members[name].config
  new = given.get("run_name", name)
  run = dataclasses.replace(
    cfg.run, run_name=new, base_output_directory=ensemble.run.base_output_directory
  )
  target = Path(run.base_output_directory) / new
  if target.exists():
    raise UserError(f"{target} exists: write run_name=ANOTHER_NAME")
  shutil.copytree(source, target, ignore=shutil.ignore_patterns("config*.yml"))
  cfg = dataclasses.replace(cfg, run=run, mesh=_mesh_alone(cfg.mesh))
  save_resolved(cfg, target / "config.yml")
  sys.stdout.write(f"{target}: go on with python -m maxlite.train {target / 'config.yml'}\n")
  return 0


def _mesh_alone(mesh: MeshConfig) -> MeshConfig:
  """The mesh of a member alone, where fsdp takes the devices that the members shared out."""
  changes = {}
  for kind in ("ici", "dcn"):
    degrees = {axis: getattr(mesh, f"{kind}_{axis}_parallelism") for axis in MESH_AXES}
    if degrees.pop("ensemble") != 1:
      changes[f"{kind}_ensemble_parallelism"] = 1
      if -1 not in degrees.values():
        changes[f"{kind}_fsdp_parallelism"] = -1
  return dataclasses.replace(mesh, **changes)


def _work(arguments: Sequence[str]) -> int:
  """Trains some of the members in this process."""
  from maxlite.ensemble.ensemble_run import run_ensemble

  folder, num_rows, *names = arguments
  cfg = _read(Path(folder))
  own = dataclasses.replace(cfg.ensemble, ensemble_strategy="auto", ensemble_num_workers=0)
  return run_ensemble(dataclasses.replace(cfg, ensemble=own), names, int(num_rows))


def _read(folder: Path) -> Config:
  path = folder / "config.yml"
  if not path.exists():
    raise UserError(f"{folder} is no run folder: it has no config.yml")
  config: Config = build(Config, read_saved(path))
  if not config.ensemble.members and not config.ensemble.sweep:
    raise UserError(f"{folder} is a run of one model, not an ensemble")
  return config
