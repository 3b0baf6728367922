"""Rendering of conversations with the Jinja2 chat templates of published models."""

import contextlib
import datetime
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from maxlite.data.sources.template_worker import CLOSE, OPEN, RenderError, render
from maxlite.data.tokenizer import ESCAPE
from maxlite.errors import UserError
from maxlite.storage.json_values import Json

# {"role": ..., "content": ...}, and other fields a template reads. The answers in a message with
# "weight": 0 do not count; templates do not see the weight.
Message = Mapping[str, Json]
Variables = Mapping[str, Json]  # of a template, in addition to those that it always has: "tools"
NO_VARIABLES: Variables = MappingProxyType({})
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of one field
# Unicode noncharacters that take the place of the first character of special tokens in messages.
_STAND_INS = [chr(code) for code in range(0xFDD3, 0xFDF0)]
_RESERVED = re.compile("[\ufdd0-\ufdef]")
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

  The text is the same as in `transformers`: messages have no null fields, and their reasoning has
  all of its names. Special tokens spelled inside a message are escaped, so they are encoded as
  plain text.

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
    longest_first = sorted(special_tokens, key=len, reverse=True)
    spelled = "|".join(re.escape(spelling) for spelling in longest_first)
    if not spelled:
      spelled = "(?!)"  # never matches
    self._spelled = re.compile(spelled)
    self._starts = re.compile(f"(?=(?:{spelled}))(.)", re.DOTALL)
    self._wrapped = re.compile(f"{ESCAPE}({spelled}){ESCAPE}")
    first_characters = sorted({spelling[:1] for spelling in special_tokens})
    self._stand_ins = dict(zip(first_characters, _STAND_INS, strict=False))
    try:
      render(source, today())
    except RenderError as error:
      raise UserError(f"{place} is not a Jinja2 template: {error}") from None

  def render(
    self,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = False,
    variables: Variables = NO_VARIABLES,
  ) -> str:
    """Render a conversation, optionally up to the start of the assistant's next answer."""
    messages = self._checked(messages, variables)
    marked_text = self._render(messages, add_generation_prompt, variables)
    return _extract_spans(marked_text).text

  def render_answers(
    self, messages: Sequence[Message], variables: Variables = NO_VARIABLES
  ) -> list[RenderedText]:
    """Render texts that contain all answers of the assistant, and the span of each answer.

    An answer is the output of a {% generation %} block. Without such blocks it is the difference
    between the conversation up to and including an assistant message and the generation prompt
    before it; whitespace after a final special token is excluded. Answers in a message of weight 0
    are left out. The result is one text, the conversation, unless a template without blocks renders
    an earlier answer differently from a last one: then it is one text per answer, which ends with
    it.

    Raises:
      UserError: the template rejects the conversation, drops its tools or calls of tools, or has no
        blocks and a generation prompt that its answers do not start with.
    """
    messages = self._checked(messages, variables)
    text = self._render(messages, False, variables)
    if self._marks_answers:
      marked = _extract_spans(text)
      return [RenderedText(marked.text, self._weighted(marked.answers, messages, variables))]
    prefixes = []
    answers: list[Span] = []
    for n, message in enumerate(messages):
      if message["role"] == "assistant":
        prefix = self._render_last_answer(messages[: n + 1], variables)
        prefixes.append(prefix)
        answers += prefix.answers
    if all(text.startswith(prefix.text) for prefix in prefixes):
      return [RenderedText(text, answers)]
    return [prefix for prefix in prefixes if prefix.answers] or prefixes[:1]

  def render_completion(
    self,
    messages: Sequence[Message],
    num_prompt: int,
    variables: Variables = NO_VARIABLES,
  ) -> RenderedText:
    """Render a conversation, and locate the answers that follow its first `num_prompt` messages.

    Answers are located as by `render_answers`.

    Raises:
      UserError: see `render_answers`; or the template renders an earlier answer differently from a
        last one, and several answers follow.
    """
    prompt = [{**message, "weight": 0} for message in messages[:num_prompt]]
    (*others, text) = self.render_answers([*prompt, *messages[num_prompt:]], variables)
    ends_with_answer = messages[-1]["role"] == "assistant"
    if others or not (ends_with_answer or text.text == self.render(messages, variables=variables)):
      raise UserError(
        f"{self._place} renders an earlier answer differently from a last one, so a conversation "
        "can have only one answer after the prompt, at its end"
      )
    return text

  def _weighted(
    self, answers: Sequence[Span], messages: Sequence[Message], variables: Variables
  ) -> list[Span]:
    """Return the marked answers that are not in messages of weight 0."""
    if all(_is_weighted(message) for message in messages):
      return list(answers)
    kept: list[Span] = []
    num_messages = 0
    num_answers = 0
    for is_weighted, run in itertools.groupby(messages, _is_weighted):
      num_messages += len(list(run))
      before = _extract_spans(self._render(messages[:num_messages], False, variables)).answers
      starts = [answer.start for answer in before]
      if starts != [answer.start for answer in answers[: len(starts)]]:
        raise UserError(
          f"{self._place} marks other answers once a conversation continues, so that those of "
          "weight 0 cannot be located: remove the weights"
        )
      if is_weighted:
        kept += answers[num_answers : len(starts)]
      num_answers = len(starts)
    return kept

  def _render_last_answer(self, messages: Sequence[Message], variables: Variables) -> RenderedText:
    """Render a conversation that ends with an answer, and locate only that answer."""
    before = self._render(messages[:-1], True, variables)
    text = self._render(messages, False, variables)
    if not text.startswith(before):
      raise UserError(
        f"{self._place} has a generation prompt that its answers do not start with, so answers "
        "cannot be located: set chat_template_path to one that has {% generation %} and "
        "{% endgeneration %} around the assistant's messages"
      )
    if not _is_weighted(messages[-1]):
      return RenderedText(text, [])
    end = len(text)
    trimmed = text.rstrip()
    if trimmed.endswith(self._special_tokens):
      end = len(trimmed)
    answer = Span(len(before), max(end, len(before)))
    return RenderedText(text, [answer])

  def _checked(self, messages: Sequence[Message], variables: Variables) -> Sequence[Message]:
    """Return the messages with contents of a form that the template reads.

    Lists of text parts become strings unless the template prints a part as it prints a string.

    Raises:
      UserError: the template prints the same without the tools, the format of the answer, or the
        calls of tools.
    """
    messages = self._with_contents(messages, variables)
    dropped: dict[str, tuple[Sequence[Message], Variables]] = {}
    for name in ("tools", "response_format"):
      if variables.get(name):
        dropped[name] = (messages, {**variables, name: None})
    if any(message.get("tool_calls") for message in messages):
      without = [{**message, "tool_calls": None} for message in messages]
      dropped["tool_calls"] = (without, variables)
    for name, (others, other_variables) in dropped.items():
      if self._prints_the_same(messages, variables, others, other_variables):
        raise UserError(
          f"{self._place} does not print {name}: set chat_template_path to one that does, or "
          f"remove {name} from the conversation"
        )
    return messages

  def _with_contents(self, messages: Sequence[Message], variables: Variables) -> Sequence[Message]:
    """Return the messages with lists of text parts if the template reads them, else strings."""
    if not any(isinstance(message.get("content"), list) for message in messages):
      return messages
    as_string: list[Message] = []
    as_part: list[Message] = []
    for message in messages:
      if isinstance(message.get("content"), list):
        text = "".join(part["text"] for part in message["content"])
        as_string.append({**message, "content": text})
        as_part.append({**message, "content": [{"type": "text", "text": text}]})
      else:
        as_string.append(message)
        as_part.append(message)
    if self._prints_the_same(as_string, variables, as_part, variables):
      return messages
    return as_string

  def _prints_the_same(
    self,
    messages: Sequence[Message],
    variables: Variables,
    others: Sequence[Message],
    other_variables: Variables,
  ) -> bool:
    """Return whether two conversations have the same text, of which the first must have one."""
    text = self._render(messages, False, variables)
    try:
      return text == self._render(others, False, other_variables)
    except UserError:
      return False

  def _render(
    self, messages: Sequence[Message], add_generation_prompt: bool, variables: Variables
  ) -> str:
    """Render a conversation with OPEN and CLOSE around the output of generation blocks.

    Special tokens that messages spell have ESCAPE inside. Without ESCAPE, the text is the one that
    the template prints for the messages as they are. It is rendered again with marks of one of two
    kinds: what takes the place of a character does not change lengths and slices, and a token
    between marks is found by searches.
    """
    given = {"messages": [_fields(message) for message in messages], **variables}
    try:
      given = _replace_strings(given, _without_reserved)
      text = self._render_given(given, add_generation_prompt)
      wrapped = _replace_strings(given, self._wrap)
      if wrapped == given:
        return text
      with_stand_ins = _replace_strings(given, self._insert_stand_ins)
    except RecursionError:
      raise UserError(f"{self._place}: the conversation is nested too deeply: flatten it") from None
    for marked, escape in (
      (with_stand_ins, self._escape_stand_ins),
      (wrapped, self._escape_wrapped),
    ):
      with contextlib.suppress(UserError):
        escaped = escape(self._render_given(marked, add_generation_prompt))
        if escaped.replace(ESCAPE, "") == text:
          return escaped
    raise UserError(
      f"{self._place} depends on special tokens that a message spells, in a way that does not tell "
      "them from its own: remove them from the message"
    )

  def _render_given(self, given: Variables, add_generation_prompt: bool) -> str:
    """Render with these variables; raise UserError if the template rejects them."""
    variables = {"tools": None, "documents": None, **self._variables, **given}
    variables["add_generation_prompt"] = add_generation_prompt
    try:
      text = render(self._source, self._today(), **variables)
    except RenderError as error:
      raise UserError(f"{self._place}: {error}") from None
    if not _has_paired_marks(text) or (OPEN in text and not self._marks_answers):
      raise UserError(
        f"{self._place} prints U+{ord(OPEN):X} or U+{ord(CLOSE):X}, which mark the answers: remove "
        "these characters from it"
      )
    return text

  def _insert_stand_ins(self, string: str) -> str:
    return self._starts.sub(lambda match: self._stand_ins.get(match[1], ESCAPE), string)

  def _escape_stand_ins(self, text: str) -> str:
    for character, stand_in in self._stand_ins.items():
      text = text.replace(stand_in, f"{character}{ESCAPE}")
    return text

  def _wrap(self, string: str) -> str:
    return self._spelled.sub(rf"{ESCAPE}\g<0>{ESCAPE}", string)

  def _escape_wrapped(self, text: str) -> str:
    """Put ESCAPE after each character of a wrapped token; what is left of other marks stays."""
    return self._wrapped.sub(lambda match: ESCAPE.join([*match[1], ""]), text)


def _is_weighted(message: Message) -> bool:
  """Return whether the answers in a message count."""
  return message.get("weight") != 0


def _fields(message: Message) -> dict[str, Json]:
  """Return what a template sees of a message."""
  fields = {}
  for name, value in message.items():
    if value is not None and name != "weight":
      fields[name] = value
  for name in _REASONING:
    if name in fields:
      return {"thinking": fields[name], **fields, "reasoning_content": fields[name]}
  return fields


def _without_reserved(string: str) -> str:
  """Replace reserved characters, and unpaired surrogates, which JSON can spell."""
  valid = string.encode(errors="replace").decode()
  return _RESERVED.sub("\N{REPLACEMENT CHARACTER}", valid)


def _replace_strings(value: Json, replace: Callable[[str], str]) -> Json:
  """Apply `replace` to all strings of `value`, keys included."""
  if isinstance(value, str):
    return replace(value)
  if isinstance(value, Mapping):
    return {replace(key): _replace_strings(inner, replace) for key, inner in value.items()}
  if isinstance(value, list):
    return [_replace_strings(inner, replace) for inner in value]
  return value


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
