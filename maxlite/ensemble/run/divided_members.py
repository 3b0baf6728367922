"""The members of an ensemble divided among the processes of a run, each of which trains its own."""

from collections.abc import Sequence

import jax

from maxlite.config import Config
from maxlite.distributed.initialize import SeparateProcesses
from maxlite.ensemble.members.assignment import assign_lpt
from maxlite.ensemble.members.run import MemberRun
from maxlite.errors import UserError
from maxlite.metrics.flops import active_parameter_count, parameter_sizes
from maxlite.runs.saved_run import run_folder


def check_division(cfg: Config, num_members: int, peers: SeparateProcesses) -> None:
  """Raise UserError if the members cannot be divided among the processes."""
  count = peers.num_processes
  refusals = {
    "the hosts of a TPU slice form one run": jax.process_count() > 1,
    "halving would compare members of all hosts": cfg.ensemble.asha_reduction_factor > 0,
    "process 0 reads the folders of all members": run_folder(cfg).mirror,
    "members are read from checkpoints": not cfg.checkpoint.enable_checkpointing,
    f"{num_members} members are too few for {count} processes": num_members < count,
  }
  for why, is_refused in refusals.items():
    if is_refused:
      raise UserError(
        f"ensemble_strategy=submesh on several processes: {why}; "
        "write ensemble_strategy=stacked or fused"
      )


def members_of_process(
  members: Sequence[MemberRun],
  peers: SeparateProcesses,
) -> list[MemberRun]:
  """The members that this process trains: all processes have about the same cost."""
  process_of = assign_lpt(member_costs(members), peers.num_processes)
  own = []
  for member, process_id in zip(members, process_of, strict=True):
    if process_id == peers.process_id:
      own.append(member)
  return own


def member_costs(members: Sequence[MemberRun]) -> list[float]:
  """The active parameters of every member, times its steps."""
  costs = []
  for member in members:
    model = member.config.model
    num_active = active_parameter_count(parameter_sizes(model), model)
    costs.append(float(num_active) * member.config.run.steps)
  return costs
