"""Rendering of Jinja2 templates in a process with limits, since a template can take for ever.

`render` starts this file as a program, and again after a template that exceeded the limits. Jinja's
sandbox protects Python's internals, but not from `10**(10**8)` or nested loops.
"""

import atexit
import contextlib
import datetime
import functools
import itertools
import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from typing import NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Unicode noncharacters around the output of {% generation %} blocks.
OPEN = "\ufdd1"
CLOSE = "\ufdd2"
# Limits of one rendering.
CPU_SECONDS = 5
MEMORY_BYTES = 512 << 20
MAX_LENGTH = 16 << 20  # characters
# Workers by process, since a forked one needs its own pipes. One per thread that renders at once.
_IDLE: defaultdict[int, list[subprocess.Popen[str]]] = defaultdict(list)
_NUMBERS = itertools.count()  # of requests; answers repeat them


class RenderError(ValueError):
  """A template is invalid, rejects its variables, or exceeds the limits."""


def render(source: str, today: datetime.date, /, **variables: object) -> str:
  """Render the template `source`, or only compile it if there are no `variables`.

  A worker is in `_IDLE` only between a complete answer and the next request. Therefore no request
  can read what an interrupted one left in the pipes. A worker that another program ends is replaced
  once.

  Raises:
    RenderError: the template is invalid, rejects `variables`, or exceeds the limits.
  """
  number = next(_NUMBERS)
  request = {"number": number, "source": source, "today": today.isoformat(), "variables": variables}
  line = f"{json.dumps(request)}\n"
  answer = None
  for _ in range(2):
    idle = _IDLE[os.getpid()]
    worker = idle.pop() if idle else _start()
    try:
      answer = _ask(worker, line, number)
    finally:
      if answer is None:
        _stop(worker)
    if answer is not None:
      idle.append(worker)
      break
    if worker.returncode == -signal.SIGPROF:
      break
  if answer is None:
    limits = f"{CPU_SECONDS} seconds or {MEMORY_BYTES >> 20} MB"
    raise RenderError(f"it takes more than {limits} to render")
  if "error" in answer:
    raise RenderError(answer["error"])
  return answer["text"]


def _ask(worker: subprocess.Popen[str], line: str, number: int) -> dict[str, str] | None:
  """Send a request; return the complete answer to it, or None if the worker ends before."""
  assert worker.stdin
  assert worker.stdout
  with contextlib.suppress(BrokenPipeError):
    worker.stdin.write(line)
    worker.stdin.flush()
  answer = worker.stdout.readline()
  if not answer.endswith("\n"):
    return None
  response = json.loads(answer)
  if response.pop("number") != number:
    raise RuntimeError("the template worker answered another request")
  return response


def _start() -> subprocess.Popen[str]:
  # -P: the files next to this one must not hide modules of the standard library.
  command = [sys.executable, "-P", __file__, str(CPU_SECONDS)]
  return subprocess.Popen(
    command,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    text=True,
    start_new_session=True,
  )


def _stop(worker: subprocess.Popen[str]) -> None:
  worker.kill()
  with contextlib.suppress(BrokenPipeError), worker:  # closes its pipes and waits
    pass


@atexit.register
def _stop_idle() -> None:
  for worker in _IDLE.pop(os.getpid(), []):
    _stop(worker)


class _Generation(Extension):
  """{% generation %} ... {% endgeneration %}: puts the block's output between OPEN and CLOSE."""

  tags = {"generation"}  # noqa: RUF012 (as the base class declares it)

  def parse(self, parser: Parser) -> Node:
    line = next(parser.stream).lineno
    body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
    return CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

  def _mark(self, caller: Callable[[], str]) -> str:
    return f"{OPEN}{caller()}{CLOSE}"


@functools.lru_cache(maxsize=8)
def _compile(source: str, today: str) -> jinja2.Template:
  """Compile a template with the filters and functions that `transformers` offers."""
  environment = ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[_Generation, loopcontrols],
  )
  environment.filters["tojson"] = _to_json
  environment.globals["raise_exception"] = _raise
  environment.globals["strftime_now"] = datetime.date.fromisoformat(today).strftime
  return environment.from_string(source)


def _to_json(
  x: object,
  ensure_ascii: bool = False,
  indent: int | None = None,
  separators: tuple[str, str] | None = None,
  sort_keys: bool = False,
) -> str:
  """Return `x` as JSON, as in `transformers`; Jinja's own filter escapes HTML.

  The noncharacters that mark special tokens in messages stay as they are.
  """
  text = json.dumps(
    x,
    ensure_ascii=False,
    indent=indent,
    separators=separators,
    sort_keys=sort_keys,
  )
  if ensure_ascii:
    return re.sub("[^\x00-\x7e\ufdd0-\ufdef]", lambda match: json.dumps(match[0])[1:-1], text)
  return text


def _raise(message: str) -> NoReturn:
  raise jinja2.TemplateError(message)


def _response(source: str, today: str, variables: dict[str, object]) -> dict[str, str]:
  """Return the rendered `text`, or an `error`."""
  text = ""
  try:
    template = _compile(source, today)
    if variables:
      text = template.render(**variables)
  except MemoryError:
    return {"error": f"it takes more than {MEMORY_BYTES >> 20} MB to render"}
  except Exception as error:  # a template can raise any other exception
    return {"error": " ".join(str(error).split()) or type(error).__name__}
  if len(text) > MAX_LENGTH:
    return {"error": f"its output of {len(text)} characters exceeds {MAX_LENGTH}"}
  return {"text": text}


def main() -> None:
  """Answer requests, a line of JSON each; SIGPROF ends the process at its CPU limit."""
  resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
  for line in sys.stdin:
    signal.setitimer(signal.ITIMER_PROF, float(sys.argv[1]))
    request = json.loads(line)
    number = request.pop("number")
    answer = json.dumps({"number": number, **_response(**request)})
    signal.setitimer(signal.ITIMER_PROF, 0)
    sys.stdout.write(f"{answer}\n")
    sys.stdout.flush()


if __name__ == "__main__":
  main()
