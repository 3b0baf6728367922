"""The loss of each held-out document equals that of the document alone."""

import functools

import jax
import numpy as np
import pytest
from tiny import LENGTH, config_of, mesh_keys, state_on

from maxlite.evaluation.document_losses import document_losses, loss_row
from maxlite.evaluation.held_out import compile_eval_step, evaluate
from maxlite.runs.open_run import open_trainer_data
from maxlite.training.trainer import build_trainer

BOS = 256
EOS = 257
# Bytes per document: shorter than a row, of equal length, and longer, with and without remainder.
SIZES = (1, 5, LENGTH - 2, LENGTH - 1, LENGTH, 3 * LENGTH - 1, 3 * LENGTH, 40)
KEYS = {"decoder_block": "llama", "base_num_decoder_layers": 1, "logits_chunk_tokens": 24}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
  """A training text and folders of held-out documents: of SIZES, and of one row each."""
  folder = tmp_path_factory.mktemp("documents")
  rng = np.random.default_rng(0)
  (folder / "train.txt").write_text("to be or not to be\n" * 9)
  for name, sizes in (("mixed", SIZES), ("rows", (LENGTH - 2,) * 7)):
    (folder / name).mkdir()
    for n, size in enumerate(sizes):
      (folder / name / f"{n}.txt").write_bytes(rng.integers(32, 127, size, np.uint8).tobytes())
  return folder


def opened(folder, name="mixed", **keys):
  """(trainer, parameters, data) with the held-out documents of one of the folders."""
  data = {"dataset_type": "text", "dataset_path": folder / "train.txt"}
  data |= {"eval_dataset_path": folder / name, "base_output_directory": folder}
  trainer = build_trainer(config_of(**(KEYS | data | keys)))
  return trainer, state_on(trainer, first_state()).params, open_trainer_data(trainer)


@functools.cache
def first_state():
  return jax.device_get(build_trainer(config_of(**KEYS)).init_state())


@functools.cache
def log_probs():
  """Function (params, tokens_1T) -> log_p_TV for a row with one document."""
  model = build_trainer(config_of(**KEYS, **mesh_keys("")), jax.devices()[:1]).model
  return jax.jit(lambda params, ids: jax.nn.log_softmax(model.apply({"params": params}, ids)[0]))


def alone(folder, n, params):
  """NLL of a document, summed over windows without context from other documents."""
  ids = np.array([BOS, *(folder / "mixed" / f"{n}.txt").read_bytes(), EOS], np.int32)
  total = 0.0
  for begin in range(0, len(ids) - 1, LENGTH):
    targets = ids[begin + 1 : begin + LENGTH + 1]
    tokens_1T = np.zeros((1, LENGTH), np.int32)
    tokens_1T[0, : len(targets)] = ids[begin : begin + len(targets)]
    total -= np.sum(np.asarray(log_probs()(params, tokens_1T))[np.arange(len(targets)), targets])
  return total


def test_document_losses_do_not_depend_on_mesh_and_batch(folder):
  params = first_state().params
  halved = jax.tree.map(lambda leaf: leaf / 2, params)
  trainer, placed, data = opened(folder)
  averages = jax.tree.map(lambda leaf: leaf / 2, placed)
  losses = document_losses(trainer, placed, data, averages)
  assert losses[:, 0].tolist() == [size + 1 for size in SIZES]
  assert losses[:, 1].tolist() == list(SIZES)
  for n in (
    0,
    2,
    5,
    6,
  ):  # part of a window, a full one, remainders of one and two ids
    want = [alone(folder, n, params), alone(folder, n, halved)]
    np.testing.assert_allclose(losses[n, 2:], want, rtol=1e-5)
  row = loss_row(losses[0])
  assert list(row) == ["tokens", "bytes", "nll", "bits_per_byte", "ema_nll", "ema_bits_per_byte"]
  np.testing.assert_allclose(row["bits_per_byte"], row["nll"] / np.log(2) / SIZES[0])
  keys = mesh_keys("data=2 context=2 tensor=2") | {"per_device_batch_size": 0.5}
  for n, (got, want) in enumerate(
    zip(document_losses(*opened(folder, **keys)), losses, strict=True)
  ):
    np.testing.assert_allclose(got[2:], want[2:3], rtol=1e-5, err_msg=n)


def test_document_losses_sum_to_the_held_out_loss(folder):
  """If no document is split, both use the same rows."""
  trainer, params, data = opened(folder, "rows")
  losses = document_losses(trainer, params, data)
  eval_step = compile_eval_step(trainer, data.source.num_bytes_V)
  held_out = evaluate(trainer, eval_step, params, data.eval_batches_by_source())
  assert len(losses) == 7
  num_tokens, _, nll = losses.sum(axis=0)
  assert num_tokens == held_out["eval_tokens"]
  np.testing.assert_allclose(nll, held_out["eval_loss"] * held_out["eval_tokens"], rtol=1e-6)
