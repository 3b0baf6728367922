"""What a compiled step is a function of, and what a plain run does not open."""

import dataclasses
import subprocess
import sys

import jax
import numpy as np
import pytest
from support.tiny import build, config_of, mesh_keys, place, take_steps, uneven_batch

from maxlite.config import Config
from maxlite.config.schema import flatten
from maxlite.training.spec import spec_of

COMPILED = ("mesh", "model", "optimizer", "training", "local_updates")
NOT_COMPILED = ("hosts", "ensemble", "checkpoint", "observe", "generate", "serve", "plan")
PLAIN_RUN = """
import sys
from maxlite.config import load_config
from maxlite.runs.run import run_training
assert run_training(load_config(sys.argv[1:])) == 0
assert "maxlite.training.program" in sys.modules
features = ("maxlite.phases", "maxlite.training.features.", "maxlite.training.qk_clip")
features += ("maxlite.layers.max_logits", "maxlite.optim.muon", "maxlite.step.spikes")
features += ("maxlite.data.skipped_rows",)
print(*[name for name in sys.modules if name.startswith(features)])
"""


def other(value):
  """A value of the same type; None for types that have none."""
  match value:
    case bool():
      return not value
    case int() | float():
      return value + 1
    case str():
      return f"{value}x"
  return None


def changed(section):
  """Config() with one key of a section changed, for every key that has such a value."""
  cfg = Config()
  part = getattr(cfg, section)
  for field in dataclasses.fields(part):
    value = other(getattr(part, field.name))
    if value is not None:
      own = dataclasses.replace(part, **{field.name: value})
      yield field.name, dataclasses.replace(cfg, **{section: own})


@pytest.mark.parametrize("section", COMPILED)
def test_every_key_of_the_step_is_in_its_spec(section):
  spec = spec_of(Config())
  assert not [name for name, cfg in changed(section) if spec_of(cfg) == spec]


@pytest.mark.parametrize("section", NOT_COMPILED)
def test_no_other_key_is_in_the_spec(section):
  spec = spec_of(Config())
  assert hash(spec) == hash(spec_of(Config()))
  assert not [name for name, cfg in changed(section) if spec_of(cfg) != spec]


def test_names_seeds_folders_and_data_are_not_in_the_spec():
  base = config_of()
  keys = {"run_name": "other", "init_weights_seed": 3, "base_output_directory": "elsewhere"}
  keys |= {"data_shuffle_seed": 4, "dataset_path": "stdlib", "dataset_type": "text"}
  differing = config_of(**keys)
  assert flatten(differing) != flatten(base)
  assert spec_of(differing) == spec_of(base)
  assert spec_of(config_of(per_device_batch_size=1)) != spec_of(base)


def test_the_spec_of_phases_is_that_of_their_steps():
  phases = "[{name: a, train: 'layers.*', steps: 1}, {name: b, train: .*, steps: 2%s}]"
  spec = spec_of(config_of(phases=phases % ""))
  assert [each.name for each in spec.objectives] == ["a", "b"]
  assert spec_of(config_of(phases=phases % ", data_shuffle_seed: 7")) == spec
  assert spec_of(config_of(phases=phases % ", learning_rate: 7")) != spec


def test_programs_of_equal_specs_take_equal_steps():
  """Of two configs whose names and seeds differ."""
  keys = {"decoder_block": "llama", **mesh_keys("fsdp=8")}
  first = build(config_of(**keys))
  second = build(config_of(**keys, run_name="other", init_weights_seed=9))
  before = jax.device_get(first.init(0))
  results = [take_steps(program, before, [uneven_batch(0)]) for program in (first, second)]
  jax.tree.map(np.testing.assert_array_equal, *results)


def test_a_step_is_one_hop_from_the_compiled_function():
  program = build(config_of(decoder_block="llama"))
  assert isinstance(program.step, jax.stages.Wrapped)
  _, metrics = program.step(program.init(0), place(program, uneven_batch(0)))
  assert np.isfinite(metrics["loss"])


def test_a_plain_run_opens_no_file_of_phases_or_features(tmp_path):
  keys = {"base_output_directory": tmp_path, "decoder_block": "llama", "steps": 2}
  keys |= {"enable_checkpointing": "false", "enable_tensorboard": "false", "jax_cache_dir": ""}
  keys |= {"dataset_type": "synthetic", "base_num_decoder_layers": 1, "base_emb_dim": 16}
  keys |= {"base_mlp_dim": 16, "max_target_length": 16, "per_device_batch_size": 1}
  arguments = [f"{key}={value}" for key, value in keys.items()]
  command = [sys.executable, "-c", PLAIN_RUN, *arguments]
  done = subprocess.run(command, capture_output=True, text=True, check=True)
  assert done.stdout.splitlines()[-1] == ""


def test_the_parts_of_a_step_have_names_in_traces():
  program = build(config_of(decoder_block="mixtral", sparse_matmul="true", **mesh_keys("fsdp=8")))
  text = program.lower(program.objectives[0]).as_text(debug_info=True)
  names = ["route", "dispatch", "experts", "combine", "attention_all_gather"]
  for name in (*names, "cross_entropy_chunk", "optimizer"):
    assert f"/{name}/" in text, name
