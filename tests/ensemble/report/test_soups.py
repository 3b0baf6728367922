"""Soups: exact means, the greedy rule, the halves of held-out data, and export."""

from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from support import trees
from support.tiny_run import empty_plots

import maxlite
from maxlite.api.arguments import to_arguments
from maxlite.config import load_config, save_resolved
from maxlite.data.batch import Batch
from maxlite.ensemble import __main__ as command
from maxlite.ensemble.members.program import MemberFunctions
from maxlite.ensemble.report.soups import greedy_soup, mean_of_arrays, score_soups
from maxlite.ensemble.run.ensemble_run import train_ensemble
from maxlite.errors import UserError
from maxlite.hf.hf_config import model_keys

WEIGHTS = Path(__file__).resolve().parents[2] / "hf" / "hf_fixtures" / "llama"
_, MODEL_KEYS = model_keys(WEIGHTS)
KEYS = [
  *to_arguments(MODEL_KEYS),
  "dataset_type=synthetic",
  "max_target_length=8",
  "steps=2",
  "eval_steps=4",
  "log_period=1",
  "enable_tensorboard=false",
  "jax_cache_dir=",
  "run_name=soups",
  "global_batch_size=8",
  "scan_unroll=1",
  "ici_ensemble_parallelism=-1",
  "ici_fsdp_parallelism=1",
  "ensemble_strategy=fused",
  f"load_parameters_path={WEIGHTS}",
]


def test_the_mean_is_summed_in_float32_and_rounded_once():
  draw = np.random.default_rng(0)
  a, b, c = draw.standard_normal((3, 3, 5)).astype(np.float32)
  expected = (a + b + c) / np.float32(3)
  np.testing.assert_array_equal(mean_of_arrays(a, b, c), expected)

  a, b, c = (array.astype(ml_dtypes.bfloat16) for array in (a, b, c))
  total = a.astype(np.float32) + b.astype(np.float32) + c.astype(np.float32)
  expected = (total / np.float32(3)).astype(ml_dtypes.bfloat16)
  mean = mean_of_arrays(a, b, c)
  assert mean.dtype == ml_dtypes.bfloat16
  np.testing.assert_array_equal(mean, expected)


def test_greedy_adds_members_by_loss_and_keeps_those_that_do_not_raise_it():
  means = {(1,): 1.0, (1, 3): 0.9, (1, 3, 0): 0.95, (1, 3, 2): 0.9}
  asked = []

  def nll_of(members):
    asked.append(tuple(members))
    return means[tuple(members)]

  assert greedy_soup([3.0, 1.0, 4.0, 2.0], nll_of) == [1, 3, 2]
  assert asked == [(1, 3), (1, 3, 0), (1, 3, 2)]


def batches_of(targets):
  for target in targets:
    ones = np.ones((1, 2), np.int32)
    yield Batch(ones, ones * target, ones, ones, np.ones((1, 2), np.float32))


def test_members_are_chosen_on_every_other_batch_and_scored_on_the_rest():
  # Member n predicts token n; batches alternate between tokens 1 and 0.
  params = {name: np.float32(np.eye(3)[n]) for n, name in enumerate("abc")}

  def log_prob(x):
    return jax.nn.log_softmax(3 * jax.numpy.broadcast_to(x, (1, 2, 3)))

  def evaluate(state, batch):
    nll = -log_prob(state.params)[0, 0, batch.targets_BT[0, 0]]
    return {"nll": 2 * nll, "weight": 2}

  def predict(state, batch):
    return log_prob(state.params)

  functions = MemberFunctions(
    init_variables=None, start=None, phases=(), step=None, predict=predict, evaluate=evaluate
  )

  def score(targets):
    return score_soups(functions, params, lambda: batches_of(targets), np.ones(3))

  scores = score([1, 0, 1, 0])
  assert list(scores) == ["uniform soup", "greedy soup of b"]
  expected = -jax.nn.log_softmax(3 * params["b"])[0]
  np.testing.assert_allclose(scores["greedy soup of b"]["nll"], expected, rtol=1e-6)
  np.testing.assert_allclose(scores["uniform soup"]["nll"], np.log(3), rtol=1e-6)
  assert list(score([1])) == ["uniform soup"]  # nothing is left to score a choice on


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
  """(folder, console output) of members that start from the weights of one run."""
  root = tmp_path_factory.mktemp("soups")
  keys = [*KEYS, f"base_output_directory={root}"]
  members = "[{name: fast}, {name: still, learning_rate: 0}]"
  with empty_plots():
    assert train_ensemble(load_config([*keys, f"members={members}"])) == 0
  return root / "soups"


def params_of(folder):
  _, params = maxlite.load(folder)
  return jax.device_get(params)


@pytest.mark.slow
def test_members_start_from_the_loaded_parameters(trained):
  first = params_of(WEIGHTS)
  still = params_of(trained / "members" / "still")
  trees.assert_equal_leaves(still, first)


@pytest.mark.slow
def test_a_soup_is_exported_bitwise_and_is_on_the_leaderboard(trained):
  assert command.main(["export", str(trained), "member=fast,still", "run_name=soup"]) == 0
  soup = params_of(trained.parent / "soup")
  fast = params_of(trained / "members" / "fast")
  still = params_of(trained / "members" / "still")

  def mean(a, b):
    return (a + b) / np.float32(2)

  trees.assert_equal_leaves(soup, jax.tree.map(mean, fast, still))
  leaderboard = (trained / "leaderboard.md").read_text()
  assert "| uniform soup " in leaderboard
  assert "| greedy soup of " in leaderboard


@pytest.mark.slow
def test_a_soup_of_an_unknown_member_is_one_line(trained, capsys):
  with pytest.raises(SystemExit):
    command.main(["export", str(trained), "member=fast,none"])
  assert "has no member none" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["lora_rank=2", "mlp_activations=[gelu, linear]"])
def test_a_soup_of_other_models_is_one_line(tmp_path, capsys, key):
  name, value = key.split("=")
  members = f"members=[{{name: a}}, {{name: b, {name}: {value}}}]"
  cfg = load_config([*KEYS, f"base_output_directory={tmp_path}", members])
  folder = tmp_path / "soups"
  folder.mkdir()
  save_resolved(cfg, folder / "config.yml")
  for names in ("a,b", "b,a"):
    with pytest.raises(SystemExit):
      command.main(["export", str(folder), f"member={names}", "run_name=soup"])
    assert f"a soup has members of one model: {name} is" in capsys.readouterr().err
  assert not (tmp_path / "soup").exists()


@pytest.mark.slow
def test_parameters_of_other_shapes_are_one_line(trained):
  keys = [*KEYS, "base_mlp_dim=64", "ensemble_strategy=auto"]
  keys += ["ici_ensemble_parallelism=1", "ici_fsdp_parallelism=-1"]
  with pytest.raises(UserError, match="has a model of other shapes"):
    maxlite.train(load_config([*keys, f"base_output_directory={trained.parent}/other"]))
