"""Conversations as text, by the Jinja2 templates that models are published with."""

import datetime
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from maxlite.config.errors import UserError
from maxlite.data.tokenizers.tokenizer import HIDDEN

Message = Mapping[str, Any]  # {"role": ..., "content": ...}, and what else a template reads
# Around what a template says is generated; Unicode keeps them for such uses.
OPEN, CLOSE = "\ufdd1", "\ufdd2"
_OURS = re.compile(f"[{HIDDEN}{OPEN}{CLOSE}]")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTemplate:
  """A template, which may use what those of the `transformers` package may.

  Special tokens that a conversation spells are hidden: they stay text when the result is encoded.

  Args:
    source: the template's text.
    place: where it is from, for error messages.
    names: of special tokens, such as `bos_token`; by them the template knows the tokens.
    specials: the spelling of every special token.
    today: what day it is, should the template ask.

  Raises:
    UserError: it is no template.
  """

  def __init__(
    self,
    source: str,
    *,
    place: str,
    names: Mapping[str, str],
    specials: Sequence[str],
    today: Callable[[], datetime.date],
  ) -> None:
    self._place, self._names, self._specials = place, names, tuple(specials)
    self._marks_answers = bool(_GENERATION.search(source))
    spelled = "|".join(map(re.escape, specials)) or "(?!)"  # (?!) is nowhere
    self._spelled = re.compile(f"(?=(?:{spelled}))(.)", re.DOTALL)
    extensions: list[Any] = [_Generation, loopcontrols]
    environment = ImmutableSandboxedEnvironment(
      trim_blocks=True, lstrip_blocks=True, extensions=extensions
    )
    environment.filters["tojson"] = _to_json
    strftime_now = lambda form: today().strftime(form)
    environment.globals |= {"raise_exception": _raise, "strftime_now": strftime_now}
    try:
      self._template = environment.from_string(source)
    except jinja2.TemplateError as error:
      raise UserError(f"{place} is no Jinja2 template: {_one_line(error)}") from None

  def render(self, messages: Sequence[Message], *, prompts_answer: bool = False) -> str:
    """The conversation; with `prompts_answer`, up to where the assistant speaks next."""
    return _cut_out(self._render(messages, prompts_answer))[0]

  def answers(self, messages: Sequence[Message]) -> list[tuple[str, list[tuple[int, int]]]]:
    """Texts with all answers of the assistant, and where in each they begin and end.

    An answer is what stands in a {% generation %} block. Where the template has none, it is what
    the conversation up to and with an assistant's message has beyond that up to where the assistant
    is prompted; white space behind a special token that ends it is no part of it. There is one
    text, the conversation, unless such a template renders its beginnings otherwise than by
    themselves: then there is one for each answer, which ends with it.

    Raises:
      UserError: the template refuses the conversation, or, having no such block, prompts the
        assistant by something that its answers do not begin with.
    """
    text = self._render(messages, prompts_answer=False)
    if self._marks_answers:
      return [_cut_out(text)]
    turns = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    found = [self._answer(messages[: n + 1]) for n in turns]
    if all(text.startswith(through) for through, _ in found):
      return [(text, [span for _, span in found])]
    return [(through, [span]) for through, span in found]

  def _answer(self, messages: Sequence[Message]) -> tuple[str, tuple[int, int]]:
    """(a conversation that ends with an answer, where in it that is)"""
    before = self._render(messages[:-1], prompts_answer=True)
    text = self._render(messages, prompts_answer=False)
    if not text.startswith(before):
      raise UserError(
        f"{self._place} prompts the assistant by something that answers do not begin with, so that "
        "they cannot be told from it: set chat_template_path to one that has {% generation %} and "
        "{% endgeneration %} around what the assistant says"
      )
    trimmed = text.rstrip()
    whole = trimmed if trimmed.endswith(self._specials) else text
    return text, (len(before), max(len(whole), len(before)))

  def _render(self, messages: Sequence[Message], prompts_answer: bool) -> str:
    try:
      return self._template.render(
        messages=self._plain(list(messages)),
        tools=None,
        documents=None,
        add_generation_prompt=prompts_answer,
        **self._names,
      )
    except Exception as error:  # a template may fail in any way that a program may
      raise UserError(f"{self._place}: {_one_line(error)}") from None

  def _plain(self, value: Any) -> Any:
    """`value` without anything in its texts that would be a special token or a mark of ours."""
    if isinstance(value, str):
      whole = value.encode(errors="replace").decode()  # JSON can spell half of a surrogate pair
      text = _OURS.sub("\N{REPLACEMENT CHARACTER}", whole)
      return self._spelled.sub(rf"\1{HIDDEN}", text)
    if isinstance(value, Mapping):
      return {key: self._plain(inner) for key, inner in value.items()}
    return [self._plain(inner) for inner in value] if isinstance(value, list) else value


class _Generation(Extension):
  """{% generation %} ... {% endgeneration %}: what the assistant says, between OPEN and CLOSE."""

  tags = {"generation"}  # noqa: RUF012 (as the base class declares it)

  def parse(self, parser: Parser) -> Node:
    line = next(parser.stream).lineno
    body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
    return CallBlock(self.call_method("_between"), [], [], body).set_lineno(line)

  def _between(self, caller: Any) -> str:
    return f"{OPEN}{caller()}{CLOSE}"


def _cut_out(text: str) -> tuple[str, list[tuple[int, int]]]:
  """`text` without OPEN and CLOSE, and where in it what stood between them begins and ends."""
  kept, begins, ends = "", [], []
  for part in re.split(f"([{OPEN}{CLOSE}])", text):
    if part == OPEN:
      begins.append(len(kept))
    elif part == CLOSE:
      ends.append(len(kept))
    else:
      kept += part
  return kept, list(zip(begins, ends, strict=True))


def _to_json(
  value: Any,
  ensure_ascii: bool = False,
  indent: int | None = None,
  separators: tuple[str, str] | None = None,
  sort_keys: bool = False,
) -> str:
  """As `transformers` has it, unlike Jinja's own, which escapes what HTML would read."""
  return json.dumps(
    value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
  )


def _raise(message: str) -> NoReturn:
  raise jinja2.TemplateError(message)


def _one_line(error: Exception) -> str:
  return " ".join(str(error).split())
