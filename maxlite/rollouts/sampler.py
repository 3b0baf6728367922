"""Sets of rollouts: written by the engine, verified by the trained program, and rewarded."""

import functools
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from maxlite.config.plugins import import_function
from maxlite.config.rollouts import RolloutSizes
from maxlite.config.schema import Config
from maxlite.data.sources.chat import ChatEncoder, check_messages
from maxlite.data.sources.chat_template import Message
from maxlite.data.sources.prompts import Prompt
from maxlite.data.tokenizer import ChatTokenizer, Tokenizer
from maxlite.distributed.object_collectives import all_gather_object
from maxlite.errors import UserError
from maxlite.inference.batcher import STOP, Batcher, TokenEvent
from maxlite.inference.detokenizer import Detokenizer
from maxlite.inference.engine import Engine, GenerationRequest
from maxlite.inference.inference_params import inference_model, inference_params
from maxlite.inference.sampling import SamplingParams
from maxlite.metrics.step_row import Row
from maxlite.registry import ADVANTAGES
from maxlite.rollouts.rewards import Rewards
from maxlite.rollouts.rollout import Answer, Rollout
from maxlite.rollouts.rollout_set import RolloutSet
from maxlite.rollouts.verification import Verifier, place_rollouts, rollout_span
from maxlite.sharding.pytree import PyTree
from maxlite.storage.json_values import Json, JsonObject
from maxlite.training.program import Program

# Passes of verification, each of which settles a token more of every rollout at least.
MAX_ROUNDS = 100
_NO_REQUEST = GenerationRequest((), 0)  # Of tokens that are only converted to text.


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
    self._shape = batch_shape
    self._tokenizer = tokenizer
    self._chat = chat
    self._rewards = Rewards(cfg.rollouts)
    self.reward_names = self._rewards.names
    self._environment: Callable[[list[Message]], Sequence[Message] | None] | None = None
    if cfg.rollouts.rollout_environment:
      self._environment = import_function("rollout_environment", cfg.rollouts.rollout_environment)
    self._stop_token_ids = tuple(tokenizer.stop_token_ids)
    if chat is not None:
      self._stop_token_ids = tuple(chat.stop_token_ids)
    self._convert = jax.jit(functools.partial(inference_params, cfg.model))
    self._engine: Engine | None = None
    self._verifier = Verifier(program, batch_shape)

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
    self._load(params)
    self._write(rollouts)
    generation_seconds = time.perf_counter() - start
    num_tokens = sum(rollout.num_own for rollout in rollouts)
    num_replaced, num_rounds, log_prob_BT = self._verify(params, rollouts)
    assert self._engine is not None
    self._engine.unload()
    verification_seconds = time.perf_counter() - start - generation_seconds
    row: Row = {
      "generation_seconds": generation_seconds,
      "verification_seconds": verification_seconds,
    }
    if num_rounds:
      row["rollout_agreement"] = 1 - num_replaced / max(num_tokens, 1)
      row["rollout_rounds"] = num_rounds
    texts = [self._text(rollout.ids, rollout.prompt.ids) for rollout in rollouts]
    start = time.perf_counter()
    reward_NR = self._reward(rollouts, texts)
    row["reward_seconds"] = time.perf_counter() - start
    return self._build_set(rollouts, texts, reward_NR, log_prob_BT, row)

  def spell(self, ids: Sequence[int]) -> list[str]:
    """The text of each token alone; of a special token its spelling or number."""
    special = {}
    if isinstance(self._tokenizer, ChatTokenizer):
      special = {token: spelling for spelling, token in self._tokenizer.special_tokens.items()}
    return [special.get(token) or self._tokenizer.decode([token]) for token in ids]

  def _load(self, params: PyTree) -> None:
    """Give the engine the parameters."""
    converted = self._convert(params)
    if self._engine is not None:
      self._engine.load(converted)
      return
    sharder = self._program.sharder
    num_rows = self._cfg.rollouts.rollout_batch_size
    if num_rows == -1:
      num_rows = self.sizes.num_prompts * self._cfg.rollouts.num_generations
    num_shards = sharder.num_shards("activation_batch")
    max_length = self.sizes.prompt + self.sizes.completion
    self._engine = Engine(
      inference_model(self._cfg.model, sharder),
      converted,
      num_rows=-(-num_rows // num_shards) * num_shards,
      max_length=max_length,
      stop_token_ids=self._stop_token_ids,
      # Two lengths of prompts: of the set, and of what verification has generated on from.
      min_prompt_length=self.sizes.prompt,
      prompt_growth=max_length,
    )

  def _write(self, rollouts: Sequence[Rollout]) -> None:
    """Write all rollouts to their ends, turn by turn."""
    while True:
      for rollout in rollouts:
        if rollout.is_turn_over and not rollout.finish_reason:
          self._answer(rollout)
      writing = [rollout for rollout in rollouts if not rollout.finish_reason]
      if not writing:
        return
      self._write_turn(writing)

  def _write_turn(self, rollouts: Sequence[Rollout]) -> None:
    """Write the turn of the model in each of the rollouts."""
    assert self._engine is not None
    batcher = Batcher(self._engine)
    sampling = SamplingParams(temperature=self._cfg.training.rollout_temperature)
    by_request = {}
    for rollout in rollouts:
      request = GenerationRequest(
        prompt=[*rollout.prompt.ids, *rollout.ids],
        max_new_tokens=self.sizes.completion - len(rollout.ids),
        sampling=sampling,
        seed=rollout.seed,
      )
      by_request[request] = rollout
    waiting = list(by_request)
    while waiting or not batcher.is_idle:
      admitted = waiting[: batcher.num_free]
      del waiting[: len(admitted)]
      for event in batcher.add(admitted) or batcher.step():
        token = event.token if event.stop_token is None else event.stop_token
        assert token is not None
        by_request[event.request].write(token, self._stop_token_ids, self.sizes.completion)

  def _answer(self, rollout: Rollout) -> None:
    """Let the environment answer the turn that is over; without one, the rollout ends."""
    environment = self._environment
    if environment is None or len(rollout.answers) + 1 >= self._cfg.rollouts.rollout_turns:
      rollout.end()
      return
    assert self._chat is not None
    assert not isinstance(rollout.prompt.text, str)
    text = self._text(rollout.turn, rollout.prompt.ids)
    messages = [*rollout.prompt.text]
    for answer in rollout.answers:
      messages += [{"role": "assistant", "content": answer.text}, *answer.messages]
    messages.append({"role": "assistant", "content": text})

    def ask() -> Json:
      try:
        said = environment([dict(message) for message in messages])
      except Exception as error:
        raise UserError(
          f"rollout_environment={self._cfg.rollouts.rollout_environment} failed for the prompt of "
          f"{rollout.prompt.place}: {type(error).__name__}: {error}"
        ) from error
      return None if said is None else [dict(message) for message in said]

    said = _on_process_0(ask)
    if not said:
      rollout.end()
      return
    answer = Answer(len(rollout.ids), text, check_messages(said, "rollout_environment: messages"))
    ids = self._chat.continuation(messages, answer.messages, rollout.prompt.variables)
    if ids and ids[0] == rollout.ids[-1]:  # the end of the turn, which the model has written
      ids = ids[1:]
    rollout.answer(answer, ids, self.sizes.completion)

  def _verify(self, params: PyTree, rollouts: Sequence[Rollout]) -> tuple[int, int, np.ndarray]:
    """Replace tokens until all are those that the trained program draws.

    Returns:
      (tokens of the engine that it does not draw, passes, log_prob_BT of the last pass). Without
      verification, there is a pass for the last only.
    """
    if self._cfg.rollouts.rollout_verification == "off":
      batch, seed_BT = place_rollouts(rollouts, self.sizes, self._shape)
      return 0, 0, self._verifier(params, batch, seed_BT).log_prob_BT
    num_replaced = 0
    for num_rounds in range(1, MAX_ROUNDS + 1):
      batch, seed_BT = place_rollouts(rollouts, self.sizes, self._shape)
      draws = self._verifier(params, batch, seed_BT)
      num_before = num_replaced
      for n, rollout in enumerate(rollouts):
        span = rollout_span(n, rollout, self.sizes)
        differs = (draws.token_BT[span] != rollout.ids) & rollout.is_own
        if differs.any():
          first = int(np.argmax(differs))
          num_replaced += 1
          rollout.gaps.append(float(draws.gap_BT[span][first]))
          drawn = int(draws.token_BT[span][first])
          rollout.cut(first)
          rollout.write(drawn, self._stop_token_ids, self.sizes.completion)
      if num_replaced == num_before:
        return num_replaced, num_rounds, draws.log_prob_BT
      self._write(rollouts)
    raise UserError(
      f"rollout_verification=exact: after {MAX_ROUNDS} passes tokens of the engine still differ "
      "from the trained program's: the two do not compute the same model; write "
      "rollout_verification=off, and report the config"
    )

  def _text(self, ids: Sequence[int], before: Sequence[int]) -> str:
    """The text of tokens after others."""
    detokenizer = Detokenizer(self._tokenizer, before)
    text = ""
    for token in ids:
      text += detokenizer.push(TokenEvent(_NO_REQUEST, token)).text
    return text + detokenizer.push(TokenEvent(_NO_REQUEST, None, STOP)).text

  def _reward(self, rollouts: Sequence[Rollout], texts: Sequence[str]) -> np.ndarray:
    """reward_NR of all functions."""
    prompts = [rollout.prompt for rollout in rollouts]
    rewards = _on_process_0(lambda: self._rewards(prompts, texts).tolist())
    return np.asarray(rewards, np.float64)

  def _build_set(
    self,
    rollouts: list[Rollout],
    texts: list[str],
    reward_NR: np.ndarray,
    log_prob_BT: np.ndarray,
    row: Row,
  ) -> RolloutSet:
    cfg = self._cfg.rollouts
    reward_N = reward_NR @ self._rewards.weight_R
    reward_N -= self._overlong_penalties(rollouts)
    reward_NG = reward_N.reshape(-1, cfg.num_generations)
    advantage_N = ADVANTAGES[cfg.advantage_estimator](reward_NG).reshape(-1)
    deviation_N = reward_NG.std(axis=1)
    row |= {
      "reward": float(reward_N.mean()),
      "reward_std": float(deviation_N.mean()),
      "silent_groups": float((deviation_N == 0).mean()),
      "completion_length": float(np.mean([each.num_own for each in rollouts])),
      "truncated_share": float(np.mean([each.is_truncated for each in rollouts])),
    }
    if len(self._rewards.names) > 1:
      for name, reward in zip(self._rewards.names, reward_NR.mean(axis=0), strict=True):
        row[f"reward/{name}"] = float(reward)
    return RolloutSet(
      cfg.num_generations, rollouts, texts, reward_NR, advantage_N, log_prob_BT, row
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


def _on_process_0(function: Callable[[], Json]) -> Json:
  """Call a function of the user on process 0; all processes return its value, or its error."""
  outcome: JsonObject = {}
  if jax.process_index() == 0:
    try:
      outcome = {"value": function()}
    except UserError as error:
      outcome = {"error": str(error)}
  outcome = all_gather_object(outcome)[0]
  if "error" in outcome:
    raise UserError(outcome["error"])
  return outcome["value"]
