"""Draft heads: losses against float64, jointly and alternately with the trunk, on any mesh."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from slow_cases import slow
from tiny import LENGTH, ROWS, VOCAB, config_of, mesh_keys, place, take_steps, trainer_of
from tiny import uneven_batch as batch_of

from maxlite.config.registry import DRAFT_LOSSES, LOSSES
from maxlite.data.batch import Batch
from maxlite.evaluation.draft_acceptance import acceptance_sums, argmax_token
from maxlite.evaluation.held_out import compile_eval_step, held_out_row
from maxlite.phases.phase_plan import losses_by_phase
from maxlite.planning.hlo import parse
from maxlite.planning.hlo_cost import matmul_flops
from maxlite.sharding import MESH_AXES, Sharder, build_mesh
from maxlite.training.loss import Hidden, run_forward
from maxlite.training.trainer import build_trainer
from maxlite.training.transforms.alternating_phases import phase_plan_of

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


def drafts_of(batch):
  """(row, position, head, position whose own head predicts the same token) of every draft."""
  for b, t, j in itertools.product(range(ROWS), range(LENGTH), range(J)):
    s = t + 1 + j
    if s < LENGTH and batch.segment_BT[b, s] == batch.segment_BT[b, t] and batch.weight_BT[b, s]:
      yield b, t, j, s


def log_softmax(logits):
  return logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))


def exact_draft_loss(name, states, batch):
  """(mean loss of the drafts, its gradients by y and w) in float64, summed draft by draft."""
  x_BTD, y_BTJD, w_DV = (np.float64(states[key]) for key in SHAPES)
  loss = 0.0
  dy_BTJD = np.zeros_like(y_BTJD)
  dw_DV = np.zeros_like(w_DV)
  drafts = list(drafts_of(batch))
  for b, t, j, s in drafts:
    log_p = log_softmax(x_BTD[b, s] @ w_DV)
    log_q = log_softmax(y_BTJD[b, t, j] @ w_DV)
    p = np.exp(log_p) if name == "match_head" else np.eye(VOCAB)[batch.targets_BT[b, s]]
    loss += np.sum(p * ((log_p if name == "match_head" else 0) - log_q))
    dy_BTJD[b, t, j] = w_DV @ (np.exp(log_q) - p)
    dw_DV += np.outer(y_BTJD[b, t, j], np.exp(log_q) - p)
  return loss / len(drafts), (dy_BTJD / len(drafts), dw_DV / len(drafts))


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
  for name in ("loss", "z_loss"):
    np.testing.assert_allclose(parts[name], next_token[1][name], rtol=1e-6)


@pytest.mark.parametrize("degrees", DEGREES[2:], ids=str)
def test_the_joint_loss_adds_the_drafts_cross_entropy(degrees, next_token):
  gradients, parts = loss_and_gradients("next_token_and_draft", degrees)
  loss, (dy_BTJD, dw_DV) = exact_draft_loss("next_token_and_draft", draw_states(), batch_of(0))
  alone, alone_parts = next_token
  np.testing.assert_allclose(parts["draft_loss"], loss, rtol=1e-5)
  np.testing.assert_allclose(parts["total_loss"], alone_parts["total_loss"] + 0.5 * loss, rtol=1e-5)
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


def test_only_one_chunk_of_draft_logits_is_in_memory():
  num_rows = 8
  length = 64
  vocab = 4096

  def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)

  ints = array(num_rows, length, dtype=jnp.int32)
  batch = Batch(ints, ints, ints, ints, array(num_rows, length))
  states = (array(num_rows, length, D), array(num_rows, length, J, D), array(D, vocab))

  def temporary_bytes(name, chunk_tokens):
    training = config_of(logits_chunk_tokens=chunk_tokens).training

    def total(states, batch):
      hidden = Hidden(layers={}, **dict(zip(SHAPES, states, strict=True)))
      sums = LOSSES[name].sums(hidden, batch, training, sharder_on({}))
      return LOSSES[name].combine(sums, training, CFG.model.moe)[0]

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
  sums = jax.jit(lambda states: acceptance_sums(Hidden(layers={}, **states), batch, 7, sharder))
  counted = jax.device_get(sums(states))

  def token(state):
    return np.argmax(np.float32(state @ states["w_DV"]))

  agrees = {
    (b, t, j): token(states["y_BTJD"][b, t, j]) == token(states["x_BTD"][b, s])
    for b, t, j, s in drafts_of(batch)
  }
  by_head = [[agreed for (_, _, head), agreed in agrees.items() if head == j] for j in range(J)]
  np.testing.assert_array_equal(counted["drafts_J"], [len(head) for head in by_head])
  np.testing.assert_array_equal(counted["accepted_J"], [sum(head) for head in by_head])
  starts = [(b, t) for b, t, j in agrees if j == J - 1]
  chains = [[agrees[b, t, j] for j in range(J)] for b, t in starts]
  chains = [chain for chain in chains if len(chain) == J]
  lengths = [sum(itertools.accumulate(map(int, chain), min)) for chain in chains]
  assert (counted["chains"], counted["length"]) == (len(chains), sum(lengths))
  assert 0 < sum(lengths) < J * len(chains)


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
  counts = (drafts([3, 1], [4, 4], 4, 4), drafts([0, 1], [2, 1], 1, 1))
  row = held_out_row({"data": [batch | {"draft": draft} for draft in counts]})
  assert row == {
    "eval_loss": 0.5,
    "eval_tokens": 8,
    "eval_acceptance_1": 0.5,
    "eval_acceptance_2": 0.4,
    "eval_accepted_length": 1.0,
  }


def two_phases(family="llama", **keys):
  """(state before, states after a step of each phase, their metrics)."""
  keys = KEYS | {"decoder_block": family} | keys
  before = jax.device_get(trainer_of(**KEYS | {"decoder_block": family}, **REPLICATED).init_state())
  states = [before]
  rows = []
  for seed in range(2):
    state, (row,) = take_steps(trainer_of(**keys), states[-1], [batch_of(seed)])
    states.append(state)
    rows.append(row)
  return states, rows


@pytest.fixture(scope="module")
def replicated():
  return two_phases(**REPLICATED)


def test_each_phase_changes_only_its_part(replicated):
  states, rows = replicated
  for (before, after), trunk_moves in zip(itertools.pairwise(states), (False, True), strict=True):
    moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), before.params, after.params)
    assert moved.pop("draft_head") == {"kernel": True}
    assert set(jax.tree.leaves(moved)) == {trunk_moves}
  assert [int(row["phase"]) for row in rows] == [0, 1]
  phase = phase_plan_of(trainer_of(**KEYS, **REPLICATED)).phases[0]
  named = losses_by_phase(phase, rows[0])
  assert named == {f"match/{loss}": rows[0][loss] for loss in ("loss", "draft_loss", "total_loss")}


def assert_same_steps(got, want):
  (states, rows), (expected_states, expected_rows) = got, want
  for row, expected in zip(rows, expected_rows, strict=True):
    assert row.keys() == expected.keys()
    for name, value in expected.items():
      np.testing.assert_allclose(row[name], value, rtol=1e-5, err_msg=name)
  for leaf, expected in zip(*map(jax.tree.leaves, (states[-1], expected_states[-1])), strict=True):
    np.testing.assert_allclose(leaf, expected, rtol=1e-4, atol=1e-6)


def test_steps_of_draft_heads_are_the_same_on_a_mesh_and_in_micro_batches(replicated):
  mesh = mesh_keys("data=2 context=2 tensor=2")
  assert_same_steps(two_phases(**mesh, gradient_accumulation_steps=2), replicated)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("mesh", "keys"),
  [
    ("fsdp=8", {"remat_policy": "full"}),
    ("data=2 expert=2 tensor=2", {"gradient_accumulation_steps": 4}),
  ],
)
def test_steps_of_draft_heads_in_a_mixture_are_the_same(mesh, keys):
  expected = two_phases("mixtral", **REPLICATED)
  assert_same_steps(two_phases("mixtral", **mesh_keys(mesh), **keys), expected)


def test_draft_heads_start_as_copies_of_the_head(replicated):
  trainer = trainer_of(**KEYS, **REPLICATED)
  batch = batch_of(0)
  placed = place(trainer, batch)
  inputs = (placed.tokens_BT, placed.segment_BT, placed.position_BT)

  @jax.jit
  def both(params):
    x_BTD, _ = trainer.model.apply({"params": params}, *inputs, method=trainer.model.hidden)
    drafted = trainer.model.apply({"params": params}, x_BTD, method=trainer.model.draft_logits)
    return trainer.model.apply({"params": params}, *inputs), drafted

  first, second = (state.params for state in replicated[0][:2])
  own_BTV, drafted_BTJV = both(first)
  for j in range(J):
    np.testing.assert_allclose(drafted_BTJV[:, :, j], own_BTV, rtol=1e-5, atol=1e-6)
  own_BT, drafted_BTJ = (np.argmax(jax.device_get(x), axis=-1) for x in both(second))
  agreed = [(j, drafted_BTJ[b, t, j] == own_BT[b, s]) for b, t, j, s in drafts_of(batch)]
  sums = compile_eval_step(trainer, np.ones(VOCAB, np.int32))(second, placed)
  expected = [sum(yes for head, yes in agreed if head == j) for j in range(J)]
  np.testing.assert_array_equal(sums["draft"]["accepted_J"], expected)


def test_draft_heads_do_not_change_other_initial_parameters(replicated):
  without = trainer_of(decoder_block="llama", base_num_decoder_layers=1, **REPLICATED).init_state()
  params = {name: leaf for name, leaf in replicated[0][0].params.items() if name != "draft_head"}
  jax.tree.map(np.testing.assert_array_equal, jax.device_get(without.params), params)


@pytest.mark.usefixtures("optimized")
def test_match_phase_has_no_backward_pass_of_the_trunk():
  """Besides the trunk's forward matmuls, it has only those of the heads and the logits."""
  whole_batch = {"logits_chunk_tokens": ROWS * LENGTH}  # in chunks, logits are computed twice
  trainer = build_trainer(config_of(**KEYS | whole_batch, **mesh_keys("")), jax.devices()[:1])
  state = trainer.abstract_state
  batch = trainer.abstract_inputs(trainer.batch_shape)

  def forward(state, batch):
    return run_forward(trainer.model, state.params, batch, None, drafts=False)

  lowered = (jax.jit(forward).lower(state, batch), trainer.lower_step(0))
  trunk, match = (matmul_flops(parse(step.compile().as_text())).total for step in lowered)
  cfg = trainer.cfg
  dim = cfg.model.base_emb_dim
  vocab = cfg.model.vocab_size
  head = dim * dim
  logits = dim * vocab
  # Heads: forward and weight gradient. Logits: forward for the trunk; forward and backward for the
  # drafts.
  macs = J * 2 * head + logits + J * 2 * logits
  np.testing.assert_allclose(match, trunk + 2 * trainer.batch_shape[0] * LENGTH * macs, rtol=0.02)
