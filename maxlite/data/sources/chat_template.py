"""Rendering of conversations with the Jinja2 chat templates of published models."""

import datetime
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from maxlite.config.errors import UserError
from maxlite.config.json_values import Json
from maxlite.data.sources.template_worker import CLOSE, OPEN, RenderError, render
from maxlite.data.tokenizer import ESCAPE

Message = Mapping[str, Json]  # {"role": ..., "content": ...}, and other fields a template reads
_RESERVED = re.compile(f"[{ESCAPE}{OPEN}{CLOSE}]")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Span(NamedTuple):
  """The characters [start, stop) of a text."""

  start: int
  stop: int


class RenderedText(NamedTuple):
  """A rendered conversation, and where the assistant's answers are in it."""

  text: str
  answers: list[Span]


class ChatTemplate:
  """A chat template with the features that `transformers` offers to templates.

  Special tokens spelled inside a message are escaped, so they are encoded as plain text.

  Args:
    source: the template's text.
    place: its origin, for error messages.
    special_tokens_map: the template's variables such as `bos_token`.
    special_tokens: the spelling of every special token.
    today: the date for templates that print it.

  Raises:
    UserError: `source` is not a Jinja2 template.
  """

  def __init__(
    self,
    source: str,
    *,
    place: str,
    special_tokens_map: Mapping[str, str],
    special_tokens: Sequence[str],
    today: Callable[[], datetime.date],
  ) -> None:
    self._source = source
    self._place = place
    self._variables = special_tokens_map
    self._special_tokens = tuple(special_tokens)
    self._today = today
    self._marks_answers = bool(_GENERATION.search(source))
    spelled = "|".join(re.escape(spelling) for spelling in special_tokens)
    if not spelled:
      spelled = "(?!)"  # never matches
    self._spelled = re.compile(f"(?=(?:{spelled}))(.)", re.DOTALL)
    try:
      render(source, today())
    except RenderError as error:
      raise UserError(f"{place} is not a Jinja2 template: {error}") from None

  def render(
    self,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = False,
    variables: Mapping[str, Json] = MappingProxyType({}),
  ) -> str:
    """Render a conversation, optionally up to the start of the assistant's next answer.

    `variables` are further ones of the template, in addition to those that it always has.
    """
    marked_text = self._render(messages, add_generation_prompt, variables)
    return _extract_spans(marked_text).text

  def render_answers(self, messages: Sequence[Message]) -> list[RenderedText]:
    """Render texts that contain all answers of the assistant, and the span of each answer.

    An answer is the output of a {% generation %} block. Without such blocks it is the difference
    between the conversation up to and including an assistant message and the generation prompt
    before it; whitespace after a final special token is excluded. The result is one text, the
    conversation, unless a template without blocks renders an earlier answer differently from a
    last one: then it is one text per answer, which ends with it.

    Raises:
      UserError: the template rejects the conversation, or has no blocks and a generation prompt
        that its answers do not start with.
    """
    text = self._render(messages, add_generation_prompt=False)
    if self._marks_answers:
      return [_extract_spans(text)]
    prefixes = []
    for n, message in enumerate(messages):
      if message["role"] == "assistant":
        prefixes.append(self._render_last_answer(messages[: n + 1]))
    if not all(text.startswith(prefix.text) for prefix in prefixes):
      return prefixes
    answers: list[Span] = []
    for prefix in prefixes:
      answers += prefix.answers
    return [RenderedText(text, answers)]

  def render_completion(self, messages: Sequence[Message], num_prompt: int) -> RenderedText:
    """Render a conversation, and locate the answers that follow its first `num_prompt` messages.

    Answers are located as by `render_answers`.

    Raises:
      UserError: see `render_answers`; or the template renders an earlier answer differently from a
        last one, and several answers follow.
    """
    texts = self.render_answers(messages)
    num_before = _count_answers(messages[:num_prompt])
    if num_before and self._marks_answers:  # a message may have no block, or several
      prompt = self._render(messages[:num_prompt], add_generation_prompt=False)
      num_before = len(_extract_spans(prompt).answers)
    if len(texts) == 1:
      text = texts[0]
      return RenderedText(text.text, text.answers[num_before:])
    if len(texts) > num_before + 1 or messages[-1]["role"] != "assistant":
      raise UserError(
        f"{self._place} renders an earlier answer differently from a last one, so a conversation "
        "can have only one answer after the prompt, at its end"
      )
    return texts[-1]

  def _render_last_answer(self, messages: Sequence[Message]) -> RenderedText:
    """Render a conversation that ends with an answer, and locate only that answer."""
    before = self._render(messages[:-1], add_generation_prompt=True)
    text = self._render(messages, add_generation_prompt=False)
    if not text.startswith(before):
      raise UserError(
        f"{self._place} has a generation prompt that its answers do not start with, so answers "
        "cannot be located: set chat_template_path to one that has {% generation %} and "
        "{% endgeneration %} around the assistant's messages"
      )
    end = len(text)
    trimmed = text.rstrip()
    if trimmed.endswith(self._special_tokens):
      end = len(trimmed)
    answer = Span(len(before), max(end, len(before)))
    return RenderedText(text, [answer])

  def _render(
    self,
    messages: Sequence[Message],
    add_generation_prompt: bool,
    variables: Mapping[str, Json] = MappingProxyType({}),
  ) -> str:
    """Render a conversation with OPEN and CLOSE around the output of generation blocks."""
    try:
      given: dict[str, Json] = {"tools": None, "documents": None, **self._variables}
      given |= {name: self._escape(value) for name, value in variables.items()}
      given["messages"] = self._escape(list(messages))
      given["add_generation_prompt"] = add_generation_prompt
      text = render(self._source, self._today(), **given)
    except RenderError as error:
      raise UserError(f"{self._place}: {error}") from None
    if not _has_paired_marks(text) or (OPEN in text and not self._marks_answers):
      raise UserError(
        f"{self._place} prints U+{ord(OPEN):X} or U+{ord(CLOSE):X}, which mark the answers: remove "
        "these characters from it"
      )
    return text

  def _escape(self, value: Json) -> Json:
    """Escape special tokens and replace reserved characters in all strings of `value`."""
    if isinstance(value, str):
      valid = value.encode(errors="replace").decode()  # JSON can spell an unpaired surrogate
      text = _RESERVED.sub("\N{REPLACEMENT CHARACTER}", valid)
      return self._spelled.sub(rf"\1{ESCAPE}", text)
    if isinstance(value, Mapping):
      return {key: self._escape(inner) for key, inner in value.items()}
    if isinstance(value, list):
      return [self._escape(inner) for inner in value]
    return value


def _count_answers(messages: Sequence[Message]) -> int:
  """Return the number of the assistant's messages."""
  return sum(message["role"] == "assistant" for message in messages)


def _has_paired_marks(text: str) -> bool:
  """Return whether every OPEN in `text` has its CLOSE after it."""
  num_open = 0
  for part in re.findall(f"[{OPEN}{CLOSE}]", text):
    if part == OPEN:
      num_open += 1
    else:
      num_open -= 1
    if num_open < 0:
      return False
  return num_open == 0


def _extract_spans(text: str) -> RenderedText:
  """Remove OPEN and CLOSE from `text`; what was between them are the answers."""
  kept = ""
  begins = []
  ends = []
  for part in re.split(f"([{OPEN}{CLOSE}])", text):
    if part == OPEN:
      begins.append(len(kept))
    elif part == CLOSE:
      ends.append(len(kept))
    else:
      kept += part
  answers = [Span(begin, end) for begin, end in zip(begins, ends, strict=True)]
  return RenderedText(kept, answers)
