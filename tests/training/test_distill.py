"""The loss `distill`: exact on any mesh, with a frozen teacher that no checkpoint holds."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.saved_models import save_run
from support.slow_cases import slow
from support.tiny import LENGTH, ROWS, VOCAB, build, config_of, mesh_keys, take_steps, uneven_batch
from support.tiny_run import keys_in, last_manifest, logged, parameter_hash, snapshot, start

from maxlite.checkpoint.checksum import tree_hash
from maxlite.config import save_resolved
from maxlite.errors import UserError
from maxlite.planning.hlo import parse
from maxlite.planning.hlo_cost import matmul_flops
from maxlite.planning.memory_estimate import estimate_memory
from maxlite.planning.plan_report import memory_lines
from maxlite.runs.open_run import open_weights
from maxlite.sharding import MESH_AXES, Sharder, build_mesh
from maxlite.training.cross_entropy import PredictionHead, Unembedding, teacher_sums
from maxlite.training.feature import find_feature
from maxlite.training.features.teacher import DISTILL, Teacher
from maxlite.training.loss import Sums
from maxlite.training.model_folders import teacher_folders
from maxlite.training.program import flops_per_step

FIXTURES = Path(__file__).resolve().parents[1] / "hf" / "hf_fixtures"
WIDTHS = (8, 8, 12)  # of the student and of two teachers
SMALL = {"decoder_block": "llama", "base_num_decoder_layers": 1}
MOE = {"decoder_block": "mixtral", "base_num_decoder_layers": 1, "load_balance_loss_weight": 0.5}
MEMBERS = {"dense": SMALL, "moe": MOE | {"base_emb_dim": 32}}


def sharder_on(degrees):
  sizes = [degrees.get(mesh_axis, 1) for mesh_axis in MESH_AXES]
  return Sharder(build_mesh(sizes, [1] * 6, jax.devices()[: np.prod(sizes)]))


def draw_models():
  """{x, w} of the student and of each teacher."""
  draw = np.random.default_rng(0)

  def normal(*shape):
    return draw.standard_normal(shape).astype(np.float32)

  return [{"x": normal(ROWS, LENGTH, width), "w": normal(width, VOCAB)} for width in WIDTHS]


def log_softmax(logits):
  return logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))


def exact_divergence(models, batch, temperature, top_k):
  """(sum over tokens, its gradients by the student's x and w) in float64."""
  (x_BTD, w_DV), *teachers = ([np.float64(m["x"]), np.float64(m["w"])] for m in models)
  log_q = log_softmax(x_BTD @ w_DV / temperature)
  p = np.mean([np.exp(log_softmax(x @ w / temperature)) for x, w in teachers], axis=0)
  if top_k:
    p = np.where(p >= np.sort(p, axis=-1)[..., -top_k, None], p, 0)
    p /= np.sum(p, axis=-1, keepdims=True)
  weight_BT1 = np.float64(batch.weight_BT)[..., None]
  terms = np.where(p > 0, p * (np.log(np.where(p > 0, p, 1)) - log_q), 0)
  slope = weight_BT1 * (np.exp(log_q) - p) / temperature
  gradients = {"x": slope @ w_DV.T, "w": np.einsum("btd,btv->dv", x_BTD, slope)}
  return np.sum(weight_BT1 * terms), gradients


def divergence(models, batch, degrees, **keys):
  """(sum, its gradients by all models), computed in chunks of 9 tokens."""
  training = dataclasses.replace(config_of(logits_chunk_tokens=27).training, **keys)

  def loss(models):
    student, *teachers = (PredictionHead(m["x"], Unembedding(m["w"], 0.0)) for m in models)
    return teacher_sums(student, teachers, batch, training, sharder_on(degrees))[2]

  return jax.jit(jax.value_and_grad(loss))(models)


@pytest.mark.parametrize(
  ("degrees", "temperature", "top_k"),
  [
    ({}, 2.0, 0),
    slow({"tensor": 4, "data": 2}, 0.5, 100),
    ({"expert": 2, "tensor": 4}, 1.0, VOCAB),
  ],
  ids=str,
)
def test_divergence_and_its_gradients_are_exact(degrees, temperature, top_k):
  models = draw_models()
  batch = uneven_batch(0)
  keys = {"distill_temperature": temperature, "distill_top_k": top_k}
  value, (student, *teachers) = divergence(models, batch, degrees, **keys)
  expected, gradients = exact_divergence(models, batch, temperature, top_k % VOCAB)
  np.testing.assert_allclose(value, expected, rtol=1e-5)
  for name, gradient in gradients.items():
    np.testing.assert_allclose(student[name], gradient, rtol=1e-4, atol=1e-5)
  assert not any(np.any(leaf) for leaf in jax.tree.leaves(teachers))


def test_the_loss_mixes_the_next_token_with_the_divergence_times_t_squared():
  cfg = config_of(loss_type="distill", teacher_path="x", distill_alpha=0.25, distill_temperature=3)
  number = jnp.float32
  sums = Sums(number(4), nll=number(8), logits_z=number(0), layers={}, divergence=number(12))
  total, parts = DISTILL.combine(sums, cfg.training, cfg.model.moe)
  assert (total, parts["loss"], parts["distill_loss"]) == (0.75 * 2 + 0.25 * 9 * 3, 2, 9 * 3)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
  """The folder of an ensemble of a dense and an MoE decoder."""
  folder = tmp_path_factory.mktemp("teacher")
  for seed, (name, keys) in enumerate(MEMBERS.items()):
    cfg = config_of(init_weights_seed=seed, **keys)
    save_run(folder / "members" / name, build(cfg).init(seed).params, cfg)
  save_resolved(config_of(members="[{name: dense}]"), folder / "config.yml")
  return folder


def student_of(teacher, mesh, num_devices=8, **keys):
  keys = {"teacher_path": teacher, "distill_temperature": 2, **mesh_keys(mesh)} | keys
  cfg = config_of(loss_type="distill", **keys)
  return build(cfg, jax.devices()[:num_devices])


def take_taught_step(program, host_state):
  def step(state, batch):
    return program.step(state, program.with_extra_inputs(batch))

  taught = dataclasses.replace(program)
  vars(taught)["step"] = step
  after, (metrics,) = take_steps(taught, host_state, [uneven_batch(0)])
  return after.params, metrics


DENSE_PAIR = SMALL | {"teacher_members": "[dense]"}  # of a student and its teacher


@pytest.fixture(scope="module")
def one_step(teacher):
  """A function from keys to (state before, parameters and metrics after) a step on one device."""

  def step_with(keys):
    program = student_of(teacher, "", 1, **keys, per_device_batch_size=ROWS)
    state = jax.device_get(program.init(7))  # other weights than the teachers'
    return state, *take_taught_step(program, state)

  return step_with


@pytest.mark.parametrize(
  ("keys", "mesh", "num_micro"),
  [
    (DENSE_PAIR, "context=2 tensor=2", 2),
    slow(MOE, "fsdp=4 tensor=2", 1),
    slow(MOE, "data=2 expert=2 tensor=2", 2),
  ],
  ids=["dense", "fsdp", "expert"],
)
def test_any_mesh_and_accumulation_give_the_same_step(teacher, one_step, keys, mesh, num_micro):
  state, expected, expected_metrics = one_step(keys)
  num_devices = 4 if keys is DENSE_PAIR else 8
  rows = {"per_device_batch_size": ROWS / num_devices}
  keys = keys | rows | {"gradient_accumulation_steps": num_micro}
  program = student_of(teacher, mesh, num_devices, **keys)
  params, metrics = take_taught_step(program, state)
  for name in ("loss", "distill_loss", "total_loss", "grad_norm"):
    np.testing.assert_allclose(metrics[name], expected_metrics[name], rtol=2e-5, err_msg=name)
  close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6)
  jax.tree.map(close, params, expected)
  sharded = find_feature(program.features, Teacher).params[-1]["embed"]["embedding"]
  assert sharded.addressable_shards[0].data.size <= sharded.size / 2


def test_a_student_equal_to_its_teacher_has_no_divergence_and_no_gradient():
  student = draw_models()[0]
  value, (gradients, _) = divergence([student, student], uneven_batch(0), {})
  assert value == 0
  np.testing.assert_allclose(gradients["x"], 0, atol=1e-6)
  np.testing.assert_allclose(gradients["w"], 0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
def test_the_step_has_no_backward_pass_of_the_teacher(teacher):
  keys = SMALL | {"teacher_members": "[dense]", "logits_chunk_tokens": 2 * ROWS * LENGTH}
  program = student_of(teacher, "", 1, **keys, per_device_batch_size=ROWS)
  compiled = matmul_flops(parse(program.lower(program.objectives[0]).compile().as_text())).total
  (counted,) = flops_per_step(program)
  forward = find_feature(program.features, Teacher).forward_flops(program.batch_shape)
  assert counted <= compiled < counted + forward / 4 < counted * 1.1  # attention is counted half


@pytest.mark.slow
def test_the_memory_estimate_counts_the_parameters_of_the_teacher(teacher):
  program = student_of(teacher, "fsdp=4 tensor=2", **SMALL)
  leaves = jax.tree.leaves(find_feature(program.features, Teacher).params)
  num_bytes = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
  estimate = estimate_memory(program)
  assert estimate.teacher == num_bytes
  state = estimate.parameters + estimate.optimizer
  assert estimate.total == pytest.approx(state + num_bytes + estimate.temporaries)
  (row,) = (line for line in memory_lines(estimate, None) if line.startswith("teacher"))
  assert float(row.split()[-1]) == round(num_bytes / 1e9, 3)


RUN = SMALL | {"steps": 8, "loss_type": "distill", "checkpoint_period": 4}


@pytest.mark.slow
def test_a_run_resumes_bitwise_and_leaves_its_teacher_as_it_was(teacher, folder, capsys):
  keys = RUN | {"teacher_path": teacher}
  before = snapshot(teacher)
  finished = folder / "finished"
  code, output = start(finished, **keys)
  assert code == 0
  assert start(folder / "resumed", **keys | {"steps": 4})[0] == 0
  with pytest.raises(SystemExit):
    start(folder / "resumed", **keys, teacher_members="[moe]")
  assert "trained with another teacher: restore teacher_path" in capsys.readouterr().err
  code, resumed = start(folder / "resumed", **keys)
  assert code == 0
  assert logged(folder / "resumed") == logged(finished)
  assert parameter_hash(resumed) == parameter_hash(output)
  assert last_manifest(folder / "resumed") == last_manifest(finished)
  assert snapshot(teacher) == before


@pytest.mark.slow
def test_a_hugging_face_folder_teaches(folder):
  cfg = config_of(
    vocab_size=40,
    tokenizer_type="byte",
    loss_type="distill",
    teacher_path=FIXTURES / "mixtral",
    max_target_length=8,
  )
  program = build(cfg)
  assert (
    find_feature(program.features, Teacher).models[0].program.spec.model.decoder_block == "mixtral"
  )
  assert "distill_loss" in program.lower(program.objectives[0]).out_info[1]


@pytest.mark.slow
def test_a_run_with_moving_averages_teaches_by_them(folder):
  keys = SMALL | {"steps": 2, "ema_decay": 0.5}
  assert start(folder, **keys)[0] == 0
  _, params, averages, _ = open_weights(config_of(**keys_in(folder, **keys)))
  student = student_of(folder / "run", "", 1, **SMALL, per_device_batch_size=ROWS)
  (taught,) = find_feature(student.features, Teacher).params
  jax.tree.map(np.testing.assert_array_equal, taught, averages)
  assert tree_hash(params) != tree_hash(averages)


@pytest.mark.parametrize(
  ("keys", "message"),
  [
    ({"vocab_size": 512}, "has vocab_size=264, the student 512"),
    ({"teacher_members": "[tiny]"}, "has no member tiny: choose one of dense, moe"),
    ({"teacher_path": "nowhere"}, "is not a run folder"),
    ({"teacher_path": ""}, "needs a teacher; write teacher_path="),
    ({"distill_temperature": 0}, "write distill_temperature=1"),
    ({"distill_top_k": 265}, "write distill_top_k=264 or less"),
    ({"members": "[{name: a}]"}, "members have no teacher"),
    ({"loss_type": "next_token"}, "is only read by loss distill"),
  ],
  ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_mistakes_are_found_before_jax(teacher, keys, message):
  with pytest.raises(UserError, match=message):
    teacher_folders(config_of(**{"loss_type": "distill", "teacher_path": teacher} | keys))
