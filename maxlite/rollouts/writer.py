"""Completions of prompts, written by the engine turn by turn, as texts and tokens."""

import functools
from collections.abc import Callable, Mapping, Sequence

import jax

from maxlite.config.plugins import import_function
from maxlite.config.schema import Config
from maxlite.data.sources.chat import ChatEncoder, check_messages
from maxlite.data.sources.chat_template import Message
from maxlite.data.tokenizer import ChatTokenizer, Tokenizer
from maxlite.errors import UserError
from maxlite.inference.batcher import STOP, Batcher, TokenEvent
from maxlite.inference.detokenizer import Detokenizer
from maxlite.inference.engine import Engine, GenerationRequest
from maxlite.inference.inference_params import inference_model, inference_params
from maxlite.inference.sampling import SamplingParams
from maxlite.rollouts.process_0 import on_process_0
from maxlite.rollouts.rollout import Answer, Rollout
from maxlite.sharding import Sharder
from maxlite.sharding.pytree import PyTree
from maxlite.storage.json_values import Json, JsonObject

_NO_REQUEST = GenerationRequest((), 0)  # Of tokens that are only converted to text.


class RolloutWriter:
  """Writes rollouts with given parameters; only the first call compiles.

  All processes of a run call it with the same prompts, and get the same tokens.
  """

  def __init__(
    self,
    cfg: Config,
    sharder: Sharder,
    tokenizer: Tokenizer,
    chat: ChatEncoder | None,
    *,
    num_rows: int,
    prompt_length: int,
    completion_length: int,
    temperature: float,
    stop: Sequence[str] = (),
    environment: str = "",
  ) -> None:
    """
    Args:
      chat: encodes the turns of a conversation; None: prompts are texts.
      num_rows: rollouts that are written at once.
      prompt_length: tokens of a prompt at most.
      completion_length: tokens of a completion at most, with the answers of an environment.
      stop: strings that end a turn of the model.
      environment: FILE.py:FUNCTION that answers turns of the model; empty: there is one turn.

    Raises:
      UserError: the environment cannot be imported.
    """
    self._cfg = cfg
    self._sharder = sharder
    self._tokenizer = tokenizer
    self._chat = chat
    self._num_rows = num_rows
    self._prompt_length = prompt_length
    self._completion_length = completion_length
    self._temperature = temperature
    self._stop = tuple(stop)
    self._environment: Callable[[list[Message]], Sequence[Message] | None] | None = None
    if environment:
      self._environment = import_function("rollout_environment", environment)
    self.stop_token_ids = tuple(tokenizer.stop_token_ids)
    if chat is not None:
      self.stop_token_ids = tuple(chat.stop_token_ids)
    self._convert = jax.jit(functools.partial(inference_params, cfg.model))
    self._engine: Engine | None = None

  def load(self, params: PyTree) -> None:
    """Give the engine the parameters of the trained model."""
    converted = self._convert(params)
    if self._engine is not None:
      self._engine.load(converted)
      return
    num_shards = self._sharder.num_shards("activation_batch")
    max_length = self._prompt_length + self._completion_length
    self._engine = Engine(
      inference_model(self._cfg.model, self._sharder),
      converted,
      num_rows=-(-self._num_rows // num_shards) * num_shards,
      max_length=max_length,
      stop_token_ids=self.stop_token_ids,
      # Two lengths of prompts: of the set, and of what verification has written on from.
      min_prompt_length=self._prompt_length,
      prompt_growth=max_length,
    )

  def unload(self) -> None:
    """Free the memory of the engine until `load`."""
    assert self._engine is not None
    self._engine.unload()

  def write(self, rollouts: Sequence[Rollout]) -> None:
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
    sampling = SamplingParams(temperature=self._temperature)
    by_request = {}
    for rollout in rollouts:
      request = GenerationRequest(
        prompt=[*rollout.prompt.ids, *rollout.ids],
        max_new_tokens=self._completion_length - len(rollout.ids),
        sampling=sampling,
        seed=rollout.seed,
      )
      by_request[request] = rollout
    waiting = list(by_request)
    while waiting or not batcher.is_idle:
      admitted = waiting[: batcher.num_free]
      del waiting[: len(admitted)]
      for event in batcher.add(admitted) or batcher.step():
        rollout = by_request[event.request]
        if rollout.is_turn_over:  # by a stop string
          continue
        token = event.token if event.stop_token is None else event.stop_token
        assert token is not None
        self.add(rollout, token)
        if rollout.is_turn_over:
          batcher.cancel(event.request)

  def _answer(self, rollout: Rollout) -> None:
    """Let the environment answer the turn that is over; without one, the rollout ends."""
    environment = self._environment
    if environment is None or len(rollout.answers) + 1 >= self._cfg.rollouts.rollout_turns:
      rollout.end()
      return
    if self._chat is None or isinstance(rollout.prompt.text, str):
      raise UserError(
        f"{rollout.prompt.place}: rollout_environment answers conversations, and the prompt is a "
        'text; write {"prompt": [{"role": "user", "content": "..."}]}, with a chat template'
      )
    text = self.text(rollout.turn, rollout.prompt.ids)
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

    said = on_process_0(ask)
    if not said:
      rollout.end()
      return
    answer = Answer(len(rollout.ids), text, check_messages(said, "rollout_environment: messages"))
    ids = self._chat.continuation(messages, answer.messages, rollout.prompt.variables)
    if ids and ids[0] == rollout.ids[-1]:  # the end of the turn, which the model has written
      ids = ids[1:]
    rollout.answer(answer, ids, self._completion_length)

  def add(self, rollout: Rollout, token: int) -> None:
    """Add a token of the model."""
    rollout.write(token, self.stop_token_ids, self._completion_length)
    for stop in self._stop:
      turn = rollout.turn
      # A character has at most four bytes, which may be a token each.
      end = turn[-4 * len(stop) - 4 :]
      if stop in self._tokenizer.decode(end):
        num_tokens = 1
        while stop not in self._tokenizer.decode(end[-num_tokens:]):
          num_tokens += 1
        rollout.stop(num_tokens)
        return

  def text(self, ids: Sequence[int], before: Sequence[int]) -> str:
    """The text of tokens after others."""
    detokenizer = Detokenizer(self._tokenizer, before, self._stop)
    text = ""
    for token in ids:
      text += detokenizer.push(TokenEvent(_NO_REQUEST, token)).text
    return text + detokenizer.push(TokenEvent(_NO_REQUEST, None, STOP)).text

  def texts(self, rollouts: Sequence[Rollout]) -> list[str]:
    """The texts of completions."""
    return [self.text(rollout.ids, rollout.prompt.ids) for rollout in rollouts]

  def row(self, rollout: Rollout, text: str, rewards: Mapping[str, float]) -> JsonObject:
    """What is written of a completion to a run's folder."""
    special = {}
    if isinstance(self._tokenizer, ChatTokenizer):
      special = {token: spelling for spelling, token in self._tokenizer.special_tokens.items()}
    spelled = [special.get(token) or self._tokenizer.decode([token]) for token in rollout.ids]
    return {
      "text": text,
      "tokens": spelled,
      "is_own": list(map(int, rollout.is_own)),
      "rewards": dict(rewards),
      "finish_reason": rollout.finish_reason,
    }
