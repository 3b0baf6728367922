"""Sets of rollouts: written by the engine, verified by the trained program, and rewarded."""

import time
from collections.abc import Iterator, Sequence

import numpy as np

from maxlite.config.rollouts import RolloutSizes
from maxlite.config.schema import Config
from maxlite.data.sources.chat import ChatEncoder
from maxlite.data.sources.prompts import Prompt
from maxlite.data.tokenizer import Tokenizer
from maxlite.errors import UserError
from maxlite.metrics.step_row import Row
from maxlite.registry import ADVANTAGES
from maxlite.rollouts.process_0 import reward_completions
from maxlite.rollouts.rewards import Rewards
from maxlite.rollouts.rollout import Rollout
from maxlite.rollouts.rollout_set import RolloutSet
from maxlite.rollouts.verification import Draws, Verifier, context_span
from maxlite.rollouts.writer import RolloutWriter
from maxlite.sharding.pytree import PyTree
from maxlite.storage.json_values import JsonObject
from maxlite.training.program import Program

# Passes of verification, each of which settles a token more of every rollout at least.
MAX_ROUNDS = 100


class RolloutSampler:
  """Samples completions of prompts with given parameters; only the first set compiles.

  All processes of a run call it with the same prompts, and get the same rollouts.
  """

  def __init__(
    self,
    cfg: Config,
    program: Program,
    sizes: RolloutSizes,
    batch_shape: tuple[int, int],
    tokenizer: Tokenizer,
    chat: ChatEncoder | None,
  ) -> None:
    """
    Args:
      sizes: of the rollouts of a batch.
      batch_shape: of the batches that are trained on.
      chat: encodes the turns of a conversation; None: prompts are texts.

    Raises:
      UserError: the mesh shards sequences; or a reward cannot be imported.
    """
    self._cfg = cfg
    self._program = program
    self.sizes = sizes
    self._rewards = Rewards(cfg.rollouts)
    self.reward_names = self._rewards.names
    self.reward_weights = self._rewards.weight_R
    num_rows = cfg.rollouts.rollout_batch_size
    if num_rows == -1:
      num_rows = sizes.num_prompts * cfg.rollouts.num_generations
    self.writer = RolloutWriter(
      cfg,
      program.sharder,
      tokenizer,
      chat,
      num_rows=num_rows,
      prompt_length=sizes.prompt,
      completion_length=sizes.completion,
      temperature=cfg.training.rollout_temperature,
      stop=cfg.rollouts.rollout_stop,
      environment=cfg.rollouts.rollout_environment,
    )
    self._verifier = Verifier(
      program, sizes, batch_shape, records_experts=cfg.rollouts.rollout_routes == "replay"
    )

  def sample(self, params: PyTree, prompts: Sequence[Prompt], seed: Sequence[int]) -> RolloutSet:
    """Write a group of completions of each prompt, verify them, and reward them.

    Args:
      params: the parameters of the trained model.
      seed: of the set; each completion has noise of its own.

    Raises:
      UserError: verification does not end, or rewards are not as `Rewards` says.
    """
    num_generations = self._cfg.rollouts.num_generations
    seeds = np.random.SeedSequence(seed).generate_state(len(prompts) * num_generations)
    rollouts = []
    for n, one in enumerate(seeds.tolist()):
      rollouts.append(Rollout(prompts[n // num_generations], one))
    start = time.perf_counter()
    self.writer.load(params)
    self.writer.write(rollouts)
    generation_seconds = time.perf_counter() - start
    num_tokens = sum(rollout.num_own for rollout in rollouts)
    num_replaced, num_rounds, draws = self._verify(params, rollouts)
    self.writer.unload()
    verification_seconds = time.perf_counter() - start - generation_seconds
    row: Row = {}
    if num_rounds:
      row["rollout_agreement"] = 1 - num_replaced / max(num_tokens, 1)
      row["rollout_rounds"] = num_rounds
    texts = self.writer.texts(rollouts)
    start = time.perf_counter()
    reward_NR = reward_completions(self._rewards, rollouts, texts)
    seconds: Row = {
      "generation_seconds": generation_seconds,
      "verification_seconds": verification_seconds,
      "reward_seconds": time.perf_counter() - start,
    }
    return self._build_set(rollouts, texts, reward_NR, draws, row, seconds)

  def rows(self, rollouts: RolloutSet, step: int) -> Iterator[JsonObject]:
    """Yield what is written of rollouts to a run's folder: a row per prompt."""
    completions: list[JsonObject] = []
    for n, rollout in enumerate(rollouts.rollouts):
      log_probs = rollouts.log_prob_NC[n, : len(rollout.ids)]
      rewards = dict(zip(self.reward_names, rollouts.reward_NR[n].tolist(), strict=True))
      row = self.writer.row(rollout, rollouts.texts[n], rewards) | {
        "log_probs": [round(float(value), 4) for value in log_probs],
        "advantage": float(rollouts.advantage_N[n]),
        "replaced_gaps": rollout.gaps,
      }
      if rollouts.expert_BTNK is not None:
        experts = rollouts.expert_BTNK[context_span(n, rollout, self.sizes)]
        row["expert_ids"] = experts.tolist()
      completions.append(row)
      if len(completions) == rollouts.num_generations:
        prompt = rollout.prompt
        yield {
          "step": step,
          "place": prompt.place,
          "prompt": prompt.text,
          "completions": completions,
        }
        completions = []

  def _verify(self, params: PyTree, rollouts: Sequence[Rollout]) -> tuple[int, int, Draws]:
    """Replace tokens until all are those that the trained program draws.

    Returns:
      (tokens of the engine that it does not draw, passes, the draws of the last pass). Without
      verification, there is a pass for the last only.
    """
    if self._cfg.rollouts.rollout_verification == "off":
      return 0, 0, self._verifier(params, rollouts)
    num_replaced = 0
    for num_rounds in range(1, MAX_ROUNDS + 1):
      draws = self._verifier(params, rollouts)
      num_before = num_replaced
      for n, rollout in enumerate(rollouts):
        drawn = draws.token_NC[n, : len(rollout.ids)].tolist()
        if drawn == rollout.ids:
          continue
        for c, (token, is_own) in enumerate(zip(rollout.ids, rollout.is_own, strict=True)):
          if is_own and token != drawn[c]:
            num_replaced += 1
            rollout.gaps.append(float(draws.gap_NC[n, c]))
            rollout.cut(c)
            self.writer.add(rollout, drawn[c])
            break
      if num_replaced == num_before:
        return num_replaced, num_rounds, draws
      self.writer.write(rollouts)
    raise UserError(
      f"rollout_verification=exact: after {MAX_ROUNDS} passes tokens of the engine still differ "
      "from the trained program's: the two do not compute the same model; write "
      "rollout_verification=off, and report the config"
    )

  def _build_set(
    self,
    rollouts: list[Rollout],
    texts: list[str],
    reward_NR: np.ndarray,
    draws: Draws,
    row: Row,
    seconds: Row,
  ) -> RolloutSet:
    cfg = self._cfg.rollouts
    reward_N = reward_NR @ self._rewards.weight_R
    reward_N -= self._overlong_penalties(rollouts)
    reward_NG = reward_N.reshape(-1, cfg.num_generations)
    advantage_N = ADVANTAGES[cfg.advantage_estimator](reward_NG).reshape(-1)
    deviation_N = reward_NG.std(axis=1)
    if self.reward_names:
      row |= {
        "reward": float(reward_N.mean()),
        "reward_std": float(deviation_N.mean()),
        "silent_groups": float((deviation_N == 0).mean()),
      }
    row |= {
      "completion_length": float(np.mean([each.num_own for each in rollouts])),
      "truncated_share": float(np.mean([each.is_truncated for each in rollouts])),
    }
    if len(self._rewards.names) > 1:
      for name, reward in zip(self._rewards.names, reward_NR.mean(axis=0), strict=True):
        row[f"reward/{name}"] = float(reward)
    return RolloutSet(
      num_generations=cfg.num_generations,
      rollouts=rollouts,
      texts=texts,
      reward_NR=reward_NR,
      advantage_N=advantage_N,
      log_prob_NC=draws.log_prob_NC,
      expert_BTNK=draws.expert_BTNK,
      row=row,
      seconds=seconds,
    )

  def _overlong_penalties(self, rollouts: Sequence[Rollout]) -> np.ndarray:
    """What long completions lose, from 0 to 1.

    Source: Yu et al., DAPO (2025), eq. 13.
    """
    buffer = self._cfg.rollouts.overlong_buffer_length
    if not buffer:
      return np.zeros(len(rollouts))
    length_N = np.asarray([rollout.num_own for rollout in rollouts])
    return np.clip((length_N - (self.sizes.completion - buffer)) / buffer, 0, 1)
