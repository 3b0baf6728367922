"""`python -m maxlite.rollout run_name=mine dataset_path=prompts.jsonl`: sample completions."""

import sys

from maxlite.runs.saved_run import main_run_config

# The keys of a run that only samples.
_SAMPLING = ("--loss_type=grpo", "--dataset_type=prompts", "--dataset_mixture=[]", "--phases=[]")


def main() -> int:
  cfg = main_run_config([*sys.argv[1:], *_SAMPLING], "maxlite.rollout")
  # Imports JAX: only after the command line is checked.
  from maxlite.rollouts.rollout_command import run_rollouts
  from maxlite.runs.open_run import join_hosts

  with join_hosts(cfg, "maxlite.rollout") as (cfg, _):
    return run_rollouts(cfg)


if __name__ == "__main__":
  sys.exit(main())
