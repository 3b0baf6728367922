"""Compares runs on the same held-out documents, by a paired bootstrap over documents."""

import dataclasses
import json
import math
import os
from pathlib import Path

import numpy as np

from maxlite.checkpoint.run_folder import RunFolder
from maxlite.config.config_field import KeyValue
from maxlite.config.raw_values import show
from maxlite.errors import UserError
from maxlite.evaluation.document_losses import document_losses
from maxlite.evaluation.paired import (
  NUM_RESAMPLES,
  Difference,
  bootstrap_difference,
  bootstrap_ratios,
)
from maxlite.metrics.waits import report_wait
from maxlite.runs.open_run import open_run_data, open_trained
from maxlite.runs.saved_run import config_of_run
from maxlite.storage.file_io import write_atomically

FEW_DOCUMENTS = 20
# Bytes by which a document may differ between tokenizers: of a first token, which is not predicted.
_FIRST_TOKEN = 64


@dataclasses.dataclass(frozen=True)
class ComparedRun:
  """A run, its loss, and its difference to the best run (None: it is the best)."""

  run: str
  loss: float
  difference: Difference | None

  @property
  def verdict(self) -> str:
    if self.difference is None:
      return "best"
    return "worse" if self.difference.is_distinguishable else "not distinguishable"


@dataclasses.dataclass(frozen=True)
class Comparison:
  """The runs, best first."""

  runs: list[ComparedRun]
  unit: str  # of losses: "nats/token", or "bits/byte" if the runs have other tokenizers
  num_documents: int

  def __str__(self) -> str:
    width = max(len("run"), *(len(each.run) for each in self.runs))
    lines = [f"{'run':{width}}  {self.unit:>10}  difference  95 % interval"]
    for each in self.runs:
      line = f"{each.run:{width}}  {each.loss:10.4f}  "
      if each.difference is None:
        line += f"{'-':>10}  {'-':20}  {each.verdict}"
      else:
        mean, low, high = each.difference
        line += f"{mean:+10.4f}  {f'{low:+.4f} to {high:+.4f}':20}  {each.verdict}"
      lines.append(line)
    lines.append(
      f"over {self.num_documents:,} documents; paired bootstrap of {NUM_RESAMPLES:,} resamples"
    )
    if self.num_documents < FEW_DOCUMENTS:
      lines.append(
        f"note: intervals over fewer than {FEW_DOCUMENTS} documents are too narrow: hold out more, "
        "such as eval_dataset_path=FOLDER"
      )
    return "\n".join(lines)

  def write(self, file: Path) -> None:
    """Write the comparison as JSON."""
    runs = []
    for each in self.runs:
      row: dict[str, object] = {"run": each.run, "loss": each.loss, "verdict": each.verdict}
      if each.difference is not None:
        row |= each.difference._asdict()
      runs.append(row)
    content = {"unit": self.unit, "num_documents": self.num_documents, "runs": runs}
    write_atomically(file, json.dumps(content, indent=2) + "\n")


def compare(*runs: str | os.PathLike[str], **keys: KeyValue) -> Comparison:
  """Compare runs on their held-out documents, which must be the same.

  Args:
    runs: run folders; the members of an ensemble's folder are runs.
    keys: keys of `maxlite.evaluate`, for every run.

  Raises:
    UserError: there are fewer than two runs, or they hold out other documents.
  """
  folders = [each for run in runs for each in _folders(run)]
  if len(folders) < 2:
    raise UserError("compare takes two runs or more, or an ensemble's folder")
  sums = []
  for folder in folders:
    with report_wait(f"evaluating the documents of {folder.place}"):
      sums.append(_document_sums(folder, keys))
  names = [folder.place for folder in folders]
  sums_RD, weights_RD, unit = _common_unit(names, sums)
  num_documents = sums_RD.shape[1]
  if num_documents < 2:
    raise UserError(f"{names[0]} holds out {num_documents} document: an interval takes two or more")
  losses_R = sums_RD.sum(axis=1) / weights_RD.sum(axis=1)
  best = int(np.argmin(losses_R))
  ratios_BR = bootstrap_ratios(sums_RD, weights_RD)
  compared = []
  for r in np.argsort(losses_R, kind="stable").tolist():
    difference = None
    if r != best:
      difference = bootstrap_difference(sums_RD, weights_RD, ratios_BR, r, best)
    compared.append(ComparedRun(names[r], float(losses_R[r]), difference))
  return Comparison(compared, unit, num_documents)


def _folders(run: str | os.PathLike[str]) -> list[RunFolder]:
  """The run folder, or those of an ensemble's members."""
  folder = RunFolder(os.path.expanduser(str(run).rstrip("/")))
  if not folder.config.exists():
    raise UserError(f"{run} is not a run folder: it has no config.yml")
  names = folder.member_names()
  return [folder.member(name) for name in names] if names else [folder]


def _document_sums(folder: RunFolder, keys: dict[str, KeyValue]) -> np.ndarray:
  """Tokens, bytes and NLL [nats] of each held-out document, [D, 3]."""
  parent, name = os.path.split(folder.place)
  arguments = [f"--base_output_directory={parent}", f"--run_name={name}"]
  arguments += [f"--{key}={show(value)}" for key, value in keys.items()]
  cfg = config_of_run(arguments, "maxlite.evaluate")
  program, params = open_trained(cfg)
  return document_losses(program, params, open_run_data(cfg, program))


def _common_unit(names: list[str], sums: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray, str]:
  """(sums [R, D], weights [R, D], unit): nats per token, or bits per byte of other tokenizers."""
  first = sums[0]
  for name, own in zip(names, sums, strict=True):
    if len(own) != len(first):
      raise UserError(
        f"{name} holds out {len(own)} documents, and {names[0]} {len(first)}: compare them on the "
        "same ones, such as eval_dataset_path=FOLDER"
      )
  tokens_RD, bytes_RD, nll_RD = np.stack(sums).transpose(2, 0, 1)
  has_same_tokens = (tokens_RD == tokens_RD[:1]).all() and (bytes_RD == bytes_RD[:1]).all()
  if has_same_tokens:
    return nll_RD, tokens_RD, "nats/token"
  differs_R = (np.abs(bytes_RD - bytes_RD[:1]) > _FIRST_TOKEN).any(axis=1)
  if differs_R.any() or not bytes_RD.all():
    other = names[int(np.argmax(differs_R))] if differs_R.any() else names[1]
    raise UserError(
      f"{other} and {names[0]} hold out other documents: compare them on the same ones, such as "
      "eval_dataset_path=FOLDER"
    )
  return nll_RD / math.log(2), bytes_RD, "bits/byte"
