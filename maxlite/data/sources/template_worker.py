"""Rendering of Jinja2 templates in a process with limits, since a template can take for ever.

`render` starts this file as a program, and again after a template that exceeded the limits. Jinja's
sandbox protects Python's internals, but not from `10**(10**8)` or nested loops.
"""

import atexit
import contextlib
import datetime
import functools
import json
import os
import resource
import signal
import subprocess
import sys
import threading
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
_LOCK = threading.Lock()  # of the worker's pipes


class RenderError(ValueError):
  """A template is invalid, rejects its variables, or exceeds the limits."""


def render(source: str, today: datetime.date, /, **variables: object) -> str:
  """Render the template `source`, or only compile it if there are no `variables`."""
  request = json.dumps({"source": source, "today": today.isoformat(), "variables": variables})
  with _LOCK:
    worker = _worker(os.getpid())  # a forked process needs its own pipes
    assert worker.stdin
    assert worker.stdout
    with contextlib.suppress(BrokenPipeError):  # it was killed in the meantime
      worker.stdin.write(f"{request}\n")
      worker.stdin.flush()
    line = worker.stdout.readline()
    if not line:
      _stop(worker)
      _worker.cache_clear()
      limits = f"{CPU_SECONDS} seconds or {MEMORY_BYTES >> 20} MB"
      raise RenderError(f"it takes more than {limits} to render")
  response = json.loads(line)
  if "error" in response:
    raise RenderError(response["error"])
  return response["text"]


@functools.cache
def _worker(_process_id: int) -> subprocess.Popen[str]:
  """Start the worker of this process."""
  # -P: the files beside this one must not hide modules of the standard library.
  command = [sys.executable, "-P", __file__, str(CPU_SECONDS)]
  worker = subprocess.Popen(
    command,
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    text=True,
    start_new_session=True,
  )
  atexit.register(_stop, worker)
  return worker


def _stop(worker: subprocess.Popen[str]) -> None:
  with contextlib.suppress(BrokenPipeError), worker:  # closes its pipes and waits
    worker.kill()


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
  """Return `x` as JSON, as in `transformers`; Jinja's own filter escapes HTML."""
  return json.dumps(
    x,
    ensure_ascii=ensure_ascii,
    indent=indent,
    separators=separators,
    sort_keys=sort_keys,
  )


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
    response = json.dumps(_response(**json.loads(line)))
    signal.setitimer(signal.ITIMER_PROF, 0)
    sys.stdout.write(f"{response}\n")
    sys.stdout.flush()


if __name__ == "__main__":
  main()
