"""Every loss from its sums over tokens: means, and the sums that micro-batches know beforehand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny import LENGTH, ROWS, uneven_batch

from maxlite.config.schema import DEFAULTS, Config, build
from maxlite.layers.moe.router import RouterSums
from maxlite.models import Decoder
from maxlite.registry import LOSSES
from maxlite.sharding import Sharder, build_mesh
from maxlite.training.loss import DecoderLoss, DraftSums, PairSums, PolicySums, Sums
from maxlite.training.mtp_loss import MtpSums

HEADS = 2  # of drafts, and layers of multi-token prediction
# Of all losses at once, which no run may have.
KEYS = {
  "decoder_block": "mixtral",
  "base_num_decoder_layers": 2,
  "num_experts": 4,
  "num_experts_per_tok": 2,
  "num_draft_heads": HEADS,
  "z_loss_multiplier": 0.3,
  "load_balance_loss_weight": 0.7,
  "router_z_loss_weight": 0.2,
  "draft_loss_weight": 0.6,
  "mtp_loss_scaling_factor": 0.4,
  "dpo_beta": 0.5,
  "distill_alpha": 0.25,
  "distill_temperature": 2.0,
}


def make_batch():
  """Uneven rows, of which one has a single token, which no layer of multi-token prediction has."""
  batch = uneven_batch(0)
  is_dropped_BT = np.zeros((ROWS, LENGTH), bool)
  is_dropped_BT[0, 1:] = True
  return batch.replace(
    segment_BT=np.where(is_dropped_BT, 0, batch.segment_BT),
    weight_BT=np.where(is_dropped_BT, 0, batch.weight_BT),
  )


def counts_of(batch, num_layers, num_mtp):
  """The numbers of a batch that no parameter changes, counted token by token."""
  weight = 0.0
  weight_J = np.zeros(HEADS)
  real = 0
  real_J = np.zeros(HEADS)
  rows_J = np.zeros((ROWS, HEADS))
  rows = np.zeros(ROWS)
  for row in range(ROWS):
    segment_T = batch.segment_BT[row]
    for t in range(LENGTH):
      if segment_T[t] == 0:
        continue
      weight += batch.weight_BT[row, t]
      real += 1
      rows[row] = 1
      for j in range(HEADS):
        later = t + 1 + j
        if later < LENGTH and segment_T[later] == segment_T[t]:
          weight_J[j] += batch.weight_BT[row, later]
          real_J[j] += 1
          rows_J[row, j] = 1
  tokens_N = [real] * num_layers
  rows_N = [rows.sum()] * num_layers
  for j in range(num_mtp):
    tokens_N.append(real_J[j])
    rows_N.append(rows_J[:, j].sum())
  return weight, weight_J, np.float32(tokens_N), np.float32(rows_N)


def sums_of(batch, num_mtp):
  """Sums of a batch with drawn numbers, except for what the batch determines."""
  weight, weight_J, tokens_N, rows_N = counts_of(batch, 2, num_mtp)
  draw = np.random.default_rng(0)

  def numbers(*shape):
    return draw.uniform(10, 100, shape).astype(np.float32)

  num_layers = len(tokens_N)
  routers = RouterSums(
    tokens=tokens_N,
    count_E=numbers(num_layers, 4),
    prob_E=numbers(num_layers, 4),
    z=numbers(num_layers),
    rows=rows_N,
    row_balance=numbers(num_layers),
    dropped=np.zeros(num_layers, np.float32),
  )
  pairs = np.float32(np.sum(batch.segment_BT.max(axis=1) // 2))
  completions = np.float32(batch.segment_BT.max(axis=1).sum())
  mtp = None
  if num_mtp:
    mtp = MtpSums(np.float32(weight_J[:num_mtp]), numbers(num_mtp))
  return Sums(
    weight=np.float32(weight),
    nll=numbers(),
    logits_z=numbers(),
    layers={"moe": routers},
    draft=DraftSums(np.float32(weight_J.sum()), numbers()),
    mtp=mtp,
    divergence=numbers(),
    pairs=PairSums(pairs, *(numbers() for _ in range(6))),
    policy=PolicySums(completions, *(numbers() for _ in range(5))),
  )


def loss_of(name, num_mtp, scope, **others):
  keys = {"mtp_num_layers": num_mtp, "load_balance_loss_scope": scope, **others}
  cfg = build(Config, DEFAULTS | KEYS | keys)
  mesh = build_mesh((1,) * 6, (1,) * 6, jax.devices()[:1])
  model = Decoder(cfg.model, Sharder(mesh))
  arguments = (model, LOSSES[name], cfg.training, cfg.model.moe)
  return DecoderLoss(*arguments)


every_loss = pytest.mark.parametrize("name", LOSSES)
every_scope = pytest.mark.parametrize("scope", ["batch", "sequence"])
every_mtp = pytest.mark.parametrize("num_mtp", [0, HEADS])


@every_loss
@every_scope
@every_mtp
def test_a_batch_twice_has_the_same_loss_and_parts(name, scope, num_mtp):
  """Means do not grow with the number of tokens; a sum would double."""
  loss = loss_of(name, num_mtp, scope)
  sums = sums_of(make_batch(), num_mtp)
  once, parts = loss.combine(sums)
  twice, parts_of_two = loss.combine(jax.tree.map(lambda x: 2 * x, sums))
  np.testing.assert_allclose(twice, once, rtol=1e-6)
  for part in parts.keys() - {"num_tokens", "expert_load", "expert_dropped"}:
    np.testing.assert_allclose(parts_of_two[part], parts[part], rtol=1e-6, err_msg=part)


def wanted_loss(name, sums, scope):
  """The total loss in float64."""
  sums = jax.tree.map(lambda x: np.asarray(x, np.float64), sums)
  routers = sums.layers["moe"]
  nll = sums.nll / sums.weight
  if scope == "batch":
    share_NE = routers.count_E / (2 * routers.tokens[:, None])
    balance_N = 4 * np.sum(share_NE * routers.prob_E / routers.tokens[:, None], axis=1)
  else:
    balance_N = routers.row_balance / routers.rows
  extra = 0.3 * sums.logits_z / sums.weight
  extra += 0.7 * balance_N.mean() + 0.2 * np.mean(routers.z / routers.tokens)
  if sums.mtp is not None:
    extra += 0.4 * np.mean(sums.mtp.nll_J / sums.mtp.weight_J)
  draft = sums.draft.loss / sums.draft.weight
  if name == "match_head":
    return draft + (0.4 * np.mean(sums.mtp.nll_J / sums.mtp.weight_J) if sums.mtp else 0)
  totals = {
    "next_token": nll,
    "next_token_and_draft": nll + 0.6 * draft,
    "distill": 0.75 * nll + 0.25 * 4 * sums.divergence / sums.weight,
    "dpo": sums.pairs.loss / sums.pairs.pairs,
    "grpo": sums.policy.loss / sums.weight,
    "on_policy_distill": sums.divergence / sums.weight,
  }
  return totals[name] + extra


@every_loss
@every_scope
@every_mtp
def test_the_loss_is_that_of_an_independent_computation(name, scope, num_mtp):
  sums = sums_of(make_batch(), num_mtp)
  total, parts = loss_of(name, num_mtp, scope).combine(sums)
  np.testing.assert_allclose(total, wanted_loss(name, sums, scope), rtol=1e-5)
  if "z_loss" in parts:
    np.testing.assert_allclose(parts["z_loss"], sums.logits_z / sums.weight, rtol=1e-6)
  assert total == parts["total_loss"]


@every_loss
@every_scope
@every_mtp
def test_micro_batches_use_the_slopes_of_the_whole_batch(name, scope, num_mtp):
  """What is known before the first backward pass gives each sum its weight in the loss."""
  batch = make_batch()
  loss = loss_of(name, num_mtp, scope)
  sums = sums_of(batch, num_mtp)
  known = loss.linearization_point(
    jax.tree.map(jnp.zeros_like, sums), jax.tree.map(jnp.asarray, batch), lambda: sums
  )

  @jax.jit
  def slopes(point):
    """Of the sums that parameters change."""
    of_all = jax.grad(lambda sums: loss.combine(sums)[0])(point)
    routers = of_all.layers["moe"]
    layers = (routers.prob_E, routers.z, routers.row_balance)
    found = [of_all.nll, of_all.logits_z, of_all.divergence, of_all.draft.loss, layers]
    if num_mtp:
      found.append(of_all.mtp.nll_J)
    return jax.tree.leaves((found, of_all.pairs.loss, of_all.policy.loss))

  for found, wanted in zip(slopes(known), slopes(sums), strict=True):
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize("aggregation", ["sequence", "constant"])
def test_losses_of_completions_are_means_over_those_of_the_whole_batch(aggregation):
  """Of completions, not of tokens, and known before the first backward pass."""
  batch = make_batch()
  loss = loss_of("grpo", 0, "sequence", loss_aggregation=aggregation, max_completion_length=5)
  sums = sums_of(batch, 0)
  known = loss.linearization_point(
    jax.tree.map(jnp.zeros_like, sums), jax.tree.map(jnp.asarray, batch), lambda: sums
  )
  divisor = batch.segment_BT.max(axis=1).sum() * (5 if aggregation == "constant" else 1)
  for point in (sums, known):
    arrays = jax.tree.map(jnp.asarray, point)
    slope = jax.grad(lambda sums: loss.combine(sums)[0])(arrays).policy.loss
    np.testing.assert_allclose(slope, 1 / divisor, rtol=1e-6)
