"""`maxlite.evaluate`: the held-out loss of a run, and that of each held-out document.

The evaluation step sums over the tokens of a held-out batch. For draft heads it counts how many
drafts speculative decoding would accept: a draft is accepted if the model's own head predicts the
same token from the text before it. Of a chain of drafts, those before the first rejected one are
accepted.
"""

import functools
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxlite.config import Config, exit_on_user_error
from maxlite.config.schema import TrainingConfig
from maxlite.data.batch import Batch
from maxlite.data.loader import DataLoader
from maxlite.layers.linear import matmul
from maxlite.metrics.step_row import bits_per_byte
from maxlite.metrics.waits import report_wait
from maxlite.models import Decoder
from maxlite.models.draft import draft_weight, shift_left
from maxlite.sharding import Sharder
from maxlite.sharding.collectives import gather_weight, pmax
from maxlite.step.train_state import TrainState, averaged_params
from maxlite.training.cross_entropy import chunks
from maxlite.training.loss import Hidden, next_token, run_forward
from maxlite.training.open_run import open_trainer_data, open_weights
from maxlite.training.saved_run import run_folder
from maxlite.training.trainer import Trainer


def run_evaluation(cfg: Config) -> int:
  """Print the loss of a checkpoint of the run over `eval_steps` held-out batches (-1: all)."""
  with exit_on_user_error("maxlite.evaluate"):
    trainer, params, averages, step = open_weights(cfg)
    result, data = evaluate_held_out(trainer, params, averages, cfg.observe.eval_steps)
  sums_DX = None
  if cfg.observe.eval_documents:
    with exit_on_user_error("maxlite.evaluate"), report_wait("evaluating documents"):
      sums_DX = document_losses(trainer, params, data, averages)
  if jax.process_index() == 0:
    folder = run_folder(cfg)
    sys.stdout.write(f"{folder.place} step {step}  {_format(result)}\n")
    if sums_DX is not None:
      with exit_on_user_error("maxlite.evaluate"):
        _write_documents(sums_DX, folder.eval_documents)
        folder.upload()
  return 0


def evaluate_held_out(
  trainer: Trainer, params: Any, averages: Any, num_batches: int
) -> tuple[dict[str, float], DataLoader]:
  """Open the run's data, and return (the result of `evaluate` on `num_batches`, -1: all, data)."""
  data = open_trainer_data(trainer)
  batches = data.eval_batches_by_source(num_batches)
  eval_step = compile_eval_step(trainer, data.source.num_bytes_V)
  with report_wait("compiling the evaluation step, and evaluating"):
    return evaluate(trainer, eval_step, params, batches, averages), data


def _write_documents(sums_DX: np.ndarray, file: Path) -> None:
  """Write a JSON line per document and print the totals."""
  rows = ({"document": n} | loss_row(sums_X) for n, sums_X in enumerate(sums_DX))
  file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
  total = loss_row(sums_DX.sum(axis=0))
  sys.stdout.write(f"{file}: {len(sums_DX):,} documents  {_format(total)}\n")


def _format(row: Mapping[str, float]) -> str:
  return "  ".join(f"{name} {value:.6g}" for name, value in row.items())


def build_evaluation(
  trainer: Trainer, data: DataLoader
) -> Callable[[TrainState], dict[str, float]] | None:
  """Build the evaluation of a state in a run; None without held-out data."""
  if data.source.eval is None:
    return None
  eval_step = compile_eval_step(trainer, data.source.num_bytes_V)

  def evaluate_state(state: TrainState) -> dict[str, float]:
    batches = data.eval_batches_by_source(trainer.cfg.observe.eval_steps)
    return evaluate(trainer, eval_step, state.params, batches, averaged_params(state))

  return evaluate_state


def evaluate(
  trainer: Trainer,
  eval_step: Callable[[Any, Batch], dict],
  params: Any,
  batches: Mapping[str, Iterable[Batch]],
  averages: Any = None,
) -> dict[str, float]:
  """Compute `eval_loss` [nats per token], `eval_bits_per_byte` and `eval_tokens` of `batches`.

  With moving averages of the parameters also `eval_ema_loss` and `eval_ema_bits_per_byte`.

  Args:
    batches: by source; with several sources, the results are over the tokens of all, and
      `eval_loss/SOURCE` is the loss of each.
  """

  def sums(batch: Batch) -> dict:
    batch = trainer.place(batch)
    found = eval_step(params, batch)
    return found if averages is None else found | {"ema": eval_step(averages, batch)}

  return held_out_row({name: map(sums, each) for name, each in batches.items()})


def held_out_row(batches: Mapping[str, Iterable[dict]]) -> dict[str, float]:
  """The results of `evaluate` from the evaluation step's sums of every batch, by source.

  With draft heads also `eval_acceptance_1`, ..., the share of each head's drafts that are accepted,
  and `eval_accepted_length`, the mean number of accepted drafts in a chain.
  """
  # In float64: float32 rounds every sum, and cannot count beyond 2**24 tokens.
  in_float64 = lambda sums: jax.tree.map(np.float64, jax.device_get(sums))
  total = lambda each: functools.reduce(functools.partial(jax.tree.map, np.add), each)
  by_source = {name: total(map(in_float64, each)) for name, each in batches.items()}
  sums = total(by_source.values())
  row = _results(sums) | {"eval_tokens": int(sums["weight"])}
  if len(by_source) > 1:
    row |= {f"eval_loss/{name}": float(s["nll"] / s["weight"]) for name, s in by_source.items()}
  averaged = _results(sums["ema"]) if "ema" in sums else {}
  return row | {name.replace("eval_", "eval_ema_", 1): x for name, x in averaged.items()}


def _results(sums: dict) -> dict[str, float]:
  results = {"eval_loss": float(sums["nll"] / sums["weight"])}
  if sums["num_bytes"]:
    results["eval_bits_per_byte"] = bits_per_byte(float(sums["nll"]), float(sums["num_bytes"]))
  if drafts := sums.get("draft"):
    shares_J = drafts["accepted_J"] / np.maximum(drafts["drafts_J"], 1)
    results |= {f"eval_acceptance_{j}": float(share) for j, share in enumerate(shares_J, start=1)}
    results["eval_accepted_length"] = float(drafts["length"] / np.maximum(drafts["chains"], 1))
  return results


def compile_eval_step(trainer: Trainer, num_bytes_V: np.ndarray) -> Callable[[Any, Batch], dict]:
  """The compiled evaluation step, on the trainer's mesh."""
  num_bytes_V = jnp.asarray(num_bytes_V)
  return jax.jit(build_eval_step(trainer.model, trainer.cfg.training, num_bytes_V))


def build_eval_step(
  model: Decoder, cfg: TrainingConfig, num_bytes_V: jax.Array
) -> Callable[[Any, Batch], dict]:
  """Build step(params, batch) -> sums of `nll` [nats], `weight` and `num_bytes` of the targets.

  With draft heads also `draft`, the result of `acceptance_sums`.
  """
  has_drafts = model.cfg.num_draft_heads > 0

  def eval_step(params: Any, batch: Batch) -> dict:
    hidden = run_forward(model, params, batch, jitter_key=None, drafts=has_drafts)
    sums = next_token(hidden, batch, cfg, model.sharder)
    num_bytes_BT = jnp.take(num_bytes_V, batch.targets_BT, mode="clip").astype(jnp.float32)
    num_bytes = jnp.sum(num_bytes_BT, where=batch.weight_BT > 0)
    counts = {"nll": sums.nll, "weight": sums.weight, "num_bytes": num_bytes}
    if has_drafts:
      counts["draft"] = acceptance_sums(hidden, batch, cfg.logits_chunk_tokens, model.sharder)
    return counts

  return eval_step


def acceptance_sums(hidden: Hidden, batch: Batch, chunk_tokens: int, sharder: Sharder) -> dict:
  """Count `accepted_J` and `drafts_J` by head, and `chains` with their accepted `length`.

  A chain starts wherever all heads have a token of the same document to predict.

  Source: Leviathan et al., Fast Inference from Transformers via Speculative Decoding (2023),
  section 2, for greedy decoding.
  """
  own_BT = argmax_token(hidden.x_BTD, hidden.w_DV, chunk_tokens, sharder)
  drafted_BTJ = argmax_token(hidden.y_BTJD, hidden.w_DV, chunk_tokens, sharder)
  num_heads = drafted_BTJ.shape[-1]
  counts_BTJ = draft_weight(batch.segment_BT, batch.weight_BT, num_heads) > 0
  agrees_BTJ = (drafted_BTJ == shift_left(own_BT, num_heads)) & counts_BTJ
  whole_BT = jnp.all(counts_BTJ, axis=-1)
  length_BT = jnp.sum(jnp.cumprod(agrees_BTJ.astype(jnp.int32), axis=-1), axis=-1)
  return {
    "accepted_J": jnp.sum(agrees_BTJ, axis=(0, 1)),
    "drafts_J": jnp.sum(counts_BTJ, axis=(0, 1)),
    "length": jnp.sum(length_BT, where=whole_BT),
    "chains": jnp.sum(whole_BT),
  }


def argmax_token(x: jax.Array, w_DV: jax.Array, chunk_tokens: int, sharder: Sharder) -> jax.Array:
  """The token with the largest logit for each state of x [B, T, ..., D]; the first of equals."""
  vocab_axes = sharder.mesh_axes("vocab")
  names = ("activation_batch", "activation_length", *(None,) * (x.ndim - 3))

  def local(x, w_dv):
    w_Dv = gather_weight(w_dv, x.dtype, sharder.mesh_axes("embed"), 0)
    x_TD = x.reshape(-1, x.shape[-1])
    by_chunk = chunks(x_TD, min(chunk_tokens, len(x_TD)))
    token_T = jax.lax.map(lambda x_TD: _argmax_token(x_TD, w_Dv, vocab_axes), by_chunk).reshape(-1)
    return token_T[: len(x_TD)].reshape(x.shape[:-1])

  return jax.shard_map(
    local,
    mesh=sharder.mesh,
    in_specs=(sharder.spec((*names, None)), sharder.spec(("embed", "vocab"))),
    out_specs=sharder.spec(names),
    check_vma=sharder.check_vma,
  )(x, w_DV)


def _argmax_token(x_TD: jax.Array, w_DV: jax.Array, vocab_axes: tuple[str, ...]) -> jax.Array:
  logits_TV = matmul(x_TD, w_DV, np.promote_types(x_TD.dtype, jnp.float32))
  first = jax.lax.axis_index(vocab_axes) * w_DV.shape[1]
  top_T = jnp.max(logits_TV, axis=-1)
  token_T = first + jnp.argmax(logits_TV, axis=-1)
  is_top_T = top_T == pmax(top_T, vocab_axes)
  return -pmax(jnp.where(is_top_T, -token_T, np.iinfo(np.int32).min), vocab_axes)  # the first


def loss_row(sums_X: np.ndarray) -> dict[str, Any]:
  """The sums of `document_losses` by name, and bits per byte."""
  num_tokens, num_bytes, *nlls = sums_X.tolist()
  row: dict[str, Any] = {"tokens": int(num_tokens), "bytes": int(num_bytes)}
  for prefix, nll in zip(("", "ema_"), nlls, strict=False):
    row[f"{prefix}nll"] = nll
    if num_bytes:
      row[f"{prefix}bits_per_byte"] = bits_per_byte(nll, num_bytes)
  return row


def document_losses(
  trainer: Trainer, params: Any, data: DataLoader, averages: Any = None
) -> np.ndarray:
  """Sum over each held-out document in float64: predicted tokens, their bytes, their NLL [nats].

  With `averages` of the parameters also theirs. A document longer than a row is read in windows
  (`DocumentWindows` of data/packing.py).

  Raises:
    UserError: no document was held out.
  """
  num_bytes_V = jnp.asarray(data.source.num_bytes_V)
  chunk_tokens = trainer.cfg.training.logits_chunk_tokens

  def step(params: Any, batch: Batch) -> jax.Array:
    """[B, 3]: of each row the number of predicted tokens, their bytes and their NLL."""
    is_target_BT = batch.weight_BT > 0
    num_bytes_BT = jnp.take(num_bytes_V, batch.targets_BT, mode="clip").astype(jnp.float32)
    nll_B, _ = row_sums(trainer.model, params, batch, chunk_tokens)
    counted = (jnp.ones_like(num_bytes_BT), num_bytes_BT)
    counts = [jnp.sum(x_BT, axis=1, where=is_target_BT) for x_BT in counted]
    return jnp.stack([*counts, nll_B], axis=1)

  # Replicated: every host needs all rows, and has only some.
  step = jax.jit(step, out_shardings=trainer.sharder.sharding(()))
  documents, sums = [], []
  for document_B, host_batch in data.document_batches():
    batch = trainer.place(host_batch)
    columns = [step(params, batch)]
    if averages is not None:
      columns.append(step(averages, batch)[:, -1:])
    sums.append(np.concatenate(jax.device_get(columns), axis=1)[: len(document_B)])
    documents.append(document_B)
  document_N = np.concatenate(documents)
  sums_DX = np.zeros((document_N[-1] + 1, sums[0].shape[1]))
  np.add.at(sums_DX, document_N, np.concatenate(sums))
  return sums_DX


def row_sums(
  model: Decoder, params: Any, batch: Batch, chunk_tokens: int
) -> tuple[jax.Array, jax.Array]:
  """Return (nll_B [nats] of the targets, number of targets that are the most likely token).

  At most `chunk_tokens` tokens per device have logits at once.
  """
  inputs = (batch.tokens_BT, batch.segment_BT, batch.position_BT)
  x_BTD, _ = model.apply({"params": params}, *inputs, method=model.hidden)
  num_rows, length = batch.tokens_BT.shape
  rows_per_device = num_rows // model.sharder.num_shards("activation_batch")
  size = min(max(chunk_tokens // rows_per_device, 1), length)
  chunked = lambda x: chunks(x.swapaxes(0, 1), size).swapaxes(1, 2)

  def sums(chunk: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    x_BtD, targets_Bt, weight_Bt = chunk
    logits_BtV = model.apply({"params": params}, x_BtD, method=model.logits)
    target_Bt = jnp.take_along_axis(logits_BtV, targets_Bt[..., None], axis=-1)[..., 0]
    nll_Bt = jax.nn.logsumexp(logits_BtV, axis=-1) - target_Bt
    is_argmax_Bt = jnp.argmax(logits_BtV, axis=-1) == targets_Bt
    add = functools.partial(jnp.sum, axis=1, where=weight_Bt > 0)
    return add(nll_Bt), add(is_argmax_Bt.astype(jnp.int32))

  by_chunk = jax.lax.map(sums, jax.tree.map(chunked, (x_BTD, batch.targets_BT, batch.weight_BT)))
  return jax.tree.map(lambda sums_NB: jnp.sum(sums_NB, axis=0), by_chunk)
