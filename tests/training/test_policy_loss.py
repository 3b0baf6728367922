"""The loss of rollouts: against an independent computation, and the exact policy gradient."""

import functools
import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny import config_of

from maxlite.registry import ADVANTAGES
from maxlite.sharding import Sharder, build_mesh
from maxlite.training.loss import Hidden
from maxlite.training.policy_loss import GRPO, ON_POLICY, PolicyBatch

ROWS, LENGTH, WIDTH, VOCAB = 4, 12, 6, 8
KEYS = {
  "decoder_block": "llama",
  "loss_type": "grpo",
  "dataset_type": "prompts",
  "dataset_path": Path(__file__).parents[2] / "configs/rl/sort_prompts.jsonl",
  "logits_chunk_tokens": 10,
}
MESHES = {
  "": (1,) * 6,
  "fsdp=2 tensor=2": (1, 1, 2, 1, 1, 2),
  "data=2 context=2": (1, 2, 1, 2, 1, 1),
}
VARIANTS = [
  {},
  {"loss_aggregation": "sequence", "rollout_temperature": 0.7},
  {"loss_aggregation": "constant", "max_completion_length": 8, "grpo_epsilon_high": 0.5},
  {"importance_sampling_level": "sequence", "grpo_epsilon": 0.4},
  {"importance_sampling_level": "sequence", "loss_aggregation": "sequence"},
  {"grpo_beta": 0.3, "reference_path": "folder"},
  {"grpo_beta": 0.3, "reference_path": "folder", "use_bias_correction_kl": "false"},
]


@functools.cache
def sharder_of(mesh):
  return Sharder(build_mesh(MESHES[mesh], (1,) * 6, jax.devices()[: np.prod(MESHES[mesh])]))


def batch_of(seed, *, on_policy=False):
  """Rows of two completions after prompts of two tokens, with padding between and behind."""
  draw = np.random.default_rng(seed)
  shape = (ROWS, LENGTH)
  segment_BT = np.zeros(shape, np.int32)
  weight_BT = np.zeros(shape, np.float32)
  advantage_BT = np.zeros(shape, np.float32)
  for row in range(ROWS):
    for segment, start in enumerate((0, 6), start=1):
      length = draw.integers(3, 7)
      segment_BT[row, start : start + length] = segment
      weight_BT[row, start + 1 : start + length] = 1
      advantage_BT[row, start : start + length] = draw.normal()
  weight_BT[1, :6] = 0  # a truncated completion without a loss
  behaviour_BT = -draw.uniform(0.5, 3, shape).astype(np.float32)
  if on_policy:
    behaviour_BT[:] = ON_POLICY
  return PolicyBatch(
    tokens_BT=np.zeros(shape, np.int32),
    targets_BT=draw.integers(VOCAB, size=shape).astype(np.int32),
    segment_BT=segment_BT,
    position_BT=np.zeros(shape, np.int32),
    weight_BT=weight_BT,
    advantage_BT=advantage_BT,
    behaviour_BT=behaviour_BT,
  )


def model_of(seed):
  """(states [B, T, D], unembedding [D, V])."""
  draw = np.random.default_rng(seed)
  return draw.normal(size=(ROWS, LENGTH, WIDTH)), draw.normal(size=(WIDTH, VOCAB))


def loss_and_gradients(cfg, sharder, batch, model, reference=None):
  """(loss, its parts, gradients of the model), in float64."""
  teachers = ()
  with jax.enable_x64(True):
    if reference is not None:
      teachers = (Hidden(*map(jnp.asarray, (reference[0],)), {}, jnp.asarray(reference[1]), None),)

    def total(model):
      hidden = Hidden(model[0], {}, model[1], None, teachers=teachers)
      sums = GRPO.sums(hidden, jax.tree.map(jnp.asarray, batch), cfg.training, sharder)
      return GRPO.combine(sums, cfg.training, cfg.model.moe)

    step = jax.jit(jax.value_and_grad(total, has_aux=True))
    (loss, parts), gradients = jax.device_get(step(tuple(map(jnp.asarray, model))))
  return loss, parts, gradients


def log_probs_of(model, temperature):
  logits = model[0] @ model[1] / temperature
  logits -= logits.max(-1, keepdims=True)
  return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def wanted_loss(cfg, batch, model, reference):
  """The loss in float64, completion by completion and token by token."""
  training = cfg.training
  own = log_probs_of(model, training.rollout_temperature)
  others = log_probs_of(reference, training.rollout_temperature)
  high = training.grpo_epsilon_high if training.grpo_epsilon_high >= 0 else training.grpo_epsilon
  by_completion = []
  for row, segment in itertools.product(range(ROWS), (1, 2)):
    is_counted_T = (batch.segment_BT[row] == segment) & (batch.weight_BT[row] > 0)
    positions = np.flatnonzero(is_counted_T)
    places = [(row, t, batch.targets_BT[row, t]) for t in positions]
    log_ratios = [own[place] - batch.behaviour_BT[place[:2]] for place in places]
    terms = []
    for place, log_ratio in zip(places, log_ratios, strict=True):
      followed = np.exp(log_ratio)
      if training.importance_sampling_level == "sequence":
        followed = np.exp(np.mean(log_ratios))
      bounded = min(max(followed, 1 - training.grpo_epsilon), 1 + high)
      advantage = batch.advantage_BT[place[:2]]
      difference = others[place] - own[place]
      kl = np.exp(difference) - difference - 1
      if training.use_bias_correction_kl:
        kl *= np.exp(log_ratio)
      terms.append(-min(followed * advantage, bounded * advantage) + training.grpo_beta * kl)
    by_completion.append(terms)
  by_token = np.concatenate(by_completion)
  if training.loss_aggregation == "token":
    return np.mean(by_token)
  if training.loss_aggregation == "sequence":
    return np.mean([np.mean(terms) if terms else 0 for terms in by_completion])
  return np.sum(by_token) / len(by_completion) / training.max_completion_length


@pytest.mark.parametrize("keys", VARIANTS, ids=[" ".join(keys) or "default" for keys in VARIANTS])
@pytest.mark.parametrize("mesh", MESHES)
def test_loss_and_gradients_are_those_of_an_independent_computation(keys, mesh):
  """Also where rows, positions and vocabulary are sharded; the gradients by finite differences."""
  cfg = config_of(**KEYS | keys)
  batch = batch_of(0)
  model, reference = model_of(1), model_of(2)
  has_reference = cfg.training.grpo_beta > 0
  loss, parts, gradients = loss_and_gradients(
    cfg, sharder_of(mesh), batch, model, reference if has_reference else None
  )
  assert loss == pytest.approx(wanted_loss(cfg, batch, model, reference), rel=1e-6)
  assert 0 < parts["clip_fraction"] < 1
  draw = np.random.default_rng(3)
  direction = [draw.normal(size=leaf.shape) for leaf in model]
  step = 1e-6
  ends = []
  for sign in (1, -1):
    moved = [leaf + sign * step * way for leaf, way in zip(model, direction, strict=True)]
    ends.append(wanted_loss(cfg, batch, moved, reference))
  found = sum(np.sum(leaf * way) for leaf, way in zip(gradients, direction, strict=True))
  assert found == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-5)


def test_on_policy_the_ratio_is_one_and_the_gradient_that_of_log_probabilities():
  cfg = config_of(**KEYS)
  batch = batch_of(0, on_policy=True)
  loss, parts, _ = loss_and_gradients(cfg, sharder_of(""), batch, model_of(1))
  counted = batch.advantage_BT[batch.weight_BT > 0]
  assert loss == pytest.approx(-counted.mean(), rel=1e-6)
  assert parts["clip_fraction"] == 0
  assert parts["approx_kl"] == 0


ANSWERS = list(itertools.product(range(4), repeat=3))  # all of three tokens out of four
PREFIXES = [prefix for length in range(3) for prefix in itertools.product(range(4), repeat=length)]


@functools.cache
def exact_problem():
  """(logits of each prefix [21, 4], rewards [64], probabilities [64], gradient of the mean)."""
  draw = np.random.default_rng(0)
  logits = draw.normal(size=(len(PREFIXES), 4))
  rewards = draw.normal(size=len(ANSWERS)) ** 3
  log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
  scores = np.zeros((len(ANSWERS), *logits.shape))  # gradients of log p(answer)
  probabilities = np.zeros(len(ANSWERS))
  for n, answer in enumerate(ANSWERS):
    for t, token in enumerate(answer):
      prefix = PREFIXES.index(answer[:t])
      probabilities[n] += log_p[prefix, token]
      scores[n, prefix] -= np.exp(log_p[prefix])
      scores[n, prefix, token] += 1
  probabilities = np.exp(probabilities)
  gradient = np.einsum("n,n,npv->pv", probabilities, rewards, scores)
  return logits, rewards, probabilities, gradient


def mean_gradient(estimator):
  """The mean of the loss's gradient over all pairs of answers, by their probabilities."""
  cfg = config_of(**KEYS | {"loss_aggregation": "constant", "max_completion_length": 3})
  logits, rewards, probabilities, _ = exact_problem()
  pairs = list(itertools.product(range(len(ANSWERS)), repeat=2))
  reward_NG = rewards[np.asarray(pairs)]
  weight_N = np.prod(probabilities[np.asarray(pairs)], axis=1) * len(pairs)
  advantage_NG = ADVANTAGES[estimator](reward_NG) * weight_N[:, None]
  chosen = [ANSWERS[n] for pair in pairs for n in pair]
  tokens_BT = np.pad(np.asarray(chosen, np.int32), ((0, 0), (0, 1)))
  shape = tokens_BT.shape
  weight_BT = np.ones(shape, np.float32)
  weight_BT[:, 3] = 0
  prefix_BT = [[PREFIXES.index(answer[:t]) for t in range(3)] + [0] for answer in chosen]
  states = np.eye(len(PREFIXES))[np.asarray(prefix_BT)]
  advantage_BT = np.broadcast_to(advantage_NG.reshape(-1, 1), shape)
  batch = PolicyBatch(
    tokens_BT=tokens_BT,
    targets_BT=tokens_BT,
    segment_BT=np.ones(shape, np.int32),
    position_BT=np.zeros(shape, np.int32),
    weight_BT=weight_BT,
    advantage_BT=advantage_BT,
    behaviour_BT=np.full(shape, ON_POLICY, np.float32),
  )
  _, _, (_, gradient) = loss_and_gradients(cfg, sharder_of(""), batch, (states, logits))
  return -3 * gradient


@pytest.mark.parametrize(("estimator", "factor"), [("leave_one_out", 1), ("group_mean", 1 / 2)])
def test_the_mean_over_all_groups_is_the_exact_policy_gradient(estimator, factor):
  """Of all 64 answers in groups of two; `group_mean` shrinks it by (G - 1) / G."""
  _, _, _, gradient = exact_problem()
  np.testing.assert_allclose(mean_gradient(estimator), factor * gradient, atol=1e-8)


def test_normalized_advantages_are_biased():
  """They weigh every pair of answers by the sign of their difference only."""
  _, _, _, gradient = exact_problem()
  found = mean_gradient("group")
  cosine = np.sum(found * gradient) / np.linalg.norm(found) / np.linalg.norm(gradient)
  assert 0.3 < cosine < 0.99
