"""Multi-token prediction: loss and gradients against a reference written from the report."""

import dataclasses
import itertools
import re

import jax
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

from maxlite.evaluation.held_out import compile_eval_step
from maxlite.metrics.flops import train_flops
from maxlite.models import Decoder
from maxlite.optim.labels import decay_mask
from maxlite.planning.hlo import parse
from maxlite.planning.hlo_cost import matmul_flops
from maxlite.sharding import MESH_AXES, Sharder, build_mesh
from maxlite.training.loss import NEXT_TOKEN, DecoderLoss
from maxlite.training.program import flops_per_step, parameter_sizes

J = 2
FACTOR = 0.5
KEYS = {
  "decoder_block": "llama",
  "base_num_decoder_layers": 1,
  "scan_layers": True,
  "mtp_num_layers": J,
  "mtp_loss_scaling_factor": FACTOR,
}
# A dense layer, then a mixture with latent attention, whose router has a bias.
DEEPSEEK = {
  "decoder_block": "deepseek",
  "base_num_decoder_layers": 2,
  "scan_layers": True,
  "first_num_dense_layers": 1,
  "kv_lora_rank": 8,
  "qk_nope_head_dim": 4,
  "qk_rope_head_dim": 2,
  "v_head_dim": 4,
  "router": "sigmoid_group_topk",
  "routed_bias": "true",
  "load_balance_loss_weight": 0.1,
  "load_balance_loss_scope": "sequence",
}
REPLICATED = mesh_keys("ensemble=8")  # Every device computes all.
EPSILON = config_of(**KEYS).model.normalization_layer_epsilon


def documents_of(batch):
  """(tokens, targets, weights) of every document of every row."""
  documents = []
  for row, number in itertools.product(range(ROWS), range(1, LENGTH + 1)):
    places = batch.segment_BT[row] == number
    if np.any(places):
      tokens_T = batch.tokens_BT[row, places]
      targets_T = batch.targets_BT[row, places]
      weight_T = batch.weight_BT[row, places]
      documents.append((tokens_T, targets_T, weight_T))
  return documents


def document_lengths(batch):
  return [len(tokens_T) for tokens_T, _, _ in documents_of(batch)]


def norm(x_TD, module):
  mean_square_T1 = np.mean(x_TD**2, axis=-1, keepdims=True)
  return x_TD / np.sqrt(mean_square_T1 + EPSILON) * module["scale"]


def rotate(x_THC):
  num_positions, _, num_channels = x_THC.shape
  frequency_C = 10_000.0 ** (-2 * np.arange(num_channels // 2) / num_channels)
  angle_T1C = np.arange(num_positions)[:, None, None] * frequency_C
  left, right = np.split(x_THC, 2, axis=-1)
  cos = np.cos(angle_T1C)
  sin = np.sin(angle_T1C)
  return np.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


def attend(x_TD, attention):
  """Causal attention of one document."""
  q_THC = np.einsum("td,dhc->thc", x_TD, attention["query"]["kernel"])
  k_TGC = np.einsum("td,dgc->tgc", x_TD, attention["key"]["kernel"])
  v_TGC = np.einsum("td,dgc->tgc", x_TD, attention["value"]["kernel"])
  num_tokens, num_heads, num_channels = q_THC.shape
  heads_per_group = num_heads // k_TGC.shape[1]
  k_THC = np.repeat(rotate(k_TGC), heads_per_group, axis=1)
  v_THC = np.repeat(v_TGC, heads_per_group, axis=1)
  scores_HTS = np.einsum("thc,shc->hts", rotate(q_THC), k_THC) / np.sqrt(num_channels)
  is_later_TS = np.triu(np.ones((num_tokens, num_tokens), bool), 1)
  scores_HTS[:, is_later_TS] = -np.inf
  weight_HTS = np.exp(scores_HTS - scores_HTS.max(axis=-1, keepdims=True))
  weight_HTS /= weight_HTS.sum(axis=-1, keepdims=True)
  mixed_THC = np.einsum("hts,shc->thc", weight_HTS, v_THC)
  return np.einsum("thc,hcd->td", mixed_THC, attention["out"]["kernel"])


def mlp(x_TD, module):
  gate_TF = x_TD @ module["wi_0"]["kernel"]
  up_TF = x_TD @ module["wi_1"]["kernel"]
  hidden_TF = gate_TF / (1 + np.exp(-gate_TF)) * up_TF
  return hidden_TF @ module["wo"]["kernel"]


def block(x_TD, params):
  """A layer of Llama on one document."""
  normed_TD = norm(x_TD, params["attention_norm"])
  x_TD = x_TD + attend(normed_TD, params["attention"])
  normed_TD = norm(x_TD, params["mlp_norm"])
  return x_TD + mlp(normed_TD, params["mlp"])


def nll_sum(x_TD, params, targets_T, weight_T):
  logits_TV = x_TD @ params["unembed"]["kernel"]
  top_T = logits_TV.max(axis=-1)
  e_TV = np.exp(logits_TV - top_T[:, None])
  partition_T = top_T + np.log(e_TV.sum(axis=-1))
  of_target_T = logits_TV[np.arange(len(targets_T)), targets_T]
  return np.sum(weight_T * (partition_T - of_target_T))


def reference(params, batch):
  """(total loss, mean loss of the layers of multi-token prediction), document by document.

  DeepSeek-V3 (2024), eq. 21 to 25. The embedding is the first of the two that are concatenated.
  """
  nll = np.zeros(1 + J)
  weight = np.zeros(1 + J)
  layer = jax.tree.map(lambda leaf: leaf[0], params["layers"])
  for tokens_T, targets_T, weight_T in documents_of(batch):
    embedding_TD = params["embed"]["embedding"][tokens_T]
    h_TD = norm(block(embedding_TD, layer), params["final_norm"])
    nll[0] += nll_sum(h_TD, params, targets_T, weight_T)
    weight[0] += weight_T.sum()
    for k in range(1, 1 + min(J, len(tokens_T) - 1)):
      module = params["mtp"][f"layers_{k - 1}"]
      last = len(tokens_T) - k
      next_TD = norm(embedding_TD[k:], module["embedding_norm"])
      hidden_TD = norm(h_TD[:last], module["hidden_norm"])
      pair = np.concatenate([next_TD, hidden_TD], axis=-1)
      projected_TD = pair @ module["projection"]["kernel"]
      h_TD = block(projected_TD, module["layer"])
      normed_TD = norm(h_TD, module["final_norm"])
      nll[k] += nll_sum(normed_TD, params, targets_T[k:], weight_T[k:])
      weight[k] += weight_T[k:].sum()
  loss = nll / weight
  mtp_loss = loss[1:].mean()
  return loss[0] + FACTOR * mtp_loss, mtp_loss


def draw_params(like, seed):
  """Normal numbers; the scales of norms are around one."""
  draw = np.random.default_rng(seed)

  def draw_leaf(leaf):
    numbers = 0.5 * draw.standard_normal(leaf.shape)
    if leaf.ndim == 1:
      return numbers + 1
    return numbers

  return jax.tree.map(draw_leaf, like)


def only_in(module, tree):
  """The tree with zeros in the leaves of other modules."""

  def select(path, leaf):
    if module in jax.tree_util.keystr(path):
      return leaf
    return np.zeros_like(leaf)

  return jax.tree.map_with_path(select, tree)


@pytest.mark.parametrize(
  "degrees", [slow({}), slow({"data": 2, "context": 2, "tensor": 2}), {"context": 4}], ids=str
)
def test_loss_and_gradients_equal_the_reference_in_float64(program_of, degrees):
  program = program_of(**KEYS, **REPLICATED)
  batch = batch_of(0)
  sizes = [degrees.get(axis, 1) for axis in MESH_AXES]
  with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
    cfg = dataclasses.replace(program.spec.model, dtype="float64", weight_dtype="float64")
    mesh = build_mesh(sizes, [1] * len(sizes), jax.devices()[: np.prod(sizes)])
    loss = DecoderLoss(Decoder(cfg, Sharder(mesh)), NEXT_TOKEN, program.spec.training, cfg.moe)
    params = draw_params(program.abstract_state.params, 0)

    @jax.jit
    def value_and_gradients(params, batch):
      def total(params):
        sums, _ = loss.forward(params, {}, batch, jax.random.key(0), {})
        return loss.combine(sums)

      return jax.value_and_grad(total, has_aux=True)(params)

    arrays = batch.replace(weight_BT=batch.weight_BT.astype(np.float64))
    (value, metrics), gradients = jax.device_get(value_and_gradients(params, arrays))
  expected, expected_mtp = reference(params, batch)
  np.testing.assert_allclose(value, expected, rtol=1e-7)
  np.testing.assert_allclose(metrics["mtp_loss"], expected_mtp, rtol=1e-7)
  assert value == metrics["total_loss"]
  # Along a direction through each module, and along one through all.
  for module in (*params, *params["mtp"], ""):
    direction = only_in(module, draw_params(params, 1))
    slope = sum(jax.tree.leaves(jax.tree.map(np.vdot, gradients, direction)))
    above = jax.tree.map(lambda x, d: x + 1e-5 * d, params, direction)
    below = jax.tree.map(lambda x, d: x - 1e-5 * d, params, direction)
    up, _ = reference(above, batch)
    down, _ = reference(below, batch)
    np.testing.assert_allclose(slope, (up - down) / 2e-5, rtol=1e-6, err_msg=module)


def two_steps(program, before):
  after, rows = take_steps(program, before, [batch_of(0), batch_of(1)])
  return after.params, rows


@pytest.mark.parametrize(
  ("family", "mesh"),
  [
    slow({}, "data=2 context=2 tensor=2"),
    slow(DEEPSEEK, "data=2 context=2 expert=2"),
  ],
  ids=str,
)
def test_steps_are_the_same_on_a_mesh_and_in_micro_batches(program_of, family, mesh):
  """With uneven documents: no micro-batch and no shard has the mean number of tokens."""
  keys = KEYS | family
  replicated = program_of(**keys, **REPLICATED)
  before = jax.device_get(replicated.init(0))
  sharded = program_of(**keys, **mesh_keys(mesh), gradient_accumulation_steps=2)
  assert_same_steps(two_steps(sharded, before), two_steps(replicated, before))


@pytest.fixture(scope="module")
def replicated(program_of):
  """(state before, state after and metrics of two steps) where every device computes all."""
  program = program_of(**KEYS | DEEPSEEK, **REPLICATED)
  before = jax.device_get(program.init(0))
  after, rows = take_steps(program, before, [batch_of(0), batch_of(1)])
  return before, after, rows


def bias_of(state, layer):
  """The bias of the router of a layer of multi-token prediction."""
  module = state.params["mtp"][f"layers_{layer}"]["layer"]
  return module["moe"]["router"]["bias"]


@pytest.mark.slow
def test_the_experts_of_the_layers_are_balanced_too(replicated):
  before, after, rows = replicated
  lengths = document_lengths(batch_of(0))
  load_NE = rows[0]["expert_load"]
  assert len(load_NE) == 1 + J
  num_chosen = config_of(**KEYS | DEEPSEEK).model.moe.num_experts_per_tok
  for j in range(J):
    num_tokens = sum(max(length - 1 - j, 0) for length in lengths)
    assert np.sum(load_NE[1 + j]) == num_chosen * num_tokens
    assert np.any(bias_of(after, j) != bias_of(before, j))


@pytest.mark.slow
def test_every_parameter_of_the_layers_is_trained_and_only_norms_do_not_decay(replicated):
  before, after, _ = replicated
  for old, new in trees.leaf_pairs(before.params["mtp"], after.params["mtp"]):
    assert np.any(old != new)
  decays = decay_mask(before.params)["mtp"]["layers_0"]
  assert decays["projection"]["kernel"]
  assert not decays["final_norm"]["scale"]


@pytest.mark.slow
def test_the_layers_change_no_other_initial_parameter(program_of, replicated):
  without = program_of(**DEEPSEEK, **REPLICATED).init(0)
  before, _, _ = replicated
  others = dict(before.params)
  del others["mtp"]
  trees.assert_equal_leaves(without.params, others)


def test_evaluation_reports_the_acceptance_of_every_layer(program_of):
  program = program_of(**KEYS, **REPLICATED)
  batch = batch_of(0)
  params = jax.tree.map(np.float32, draw_params(program.abstract_state.params, 0))
  eval_step = compile_eval_step(program, np.ones(VOCAB, np.int32))
  sums = eval_step(params, place(program, batch))
  lengths = document_lengths(batch)
  for j, count in enumerate(sums["draft"]["drafts_J"]):
    # The last token of a document has no target.
    assert count == sum(max(length - 2 - j, 0) for length in lengths)


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("trained", [".*", "mtp/.*"])
def test_flops_equal_those_of_the_compiled_step(trained):
  """The reference attention computes the full square, of which the estimate counts half."""
  keys = {
    "base_emb_dim": 32,
    "base_mlp_dim": 96,
    "logits_chunk_tokens": 4096,  # In chunks, logits are computed twice.
    "attention": "reference",
    "phases": f"[{{name: all, train: ['{trained}'], steps: 1}}]",
  }
  program = build(config_of(**KEYS | keys, **mesh_keys("")), jax.devices()[:1])
  sizes = parameter_sizes(program)
  trained_paths = [path for path in sizes if re.fullmatch(trained, path)]
  flops = train_flops(program.spec.model, sizes, program.batch_shape, trained_paths, drafts=True)
  assert flops_per_step(program) == [flops.total]
  module = parse(program.lower(program.objectives[0]).compile().as_text())
  compiled = matmul_flops(module).total
  assert compiled == pytest.approx(flops.total + flops.attention, rel=0.02)
