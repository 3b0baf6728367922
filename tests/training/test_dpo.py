"""The loss `dpo`: as defined on separate sequences, on any mesh, with either kind of reference."""

import dataclasses
import functools
import itertools
import json
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from preference_pairs import PAIRS, draw_pairs, packed
from support import trees
from support.saved_models import save_run
from support.slow_cases import slow
from support.tiny import (
  LENGTH,
  ROWS,
  VOCAB,
  build,
  config_of,
  mesh_keys,
  place,
  state_on,
  take_steps,
)
from support.tiny_run import keys_in, logged, start

from maxlite.checkpoint.checksum import leaves_by_path
from maxlite.config import schema
from maxlite.config.schema import DEFAULTS, Config, LoraConfig
from maxlite.data.batch import Batch
from maxlite.errors import UserError
from maxlite.layers.lora import ADAPTER, drop_modules
from maxlite.models import Decoder
from maxlite.runs.evaluate_run import run_evaluation
from maxlite.sharding import MESH_AXES, Sharder, build_mesh
from maxlite.training.loss import Hidden
from maxlite.training.model_folders import check_model_folders
from maxlite.training.preference_loss import dpo_sums
from maxlite.training.program import build_objective_parts, flops_per_step, inputs_hash

ADAPTERS = {
  "lora_rank": 2,
  "lora_alpha": 4,
  "phases": "[{name: tune, train: ['.*lora_.*'], steps: 8}]",
}
DENSE = {"decoder_block": "llama", "base_num_decoder_layers": 1}
MOE = {
  "decoder_block": "mixtral",
  "base_num_decoder_layers": 1,
  "load_balance_loss_weight": 0.5,
  "router_z_loss_weight": 0,
}
# A state, a convolution, and chunks of 3 positions end where a sequence does.
RECURRENT = {
  "decoder_block": "nemotron_h",
  "base_num_decoder_layers": 3,
  "hybrid_override_pattern": "M*-",
  "mlp_activations": "[squared_relu]",
  "mamba_num_heads": 4,
  "mamba_head_dim": 4,
  "mamba_num_groups": 2,
  "mamba_state_dim": 4,
  "mamba_chunk_size": 4,
}
CHUNKED = {
  "decoder_block": "llama4",
  "base_num_decoder_layers": 2,
  "global_layers": "[1]",
  "num_experts_per_tok": 1,
  "router": "topk_sigmoid",
  "norm_topk_prob": False,
  "shared_experts": 1,
  "sliding_window_size": 3,
  "query_scaling_beta": 0.5,
  "original_max_position_embeddings": 2,
  "load_balance_loss_weight": 0,
  "router_z_loss_weight": 0,
}
MEANS = (
  "loss",
  "rewards/chosen",
  "rewards/rejected",
  "rewards/margins",
  "rewards/accuracies",
  "logps/chosen",
  "logps/rejected",
)


def program_on(mesh, num_devices=8, **keys):
  return build(config_of(**PAIRS | mesh_keys(mesh) | keys), jax.devices()[:num_devices])


def with_drawn_adapters(state):
  """The state on the host, whose adapters change the model."""
  draw = np.random.default_rng(1)
  host = jax.device_get(state)

  def drawn(key_path, leaf):
    if any(getattr(key, "key", "") in ADAPTER for key in key_path):
      return draw.standard_normal(leaf.shape).astype(leaf.dtype) / 4
    return leaf

  return host.replace(params=jax.tree.map_with_path(drawn, host.params))


class Alone(NamedTuple):
  """Sequences with a row each."""

  tokens_ST: np.ndarray
  targets_ST: np.ndarray
  # 1 where the target is of an answer.
  weight_ST: np.ndarray


def separate(rows):
  """The chosen sequence of every pair, and the rejected ones, unpacked."""
  pairs = list(itertools.chain.from_iterable(rows))
  sequences = [pair.chosen for pair in pairs] + [pair.rejected for pair in pairs]
  shape = (len(sequences), LENGTH)
  alone = Alone(
    tokens_ST=np.zeros(shape, int),
    targets_ST=np.zeros(shape, int),
    weight_ST=np.zeros(shape, np.float32),
  )
  for n, sequence in enumerate(sequences):
    length = len(sequence.weights)
    alone.tokens_ST[n, :length] = sequence.ids[:-1]
    alone.targets_ST[n, :length] = sequence.ids[1:]
    alone.weight_ST[n, :length] = sequence.weights
  return alone


def log_probs(model, params, alone):
  """(of the chosen, of the rejected) answers, each [pairs]."""
  logits_STV = model.apply({"params": params}, alone.tokens_ST)
  log_p_STV = jax.nn.log_softmax(logits_STV)
  targets_ST1 = jnp.asarray(alone.targets_ST)[..., None]
  log_p_ST1 = jnp.take_along_axis(log_p_STV, targets_ST1, axis=2)
  log_p_S = jnp.sum(log_p_ST1[..., 0] * alone.weight_ST, axis=1)
  return jnp.split(log_p_S, 2)


def loss_by_definition(program, params, rows):
  """(loss, means over pairs), from sequences with a row each."""
  model = program.spec.model
  base = Decoder(dataclasses.replace(model, lora=LoraConfig()), program.sharder)
  alone = separate(rows)
  log_p_chosen, log_p_rejected = log_probs(program.model, params, alone)
  base_params = drop_modules(params, ADAPTER)
  reference_chosen, reference_rejected = log_probs(base, base_params, alone)
  chosen = 0.5 * (log_p_chosen - reference_chosen)
  rejected = 0.5 * (log_p_rejected - reference_rejected)
  p_preferred = jax.nn.sigmoid(chosen - rejected)
  loss = -0.9 * jnp.log(p_preferred) - 0.1 * jnp.log(1 - p_preferred)
  is_right = (chosen > rejected).astype(jnp.float32)
  means = {
    "loss": jnp.mean(loss),
    "rewards/chosen": jnp.mean(chosen),
    "rewards/rejected": jnp.mean(rejected),
    "rewards/margins": jnp.mean(chosen - rejected),
    "rewards/accuracies": jnp.mean(is_right),
    "logps/chosen": jnp.mean(log_p_chosen),
    "logps/rejected": jnp.mean(log_p_rejected),
  }
  return means["loss"], means


@pytest.fixture(scope="module")
def dense():
  """A program on one device, and its first state with adapters that change the model."""
  program = program_on("", 1, **DENSE, **ADAPTERS, per_device_batch_size=ROWS)
  return program, with_drawn_adapters(program.init(0))


@pytest.mark.parametrize(
  ("model", "num_micro"), [slow(DENSE, 1), (DENSE, 4), slow(RECURRENT, 1), slow(CHUNKED, 1)]
)
def test_packed_pairs_have_the_loss_and_gradients_of_the_definition(model, num_micro):
  keys = model | ADAPTERS | {"gradient_accumulation_steps": num_micro}
  program = program_on("", 1, **keys, per_device_batch_size=ROWS)
  state = with_drawn_adapters(program.init(0))
  rows = draw_pairs(0)
  step = jax.jit(build_objective_parts(program, program.objectives[0]).gradients)
  result = step(state.params, None, place(program, packed(rows)), jax.random.key(0))
  by_definition = functools.partial(loss_by_definition, program, rows=rows)
  (_, means), gradients = jax.jit(jax.value_and_grad(by_definition, has_aux=True))(state.params)
  assert 0 < means["rewards/accuracies"] < 1
  for name in MEANS:
    np.testing.assert_allclose(result.metrics[name], means[name], rtol=1e-5, err_msg=name)
  expected = leaves_by_path(gradients)
  found = leaves_by_path(result.gradients)
  assert found
  for path, gradient in found.items():
    np.testing.assert_allclose(gradient, expected[path], rtol=1e-4, atol=1e-5, err_msg=path)


@pytest.mark.parametrize("mesh", [(1, 1), (2, 1), (2, 2)], ids=["one", "context", "both"])
def test_sequences_across_the_shards_border_count_as_a_whole(mesh):
  """`dpo_sums` of drawn hidden states: row 0 has one pair, whose chosen sequence has the border."""
  context, tensor = mesh
  sizes = {"context": context, "tensor": tensor}
  degrees = [sizes.get(name, 1) for name in MESH_AXES]
  sharder = Sharder(build_mesh(degrees, [1] * 6, jax.devices()[: context * tensor]))
  draw = np.random.default_rng(0)
  segment_BT = np.array(
    [np.repeat([1, 2, 0], [11, 3, 2]), np.repeat([1, 2, 3, 4], [3, 4, 6, 3])], np.int32
  )
  shape = segment_BT.shape
  batch = Batch(
    tokens_BT=draw.integers(VOCAB, size=shape, dtype=np.int32),
    targets_BT=draw.integers(VOCAB, size=shape, dtype=np.int32),
    position_BT=np.zeros(shape, np.int32),
    segment_BT=segment_BT,
    weight_BT=((draw.random(shape) < 0.7) & (segment_BT > 0)).astype(np.float32),
  )
  x_2BTD = draw.standard_normal((2, *shape, 4)).astype(np.float32)  # of the policy, the reference
  w_DV = draw.standard_normal((4, VOCAB)).astype(np.float32)
  cfg = schema.build(Config, DEFAULTS | {"dpo_beta": 0.5, "dpo_label_smoothing": 0.1}).training

  @jax.jit
  def loss_of(x_2BTD):
    reference = Hidden(x_2BTD[1], {}, w_DV, None)
    hidden = Hidden(x_2BTD[0], {}, w_DV, None, teachers=(reference,))
    return dpo_sums(hidden, batch, cfg, sharder).pairs

  log_p_2BTV = jax.nn.log_softmax(np.asarray(x_2BTD, np.float64) @ w_DV)
  log_p_2BT = np.take_along_axis(np.asarray(log_p_2BTV), batch.targets_BT[None, ..., None], 3)[
    ..., 0
  ]
  rewards = []
  for row, segment in ((0, 1), (1, 1), (1, 3)):
    of_pair = []
    for number in (segment, segment + 1):
      weight_T = batch.weight_BT[row] * (segment_BT[row] == number)
      policy, reference = np.sum(weight_T * log_p_2BT[:, row], axis=1)
      of_pair.append(0.5 * (policy - reference))
    rewards.append(of_pair)
  chosen, rejected = np.transpose(rewards)
  margin = chosen - rejected
  loss = 0.9 * np.logaddexp(0, -margin) + 0.1 * np.logaddexp(0, margin)
  pairs = loss_of(x_2BTD)
  assert pairs.pairs == 3
  np.testing.assert_allclose(pairs.loss, loss.sum(), rtol=1e-5)
  np.testing.assert_allclose(pairs.rewards_chosen, chosen.sum(), rtol=1e-4)
  np.testing.assert_allclose(pairs.rewards_rejected, rejected.sum(), rtol=1e-4)


@pytest.fixture(scope="module")
def one_step():
  """A function from keys to (state before, parameters and metrics after) a step on one device."""

  @functools.cache
  def step_with(block):
    keys = {"mixtral": MOE, "llama": DENSE}[block]
    program = program_on("", 1, **keys, **ADAPTERS, per_device_batch_size=ROWS)
    state = with_drawn_adapters(program.init(0))
    after, (metrics,) = take_steps(program, state, [packed(draw_pairs(0))])
    return state, after.params, metrics

  return step_with


@pytest.mark.parametrize(
  ("keys", "mesh", "num_micro"),
  [
    slow(DENSE, "data=2 context=2 tensor=2", 2),
    slow(MOE, "fsdp=2 context=2 tensor=2", 1),
    slow(MOE, "data=2 expert=2 context=2", 2),
    slow(MOE, "fsdp=8", 1),
    slow(MOE, "data=2 fsdp=2 tensor=2", 4),
  ],
)
def test_any_mesh_and_accumulation_give_the_same_step(one_step, keys, mesh, num_micro):
  state, expected, expected_metrics = one_step(keys["decoder_block"])
  program = program_on(mesh, **keys, **ADAPTERS, gradient_accumulation_steps=num_micro)
  after, (metrics,) = take_steps(program, state, [packed(draw_pairs(0))])
  for name in (*MEANS, "total_loss", "grad_norm"):
    np.testing.assert_allclose(metrics[name], expected_metrics[name], rtol=5e-5, err_msg=name)
  balance = 0.0
  if keys is MOE:
    balance = metrics["load_balance_loss"]
    np.testing.assert_allclose(balance, expected_metrics["load_balance_loss"], rtol=5e-5)
  np.testing.assert_allclose(metrics["total_loss"], metrics["loss"] + 0.5 * balance, rtol=1e-5)
  for leaf, expected_leaf in trees.leaf_pairs(after.params, expected):
    np.testing.assert_allclose(leaf, expected_leaf, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_folder_is_a_reference_like_the_model_without_adapters(dense, tmp_path):
  program, state = dense
  rows = packed(draw_pairs(0))
  _, (expected,) = take_steps(program, state, [rows])
  plain = config_of(**DENSE)
  save_run(tmp_path, drop_modules(state.params, ADAPTER), plain)
  keys = DENSE | ADAPTERS | {"reference_path": tmp_path, "per_device_batch_size": ROWS}
  referring = program_on("", 1, **keys)
  inputs = referring.with_extra_inputs(place(referring, rows))
  _, metrics = referring.step(state_on(referring, state), inputs)
  for name in (*MEANS, "grad_norm"):
    np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-6, err_msg=name)
  (flops,) = flops_per_step(referring)
  assert [flops] == flops_per_step(program)
  assert inputs_hash(referring)
  assert not inputs_hash(program)


def write_lines(file, records):
  file.parent.mkdir(exist_ok=True)
  lines = [json.dumps(record) for record in records]
  file.write_text("\n".join(lines) + "\n")


@pytest.mark.slow
def test_a_run_learns_and_evaluates_preferences(folder, capsys):
  pairs = [{"prompt": f"{n}", "chosen": f"{n}", "rejected": f"{n + 1}"} for n in range(40)]
  write_lines(folder / "pairs.jsonl", pairs)
  chats = [{"prompt": f"{n}", "completion": f"{n}"} for n in range(9)]
  write_lines(folder / "chats.jsonl", chats)
  tune = "{name: tune, train: ['.*lora_.*'], steps: 3}"
  fit = (
    "{name: fit, train: ['.*lora_.*'], steps: 1, loss: next_token, dataset_type: chat"
    f", dataset_path: [{folder}/chats.jsonl]}}"
  )
  keys = {
    **DENSE,
    **ADAPTERS,
    **PAIRS,
    "phases": f"[{tune}, {fit}]",
    "dataset_path": folder / "pairs.jsonl",
    "max_target_length": 64,
    "eval_fraction": 0.2,
  }
  code, output = start(folder, **keys)
  assert code == 0
  assert " pairs; eval " in output
  rows = logged(folder)
  assert [row["phase"] for row in rows] == [0, 0, 0, 1, 0, 0, 0, 1]
  first, *_, last_pairs, last = rows
  # Before the first update, model and reference are equal.
  np.testing.assert_allclose(first["loss"], np.log(2), rtol=1e-5)
  np.testing.assert_allclose(first["rewards/margins"], 0, atol=1e-5)
  assert last_pairs["rewards/margins"] > 0
  assert "rewards/margins" not in last
  assert 0 <= last["eval_rewards/accuracies"] <= 1
  capsys.readouterr()
  assert run_evaluation(config_of(**keys_in(folder, **keys))) == 0
  printed = capsys.readouterr().out
  for name in ("eval_loss", "eval_rewards/accuracies", "eval_ema_rewards/margins"):
    assert f"{name} {last[name]:.6g}" in printed


@pytest.mark.parametrize(
  ("keys", "message"),
  [
    ({"phases": "[]", "lora_rank": 0}, "needs a reference model; write reference_path=FOLDER"),
    ({"phases": "[]"}, "needs a reference model"),
    ({"lora_rank": 0}, "needs a reference model"),
    ({"reference_path": "nowhere"}, "reference_path=nowhere is not a run folder"),
    ({"loss_type": "next_token"}, "is only read by loss dpo; write loss_type=dpo, or dpo_beta=0.1"),
    ({"dpo_beta": 0}, "the loss would be constant"),
    ({"mtp_num_layers": 1}, "would also learn the rejected answers"),
    (
      {"sequence_length_schedule": "[[0, 8]]", "phases": "[]", "reference_path": "x"},
      "would cut pairs",
    ),
    ({"members": "[{name: a}]"}, "members have no reference model"),
    ({"dataset_type": "chat"}, "needs pairs of answers; write dataset_type: preference"),
    (
      {"dataset_type": "chat", "phases": "[]", "reference_path": "x"},
      "needs pairs of answers; write dataset_type=preference",
    ),
    (
      {"loss_type": "next_token", "phases": "[]", "dpo_beta": 0.1, "dpo_label_smoothing": 0},
      "dataset_type=preference with loss_type=next_token: pairs are for preference losses",
    ),
    (
      {"phases": "[{name: fit, train: ['.*'], steps: 8, loss: next_token}]"},
      "is only read by loss dpo",
    ),
    (
      {
        "phases": "[{name: fit, train: ['.*'], steps: 8, loss: next_token}]",
        "dpo_beta": 0.1,
        "dpo_label_smoothing": 0,
      },
      "pairs are for preference losses; write loss: dpo",
    ),
    ({"phases": "[{name: all, train: ['.*'], steps: 8}]"}, "would change its own reference by"),
  ],
  ids=str,
)
def test_mistakes_are_one_line(keys, message):
  def check_and_build():
    cfg = config_of(**DENSE | ADAPTERS | PAIRS | keys)
    check_model_folders(cfg)  # as a command does before it imports JAX
    build(cfg, jax.devices()[:1])

  with pytest.raises(UserError, match=re.escape(message)):
    check_and_build()
