"""A completion that the model writes, in one or several turns."""

import dataclasses
from collections.abc import Sequence

from maxlite.data.sources.chat_template import Message
from maxlite.data.sources.prompts import Prompt
from maxlite.inference.batcher import LENGTH, STOP


@dataclasses.dataclass
class Answer:
  """What an environment says after a turn of the model."""

  num_before: int  # Tokens of the rollout before it.
  text: str  # Of the turn.
  messages: list[Message]


@dataclasses.dataclass
class Rollout:
  """A prompt, and what follows it so far.

  Attributes:
    prompt: the prompt.
    seed: of the noise; token number `n` of the sequence is drawn with `fold_in(key(seed), n)`.
    ids: the tokens after the prompt, stop tokens included.
    is_own: for each of them, whether the model has written it.
    has_loss: for each of them, whether it is trained; a stop string of the model's is not.
    answers: of the environment; a turn of the model follows each.
    is_turn_over: whether the latest token ends the turn of the model.
    finish_reason: why it has ended: STOP, or LENGTH; empty: it has not.
    gaps: for each token that verification has replaced, by how much it was behind [nats].
  """

  prompt: Prompt
  seed: int
  ids: list[int] = dataclasses.field(default_factory=list)
  is_own: list[bool] = dataclasses.field(default_factory=list)
  has_loss: list[bool] = dataclasses.field(default_factory=list)
  answers: list[Answer] = dataclasses.field(default_factory=list)
  is_turn_over: bool = False
  finish_reason: str = ""
  gaps: list[float] = dataclasses.field(default_factory=list)

  @property
  def is_truncated(self) -> bool:
    """Whether it ended by its length."""
    return self.finish_reason == LENGTH

  @property
  def num_own(self) -> int:
    """The number of tokens that the model has written."""
    return sum(self.is_own)

  @property
  def turn(self) -> list[int]:
    """The tokens of the latest turn of the model."""
    start = len(self.ids)
    while start and self.is_own[start - 1]:
      start -= 1
    return self.ids[start:]

  def write(self, token: int, stop_token_ids: Sequence[int], max_tokens: int) -> None:
    """Add a token of the model."""
    self.ids.append(token)
    self.is_own.append(True)
    self.has_loss.append(True)
    if token in stop_token_ids:
      self.is_turn_over = True
    elif len(self.ids) >= max_tokens:
      self.finish_reason = LENGTH

  def answer(self, answer: Answer, ids: Sequence[int], max_tokens: int) -> None:
    """Add an answer of the environment, after which there must be room for a token of the model."""
    if len(self.ids) + len(ids) >= max_tokens:
      self.finish_reason = LENGTH
      return
    self.answers.append(answer)
    self.ids += ids
    self.is_own += [False] * len(ids)
    self.has_loss += [False] * len(ids)
    self.is_turn_over = False

  def stop(self, num_tokens: int) -> None:
    """End the turn with a stop string, which the last tokens spell."""
    self.has_loss[-num_tokens:] = [False] * num_tokens
    self.is_turn_over = True
    self.finish_reason = ""

  def end(self) -> None:
    """End it after a turn."""
    self.finish_reason = STOP

  def cut(self, length: int) -> None:
    """Remove all after the first `length` tokens, of which the next is the model's."""
    del self.ids[length:]
    del self.is_own[length:]
    del self.has_loss[length:]
    self.answers = [answer for answer in self.answers if answer.num_before < length]
    self.is_turn_over = False
    self.finish_reason = ""
