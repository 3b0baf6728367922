"""The loss of each held-out document equals that of the document alone."""

import jax
import numpy as np
import pytest
from support.tiny import LENGTH, build, config_of, mesh_keys, state_on

from maxlite.evaluation.document_losses import document_losses, loss_row
from maxlite.evaluation.held_out import compile_eval_step, evaluate
from maxlite.runs.open_run import open_run_data

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


def open_with(folder, first_state, name="mixed", **keys):
  """(program, parameters, data) with the held-out documents of one of the folders."""
  data = {
    "dataset_type": "text",
    "dataset_path": folder / "train.txt",
    "eval_dataset_path": folder / name,
    "base_output_directory": folder,
  }
  cfg = config_of(**KEYS | data | keys)
  program = build(cfg)
  params = state_on(program, first_state).params
  return program, params, open_run_data(cfg, program)


@pytest.fixture(scope="module")
def first_state():
  return jax.device_get(build(config_of(**KEYS)).init(0))


@pytest.fixture(scope="module")
def document_nll(folder):
  """A function from a document's number and parameters to its NLL.

  It is summed over windows without context from other documents.
  """
  program = build(config_of(**KEYS, **mesh_keys("")), jax.devices()[:1])

  @jax.jit
  def log_probs(params, tokens_1T):
    (logits_TV,) = program.model.apply({"params": params}, tokens_1T)
    return jax.nn.log_softmax(logits_TV)

  def nll(number, params):
    text = (folder / "mixed" / f"{number}.txt").read_bytes()
    ids = np.array([BOS, *text, EOS], np.int32)
    total = 0.0
    for begin in range(0, len(ids) - 1, LENGTH):
      targets = ids[begin + 1 : begin + LENGTH + 1]
      tokens_1T = np.zeros((1, LENGTH), np.int32)
      tokens_1T[0, : len(targets)] = ids[begin : begin + len(targets)]
      log_p_TV = np.asarray(log_probs(params, tokens_1T))
      total -= log_p_TV[np.arange(len(targets)), targets].sum()
    return total

  return nll


def halve(params):
  return jax.tree.map(lambda leaf: leaf / 2, params)


def test_document_losses_do_not_depend_on_mesh_and_batch(folder, first_state, document_nll):
  params = first_state.params
  program, placed, data = open_with(folder, first_state)
  losses = document_losses(program, placed, data, halve(placed))
  assert losses[:, 0].tolist() == [size + 1 for size in SIZES]
  assert losses[:, 1].tolist() == list(SIZES)
  for n in (0, 2, 5, 6):  # part of a window, a full one, remainders of one and two ids
    nll, averaged_nll = losses[n, 2:]
    np.testing.assert_allclose(nll, document_nll(n, params), rtol=1e-5)
    np.testing.assert_allclose(averaged_nll, document_nll(n, halve(params)), rtol=1e-5)
  row = loss_row(losses[0])
  assert list(row) == ["tokens", "bytes", "nll", "bits_per_byte", "ema_nll", "ema_bits_per_byte"]
  np.testing.assert_allclose(row["bits_per_byte"], row["nll"] / np.log(2) / SIZES[0])
  keys = mesh_keys("data=2 context=2 tensor=2") | {"per_device_batch_size": 0.5}
  program, placed, data = open_with(folder, first_state, **keys)
  own_losses = document_losses(program, placed, data)
  assert own_losses.shape == (len(SIZES), 3)
  np.testing.assert_allclose(own_losses[:, 2], losses[:, 2], rtol=1e-5)


def test_document_losses_sum_to_the_held_out_loss(folder, first_state):
  """If no document is split, both use the same rows."""
  program, params, data = open_with(folder, first_state, "rows")
  losses = document_losses(program, params, data)
  eval_step = compile_eval_step(program, data.source.num_bytes_V)
  held_out = evaluate(program, eval_step, params, data.eval_batches_by_source())
  assert len(losses) == 7
  num_tokens, _, nll = losses.sum(axis=0)
  assert num_tokens == held_out["eval_tokens"]
  np.testing.assert_allclose(nll, held_out["eval_loss"] * held_out["eval_tokens"], rtol=1e-6)
