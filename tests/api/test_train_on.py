"""`Run.train_on` takes the steps of a run on given batches."""

import dataclasses

import jax
import numpy as np
import pytest
from support.slow_cases import slow
from support.tiny_run import STEPS

import maxlite
from maxlite.runs.open_run import open_run_data


@pytest.fixture(scope="module")
def run(finished):
  return maxlite.open_run(finished[0] / "run")


def test_it_takes_the_steps_of_a_run(run):
  """Batches of the run's own stream, from its first parameters, give its last ones to the bit."""
  start = dataclasses.replace(run, step=0, params=run.program.init(0).params)
  first = jax.device_get(start.params)
  stream = open_run_data(run.config, run.program).train_stream()
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
    (np.full((16, 16), -1), "tokens of a batch are from -1 to -1: give integers from 0"),
    (np.full((16, 16), 2**32 + 5), "from 4294967301 to 4294967301: give integers from 0"),
    ([[1, 2], [3]], "rows of different lengths: pad them"),
    (None, "tokens of a batch are object"),
    (np.zeros((0, 16), np.int32), r"of shape \(0, 16\): give integers"),
  ],
)
def test_a_batch_that_does_not_fit_is_one_line(run, batch, message):
  with pytest.raises(maxlite.UserError, match=message) as caught:
    run.train_on([batch])
  assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
  ("field", "values", "message"),
  [
    ("tokens_BT", np.full((16, 16), 2**32 + 5), "tokens of a batch are from 4294967301"),
    ("tokens_BT", np.full((16, 16), 5.0), "tokens of a batch are float64"),
    ("targets_BT", np.full((16, 16), 2**33), "targets of a batch are from 8589934592"),
    ("targets_BT", np.full((16, 16), 264), "targets of a batch have ids from 264"),
    ("targets_BT", np.full((16, 16), 1.5), "targets of a batch are float64"),
    ("segment_BT", np.full((16, 16), 2**32), "segments of a batch are from 4294967296"),
    ("segment_BT", np.tile([1, 2], (16, 8)), "segment 1 of row 0 of a batch has a gap"),
    ("position_BT", np.full((16, 16), -1), "positions of a batch are from -1 to -1"),
    ("position_BT", np.full((16, 16), np.nan), "positions of a batch are float64"),
    ("weight_BT", np.full((16, 16), -1.0), "weights of a batch are from -1.0 to -1.0: give finite"),
    ("weight_BT", np.full((16, 16), np.nan), "weights of a batch are from nan to nan: give finite"),
    ("weight_BT", np.full((16, 16), 1e300), "give finite numbers"),
    ("weight_BT", np.full((16, 16), 0.0), "weights of a batch sum to 0: give 1 to a target"),
    ("weight_BT", np.full((16, 16), 1e-4), "weights of a batch sum to 0.0256: give 1 to a target"),
    ("weight_BT", np.full((16, 16), "1"), "weights of a batch are <U1: give numbers"),
    ("weight_BT", np.ones((16, 15)), r"weights of shape \(16, 15\): give them the same"),
    ("segment_BT", [[1], [1, 2]], "segments of a batch have rows of different lengths"),
  ],
)
def test_every_field_is_checked_before_it_is_cast(run, field, values, message):
  batch = maxlite.Batch.of(np.ones((16, 16), np.int64)).replace(**{field: values})
  with pytest.raises(maxlite.UserError, match=message):
    run.train_on([batch])


def test_fields_of_other_integer_and_float_types_train_the_same(run):
  batch = maxlite.Batch.of(np.arange(256).reshape(16, 16))
  wide = jax.tree.map(lambda field: field.astype(np.uint64), batch)
  wide = wide.replace(weight_BT=batch.weight_BT.astype(np.float64))
  _, rows = run.train_on([batch])
  _, same = run.train_on([wide])
  assert rows == same


@pytest.fixture(scope="module")
def recorded(finished):
  """(a run without noise, a batch, the batch with its experts)."""
  run = maxlite.open_run(finished[0] / "run", router_jitter=0)
  tokens_BT = np.random.default_rng(0).integers(0, 264, (16, 16))
  batch = maxlite.Batch.of(tokens_BT, np.sort(tokens_BT % 3, axis=1)[:, ::-1])
  return run, batch, run.with_routes(batch)


def test_recorded_experts_give_the_bits_of_the_step_that_chose_them(recorded):
  run, batch, with_experts = recorded
  live, rows = run.train_on([batch])
  replayed, same = run.train_on([with_experts])
  assert same == rows
  jax.tree.map(np.testing.assert_array_equal, replayed.params, live.params)
  shifted = np.roll(with_experts.expert_BTNK, 1, axis=1)
  _, others = run.train_on([with_experts.replace(expert_BTNK=shifted)])
  assert others[0]["loss"] != rows[0]["loss"]


@pytest.mark.parametrize(
  ("change", "message"),
  [
    (lambda x: x[..., :1], r"experts of a batch are int32 of shape \(16, 16, 1, 1\): give"),
    slow(lambda x: x.astype(float), "experts of a batch are float64"),
    (lambda x: x + 1, "give each token different ones from 0 to 3 in a layer"),
    slow(np.zeros_like, "give each token different ones from 0 to 3 in a layer"),
    (lambda x: None, "some batches have the experts of their tokens"),
  ],
)
def test_experts_that_do_not_fit_are_one_line(recorded, change, message):
  run, _, with_experts = recorded
  wrong = with_experts.replace(expert_BTNK=change(with_experts.expert_BTNK))
  with pytest.raises(maxlite.UserError, match=message) as caught:
    run.train_on([with_experts, wrong])
  assert "\n" not in str(caught.value)


def test_a_batch_instead_of_a_list_of_batches_is_refused(run):
  with pytest.raises(maxlite.UserError, match=r"write \[batch\]"):
    run.train_on(maxlite.Batch.of(np.ones((16, 16), np.int32)))


@pytest.mark.parametrize("ids", [[[2**32 + 5]], [[264]], [[-1]], [[1.0]], [[1], [2, 3]]])
def test_a_loaded_model_refuses_ids_outside_its_vocabulary(run, ids):
  with pytest.raises(maxlite.UserError, match="tokens of a batch"):
    run.model.apply(run.params, ids)


def test_tokens_and_segments_of_different_shapes_are_refused():
  with pytest.raises(maxlite.UserError, match="give them the same"):
    maxlite.Batch.of(np.zeros((2, 4), np.int32), np.zeros((2, 3), np.int32))
