"""Members of an ensemble: names, own keys and shared keys."""

import math

import pytest

from maxlite.config import load_config, yaml_files
from maxlite.config.members import MEMBER_KEYS, members_of
from maxlite.config.schema import (
  DEFAULTS,
  Config,
  DataConfig,
  EnsembleConfig,
  MeshConfig,
  ModelConfig,
  OptimizerConfig,
  RunConfig,
  TrainingConfig,
  flatten,
)
from maxlite.config.schema.training_config import (
  POLICY_KEYS,
  PREFERENCE_KEYS,
  REFERENCE_KEYS,
  TEACHER_KEYS,
)
from maxlite.errors import UserError


def members_from(*argv):
  return members_of(load_config(argv))


def overrides_of(*argv):
  return [member.overrides for member in members_from(*argv)]


def drawn(key, rule, num_members=120, seed=0, others=""):
  """The value of `key` in each member."""
  keys = f"{{{key}: {rule}{others}}}"
  argv = f"sweep={{draw: {keys}, num_members: {num_members}, seed: {seed}}}"
  return [overrides[key] for overrides in overrides_of(argv)]


def test_no_members_without_an_ensemble():
  assert members_of(Config()) == ()


def test_members_keep_their_order_and_names():
  found = members_from("members=[{head_dim: 8}, {name: wide, base_emb_dim: 512}, {}]")
  assert [member.name for member in found] == ["m00", "wide", "m02"]
  assert [member.overrides for member in found] == [{"head_dim": 8}, {"base_emb_dim": 512}, {}]


def test_numbers_are_zero_padded():
  sweep = f"sweep={{grid: {{init_weights_seed: [{', '.join(map(str, range(101)))}]}}}}"
  found = members_from(sweep)
  assert (found[0].name, found[100].name) == ("m000", "m100")


def test_grid_is_every_combination_in_order():
  grid = "{init_weights_seed: [1, 0], mlp_activations: [[gelu], [silu, linear]]}"
  assert overrides_of(f"sweep={{grid: {grid}}}") == [
    {"init_weights_seed": seed, "mlp_activations": activations}
    for seed in (1, 0)
    for activations in (("gelu",), ("silu", "linear"))
  ]


def test_seeds_of_a_sweep_vary_fastest():
  sweep = "sweep={grid: {learning_rate: [1e-3, 3e-4]}, seeds: 2}"
  assert overrides_of(sweep) == [
    {"learning_rate": 1e-3, "init_weights_seed": 0},
    {"learning_rate": 1e-3, "init_weights_seed": 1},
    {"learning_rate": 3e-4, "init_weights_seed": 0},
    {"learning_rate": 3e-4, "init_weights_seed": 1},
  ]
  assert overrides_of("sweep={seeds: 2}") == [{"init_weights_seed": 0}, {"init_weights_seed": 1}]
  drawn = "draw: {learning_rate: {uniform: [0.1, 1]}}, num_members: 2"
  rates = [own["learning_rate"] for own in overrides_of(f"sweep={{{drawn}, seeds: 2}}")]
  assert (
    rates[::2]
    == rates[1::2]
    == [own["learning_rate"] for own in overrides_of(f"sweep={{{drawn}}}")]
  )


def test_members_and_sweep_give_their_product():
  argv = ("members=[{head_dim: 8}, {name: a}]", "sweep={grid: {learning_rate: [1e-3, 3e-4]}}")
  found = {member.name: member.overrides for member in members_from(*argv)}
  assert found == {
    "m00": {"head_dim": 8, "learning_rate": 1e-3},
    "m01": {"head_dim": 8, "learning_rate": 3e-4},
    "a_00": {"learning_rate": 1e-3},
    "a_01": {"learning_rate": 3e-4},
  }
  assert list(found["m00"]) == ["head_dim", "learning_rate"]


def test_command_line_replaces_members_of_files(tmp_path):
  (tmp_path / "own.yml").write_text("members:\n- head_dim: 8\n- head_dim: 16\n")
  assert len(members_from(str(tmp_path / "own.yml"))) == 2
  assert overrides_of(str(tmp_path / "own.yml"), "members=[{head_dim: 4}]") == [{"head_dim": 4}]


def test_member_config_equals_that_of_a_solo_run():
  shared = ["steps=9", "run_name=all", "base_output_directory=out", "head_dim=16"]
  argv = [
    "members=[{name: a, learning_rate: 1e-3}]",
    "asha_reduction_factor=2",
    "asha_min_steps=3",
  ]
  [member] = members_from(*shared, *argv, "ensemble_strategy=processes", "ensemble_num_workers=3")
  alone = load_config(["steps=9", "head_dim=16", "learning_rate=1e-3"])
  folders = {
    "run_name": "a",
    "base_output_directory": "out/all/members",
    "token_cache_directory": "out/.tokens",
  }
  assert flatten(member.config) == flatten(alone) | folders
  assert member.config.ensemble == EnsembleConfig()


def test_token_cache_directory_is_shared():
  [member] = members_from("members=[{}]", "token_cache_directory=tokens")
  assert member.config.data.token_cache_directory == "tokens"


@pytest.mark.parametrize(
  ("ensemble_data", "seeds", "sampling"),
  [
    ("shared", [7, 7, 5], "shuffle"),
    ("independent", [7, 8, 5], "shuffle"),
    ("bootstrap", [7, 8, 5], "bootstrap"),
  ],
)
def test_ensemble_data_sets_seeds_and_sampling(ensemble_data, seeds, sampling):
  members = "members=[{head_dim: 8}, {}, {data_shuffle_seed: 5}]"
  found = members_from(members, f"ensemble_data={ensemble_data}", "data_shuffle_seed=7")
  assert [member.config.data.data_shuffle_seed for member in found] == seeds
  assert {member.config.data.data_sampling for member in found} == {sampling}


def test_member_preset_is_overridden_by_keys_and_leaves_shared_keys(tmp_path, monkeypatch):
  (tmp_path / "models").mkdir()
  preset = "head_dim: 16\nbase_emb_dim: 128\nvocab_size: 999\nsteps: 3\n"
  (tmp_path / "models" / "small.yml").write_text(preset)
  monkeypatch.setattr(yaml_files, "CONFIGS", tmp_path)
  [member] = members_from("members=[{base_emb_dim: 64, model_name: small}]", "base_emb_dim=32")
  config = member.config
  assert member.overrides == {"base_emb_dim": 64, "model_name": "small"}
  assert (config.model.head_dim, config.model.base_emb_dim) == (16, 64)
  assert (config.model.vocab_size, config.run.steps) == (320, DEFAULTS["steps"])
  assert config.run.model_name == ""


def test_shared_keys_in_members_are_an_error():
  for key in DEFAULTS.keys() - MEMBER_KEYS:
    value = {"members": "[{}]", "sweep": "{}", "pbt_hyperparameters": "{}"}.get(key, "1")
    with pytest.raises(UserError, match=rf"members\[0\]: {key}="):
      load_config([f"members=[{{{key}: {value}}}]"])


def test_keys_that_determine_batches_are_shared():
  assert MEMBER_KEYS.isdisjoint(flatten(MeshConfig()))
  assert MEMBER_KEYS & flatten(DataConfig()).keys() == {"data_shuffle_seed", "data_sampling"}
  assert MEMBER_KEYS & flatten(RunConfig()).keys() == {
    *("init_weights_seed", "model_name", "steps")
  }
  assert flatten(ModelConfig()).keys() - MEMBER_KEYS == {"vocab_size"}
  assert flatten(OptimizerConfig()).keys() - MEMBER_KEYS == {"pbt_hyperparameters"}
  of_other_models = {*TEACHER_KEYS, *PREFERENCE_KEYS, *REFERENCE_KEYS, *POLICY_KEYS}
  assert flatten(TrainingConfig()).keys() - MEMBER_KEYS == of_other_models


def test_draws_depend_on_the_seed():
  rule = "{log_uniform: [1e-4, 1e-2]}"
  first, again, other = (drawn("learning_rate", rule, 9, seed=seed) for seed in (0, 0, 1))
  assert first == again
  assert first != other


def test_more_members_or_keys_do_not_change_draws():
  rule = "{log_uniform: [1e-4, 1e-2]}"
  few = drawn("learning_rate", rule, num_members=5)
  assert drawn("learning_rate", rule, num_members=9)[:5] == few
  assert drawn("learning_rate", rule, 5, others=", head_dim: {choice: [8, 16]}") == few


def test_draws_are_distinct():
  assert sorted(drawn("head_dim", "{choice: [2, 4, 6, 8]}", num_members=4)) == [2, 4, 6, 8]


def test_log_uniform_draws_every_decade_equally_often():
  rates = drawn("learning_rate", "{log_uniform: [1e-4, 1e-2]}")
  assert all(1e-4 <= rate <= 1e-2 and float(f"{rate:.4g}") == rate for rate in rates)
  assert 42 < sum(rate < 1e-3 for rate in rates) < 78


def test_uniform_draws():
  decays = drawn("adam_weight_decay", "{uniform: [0.1, 0.3]}")
  assert all(0.1 <= decay <= 0.3 for decay in decays)
  assert math.isclose(sum(decays) / len(decays), 0.2, abs_tol=0.02)


@pytest.mark.parametrize("rule", ["{uniform: [2, 5]}", "{choice: [2, 3, 4, 5]}"])
def test_integers_are_drawn_equally_often(rule):
  seeds = ", init_weights_seed: {uniform: [0, 2000000000]}"
  drawn_layers = drawn("base_num_decoder_layers", rule, others=seeds)
  assert all(18 < drawn_layers.count(layers) < 42 for layers in (2, 3, 4, 5))
  assert set(drawn_layers) == {2, 3, 4, 5}


def test_log_uniform_integers():
  seeds = ", init_weights_seed: {uniform: [0, 2000000000]}"
  widths = drawn("base_mlp_dim", "{log_uniform: [16, 1024]}", others=seeds)
  assert all(type(width) is int and 16 <= width <= 1024 for width in widths)
  assert 42 < sum(width < 128 for width in widths) < 78


@pytest.mark.parametrize(
  ("file", "count"), [("seeds", 32), ("depth_width", 12)], ids=["seeds", "depth_width"]
)
def test_number_of_members_of_shipped_ensembles(file, count):
  found = members_from(str(yaml_files.CONFIGS / "ensemble" / f"{file}.yml"))
  assert len(found) == count
  if file == "seeds":
    assert len({tuple(flatten(member.config.model).items()) for member in found}) == 1
  else:
    assert len({tuple(flatten(member.config.model).items()) for member in found}) == count


def test_all_mistakes_of_all_members_are_reported_at_once():
  members = "members=[{dropout_rate: 0.1, learning_rte: 1}, {vocab_size: 5}]"
  with pytest.raises(UserError) as error:
    load_config([members, "sweep={grid: {adam_eps: [x, 1e-6]}}"])
  first, second, third, fourth = error.value.lines
  assert first.startswith("members[0]: dropout_rate=0.1 is a key of MaxText")
  assert "learning_rte=1 is not a key; did you mean learning_rate?" in second
  assert "sweep.grid: adam_eps=x is not a finite number" in third
  assert "members[1]: vocab_size=5 is shared by all members" in fourth
