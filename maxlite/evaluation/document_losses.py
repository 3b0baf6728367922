"""The loss of each held-out document."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxlite.data.batch import DeviceBatch
from maxlite.data.loader import DataLoader
from maxlite.metrics.step_row import bits_per_byte
from maxlite.models import Decoder
from maxlite.sharding.pytree import PyTree
from maxlite.training.cross_entropy import chunks
from maxlite.training.program import Program


class _Chunk(NamedTuple):
  """The final states of some positions of all rows, their targets and weights."""

  x_BtD: jax.Array
  targets_Bt: jax.Array
  weight_Bt: jax.Array


def loss_row(sums_X: np.ndarray) -> dict[str, float]:
  """The sums of `document_losses` by name, and bits per byte.

  Args:
    sums_X: tokens, bytes, negative log-likelihood [nats], and that of the moving averages if the
      run has them.
  """
  num_tokens, num_bytes, nll, *ema_nll = sums_X.tolist()
  row: dict[str, float] = {"tokens": int(num_tokens), "bytes": int(num_bytes), "nll": nll}
  if num_bytes:
    row["bits_per_byte"] = bits_per_byte(nll, num_bytes)
  if ema_nll:
    row["ema_nll"] = ema_nll[0]
    if num_bytes:
      row["ema_bits_per_byte"] = bits_per_byte(ema_nll[0], num_bytes)
  return row


def document_losses(
  program: Program, params: PyTree, data: DataLoader, averages: PyTree = None
) -> np.ndarray:
  """Sum over each held-out document in float64: predicted tokens, their bytes, their NLL [nats].

  With `averages` of the parameters also theirs. A document longer than a row is read in windows
  (`DocumentWindows` of data/packing.py).

  Raises:
    UserError: no document was held out.
  """
  num_bytes_V = jnp.asarray(data.source.num_bytes_V)
  chunk_tokens = program.spec.training.logits_chunk_tokens

  def step(params: PyTree, batch: DeviceBatch) -> jax.Array:
    """[B, 3]: of each row the number of predicted tokens, their bytes and their NLL."""
    is_target_BT = batch.weight_BT > 0
    num_bytes_BT = jnp.take(num_bytes_V, batch.targets_BT, mode="clip").astype(jnp.float32)
    nll_B, _ = row_sums(program.model, params, batch, chunk_tokens)
    num_tokens_B = jnp.sum(jnp.ones_like(num_bytes_BT), axis=1, where=is_target_BT)
    num_bytes_B = jnp.sum(num_bytes_BT, axis=1, where=is_target_BT)
    return jnp.stack([num_tokens_B, num_bytes_B, nll_B], axis=1)

  # Replicated: every host needs all rows, and has only some.
  step = jax.jit(step, out_shardings=program.sharder.sharding(()))
  documents = []
  sums = []
  for document_B, host_batch in data.document_batches():
    batch = program.place(host_batch)
    columns = [step(params, batch)]
    if averages is not None:
      of_averages = step(averages, batch)
      columns.append(of_averages[:, -1:])
    num_rows = len(document_B)  # without those that fill the last batch
    sums_BX = np.concatenate(jax.device_get(columns), axis=1)
    sums.append(sums_BX[:num_rows])
    documents.append(document_B)
  document_N = np.concatenate(documents)
  sums_NX = np.concatenate(sums)
  num_documents = document_N[-1] + 1
  sums_DX = np.zeros((num_documents, sums_NX.shape[1]))
  np.add.at(sums_DX, document_N, sums_NX)
  return sums_DX


def row_sums(
  model: Decoder, params: PyTree, batch: DeviceBatch, chunk_tokens: int
) -> tuple[jax.Array, jax.Array]:
  """Return (nll_B [nats] of the targets, number of targets that are the most likely token).

  At most `chunk_tokens` tokens per device have logits at once.
  """
  result: PyTree = model.apply(
    {"params": params},
    batch.tokens_BT,
    batch.segment_BT,
    batch.position_BT,
    method=model.hidden,
  )
  x_BTD, _ = result
  num_rows, length = batch.tokens_BT.shape
  rows_per_device = num_rows // model.sharder.num_shards("activation_batch")
  size = min(max(chunk_tokens // rows_per_device, 1), length)

  def divide(x_BT: jax.Array) -> jax.Array:
    """Divide the positions into chunks: [number of chunks, B, size, ...]."""
    return chunks(x_BT.swapaxes(0, 1), size).swapaxes(1, 2)

  def sums(chunk: _Chunk) -> tuple[jax.Array, jax.Array]:
    logits_BtV: PyTree = model.apply({"params": params}, chunk.x_BtD, method=model.logits)
    targets_Bt1 = chunk.targets_Bt[..., None]
    target_Bt1 = jnp.take_along_axis(logits_BtV, targets_Bt1, axis=-1)
    partition_Bt = jax.nn.logsumexp(logits_BtV, axis=-1)
    nll_Bt = partition_Bt - target_Bt1[..., 0]
    is_argmax_Bt = jnp.argmax(logits_BtV, axis=-1) == chunk.targets_Bt
    is_target_Bt = chunk.weight_Bt > 0
    nll_B = jnp.sum(nll_Bt, axis=1, where=is_target_Bt)
    num_argmax_B = jnp.sum(is_argmax_Bt.astype(jnp.int32), axis=1, where=is_target_Bt)
    return nll_B, num_argmax_B

  whole = _Chunk(x_BTD, batch.targets_BT, batch.weight_BT)
  by_chunk = jax.lax.map(sums, jax.tree.map(divide, whole))
  return jax.tree.map(lambda sums_NB: jnp.sum(sums_NB, axis=0), by_chunk)
