"""Losses of rollouts in training: the model completes prompts before it takes a step on them."""

from pathlib import Path

import jax

from maxlite.checkpoint.run_folder import RunFolder
from maxlite.config.rollouts import rollout_sizes
from maxlite.config.schema import Config
from maxlite.data.batch import local_rows, to_global
from maxlite.data.loader import PromptStream
from maxlite.data.sources.chat import open_chat
from maxlite.data.tokenizer import open_tokenizer
from maxlite.data.train_streams import TrainStreams
from maxlite.metrics.writers import JsonlWriter
from maxlite.registry import ROLLOUT_LOSSES
from maxlite.rollouts.rewards import check_rewards
from maxlite.rollouts.rollout_set import RolloutSet
from maxlite.rollouts.sampler import RolloutSampler
from maxlite.runs.saved_run import run_folder
from maxlite.sharding.pytree import PyTree
from maxlite.step.train_state import TrainState
from maxlite.training.feature import Feature, FeatureRequest
from maxlite.training.program import Objective, Program
from maxlite.training.spec import data_by_objective
from maxlite.training.trainer import Trainer

ROLLOUTS = "rollouts.jsonl"  # In the folder of a run.


class RolloutTrainer(Trainer):
  """Takes steps on rollouts of the parameters before them; the first step of a set is on-policy."""

  def __init__(self, cfg: Config, program: Program, state: TrainState):
    super().__init__(cfg, program, state)
    check_rewards(cfg.rollouts, [each.loss for each in program.spec.objectives])
    self._objectives = {each.name: each for each in program.objectives}
    self._samplers: dict[str, RolloutSampler] = {}
    # The rollouts of the latest step, and the steps taken on them.
    self._rollouts: RolloutSet | None = None
    self._num_steps = 0
    self._step = int(state.step)
    self._file: JsonlWriter | None = None
    if jax.process_index() == 0:
      self._file = JsonlWriter(run_folder(cfg).directory / ROLLOUTS, self._step)

  def next_batch(self, stream: TrainStreams) -> PyTree:
    """The inputs of the next step; of a loss of rollouts, the model writes them first."""
    self._step += 1
    name = self.program.due(self.state)
    objective = self._objectives[name]
    if objective.spec.loss not in ROLLOUT_LOSSES:
      self._rollouts = None
      return super().next_batch(stream)
    sampler = self._sampler(objective)
    prompts = stream.prompts(name)
    rollouts = self._take_rollouts(sampler, prompts)
    batch = rollouts.batch(
      sampler.sizes,
      objective.batch_shape,
      is_first=self._num_steps == 0,
      masks_truncated=self.cfg.rollouts.mask_truncated_completions,
    )
    self._rollouts = rollouts
    self._num_steps += 1
    prompts.pending = None
    if self._num_steps < self.cfg.rollouts.num_iterations:
      prompts.pending = {"num_steps": self._num_steps, **rollouts.to_json()}
    rows = local_rows(self.program.batch_sharding, objective.batch_shape)
    own = jax.tree.map(lambda x_BT: x_BT[rows.start : rows.stop], batch)
    placed = to_global(own, self.program.batch_sharding, objective.batch_shape)
    return self.program.with_extra_inputs(placed)

  def _take_rollouts(self, sampler: RolloutSampler, prompts: PromptStream) -> RolloutSet:
    """The rollouts of the next step: the latest, a resumed run's, or new ones."""
    if prompts.pending is not None:
      self._num_steps = prompts.pending["num_steps"]
      if self._rollouts is not None:
        return self._rollouts
      return RolloutSet.from_json(prompts.pending, prompts.latest())
    self._num_steps = 0
    seed = [self.cfg.run.init_weights_seed, prompts.num_taken]
    rollouts = sampler.sample(self.state.params, next(prompts), seed)
    if self._file is not None:
      for row in sampler.rows(rollouts, self._step):
        self._file.write(row)
      self._file.flush()
    return rollouts

  def step(self, inputs: PyTree) -> dict[str, PyTree]:
    """Take a step; its metrics include numbers of the rollouts."""
    metrics: dict[str, PyTree] = dict(super().step(inputs))
    if self._rollouts is not None:
      metrics.update(self._rollouts.row)
      if self._num_steps == 1:
        metrics.update(self._rollouts.seconds)
    return metrics

  def close(self) -> None:
    if self._file is not None:
      self._file.close()

  def _sampler(self, objective: Objective) -> RolloutSampler:
    """The sampler of an objective."""
    if objective.name not in self._samplers:
      data = data_by_objective(self.cfg)[objective.name]
      tokenizer = open_tokenizer(data)
      self._samplers[objective.name] = RolloutSampler(
        self.cfg,
        self.program,
        rollout_sizes(self.cfg, data, objective.batch_shape[0]),
        objective.batch_shape,
        tokenizer,
        open_chat(data, tokenizer),
      )
    return self._samplers[objective.name]


class Rollouts(Feature):
  """The rollouts of a run, an entry of FEATURES."""

  trainer_type = RolloutTrainer

  def __init__(self, request: FeatureRequest):
    del request

  def describe(self, cfg: Config) -> list[str]:
    rollouts = cfg.rollouts
    line = (
      f"rollouts: {rollouts.num_generations} completions of each prompt at temperature "
      f"{cfg.training.rollout_temperature:g}, verification {rollouts.rollout_verification}, "
      f"rewards {', '.join(rollouts.reward_functions)}"
    )
    if rollouts.rollout_routes == "replay":
      line += ", experts replayed in all steps on a set"
    return [line]

  def draw(self, folder: RunFolder, step: int) -> list[Path]:
    from maxlite.rollouts import rollout_page  # slow to import

    return rollout_page.draw(folder.metrics, folder.directory / ROLLOUTS)
