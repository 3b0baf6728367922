"""Config keys of the implementation change no number; keys of the model do."""

import jax
import numpy as np
import pytest
from support import trees
from support.slow_cases import slow
from support.tiny import VOCAB, build, config_of, place, state_on, take_steps, uneven_batch

from maxlite.evaluation.held_out import compile_eval_step
from maxlite.runs.open_run import open_objective_data, open_run_data


@pytest.fixture(scope="module")
def program(program_of):
  return program_of(decoder_block="mixtral")


@pytest.fixture(scope="module")
def first_state(program):
  return jax.device_get(program.init(0))


def one_step(program, state):
  """(metrics of a step, parameters after it)."""
  after, (metrics,) = take_steps(program, state, [uneven_batch(0)])
  return metrics, after.params


def held_out_loss(program, state):
  eval_step = compile_eval_step(program, np.ones(VOCAB, np.int32))
  params = state_on(program, state).params
  sums = eval_step(params, place(program, uneven_batch(0)))
  return sums["nll"] / sums["weight"]


@pytest.fixture(scope="module")
def expected_loss(program, first_state):
  """The held-out loss with the default keys of the model."""
  return held_out_loss(program, first_state)


SCANNED = {"decoder_block": "mixtral", "base_num_decoder_layers": 2, "scan_layers": True}


@pytest.mark.parametrize(
  ("keys", "changed"),
  [
    slow({"decoder_block": "llama"}, {"attention_block_q": 5}),
    slow(SCANNED | {"scan_unroll": 1}, {"scan_unroll": 2, "attention_block_q": 5}),
  ],
)
def test_implementation_keys_do_not_change_the_step(program_of, keys, changed):
  program = program_of(**keys)
  state = jax.device_get(program.init(0))
  expected, expected_params = one_step(program, state)
  other = program_of(**keys | changed)
  metrics, params = one_step(other, state)
  for name in ("total_loss", "grad_norm"):
    np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-5)
  for leaf, expected_leaf in trees.leaf_pairs(params, expected_params):
    np.testing.assert_allclose(leaf, expected_leaf, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
  "other",
  [
    slow({"normalization_layer_epsilon": 0.5}),
    {"rope_max_timescale": 10},
    slow({"router": "topk_softmax", "norm_topk_prob": "false"}),
  ],
  ids=str,
)
def test_model_keys_change_the_loss(program_of, first_state, expected_loss, other):
  loss = held_out_loss(program_of(decoder_block="mixtral", **other), first_state)
  assert abs(loss / expected_loss - 1) > 1e-6


def test_the_seed_changes_the_initial_parameters(program_of, first_state):
  other_state = program_of(decoder_block="mixtral").init(1)
  embedding = first_state.params["embed"]["embedding"]
  other_embedding = other_state.params["embed"]["embedding"]
  assert np.all(embedding != jax.device_get(other_embedding))


@pytest.mark.slow
def test_auxiliary_losses_are_weighted(program_of, first_state):
  """With other weights than the default ones, of which test_meshes.py tests the sum."""
  weights = {"router_z_loss_weight": 0.5, "load_balance_loss_weight": 0.25}
  metrics, _ = one_step(program_of(decoder_block="mixtral", **weights), first_state)
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
  cfg = config_of(**keys)
  open_run_data(cfg, build(cfg))
  assert list(expected.glob("*/train.bin"))


def test_phases_that_read_the_documents_of_the_run_hold_out_the_same_tail(tmp_path):
  text = tmp_path / "text.txt"
  text.write_text("to be or not to be\n" * 99)
  keys = {"dataset_type": "text", "dataset_path": text, "token_cache_directory": tmp_path}
  phases = "[{name: small, train: .*, steps: 1, per_device_batch_size: 1}]"
  cfg = config_of(phases=phases, phase_strategy="separate", **keys)
  program = build(cfg)
  data = open_run_data(cfg, program)
  assert data.source.eval
  phase_data = open_objective_data(cfg, program, data)["small"]
  assert phase_data.global_batch_size != data.global_batch_size
  assert phase_data.source.train.identity == data.source.train.identity
