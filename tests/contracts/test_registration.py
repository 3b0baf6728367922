"""One line in a table registers an implementation: a toy of every kind is registered and run."""

import dataclasses
import re
import types
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import struct

from maxlite import registry as tables
from maxlite.config import load_config
from maxlite.config.model_families import MODELS, AttentionForm, ModelFamily, MoeForm
from maxlite.ensemble import Ensemble, Member
from maxlite.errors import UserError
from maxlite.metrics.writers import read_rows
from maxlite.runs.run import run_training
from maxlite.training.feature import Feature

# Of each kind: the table, and the entry that the toy calls.
KINDS = {
  "router": (tables.PLAIN_ROUTERS, "topk_softmax"),
  "dispatch": (tables.DISPATCHES, "ragged"),
  "attention": (tables.ATTENTION_BACKENDS, "reference"),
  "grouped_matmul": (tables.GROUPED_MATMUL_BACKENDS, "ragged_dot"),
  "source": (tables.SOURCES, "text"),
  "packing": (tables.PACKING_STRATEGIES, "concatenate"),
  "tokenizer": (tables.TOKENIZERS, "byte"),
  "optimizer": (tables.OPTIMIZERS, "lion"),
  "schedule": (tables.SCHEDULES, "constant"),
  "loss": (tables.TOKEN_LOSSES, "next_token"),
  "feature": (tables.FEATURES, "teacher"),
  "strategy": (tables.ENSEMBLE_STRATEGIES, "fused"),
}
TOYS = types.SimpleNamespace()
CALLED = set()


@struct.dataclass
class Counted:
  """An optimizer state, and the number of the steps that read the toy's input."""

  inner: Any
  num_steps: jax.Array


class ToyFeature(Feature):
  """Adds a counter to the state, a number to the inputs, and a metric around the step."""

  def start(self, state):
    return state.replace(opt_state=Counted(state.opt_state, jnp.float32(0)))

  def shard_state(self, shardings, state, shard):
    counter = shard(jax.ShapeDtypeStruct((), jnp.float32))
    return shardings.replace(opt_state=Counted(shardings.opt_state, counter))

  def inputs(self):
    return {"toy": jnp.float32(3)}

  def abstract_inputs(self):
    return {"toy": jax.ShapeDtypeStruct((), jnp.float32)}

  def wrap_step(self, step, objective):
    def counted_step(state, inputs):
      counted = state.opt_state
      state, metrics = step(state.replace(opt_state=counted.inner), inputs)
      num_steps = counted.num_steps + inputs.extra["toy"]
      counted = Counted(state.opt_state, num_steps)
      return state.replace(opt_state=counted), metrics | {"toy": num_steps}

    return counted_step

  def add_to_row(self, row):
    return {"twice_toy": 2 * row["toy"]}


def recorded(kind, function):
  def toy(*args, **kwargs):
    CALLED.add(kind)
    return function(*args, **kwargs)

  return toy


def write_toys():
  """Writes the toys, each of which calls the entry of its kind in KINDS."""
  for kind, (table, name) in KINDS.items():
    setattr(TOYS, kind, recorded(kind, table[name]))
  next_token = tables.LOSSES["next_token"]
  TOYS.feature = recorded("feature", lambda request: ToyFeature())
  TOYS.loss = dataclasses.replace(next_token, sums=recorded("loss", next_token.sums))
  byte_tokenizer = tables.TOKENIZERS["byte"]
  TOYS.tokenizer = recorded("tokenizer", lambda path: byte_tokenizer(""))
  ragged = tables.DISPATCHES["ragged"]
  for kind in ("attention", "grouped_matmul"):
    table, name = KINDS[kind]
    backend = table[name]
    setattr(TOYS, kind, dataclasses.replace(backend, implementation=recorded(kind, backend.run)))
  TOYS.dispatch = dataclasses.replace(
    ragged,
    apply_experts=recorded("dispatch", ragged.apply_experts),
    is_selected=lambda cfg: cfg.router == "toy",
  )


@pytest.fixture(scope="module")
def registered():
  """Adds one line per kind to its table, as a plug-in does; nothing else is changed."""
  write_toys()
  for kind, (table, _) in KINDS.items():
    table["toy"] = f"{__name__}:TOYS.{kind}"
  MODELS["toy"] = ModelFamily(AttentionForm(qk_norm="head"), MoeForm())
  yield
  for table, _ in KINDS.values():
    del table["toy"]
  del MODELS["toy"]


@pytest.fixture(scope="module")
def trained(registered, tmp_path_factory):
  """Runs two steps of a config that selects every toy."""
  folder = tmp_path_factory.mktemp("toys")
  (folder / "data.txt").write_text("".join(f"line {n} of some text\n" for n in range(400)))
  keys = ["decoder_block", "router", "attention", "grouped_matmul"]
  keys += ["dataset_type", "packing_strategy", "tokenizer_type", "opt_type", "lr_schedule_type"]
  argv = [
    *(f"{key}=toy" for key in keys),
    "phases=[{name: all, train: .*, steps: 1, loss: toy}]",
    *(f"{key}={folder}/data.txt" for key in ("dataset_path", "tokenizer_path")),
    *(f"base_output_directory={folder}", "jax_cache_dir=", "eval_split=tail", "eval_steps=1"),
    *("steps=2", "enable_checkpointing=false", "enable_tensorboard=false"),
    *("max_target_length=16", "per_device_batch_size=1", "sharding_tolerance=1"),
    *("base_num_decoder_layers=1", "base_num_query_heads=2", "base_num_kv_heads=2", "head_dim=8"),
    *("base_emb_dim=16", "base_moe_mlp_dim=16", "num_experts=2"),
  ]
  assert run_training(load_config(argv)) == 0
  return read_rows(folder / "base" / "metrics.jsonl")


def test_toy_feature_adds_to_the_state_to_the_inputs_and_around_the_step(trained):
  assert [row["toy"] for row in trained] == [3, 6]
  assert [row["twice_toy"] for row in trained] == [6, 12]


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"strategy"}))
def test_training_calls_the_toy(kind, trained):
  assert kind in CALLED


def test_toy_family(trained):
  cfg = load_config(["decoder_block=toy"]).model
  assert cfg.family.attention.qk_norm == "head"


def test_toy_strategy(registered):
  members = [Member(nn.Dense(1), optax.sgd(0.1), name=name) for name in "ab"]

  def loss(model, batch):
    return jnp.mean(model(batch) ** 2)

  batch_BD = jnp.ones((2, 2))
  ensemble = Ensemble(members, loss, strategy="toy", devices=jax.devices()[:1])
  _, metrics = ensemble.step(ensemble.init(batch_BD), batch_BD)
  assert metrics["loss"].shape == (2,)
  assert "strategy" in CALLED


MUP = ("parametrization=mup", "mup_base_emb_dim=64", "decoder_block=llama")
MEMBERS = ("members=[{}]", "ensemble_strategy=toy")


@pytest.mark.parametrize(
  ("argv", "message"),
  [
    (("opt_type=toy", *MUP), "opt_type=toy with parametrization=mup: mup has no rule for its"),
    (
      ("opt_type=toy", "pbt_hyperparameters={adam_b1: {uniform: [0, 0.9]}}"),
      "is not read by opt",
    ),
    ((*MEMBERS, "num_processes=2"), "ensemble_strategy=toy with num_processes=2: runs in one proc"),
    ((*MEMBERS, "pbt_period=10"), "pbt_period=10 with ensemble_strategy=toy: only stacked members"),
    ((*MEMBERS, "ensemble_num_workers=2"), "this strategy starts no processes"),
    (("dataset_type=toy",), "dataset_type=toy: stdlib is text"),
    (("dataset_type=toy", "packing=false"), "only conversations can have a row each"),
    (("tokenizer_type=toy",), "with tokenizer_type=toy: no such file"),
  ],
)
def test_nothing_is_assumed_about_a_toy_whose_entry_states_nothing(argv, message, registered):
  with pytest.raises(UserError, match=re.escape(message)):
    load_config(list(argv))


def test_rules_read_what_the_entry_of_a_toy_states(registered):
  optimizer = tables.OPTIMIZERS.entry("toy")
  source = tables.SOURCES.entry("toy")
  tables.OPTIMIZERS["toy"] = dataclasses.replace(
    optimizer, mup_updates="adam", hyperparameters=("adam_b1",)
  )
  tables.SOURCES["toy"] = dataclasses.replace(source, has_text_column=True, is_plain_text=True)
  try:
    changes = "pbt_hyperparameters={adam_b1: {uniform: [0, 0.9]}}"
    assert load_config(["opt_type=toy", changes, *MUP]).optimizer.opt_type == "toy"
    assert load_config(["dataset_type=toy"]).data.dataset_path == ("stdlib",)
    with pytest.raises(UserError, match="text_column='' with dataset_type=toy: is empty"):
      load_config(["dataset_type=toy", "text_column="])
  finally:
    tables.OPTIMIZERS["toy"] = optimizer
    tables.SOURCES["toy"] = source


def test_names_and_entries_are_read_without_an_import():
  table = tables.Registry(tables.Entry, toy="no_such_module:attribute")
  assert "toy" in table
  assert list(table) == ["toy"]
  assert table.entry("toy").implementation == "no_such_module:attribute"


def test_another_implementation_keeps_what_the_entry_states():
  entry = tables.SourceEntry("module:first", is_plain_text=True)
  table = tables.Registry(tables.SourceEntry, toy=entry)
  table["toy"] = "module:second"
  assert table.entry("toy") == dataclasses.replace(entry, implementation="module:second")


def test_unregistered_name_is_an_error():
  with pytest.raises(UserError, match=r"router=toyy is not one of softmax_topk, "):
    load_config(["router=toyy"])
