"""`Run.train_on` takes the steps of a run on given batches."""

import dataclasses

import jax
import numpy as np
import pytest
from tiny_run import STEPS

import maxlite
from maxlite.runs.open_run import open_trainer_data


@pytest.fixture(scope="module")
def run(finished):
  return maxlite.open_run(finished[0] / "run")


def test_it_takes_the_steps_of_a_run(run):
  """Batches of the run's own stream, from its first parameters, give its last ones to the bit."""
  start = dataclasses.replace(run, step=0, params=run.trainer.init_state().params)
  first = jax.device_get(start.params)
  stream = open_trainer_data(run.trainer).train_stream()
  after, rows = start.train_on(next(stream) for _ in range(STEPS))
  assert after.step == STEPS
  jax.tree.map(np.testing.assert_array_equal, after.params, run.params)
  jax.tree.map(np.testing.assert_array_equal, after.ema_params, run.ema_params)
  jax.tree.map(np.testing.assert_array_equal, start.params, first)  # not donated
  for name in ("loss", "grad_norm", "expert_imbalance"):
    np.testing.assert_array_equal([row[name] for row in rows], run.metrics[name])


def test_a_batch_of_tokens_predicts_the_next_token_of_each_document():
  batch = maxlite.Batch.of([[5, 6, 7, 8, 9]], [[1, 1, 1, 2, 0]])
  np.testing.assert_array_equal(batch.targets_BT, [[6, 7, 0, 0, 0]])
  np.testing.assert_array_equal(batch.weight_BT, [[1, 1, 0, 0, 0]])
  np.testing.assert_array_equal(batch.position_BT, [[0, 1, 2, 0, 0]])
  whole = maxlite.Batch.of([[5, 6, 7]])
  np.testing.assert_array_equal(whole.segment_BT, [[1, 1, 1]])
  np.testing.assert_array_equal(whole.weight_BT, [[1, 1, 0]])


@pytest.mark.parametrize(
  ("batch", "message"),
  [
    (np.zeros((16, 16)), "tokens of a batch are float64"),
    (np.zeros(16, np.int32), r"of shape \(16,\): give integers"),
    (np.zeros((2, 16), np.int32), r"a batch has the shape \(2, 16\), but the run trains on"),
    (np.full((16, 16), 264), "ids from 264 to 264, but vocab_size=264"),
    (np.full((16, 16), -1), "ids from -1 to -1"),
  ],
)
def test_a_batch_that_does_not_fit_is_one_line(run, batch, message):
  with pytest.raises(maxlite.UserError, match=message) as caught:
    run.train_on([batch])
  assert "\n" not in str(caught.value)


def test_tokens_and_segments_of_different_shapes_are_refused():
  with pytest.raises(maxlite.UserError, match="give them the same"):
    maxlite.Batch.of(np.zeros((2, 4), np.int32), np.zeros((2, 3), np.int32))
