"""Opening one data source, with data held out."""

import dataclasses
from pathlib import Path

from maxlite.config.errors import UserError
from maxlite.config.registry import SOURCES
from maxlite.config.schema import DataConfig
from maxlite.data.sources import DataSource

# Where the split by content holds out none or all of few documents: other keys, and what they do.
_FEW_DOCUMENTS = (
  ({"eval_split": "tail"}, "eval_split=tail holds out the tail of the data"),
  ({"eval_fraction": 0.0}, "nothing is held out"),
)


def open_source(
  cfg: DataConfig, vocab_size: int, cache_directory: Path, *, evaluates: bool
) -> DataSource:
  """Open one source. `evaluates`: whether data must be held out, if its documents allow it.

  Raises:
    UserError: see `open_data`.
  """
  open_one = lambda cfg: SOURCES[cfg.dataset_type](cfg, vocab_size, cache_directory)
  source: DataSource = open_one(cfg)
  holds_out = bool(cfg.eval_fraction or cfg.eval_dataset_path)
  by_content = holds_out and cfg.eval_split == "documents" and not cfg.eval_dataset_path
  for keys, effect in _FEW_DOCUMENTS if by_content else ():
    if len(source.train) and (source.eval or not evaluates):
      break
    source = open_one(dataclasses.replace(cfg, **keys))
    summary = f"{source.summary}; too few documents for eval_split=documents, so {effect}"
    source = dataclasses.replace(source, summary=summary)
  if not len(source.train):
    raise UserError(
      f"nothing is left to train on ({source.summary}): lower eval_fraction, or add files to "
      "dataset_path that are not in eval_dataset_path"
    )
  if evaluates and holds_out and not by_content and not source.eval:
    raise UserError(
      f"nothing is held out by eval_split={cfg.eval_split} and eval_fraction={cfg.eval_fraction} "
      f"({source.summary}): raise eval_fraction or name files in eval_dataset_path "
      "(eval_fraction=0: hold out nothing)"
    )
  return source
