"""One line in a table registers an implementation: a toy of every kind is registered and run."""

import dataclasses
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

from maxlite.config import UserError, load_config
from maxlite.config import registry as tables
from maxlite.config.model_families import MODELS, ModelFamily
from maxlite.ensemble import Ensemble, Member
from maxlite.runs.run import run_training

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
  "strategy": (tables.ENSEMBLE_STRATEGIES, "fused"),
}
TOYS = types.SimpleNamespace()
CALLED = set()


def recorded(kind, function):
  def toy(*args, **kwargs):
    CALLED.add(kind)
    return function(*args, **kwargs)

  return toy


@pytest.fixture(scope="module")
def registered():
  with pytest.MonkeyPatch.context() as patch:
    for kind, (table, name) in KINDS.items():
      patch.setitem(table, "toy", f"{__name__}:TOYS.{kind}")
      setattr(TOYS, kind, recorded(kind, table[name]))
    TOYS.loss = dataclasses.replace(
      tables.LOSSES["next_token"], sums=recorded("loss", tables.LOSSES["next_token"].sums)
    )
    byte_tokenizer = tables.TOKENIZERS["byte"]
    TOYS.tokenizer = recorded("tokenizer", lambda path: byte_tokenizer(""))
    TOYS.dispatch = dataclasses.replace(
      tables.DISPATCHES["ragged"],
      apply_experts=recorded("dispatch", tables.DISPATCHES["ragged"].apply_experts),
      is_selected=lambda cfg: cfg.router == "toy",
    )
    patch.setitem(MODELS, "toy", ModelFamily(is_moe=True, qk_norm="head"))
    yield


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


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"strategy"}))
def test_training_calls_the_toy(kind, trained):
  assert kind in CALLED


def test_toy_family(trained):
  cfg = load_config(["decoder_block=toy"]).model
  assert cfg.family.qk_norm == "head"


def test_toy_strategy(registered):
  members = [Member(nn.Dense(1), optax.sgd(0.1), name=name) for name in "ab"]
  loss = lambda model, batch: jnp.mean(model(batch) ** 2)
  batch_BD = jnp.ones((2, 2))
  ensemble = Ensemble(members, loss, strategy="toy", devices=jax.devices()[:1])
  _, metrics = ensemble.step(ensemble.init(batch_BD), batch_BD)
  assert metrics["loss"].shape == (2,)
  assert "strategy" in CALLED


def test_unregistered_name_is_an_error():
  with pytest.raises(UserError, match=r"router=toyy is not one of softmax_topk, "):
    load_config(["router=toyy"])
