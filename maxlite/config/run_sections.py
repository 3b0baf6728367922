"""The sections of the schema about hosts and checkpoints; see schema.py."""

import dataclasses

from maxlite.config.config_field import field


@dataclasses.dataclass(frozen=True)
class HostsConfig:
  """Which of a run's processes this one is; SLURM, Open MPI, Kubernetes and Cloud TPU tell it."""

  coordinator_address: str = field(
    "", "HOST:PORT of process 0, where all processes meet; empty: what started them tells."
  )
  num_processes: int = field(
    -1, "Processes of the run; 1: this one alone, whatever started it; -1: as told.", low=-1
  )
  process_id: int = field(-1, "Which of them this is, from 0 on; -1: as told.", low=-1)
  jax_distributed_initialization_timeout: int = field(
    300, "How long the processes wait for the last to come.", unit="seconds", low=1
  )
  jax_distributed_heartbeat_timeout_seconds: int = field(
    100,
    "Silence after which a process is taken for lost, and all others leave.",
    unit="seconds",
    low=1,
  )


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """What is written to disk to go on from."""

  enable_checkpointing: bool = field(True, "Write checkpoints, and go on from the newest.")
  checkpoint_period: int = field(100, "Steps between checkpoints.", unit="steps", low=1)
  async_checkpointing: bool = field(True, "Write while training goes on.")
  max_num_checkpoints_to_keep: int = field(3, "Newest checkpoints that are kept.", low=1)
  checkpoint_keep_period: int = field(
    0, "Also keep every checkpoint at a multiple of this; 0: none.", unit="steps", low=0
  )
  local_checkpoint_directory: str = field(
    "",
    "Folder on each host itself, such as /dev/shm/maxlite, for checkpoints between those that all "
    "hosts share; empty: none.",
  )
  local_checkpoint_period: int = field(
    10, "Steps between checkpoints in local_checkpoint_directory.", unit="steps", low=1
  )
  local_checkpoint_replication: bool = field(
    False,
    "Each process also keeps the local checkpoints of one on another host, where no other holds "
    "the same part of the state.",
  )
