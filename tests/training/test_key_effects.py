"""Config keys of the implementation change no number; keys of the model do."""

import jax
import numpy as np
import pytest
from support import trees
from support.tiny import VOCAB, config_of, place, state_on, take_steps, uneven_batch

from maxlite.evaluation.held_out import compile_eval_step
from maxlite.runs.open_run import open_objective_data, open_trainer_data
from maxlite.training.trainer import build_trainer


@pytest.fixture(scope="module")
def trainer(trainer_of):
  return trainer_of(decoder_block="mixtral")


@pytest.fixture(scope="module")
def first_state(trainer):
  return jax.device_get(trainer.init_state())


def one_step(trainer, state):
  """(metrics of a step, parameters after it)."""
  after, (metrics,) = take_steps(trainer, state, [uneven_batch(0)])
  return metrics, after.params


def held_out_loss(trainer, state):
  eval_step = compile_eval_step(trainer, np.ones(VOCAB, np.int32))
  params = state_on(trainer, state).params
  sums = eval_step(params, place(trainer, uneven_batch(0)))
  return sums["nll"] / sums["weight"]


@pytest.fixture(scope="module")
def expected_loss(trainer, first_state):
  """The held-out loss with the default keys of the model."""
  return held_out_loss(trainer, first_state)


@pytest.mark.slow
def test_implementation_keys_do_not_change_the_step(trainer_of):
  keys = {"decoder_block": "mixtral", "base_num_decoder_layers": 2, "scan_layers": True}
  trainer = trainer_of(**keys, scan_unroll=1)
  state = jax.device_get(trainer.init_state())
  expected, expected_params = one_step(trainer, state)
  other = trainer_of(**keys, scan_unroll=2, attention_block_q=5)
  metrics, params = one_step(other, state)
  for name in ("total_loss", "grad_norm"):
    np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-5)
  for leaf, expected_leaf in trees.leaf_pairs(params, expected_params):
    np.testing.assert_allclose(leaf, expected_leaf, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
  "other",
  [
    {"normalization_layer_epsilon": 0.5},
    {"rope_max_timescale": 10},
    {"router": "topk_softmax", "norm_topk_prob": "false"},
  ],
  ids=str,
)
def test_model_keys_change_the_loss(trainer_of, first_state, expected_loss, other):
  loss = held_out_loss(trainer_of(decoder_block="mixtral", **other), first_state)
  assert abs(loss / expected_loss - 1) > 1e-6


@pytest.mark.slow
def test_the_seed_changes_the_initial_parameters(trainer_of, first_state):
  other_state = trainer_of(decoder_block="mixtral", init_weights_seed=1).init_state()
  embedding = first_state.params["embed"]["embedding"]
  other_embedding = other_state.params["embed"]["embedding"]
  assert np.all(embedding != jax.device_get(other_embedding))


@pytest.mark.slow
def test_auxiliary_losses_are_weighted(trainer_of, first_state):
  """With other weights than the default ones, of which test_meshes.py tests the sum."""
  weights = {"router_z_loss_weight": 0.5, "load_balance_loss_weight": 0.25}
  metrics, _ = one_step(trainer_of(decoder_block="mixtral", **weights), first_state)
  auxiliary = 0.5 * metrics["router_z_loss"] + 0.25 * metrics["load_balance_loss"]
  expected = metrics["loss"] + auxiliary
  np.testing.assert_allclose(metrics["total_loss"], expected, rtol=1e-6)


@pytest.mark.parametrize("named", [True, False])
def test_the_token_cache_is_in_the_configured_directory(tmp_path, named):
  text = tmp_path / "text.txt"
  text.write_text("to be or not to be\n" * 99)
  keys = {
    "dataset_type": "text",
    "dataset_path": text,
    "eval_split": "tail",
    "base_output_directory": tmp_path / "runs",
  }
  expected = tmp_path / "runs" / ".tokens"
  if named:
    expected = tmp_path / "tokens"
    keys["token_cache_directory"] = expected
  open_trainer_data(build_trainer(config_of(**keys)))
  assert list(expected.glob("*/train.bin"))


def test_phases_that_read_the_documents_of_the_run_hold_out_the_same_tail(tmp_path):
  text = tmp_path / "text.txt"
  text.write_text("to be or not to be\n" * 99)
  keys = {"dataset_type": "text", "dataset_path": text, "token_cache_directory": tmp_path}
  phases = "[{name: small, train: .*, steps: 1, per_device_batch_size: 1}]"
  trainer = build_trainer(config_of(phases=phases, phase_strategy="separate", **keys))
  data = open_trainer_data(trainer)
  assert data.source.eval
  phase_data = open_objective_data(trainer, data)["small"]
  assert phase_data.global_batch_size != data.global_batch_size
  assert phase_data.source.train.identity == data.source.train.identity
