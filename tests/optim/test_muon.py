"""Muon's updates of every matrix, against singular value decompositions in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.slow_cases import fast_only
from support.tiny import build as build_tiny
from support.tiny import config_of, mesh_keys, take_steps, uneven_batch

from maxlite.config.schema import DEFAULTS, ModelConfig, OptimizerConfig, build
from maxlite.errors import UserError
from maxlite.optim import build_optimizer
from maxlite.sharding import MESH_AXES, Sharder, build_mesh

SPLITS = ("none", "parts", "heads")
RATE = 0.5
BETA = 0.8
MLA = {"kv_lora_rank": 6, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 8}
SHAPES = {
  "query": ((6, 4, 6), ("q_lora", "q_heads", "kv")),
  "kv_up": ((6, 4, 12), ("kv_lora", "q_heads", "kv")),
  "kv_down": ((16, 8), ("embed", "latent")),
  "key": ((2, 16, 4, 8), ("layers", "embed", "kv_heads", "kv")),
  "out": ((4, 8, 16), ("q_heads", "kv", "embed")),
  "experts": ((4, 16, 8), ("exp", "embed_no_exp", "mlp")),
}
MESHES = ("fsdp=2 tensor=4", "tensor=2 fsdp=4", "tensor=8", "expert=4 fsdp=2")
NAMES = {"attention": {name: {"kernel": jax.P(*axes)} for name, (_, axes) in SHAPES.items()}}


def matrices_of(name, x, split):
  """[..., in, out]: the matrices of a kernel, written out by hand."""
  parts = {"kv_up": [x[..., :4], x[..., 4:]], "kv_down": [x[:, :6], x[:, 6:]]}.get(name, [x])
  if split == "none":
    parts = [x]
  if name in ("query", "kv_up", "key") and split == "heads":
    return [part.swapaxes(-3, -2) for part in parts]
  if name in ("query", "kv_up", "key"):
    return [part.reshape(*part.shape[:-2], -1) for part in parts]
  if name == "out":
    return [x.reshape(32, 16)]
  return parts


def after_newton_schulz(matrix):
  """U p(S) V^T, where p is five steps of the polynomial on S, divided by its norm.

  It is the orthogonal factor U V^T up to 0.35, as p maps all but the smallest numbers there.
  """
  u, s, v = np.linalg.svd(matrix, full_matrices=False)
  s = s / (np.sqrt((s**2).sum(-1, keepdims=True)) + 1e-8)
  is_small = s < 0.03
  for _ in range(5):
    s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
  assert (is_small | (np.abs(s - 1) < 0.35)).all()
  assert is_small.mean() < 0.1
  return (u * s[..., None, :]) @ v


def draw_params(seed, dtype=np.float64):
  draw = np.random.default_rng(seed)

  def array(name):
    x = draw.normal(size=SHAPES[name][0])
    if name == "query":  # heads of very different sizes
      x *= np.array([1, 30, 1e-2, 3])[None, :, None]
    return x.astype(dtype)

  return {"attention": {name: {"kernel": array(name)} for name in SHAPES}}


def optimizer(split):
  keys = {
    "opt_type": "muon",
    "muon_split": split,
    "muon_beta": BETA,
    "learning_rate": RATE,
    "lr_schedule_type": "constant",
    "learning_rate_schedule_steps": 10,
    "warmup_steps_fraction": 0.0,
    "adam_weight_decay": 0.0,
    "gradient_clipping_threshold": 0.0,
  }
  model = build(ModelConfig, DEFAULTS | MLA)
  return build_optimizer(build(OptimizerConfig, DEFAULTS | keys), NAMES, model)


def updates_after(tx, steps):
  state = tx.init(steps[0])
  for gradients in steps:
    updates, state = tx.update(gradients, state, steps[0])
  return updates, state


@pytest.mark.parametrize("split", fast_only(SPLITS, "heads"))
def test_every_matrix_is_orthogonalised_by_itself(split):
  steps = [draw_params(seed) for seed in (0, 1)]
  with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
    updates, _ = jax.device_get(jax.jit(functools.partial(updates_after, optimizer(split)))(steps))
  for name in SHAPES:
    first, second = (step["attention"][name]["kernel"] for step in steps)
    # Nesterov momentum with optax's correction of its bias, for the second update.
    momentum = (1 - BETA) * (BETA * first + second)
    mean = BETA * momentum / (1 - BETA**3) + (1 - BETA) * second / (1 - BETA**2)
    update = updates["attention"][name]["kernel"]
    got = matrices_of(name, update, split)
    for matrix, result in zip(matrices_of(name, mean, split), got, strict=True):
      size = 0.2 * np.sqrt(max(matrix.shape[-2:]))
      want = -RATE * size * after_newton_schulz(matrix)
      np.testing.assert_allclose(result, want, rtol=1e-6, atol=1e-9, err_msg=name)


def test_heads_have_updates_of_one_size():
  """Whatever the sizes of their gradients, which differ by a factor of 3000."""
  steps = [draw_params(0)]
  by_split = {}
  for split in ("parts", "heads"):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
      updates, _ = jax.jit(functools.partial(updates_after, optimizer(split)))(steps)
    by_split[split] = np.linalg.norm(updates["attention"]["query"]["kernel"], axis=(0, 2))
  assert by_split["parts"].max() > 5 * by_split["parts"].min()
  assert by_split["heads"].max() < 1.3 * by_split["heads"].min()


def test_the_state_does_not_depend_on_the_split():
  """So a checkpoint fits each of them."""
  params = draw_params(0, np.float32)
  states = [jax.eval_shape(optimizer(split).init, params) for split in SPLITS]
  assert states[0] == states[1] == states[2]


@pytest.mark.parametrize("mesh", fast_only(MESHES, "fsdp=2 tensor=4"))
def test_updates_do_not_depend_on_the_mesh(mesh):
  given = dict(part.split("=") for part in mesh.split())
  degrees = [int(given.get(axis, 1)) for axis in MESH_AXES]
  sharder = Sharder(build_mesh(degrees, (1,) * len(MESH_AXES)))
  steps = [draw_params(seed, np.float32) for seed in (0, 1)]
  compute = functools.partial(updates_after, optimizer("heads"))

  def shard(x, axes):
    try:
      return jax.device_put(x, sharder.sharding(tuple(axes)))
    except ValueError:  # an axis that the mesh does not divide
      return jax.device_put(x, sharder.sharding((None,) * x.ndim))

  sharded = [jax.tree.map(shard, step, NAMES) for step in steps]
  with jax.numpy_dtype_promotion("standard"):
    got, _ = jax.device_get(jax.jit(compute)(sharded))
    want, _ = jax.device_get(jax.jit(compute)(steps))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), got, want)


LATENT = {
  "decoder_block": "deepseek",
  "opt_type": "muon",
  "muon_split": "heads",
  "q_lora_rank": 8,
  "kv_lora_rank": 8,
  "qk_nope_head_dim": 4,
  "qk_rope_head_dim": 2,
  "v_head_dim": 4,
}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["tensor=4 fsdp=2", "data=2 fsdp=2 tensor=2", "context=2 fsdp=4"])
def test_steps_of_latent_attention_do_not_depend_on_the_mesh(mesh):
  whole = build_tiny(config_of(**LATENT, **mesh_keys("fsdp=8")))
  before = jax.device_get(whole.init(0))
  batches = [uneven_batch(seed) for seed in range(2)]
  want, _ = take_steps(whole, before, batches)
  got, _ = take_steps(build_tiny(config_of(**LATENT, **mesh_keys(mesh))), before, batches)

  def check(a, b, start):
    scale = np.abs(b - start).max()
    np.testing.assert_allclose(a - start, b - start, atol=0.02 * scale)

  jax.tree.map(check, got.params, want.params, before.params)


def test_mup_refuses_matrices_of_heads():
  keys = {"parametrization": "mup", "mup_base_emb_dim": 16, "decoder_block": "llama"}
  with pytest.raises(UserError, match="muon_split=parts"):
    config_of(**keys, opt_type="muon", muon_split="heads")
  assert jnp.isfinite(config_of(**keys, opt_type="muon").optimizer.muon_beta)
