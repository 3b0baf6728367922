"""Config keys of the implementation change no number; keys of the model do."""

import functools

import jax
import numpy as np
import pytest
from tiny import VOCAB, config_of, place, state_on, take_steps, trainer_of, uneven_batch

from maxlite.evaluation.held_out import compile_eval_step
from maxlite.runs.open_run import open_objective_data, open_trainer_data
from maxlite.training.trainer import build_trainer


@functools.cache
def one_step(**keys):
  """(metrics of the first step, parameters after it)."""
  trainer = trainer_of(decoder_block="mixtral", **keys)
  after, (metrics,) = take_steps(trainer, first_state(), [uneven_batch(0)])
  return metrics, after.params


def held_out_loss(**keys):
  trainer = trainer_of(decoder_block="mixtral", **keys)
  eval_step = compile_eval_step(trainer, np.ones(VOCAB, np.int32))
  sums = eval_step(state_on(trainer, first_state()).params, place(trainer, uneven_batch(0)))
  return sums["nll"] / sums["weight"]


@functools.cache
def first_state(**keys):
  return jax.device_get(trainer_of(decoder_block="mixtral", **keys).init_state())


def test_implementation_keys_do_not_change_the_step():
  (expected, expected_params), (metrics, params) = (
    one_step(),
    one_step(scan_unroll=2, attention_block_q=5),
  )
  for name in ("total_loss", "grad_norm"):
    np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-5)
  jax.tree.map(
    functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), params, expected_params
  )


@pytest.mark.parametrize(
  "other",
  [
    {"normalization_layer_epsilon": 0.5},
    {"rope_max_timescale": 10},
    {"router": "topk_softmax", "norm_topk_prob": "false"},
  ],
  ids=str,
)
def test_model_keys_change_the_loss(other):
  assert abs(held_out_loss(**other) / held_out_loss() - 1) > 1e-6


def test_the_seed_changes_the_initial_parameters():
  states = first_state(), first_state(init_weights_seed=1)
  embeddings = [state.params["embed"]["embedding"] for state in states]
  assert np.all(embeddings[0] != embeddings[1])


def test_auxiliary_losses_are_weighted():
  """With other weights than the default ones, of which test_meshes.py tests the sum."""
  metrics, _ = one_step(router_z_loss_weight=0.5, load_balance_loss_weight=0.25)
  expected = metrics["loss"] + 0.5 * metrics["router_z_loss"] + 0.25 * metrics["load_balance_loss"]
  np.testing.assert_allclose(metrics["total_loss"], expected, rtol=1e-6)


@pytest.mark.parametrize("named", [True, False])
def test_the_token_cache_is_in_the_configured_directory(tmp_path, named):
  keys = {"token_cache_directory": tmp_path / "tokens"} if named else {}
  text = tmp_path / "text.txt"
  text.write_text("to be or not to be\n" * 99)
  data = {"dataset_type": "text", "dataset_path": text, "eval_split": "tail"}
  cfg = config_of(base_output_directory=tmp_path / "runs", **(data | keys))
  open_trainer_data(build_trainer(cfg))
  expected = tmp_path / "tokens" if named else tmp_path / "runs" / ".tokens"
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
