"""The losses of rollouts beside trl's, on the same log-probabilities and logits."""

import collections
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny import config_of

from maxlite.sharding import Sharder, build_mesh
from maxlite.training.loss import Hidden
from maxlite.training.on_policy_distill import ON_POLICY_DISTILL
from maxlite.training.policy_loss import GRPO, PolicyBatch

torch = pytest.importorskip("torch", reason="needs torch: pip install 'maxlite[hf]'")
trl = pytest.importorskip("trl", reason="needs trl: pip install 'maxlite[trl]'")

pytestmark = pytest.mark.hf
ROWS, LENGTH, WIDTH, VOCAB = 6, 9, 5, 11
SHARDER = Sharder(build_mesh((1,) * 6, (1,) * 6, jax.devices()[:1]))


@pytest.fixture
def prompts(tmp_path):
  path = tmp_path / "prompts.jsonl"
  path.write_text('{"prompt": "ab"}\n')
  return {"decoder_block": "llama", "dataset_type": "prompts", "dataset_path": path}


def drawn(seed):
  """(states of model and reference, unembedding, batch with a completion per row)."""
  draw = np.random.default_rng(seed)
  states = [draw.normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32) for _ in range(2)]
  w_DV = draw.normal(size=(WIDTH, VOCAB)).astype(np.float32)
  shape = (ROWS, LENGTH)
  length_B = draw.integers(3, LENGTH + 1, ROWS)
  is_real_BT = np.arange(LENGTH)[None] < length_B[:, None]
  weight_BT = (is_real_BT & (np.arange(LENGTH)[None] >= 2)).astype(np.float32)
  advantage_BT = np.broadcast_to(draw.normal(size=(ROWS, 1)), shape).astype(np.float32)
  batch = PolicyBatch(
    tokens_BT=np.zeros(shape, np.int32),
    targets_BT=draw.integers(VOCAB, size=shape).astype(np.int32),
    segment_BT=is_real_BT.astype(np.int32),
    position_BT=np.zeros(shape, np.int32),
    weight_BT=weight_BT,
    advantage_BT=advantage_BT,
    behaviour_BT=-draw.uniform(0.5, 4, shape).astype(np.float32),
  )
  return states, w_DV, batch


def log_probs_in_torch(x_BTD, w_DV, batch, temperature):
  logits = x_BTD @ torch.as_tensor(w_DV) / temperature
  targets = torch.as_tensor(batch.targets_BT, dtype=torch.long)[..., None]
  return torch.log_softmax(logits, -1).gather(-1, targets)[..., 0]


def trl_loss(training, trl_type, states, w_DV, batch):
  """(loss, gradient of the states) of `GRPOTrainer`."""
  x_BTD = torch.tensor(states[0], requires_grad=True)
  own = log_probs_in_torch(x_BTD, w_DV, batch, training.rollout_temperature)
  mask = torch.as_tensor(batch.weight_BT)
  high = training.grpo_epsilon_high if training.grpo_epsilon_high >= 0 else training.grpo_epsilon
  trainer = types.SimpleNamespace(
    _get_per_token_logps_and_entropies=lambda *_, **__: (own, torch.zeros_like(own), None),
    _metrics={"train": collections.defaultdict(list)},
    accelerator=types.SimpleNamespace(gather=lambda x: x, reduce=lambda x, **_: x, num_processes=1),
    args=types.SimpleNamespace(
      use_bias_correction_kl=training.use_bias_correction_kl, delta=None, steps_per_generation=1
    ),
    _entropy_bonus_enabled=False,
    aux_loss_enabled=False,
    beta=training.grpo_beta,
    current_gradient_accumulation_steps=1,
    epsilon_low=training.grpo_epsilon,
    epsilon_high=high,
    importance_sampling_level=training.importance_sampling_level,
    loss_type=trl_type,
    max_completion_length=training.max_completion_length,
    model=types.SimpleNamespace(training=True),
    off_policy_mask_threshold=None,
    top_entropy_quantile=1.0,
    use_vllm=False,
  )
  ids = torch.zeros((ROWS, LENGTH), dtype=torch.long)
  inputs = {
    "prompt_ids": ids[:, :0],
    "prompt_mask": mask[:, :0],
    "completion_ids": ids,
    "completion_mask": mask,
    "advantages": torch.as_tensor(batch.advantage_BT[:, 0].copy()),
    "old_per_token_logps": torch.as_tensor(batch.behaviour_BT),
    "num_items_in_batch": mask.sum(),
  }
  if training.grpo_beta:
    reference = torch.as_tensor(states[1])
    inputs["ref_per_token_logps"] = log_probs_in_torch(
      reference, w_DV, batch, training.rollout_temperature
    )
  loss = trl.GRPOTrainer._compute_loss(trainer, None, inputs)
  loss.backward()
  return loss.item(), x_BTD.grad.numpy()


@pytest.mark.parametrize(
  ("trl_type", "keys"),
  [
    ("dapo", {"grpo_epsilon_high": 0.28}),
    ("grpo", {"loss_aggregation": "sequence", "rollout_temperature": 0.7}),
    ("dr_grpo", {"loss_aggregation": "constant", "max_completion_length": 7}),
    ("grpo", {"importance_sampling_level": "sequence", "loss_aggregation": "sequence"}),
    ("dapo", {"grpo_beta": 0.2, "reference_path": "folder"}),
    ("dapo", {"grpo_beta": 0.2, "reference_path": "folder", "use_bias_correction_kl": "false"}),
  ],
)
def test_policy_losses_and_gradients_are_those_of_trl(prompts, trl_type, keys):
  cfg = config_of(**prompts, loss_type="grpo", **keys)
  states, w_DV, batch = drawn(0)
  wanted, wanted_gradient = trl_loss(cfg.training, trl_type, states, w_DV, batch)
  teachers = ()
  if cfg.training.grpo_beta:
    teachers = (Hidden(jnp.asarray(states[1]), {}, jnp.asarray(w_DV), None),)

  def total(x_BTD):
    hidden = Hidden(x_BTD, {}, jnp.asarray(w_DV), None, teachers=teachers)
    sums = GRPO.sums(hidden, jax.tree.map(jnp.asarray, batch), cfg.training, SHARDER)
    return GRPO.combine(sums, cfg.training, cfg.model.moe)[0]

  loss, gradient = jax.value_and_grad(total)(jnp.asarray(states[0]))
  assert float(loss) == pytest.approx(wanted, rel=1e-5)
  np.testing.assert_allclose(gradient, wanted_gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_on_policy_distillation_is_that_of_trl(prompts, beta):
  from trl.experimental.gkd import GKDTrainer

  keys = {"loss_type": "on_policy_distill", "teacher_path": "folder", "gkd_beta": beta}
  cfg = config_of(**prompts, **keys, rollout_temperature=0.8)
  states, w_DV, batch = drawn(1)
  x_BTD = torch.tensor(states[0], requires_grad=True)
  labels = torch.where(torch.as_tensor(batch.weight_BT) > 0, 1, -100)
  wanted = GKDTrainer.generalized_jsd_loss(
    student_logits=x_BTD @ torch.as_tensor(w_DV),
    teacher_logits=torch.as_tensor(states[1] @ w_DV),
    labels=labels,
    beta=beta,
    temperature=0.8,
  )
  wanted.backward()
  teacher = Hidden(jnp.asarray(states[1]), {}, jnp.asarray(w_DV), None)

  def total(x_BTD):
    hidden = Hidden(x_BTD, {}, jnp.asarray(w_DV), None, teachers=(teacher,))
    sums = ON_POLICY_DISTILL.sums(hidden, jax.tree.map(jnp.asarray, batch), cfg.training, SHARDER)
    return ON_POLICY_DISTILL.combine(sums, cfg.training, cfg.model.moe)[0]

  loss, gradient = jax.value_and_grad(total)(jnp.asarray(states[0]))
  assert float(loss) == pytest.approx(wanted.item(), rel=1e-5)
  np.testing.assert_allclose(gradient, x_BTD.grad.numpy(), rtol=1e-4, atol=1e-6)
