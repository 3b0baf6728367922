"""`maxlite.serve`: serve the latest checkpoint of a run over HTTP."""

import contextlib
import datetime
import socket

from maxlite.config import Config
from maxlite.data.sources.chat import open_chat
from maxlite.errors import UserError, exit_on_user_error, write_line
from maxlite.inference.batcher import Batcher
from maxlite.inference.generation import build_engine
from maxlite.inference.prompts import open_text_tokenizer
from maxlite.inference.server.address import (
  allowed_hosts,
  read_api_key,
  url_host,
  warn_if_open,
)
from maxlite.inference.server.engine_thread import EngineThread
from maxlite.runs.open_run import open_trained

# All programs are compiled before the first answer, so there are few: more padding costs less.
_MIN_PROMPT_LENGTH = 64
_PROMPT_GROWTH = 4


def run_serving(cfg: Config, listening: socket.socket) -> int:
  """Serve on the socket `listening` until interrupted."""
  with exit_on_user_error("maxlite.serve"):
    try:
      from maxlite.inference.server import http_server
      from maxlite.inference.server.http_api import Api
    except ImportError as error:
      raise UserError(
        f"serving needs {error.name}: pip install 'maxlite[serve]', or starlette and uvicorn"
      ) from None
    tokenizer = open_text_tokenizer(cfg)
    program, params = open_trained(cfg)
    chat = open_chat(cfg.data, tokenizer, datetime.date.today)
    stop_token_ids = tokenizer.stop_token_ids
    chat_prompt = None
    if chat is not None:
      stop_token_ids = chat.stop_token_ids
      chat_prompt = chat.prompt
    engine = build_engine(
      cfg,
      program.sharder,
      params,
      stop_token_ids,
      min_prompt_length=_MIN_PROMPT_LENGTH,
      prompt_growth=_PROMPT_GROWTH,
    )
  host = cfg.serve.serve_host
  api_key = read_api_key(cfg.serve)
  warn_if_open(host, api_key)
  url = f"http://{url_host(host)}:{listening.getsockname()[1]}/"

  def report_ready() -> None:
    write_line(f"compiled in {engine.compile_seconds:.1f} s")
    write_line(f"serving {cfg.run.run_name} on {url}")

  thread = EngineThread(Batcher(engine), cfg.serve.serve_queue_size, report_ready)
  write_line(f"compiling; until then {url}health is 503, and requests wait")
  with thread.running() as engine_thread:
    api = Api(
      engine_thread,
      tokenizer,
      chat_prompt,
      name=cfg.run.run_name,
      max_length=engine.max_length,
      api_key=api_key,
    )
    server = http_server.HttpServer(
      api.build_app(allowed_hosts(host)),
      engine_thread,
      max_per_address=cfg.serve.serve_connections_per_address,
    )
    with contextlib.suppress(KeyboardInterrupt):
      server.run([listening])
  if thread.compile_error is not None:
    raise thread.compile_error
  return 0
