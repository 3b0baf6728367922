"""On-policy distillation: against independent divergences in float64, and in a run."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.tiny import config_of
from support.tiny_run import logged, start

from maxlite.config.saved import save_resolved
from maxlite.errors import UserError
from maxlite.sharding import Sharder, build_mesh
from maxlite.training.loss import Hidden
from maxlite.training.model_folders import teacher_folders
from maxlite.training.on_policy_distill import ON_POLICY_DISTILL
from maxlite.training.policy_loss import PolicyBatch

ROWS, LENGTH, WIDTH, VOCAB = 4, 6, 6, 8
MESHES = {"": (1, 1, 1, 1, 1, 1), "fsdp=2 tensor=2": (1, 1, 2, 1, 1, 2)}


def config_with(tmp_path, **keys):
  path = tmp_path / "prompts.jsonl"
  path.write_text('{"prompt": "ab"}\n')
  run = {
    "loss_type": "on_policy_distill",
    "dataset_type": "prompts",
    "dataset_path": path,
    "teacher_path": "folder",
    "decoder_block": "llama",
    "logits_chunk_tokens": 5,
  }
  return config_of(**run | keys)


def kl(p_V, q_V):
  return np.sum(p_V * (np.log(p_V) - np.log(q_V)), axis=-1)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("beta", [0.0, 1.0, 0.3])
def test_divergence_and_gradient_are_those_of_an_independent_computation(tmp_path, beta, mesh):
  cfg = config_with(tmp_path, gkd_beta=beta, rollout_temperature=0.8)
  sizes = MESHES[mesh]
  sharder = Sharder(build_mesh(sizes, (1,) * 6, jax.devices()[: np.prod(sizes)]))
  draw = np.random.default_rng(0)
  models = [
    (draw.normal(size=(ROWS, LENGTH, WIDTH)), draw.normal(size=(WIDTH, VOCAB))) for _ in range(3)
  ]
  weight_BT = (draw.uniform(size=(ROWS, LENGTH)) < 0.6).astype(np.float32)
  zeros = np.zeros((ROWS, LENGTH), np.int32)
  batch = PolicyBatch(zeros, zeros, zeros + 1, zeros, weight_BT, weight_BT, weight_BT)

  def wanted(x_BTD):
    def softmax(model):
      logits = model[0] @ model[1] / 0.8
      exp = np.exp(logits - logits.max(-1, keepdims=True))
      return exp / exp.sum(-1, keepdims=True)

    q = softmax((x_BTD, models[0][1]))
    p = (softmax(models[1]) + softmax(models[2])) / 2
    if beta in (0, 1):
      by_token = kl(p, q) if beta == 0 else kl(q, p)
    else:
      middle = beta * p + (1 - beta) * q
      by_token = beta * kl(p, middle) + (1 - beta) * kl(q, middle)
    return np.sum(weight_BT * by_token) / weight_BT.sum()

  with jax.enable_x64(True):
    student, *teachers = [
      Hidden(jnp.asarray(x_BTD), {}, jnp.asarray(w_DV), None) for x_BTD, w_DV in models
    ]

    def total(x_BTD):
      hidden = student.replace(x_BTD=x_BTD, teachers=tuple(teachers))
      sums = ON_POLICY_DISTILL.sums(hidden, jax.tree.map(jnp.asarray, batch), cfg.training, sharder)
      return ON_POLICY_DISTILL.combine(sums, cfg.training, cfg.model.moe)[0]

    loss, gradient = jax.jit(jax.value_and_grad(total))(student.x_BTD)
    loss, gradient = jax.device_get((loss, gradient))
  assert loss == pytest.approx(wanted(models[0][0]), rel=1e-6)
  way = draw.normal(size=gradient.shape)
  step = 1e-6
  slope = (wanted(models[0][0] + step * way) - wanted(models[0][0] - step * way)) / (2 * step)
  assert np.sum(gradient * way) == pytest.approx(slope, rel=1e-5)


@pytest.mark.slow
def test_a_student_that_starts_as_its_teacher_has_no_divergence(tmp_path):
  teacher = {"steps": 2, "run_name": "teacher", "decoder_block": "llama", "ema_decay": 0}
  path = tmp_path / "text.jsonl"
  path.write_text("".join(json.dumps({"text": f"line {n}"}) + "\n" for n in range(200)))
  code, _ = start(tmp_path, dataset_type="jsonl", dataset_path=path, **teacher)
  assert code == 0
  prompts = tmp_path / "prompts.jsonl"
  prompts.write_text('{"prompt": "li"}\n{"prompt": "ne"}\n')
  keys = {
    "loss_type": "on_policy_distill",
    "dataset_type": "prompts",
    "dataset_path": prompts,
    "teacher_path": tmp_path / "teacher",
    "load_parameters_path": tmp_path / "teacher",
    "decoder_block": "llama",
    "max_prefill_predict_length": 4,
    "max_completion_length": 5,
    "num_generations": 2,
    "learning_rate": 1e-2,
    "warmup_steps_fraction": 0,
    "router_jitter": 0,
    "steps": 2,
  }
  code, _ = start(tmp_path, **keys)
  assert code == 0
  rows = logged(tmp_path)
  assert abs(rows[0]["loss"]) < 1e-6
  assert "reward" not in rows[0]


def test_a_teacher_with_another_tokenizer_or_template_is_refused(tmp_path):
  """Equal ids must stand for equal texts; the sizes of vocabularies do not tell."""
  template = tmp_path / "own.jinja"
  template.write_text("{{ messages }}")
  for name, text in (("same", "{{ messages }}"), ("other", "{{ messages[0] }}")):
    folder = tmp_path / name / "run"
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "tokenizer/given_template.jinja").write_text(text)
    cfg = config_with(tmp_path, chat_template_path=folder / "tokenizer/given_template.jinja")
    save_resolved(cfg, folder / "config.yml")

  def open_teacher(name, **keys):
    teacher_folders(config_with(tmp_path, teacher_path=tmp_path / name / "run", **keys))

  open_teacher("same", chat_template_path=template)
  with pytest.raises(UserError, match="another chat_template_path"):
    open_teacher("other", chat_template_path=template)
  values = (tmp_path / "same/run/config.yml").read_text()
  changed = values.replace("tokenizer_type: byte", "tokenizer_type: huggingface")
  (tmp_path / "same/run/config.yml").write_text(changed)
  with pytest.raises(UserError, match="tokenizer_type=huggingface, the run byte"):
    open_teacher("same")
