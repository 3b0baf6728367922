"""Draft heads: losses against float64, jointly and alternately with the trunk, on any mesh."""

import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import trees
from support.slow_cases import slow
from support.tiny import (
  LENGTH,
  ROWS,
  VOCAB,
  assert_same_steps,
  build,
  config_of,
  mesh_keys,
  place,
  take_steps,
)
from support.tiny import uneven_batch as batch_of

from maxlite.data.batch import Batch
from maxlite.evaluation.draft_acceptance import acceptance_sums, argmax_token
from maxlite.evaluation.held_out import compile_eval_step, held_out_row
from maxlite.phases.phase_plan import losses_by_phase
from maxlite.planning.hlo import parse
from maxlite.planning.hlo_cost import matmul_flops
from maxlite.registry import DRAFT_LOSSES, LOSSES
from maxlite.sharding import MESH_AXES, Sharder, build_mesh
from maxlite.step.train_state import TrainState
from maxlite.training.features.phases import phase_plan_of
from maxlite.training.loss import Hidden, run_forward

D = 8
J = 3
SHAPES = {"x_BTD": (ROWS, LENGTH, D), "y_BTJD": (ROWS, LENGTH, J, D), "w_DV": (D, VOCAB)}
DEGREES = [{}, {"tensor": 4, "data": 2}, {"expert": 2, "context": 2, "tensor": 2}]
CFG = config_of(logits_chunk_tokens=20, draft_loss_weight=0.5, z_loss_multiplier=0.1)
MATCH = "{name: match, train: [draft_head/.*], steps: 1, loss: match_head}"
JOINT = "{name: joint, train: ['.*'], steps: 1, loss: next_token_and_draft}"
KEYS = {
  "decoder_block": "llama",
  "base_num_decoder_layers": 1,
  "num_draft_heads": J,
  "phases": f"[{MATCH}, {JOINT}]",
}
REPLICATED = mesh_keys("ensemble=8")  # every device computes all


def sharder_on(degrees):
  sizes = [degrees.get(mesh_axis, 1) for mesh_axis in MESH_AXES]
  return Sharder(build_mesh(sizes, [1] * 6, jax.devices()[: np.prod(sizes)]))


def draw_states():
  draw = np.random.default_rng(0)
  return {name: draw.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}


class DraftPlace(NamedTuple):
  """A draft: row, position, head, and the position whose own head predicts the same token."""

  b: int
  t: int
  j: int
  s: int


def drafts_of(batch):
  """The places of all drafts, which do not reach into another document."""
  places = []
  for b, t, j in itertools.product(range(ROWS), range(LENGTH), range(J)):
    s = t + 1 + j
    if s >= LENGTH or not batch.weight_BT[b, s]:
      continue
    if batch.segment_BT[b, s] == batch.segment_BT[b, t]:
      places.append(DraftPlace(b, t, j, s))
  return places


def log_softmax(logits):
  return logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))


def exact_draft_loss(name, states, batch):
  """(mean loss of the drafts, its gradients by y and w) in float64, summed draft by draft."""
  x_BTD = np.float64(states["x_BTD"])
  y_BTJD = np.float64(states["y_BTJD"])
  w_DV = np.float64(states["w_DV"])
  loss = 0.0
  dy_BTJD = np.zeros_like(y_BTJD)
  dw_DV = np.zeros_like(w_DV)
  drafts = drafts_of(batch)
  for b, t, j, s in drafts:
    log_q = log_softmax(y_BTJD[b, t, j] @ w_DV)
    if name == "match_head":  # the divergence from the distribution of the head
      log_p = log_softmax(x_BTD[b, s] @ w_DV)
      p = np.exp(log_p)
      loss += np.sum(p * (log_p - log_q))
    else:  # the cross-entropy of the target
      p = np.eye(VOCAB)[batch.targets_BT[b, s]]
      loss += np.sum(p * -log_q)
    slope_V = np.exp(log_q) - p
    dy_BTJD[b, t, j] = w_DV @ slope_V
    dw_DV += np.outer(y_BTJD[b, t, j], slope_V)
  number = len(drafts)
  return loss / number, (dy_BTJD / number, dw_DV / number)


def loss_and_gradients(name, degrees, training=CFG.training):
  """(total, gradients by the states), and the loss's parts."""
  sharder = sharder_on(degrees)
  batch = batch_of(0)

  def total(states):
    hidden = Hidden(layers={}, **states)
    sums = LOSSES[name].sums(hidden, batch, training, sharder)
    return LOSSES[name].combine(sums, training, CFG.model.moe)

  gradients, parts = jax.jit(jax.grad(total, has_aux=True))(draw_states())
  return gradients, parts


def assert_close(got, want):
  np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6 * np.max(np.abs(want)))


@pytest.fixture(scope="module")
def next_token():
  return loss_and_gradients("next_token", {})


@pytest.mark.parametrize("degrees", [slow(DEGREES[0]), slow(DEGREES[1]), DEGREES[2]], ids=str)
def test_match_head_is_the_mean_divergence_with_its_gradient(degrees, next_token):
  gradients, parts = loss_and_gradients("match_head", degrees)
  loss, (dy_BTJD, dw_DV) = exact_draft_loss("match_head", draw_states(), batch_of(0))
  np.testing.assert_allclose(parts["draft_loss"], loss, rtol=1e-5)
  assert parts["total_loss"] == parts["draft_loss"]
  assert_close(gradients["y_BTJD"], dy_BTJD)
  assert_close(gradients["w_DV"], dw_DV)
  assert not np.any(gradients["x_BTD"])  # the target gets no gradient
  _, alone_parts = next_token
  for name in ("loss", "z_loss"):
    np.testing.assert_allclose(parts[name], alone_parts[name], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("degrees", DEGREES[2:], ids=str)
def test_the_joint_loss_adds_the_drafts_cross_entropy(degrees, next_token):
  gradients, parts = loss_and_gradients("next_token_and_draft", degrees)
  loss, (dy_BTJD, dw_DV) = exact_draft_loss("next_token_and_draft", draw_states(), batch_of(0))
  alone, alone_parts = next_token
  np.testing.assert_allclose(parts["draft_loss"], loss, rtol=1e-5)
  total = alone_parts["total_loss"] + 0.5 * loss
  np.testing.assert_allclose(parts["total_loss"], total, rtol=1e-5)
  assert_close(gradients["y_BTJD"], 0.5 * dy_BTJD)
  assert_close(gradients["w_DV"], alone["w_DV"] + 0.5 * dw_DV)
  assert_close(gradients["x_BTD"], alone["x_BTD"])


def test_joint_loss_without_weight_equals_next_token(next_token):
  training = config_of(logits_chunk_tokens=20, z_loss_multiplier=0.1, draft_loss_weight=0).training
  gradients, parts = loss_and_gradients("next_token_and_draft", {}, training)
  alone, alone_parts = next_token
  np.testing.assert_allclose(parts["total_loss"], alone_parts["total_loss"], rtol=1e-6)
  assert not np.any(gradients.pop("y_BTJD"))
  for name, gradient in gradients.items():
    assert_close(gradient, alone[name])


def test_losses_that_need_draft_heads():
  assert tuple(name for name, loss in LOSSES.items() if loss.drafts) == tuple(DRAFT_LOSSES)


@pytest.mark.slow
def test_only_one_chunk_of_draft_logits_is_in_memory():
  num_rows = 8
  length = 64
  vocab = 4096

  def floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)

  ints = jax.ShapeDtypeStruct((num_rows, length), jnp.int32)
  batch = Batch(ints, ints, ints, ints, floats(num_rows, length))
  states = {
    "x_BTD": floats(num_rows, length, D),
    "y_BTJD": floats(num_rows, length, J, D),
    "w_DV": floats(D, vocab),
  }

  def temporary_bytes(name, chunk_tokens):
    training = config_of(logits_chunk_tokens=chunk_tokens).training

    def total(states, batch):
      hidden = Hidden(layers={}, **states)
      sums = LOSSES[name].sums(hidden, batch, training, sharder_on({}))
      loss, _ = LOSSES[name].combine(sums, training, CFG.model.moe)
      return loss

    compiled = jax.jit(jax.grad(total)).lower(states, batch).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  all_logits = num_rows * length * J * vocab * 4
  for name in DRAFT_LOSSES:
    assert temporary_bytes(name, 64) < 6 * all_logits * 64 / (num_rows * length * J)


@pytest.mark.parametrize("degrees", DEGREES[2:], ids=str)
def test_acceptance_equals_a_count_by_draft(degrees):
  states = draw_states()
  batch = batch_of(0)
  sharder = sharder_on(degrees)
  # Half of the drafts are correct, and some maxima occur twice.
  right = np.random.default_rng(1).random((ROWS, LENGTH, J)) < 0.5
  for b, t, j, s in drafts_of(batch):
    if right[b, t, j]:
      states["y_BTJD"][b, t, j] = states["x_BTD"][b, s]
  states["w_DV"][:, 200:260] = states["w_DV"][:, 100:160]

  @jax.jit
  def sums(states):
    return acceptance_sums(Hidden(layers={}, **states), batch, 7, sharder)

  counted = jax.device_get(sums(states))

  def token(state_D):
    return np.argmax(np.float32(state_D @ states["w_DV"]))

  drafts_J = np.zeros(J)
  accepted_J = np.zeros(J)
  agrees = {}
  for b, t, j, s in drafts_of(batch):
    agreed = token(states["y_BTJD"][b, t, j]) == token(states["x_BTD"][b, s])
    agrees[b, t, j] = agreed
    drafts_J[j] += 1
    accepted_J[j] += agreed
  np.testing.assert_array_equal(counted["drafts_J"], drafts_J)
  np.testing.assert_array_equal(counted["accepted_J"], accepted_J)
  # A chain has a draft of every head; its length is the number of drafts before the first wrong.
  num_chains = 0
  total_length = 0
  for b, t, j in agrees:
    if j == J - 1:
      num_chains += 1
      chain = [agrees[b, t, head] for head in range(J)]
      total_length += [*chain, False].index(False)
  assert counted["chains"] == num_chains
  assert counted["length"] == total_length
  assert 0 < total_length < J * num_chains


def test_argmax_takes_the_first_of_equal_logits():
  w_DV = np.zeros((D, VOCAB), np.float32)
  w_DV[0, [7, 200]] = 1
  x_BTD = np.ones(SHAPES["x_BTD"], np.float32)
  for degrees in DEGREES[::2]:
    sharder = sharder_on(degrees)
    tokens = jax.jit(lambda x, w, sharder=sharder: argmax_token(x, w, 5, sharder))(x_BTD, w_DV)
    np.testing.assert_array_equal(tokens, 7)


def test_held_out_row_is_over_all_batches():
  def drafts(accepted, drafts, length, chains):
    return {
      "accepted_J": np.array(accepted),
      "drafts_J": np.array(drafts),
      "length": length,
      "chains": chains,
    }

  batch = {"nll": 2.0, "weight": 4.0, "num_bytes": 0.0}
  first = batch | {"draft": drafts([3, 1], [4, 4], 4, 4)}
  second = batch | {"draft": drafts([0, 1], [2, 1], 1, 1)}
  row = held_out_row({"data": [first, second]})
  assert row == {
    "eval_loss": 0.5,
    "eval_tokens": 8,
    "eval_acceptance_1": 0.5,
    "eval_acceptance_2": 0.4,
    "eval_accepted_length": 1.0,
  }


class TwoPhases(NamedTuple):
  """The state before a step of each phase, the states after each, and their metrics."""

  before: TrainState
  matched: TrainState
  joint: TrainState
  rows: list[dict]


def two_phases(program, before):
  matched, (first_row,) = take_steps(program, before, [batch_of(0)])
  joint, (second_row,) = take_steps(program, matched, [batch_of(1)])
  return TwoPhases(before, matched, joint, [first_row, second_row])


def replicated_phases(program):
  return two_phases(program, jax.device_get(program.init(0)))


@pytest.fixture(scope="module")
def program(program_of):
  """The program where every device computes all."""
  return program_of(**KEYS, **REPLICATED)


@pytest.fixture(scope="module")
def replicated(program):
  return replicated_phases(program)


def has_moved(before, after):
  """A tree of booleans: which leaves differ."""
  return jax.tree.map(lambda a, b: bool(np.any(a != b)), before, after)


@pytest.mark.slow
def test_each_phase_changes_only_its_part(replicated, program):
  moved = has_moved(replicated.before.params, replicated.matched.params)
  assert moved.pop("draft_head") == {"kernel": True}
  assert set(jax.tree.leaves(moved)) == {False}
  moved = has_moved(replicated.matched.params, replicated.joint.params)
  assert moved.pop("draft_head") == {"kernel": True}
  assert set(jax.tree.leaves(moved)) == {True}
  row, second_row = replicated.rows
  assert int(row["phase"]) == 0
  assert int(second_row["phase"]) == 1
  phase = phase_plan_of(program).phases[0]
  assert losses_by_phase(phase, row) == {
    "match/loss": row["loss"],
    "match/draft_loss": row["draft_loss"],
    "match/total_loss": row["total_loss"],
  }


def assert_same_phases(got, want):
  assert_same_steps((got.joint, got.rows), (want.joint, want.rows))


@pytest.mark.slow
def test_steps_of_draft_heads_are_the_same_on_a_mesh_and_in_micro_batches(program_of, replicated):
  mesh = mesh_keys("data=2 context=2 tensor=2")
  program = program_of(**KEYS, **mesh, gradient_accumulation_steps=2)
  assert_same_phases(two_phases(program, replicated.before), replicated)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("mesh", "keys"),
  [
    ("fsdp=8", {"remat_policy": "full"}),
    ("data=2 expert=2 tensor=2", {"gradient_accumulation_steps": 4}),
  ],
)
def test_steps_of_draft_heads_in_a_mixture_are_the_same(program_of, mesh, keys):
  mixture = KEYS | {"decoder_block": "mixtral"}
  expected = replicated_phases(program_of(**mixture, **REPLICATED))
  program = program_of(**mixture, **mesh_keys(mesh), **keys)
  assert_same_phases(two_phases(program, expected.before), expected)


@pytest.mark.slow
def test_draft_heads_start_as_copies_of_the_head(replicated, program):
  model = program.model
  batch = batch_of(0)
  placed = place(program, batch)

  @jax.jit
  def both(params):
    """(logits of the model, logits of its draft heads)."""
    variables = {"params": params}
    inputs = {"segment_BT": placed.segment_BT, "position_BT": placed.position_BT}
    own_BTV = model.apply(variables, placed.tokens_BT, **inputs)
    x_BTD, _ = model.apply(variables, placed.tokens_BT, **inputs, method=model.hidden)
    drafted_BTJV = model.apply(variables, x_BTD, method=model.draft_logits)
    return own_BTV, drafted_BTJV

  own_BTV, drafted_BTJV = both(replicated.before.params)
  for j in range(J):
    np.testing.assert_allclose(drafted_BTJV[:, :, j], own_BTV, rtol=1e-5, atol=1e-6)
  own_BTV, drafted_BTJV = jax.device_get(both(replicated.matched.params))
  own_BT = np.argmax(own_BTV, axis=-1)
  drafted_BTJ = np.argmax(drafted_BTJV, axis=-1)
  accepted_J = np.zeros(J)
  for b, t, j, s in drafts_of(batch):
    accepted_J[j] += drafted_BTJ[b, t, j] == own_BT[b, s]
  eval_step = compile_eval_step(program, np.ones(VOCAB, np.int32))
  sums = eval_step(replicated.matched.params, placed)
  np.testing.assert_array_equal(sums["draft"]["accepted_J"], accepted_J)


@pytest.mark.slow
def test_draft_heads_do_not_change_other_initial_parameters(program_of, replicated):
  without = program_of(decoder_block="llama", base_num_decoder_layers=1, **REPLICATED).init(0)
  params = dict(replicated.before.params)
  del params["draft_head"]
  trees.assert_equal_leaves(without.params, params)


@pytest.mark.usefixtures("optimized")
def test_match_phase_has_no_backward_pass_of_the_trunk():
  """Besides the trunk's forward matmuls, it has only those of the heads and the logits."""
  whole_batch = {"logits_chunk_tokens": ROWS * LENGTH}  # in chunks, logits are computed twice
  program = build(config_of(**KEYS | whole_batch, **mesh_keys("")), jax.devices()[:1])
  state = program.abstract_state
  batch = program.abstract_inputs(program.objectives[0])

  def forward(state, batch):
    return run_forward(program.model, state.params, batch, None, drafts=False)

  def flops_of(lowered):
    module = parse(lowered.compile().as_text())
    return matmul_flops(module).total

  trunk = flops_of(jax.jit(forward).lower(state, batch))
  match = flops_of(program.lower(program.objectives[0]))
  dim = program.spec.model.base_emb_dim
  vocab = program.spec.model.vocab_size
  head = dim * dim
  logits = dim * vocab
  # Heads: forward and weight gradient. Logits: forward for the trunk; forward and backward for the
  # drafts.
  macs = J * 2 * head + logits + J * 2 * logits
  num_tokens = program.batch_shape[0] * LENGTH
  np.testing.assert_allclose(match, trunk + 2 * num_tokens * macs, rtol=0.02)
