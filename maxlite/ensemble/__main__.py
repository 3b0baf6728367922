"""`python -m maxlite.ensemble export RUN member=NAME [run_name=NEW]`: a member as a solo run.

`member=NAME,NAME,...` exports their soup, a model with the mean of their parameters.

`python -m maxlite.ensemble worker RUN BATCH_SIZE LAST_STEP NAME ...` is a worker of `processes`.
"""

import dataclasses
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from maxlite.checkpoint.run_folder import RunFolder
from maxlite.config import Config, UserError, exit_on_user_error, read_saved, save_resolved
from maxlite.config.members import members_of
from maxlite.config.raw_values import show
from maxlite.config.schema import KEYS, MESH_AXES, MeshConfig, RunConfig, build, flatten
from maxlite.config.values import suggest
from maxlite.ensemble.report.soups import write_soup
from maxlite.ensemble.run.ensemble_run import run_ensemble

_USAGE = (
  "usage: python -m maxlite.ensemble export RUN_FOLDER member=NAME[,NAME...] [run_name=NEW] "
  "[trust_plugins=true]"
)


def main(arguments: Sequence[str]) -> int:
  """Run a subcommand and return the exit code."""
  with exit_on_user_error("maxlite.ensemble"):
    if arguments[:1] == ["export"]:
      return _export(arguments[1:])
    if arguments[:1] == ["worker"]:
      return _train_members(*arguments[1:])
    raise UserError(_USAGE)


def _export(arguments: Sequence[str]) -> int:
  """Write a member, or the mean of several, to a run folder next to the ensemble's."""
  given = dict(argument.split("=", 1) for argument in arguments[1:] if "=" in argument)
  if (
    not arguments or "member" not in given or given.keys() - {"member", "run_name", "trust_plugins"}
  ):
    raise UserError(_USAGE)
  trusts = given.get("trust_plugins") == "true"
  ensemble = _read_config(Path(arguments[0]), trust_plugins=trusts)
  members = {member.name: member.config for member in members_of(ensemble)}
  names = given["member"].split(",")
  for name in names:
    if name not in members:
      raise UserError(f"{arguments[0]} has no member {name}; {suggest(name, members)}")
  cfg = members[names[0]]
  _require_one_model({name: members[name] for name in names})
  sources = [Path(cfg.run.base_output_directory) / name for name in names]
  for source in sources:
    if not (source / "checkpoints").is_dir():
      raise UserError(f"{source} has no checkpoint: train the ensemble first")
  root, new_name = ensemble.run.base_output_directory, given.get("run_name", names[0])
  target = Path(root) / new_name
  if target.exists():
    raise UserError(f"{target} exists: write run_name=ANOTHER_NAME")
  if len(names) > 1:
    write_soup([RunFolder(source) for source in sources], target / "checkpoints" / "0")
    cfg = dataclasses.replace(cfg, training=dataclasses.replace(cfg.training, ema_decay=0.0))
  else:
    shutil.copytree(sources[0], target, ignore=shutil.ignore_patterns("config*.yml"))
  run = dataclasses.replace(cfg.run, run_name=new_name, base_output_directory=root)
  cfg = dataclasses.replace(cfg, run=run, mesh=_solo_mesh(cfg.mesh))
  save_resolved(cfg, target / "config.yml")
  sys.stdout.write(f"{target}: resume with python -m maxlite.train {target / 'config.yml'}\n")
  return 0


def _require_one_model(members: Mapping[str, Config]) -> None:
  """Raise UserError if the members of a soup differ in a key that weights depend on."""
  (first, cfg), *others = members.items()
  for name, other in others:
    own = flatten(other.model)
    for key, value in flatten(cfg.model).items():
      if KEYS[key].field.shapes_model and value != own[key]:
        raise UserError(
          f"a soup has members of one model: {key} is {show(value)} in {first}, and "
          f"{show(own[key])} in {name}"
        )


def _solo_mesh(mesh: MeshConfig) -> MeshConfig:
  """A mesh without members; `fsdp` takes the devices of the axis `ensemble`."""
  changes = {}
  for kind in ("ici", "dcn"):
    degrees = {axis: getattr(mesh, f"{kind}_{axis}_parallelism") for axis in MESH_AXES}
    if degrees.pop("ensemble") != 1:
      changes[f"{kind}_ensemble_parallelism"] = 1
      if -1 not in degrees.values():
        changes[f"{kind}_fsdp_parallelism"] = -1
  return dataclasses.replace(mesh, **changes)


def _train_members(folder: str, batch_size: str, last_step: str, *names: str) -> int:
  """Train some of the members in this process up to a step."""
  cfg = _read_config(Path(folder), trust_plugins=True)  # the parent's own run
  changes = {"ensemble_strategy": "auto", "ensemble_num_workers": 0, "asha_reduction_factor": 0}
  cfg = dataclasses.replace(cfg, ensemble=dataclasses.replace(cfg.ensemble, **changes))
  return run_ensemble(cfg, names, int(batch_size), int(last_step))


def _read_config(folder: Path, *, trust_plugins: bool) -> Config:
  path = folder / "config.yml"
  if not path.exists():
    raise UserError(f"{folder} is not a run folder: it has no config.yml")
  command = Config(run=RunConfig(trust_plugins=trust_plugins))
  config: Config = build(Config, read_saved(path, command) | {"trust_plugins": False})
  if not config.ensemble.is_set:
    raise UserError(f"{folder} is a run of one model, not an ensemble")
  return config


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
