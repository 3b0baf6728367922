"""`maxlite.serve`: serve the latest checkpoint of a run over HTTP."""

import datetime
import ipaddress
import sys
from collections.abc import Sequence

from maxlite.config import Config, exit_on_user_error
from maxlite.config.errors import UserError
from maxlite.data.sources.chat import open_chat
from maxlite.inference.batcher import Batcher
from maxlite.inference.generation import build_engine, open_text_tokenizer
from maxlite.inference.server.engine_thread import EngineThread
from maxlite.training.open_run import config_of_run, open_trained

_EXTRA_CONNECTIONS = 200  # to answer requests that the full queue rejects


def run_serving(cfg: Config, argv: Sequence[str]) -> int:
  """Serve until interrupted."""
  with exit_on_user_error("maxlite.serve"):
    try:
      import uvicorn

      from maxlite.inference.server.http_api import Api
    except ImportError as error:
      raise UserError(
        f"serving needs {error.name}: pip install 'maxlite[serve]', or starlette and uvicorn"
      ) from None
    cfg = config_of_run(cfg, argv)
    tokenizer = open_text_tokenizer(cfg)
    trainer, params, _ = open_trained(cfg)
    chat = open_chat(cfg.data, tokenizer, datetime.date.today)
    engine = build_engine(
      trainer, params, chat.stop_token_ids if chat else tokenizer.stop_token_ids
    )
  engine.compile_ahead()  # not while the first client waits
  sys.stderr.write(f"compiled in {engine.compile_seconds:.1f} s\n")
  with EngineThread(Batcher(engine), cfg.serve.serve_queue_size).running() as engine_thread:
    prompt, max_length = chat.prompt if chat else None, engine.max_length
    api = Api(engine_thread, tokenizer, prompt, name=cfg.run.run_name, max_length=max_length)
    uvicorn.run(
      api.build_app(allowed_hosts(cfg.serve.serve_host)),
      host=cfg.serve.serve_host,
      port=cfg.serve.serve_port,
      limit_concurrency=engine.num_rows + cfg.serve.serve_queue_size + _EXTRA_CONNECTIONS,
      timeout_graceful_shutdown=5,  # [seconds] for open streams after an interrupt
    )
  return 0


def allowed_hosts(host: str) -> list[str]:
  """Return the Host headers to accept if the server listens on `host`.

  On a loopback address other names are rejected: a web page could point them here (DNS rebinding).
  """
  try:
    is_local = ipaddress.ip_address(host).is_loopback
  except ValueError:
    is_local = host == "localhost"
  return [host, "localhost", "127.0.0.1"] if is_local else ["*"]
