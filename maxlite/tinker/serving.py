"""`maxlite.tinker`: serve a run as the base of adapters, for the official Tinker client."""

import contextlib
import socket
from pathlib import Path

from maxlite.adapters.engine import AdamW, AdapterEngine, AdapterSpec
from maxlite.config import Config
from maxlite.data.tokenizer import Tokenizer
from maxlite.errors import UserError, exit_on_user_error, write_line
from maxlite.inference.prompts import open_text_tokenizer
from maxlite.inference.server.address import (
  allowed_hosts,
  read_api_key,
  url_host,
  warn_if_open,
)
from maxlite.registry import SOURCES
from maxlite.runs.open_run import open_trained
from maxlite.runs.saved_run import run_folder
from maxlite.tinker.sampler import Sampler
from maxlite.tinker.store import Store
from maxlite.tinker.worker import Worker

_DATABASE = "tinker.sqlite"
_MAX_CONNECTIONS = 4096  # a client holds one open for every future that it waits for


def run_serving(cfg: Config, listening: socket.socket) -> int:
  """Serve on the socket `listening` until interrupted."""
  with exit_on_user_error("maxlite.tinker"):
    try:
      import uvicorn

      from maxlite.inference.server.http_server import server_config
      from maxlite.tinker.http_api import Api
    except ImportError as error:
      raise UserError(
        f"serving needs {error.name}: pip install 'maxlite[serve]', or starlette and uvicorn"
      ) from None
    tokenizer = None
    if not SOURCES.entry(cfg.data.dataset_type).is_synthetic:
      tokenizer = open_text_tokenizer(cfg)
    store = Store(run_folder(cfg).directory / _DATABASE)
    program, params = open_trained(cfg)
    max_length = cfg.data.max_target_length
    engine = AdapterEngine(
      cfg.model,
      program.sharder,
      params,
      num_slots=cfg.serve.max_loras + 1,  # one for the sampler
      max_rank=cfg.serve.max_lora_rank,
      max_length=max_length,
    )
  host = cfg.serve.serve_host
  api_key = read_api_key(cfg.serve)
  warn_if_open(host, api_key)
  sampler = Sampler(
    engine,
    tokenizer,
    scoring_slot=cfg.serve.max_loras,
    num_rows=cfg.generate.decode_batch_size,
  )
  _compile_ahead(engine)
  base_model = cfg.serve.served_model_name or cfg.run.run_name
  worker = Worker(store, engine, sampler, base_model)
  api = Api(
    store,
    worker,
    engine.empty(),
    base_model=base_model,
    max_length=max_length,
    tokenizer_id=_tokenizer_id(cfg, tokenizer),
    api_key=api_key,
  )
  server = uvicorn.Server(
    server_config(
      api.build_app(allowed_hosts(host)),
      max_connections=_MAX_CONNECTIONS,
      max_per_address=cfg.serve.serve_connections_per_address,
      log_level="warning",
    )
  )

  def end() -> None:
    server.should_exit = True

  worker.start(api.on_result, end)
  url = f"http://{url_host(host)}:{listening.getsockname()[1]}"
  write_line(f"serving {base_model} to the Tinker client: TINKER_BASE_URL={url}")
  with contextlib.suppress(KeyboardInterrupt):
    server.run([listening])
  worker.close()
  store.close()
  if worker.error is not None:
    raise worker.error
  return 0


def _compile_ahead(engine: AdapterEngine) -> None:
  """Compile what clients should not wait for while the store is locked."""
  engine.join(0, engine.new_adapter(AdapterSpec(rank=1)))
  engine.update(0, AdamW())
  engine.leave(0)


def _tokenizer_id(cfg: Config, tokenizer: Tokenizer | None) -> str:
  """The folder of the tokenizer, if `transformers` can read it."""
  if tokenizer is None or cfg.data.tokenizer_type != "huggingface":
    return ""
  folder = Path(cfg.data.tokenizer_path).resolve().parent
  is_readable = (folder / "tokenizer.json").is_file() and ":" not in str(folder)
  return str(folder) if is_readable else ""
