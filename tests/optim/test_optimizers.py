"""Every optimizer of the table: convergence, weight decay and clipping."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxlite.config.raw_values import FrozenMapping
from maxlite.config.schema import DEFAULTS, ModelConfig, OptimizerConfig, build
from maxlite.errors import UserError
from maxlite.optim import build_optimizer, build_schedule, learning_rate
from maxlite.registry import OPTIMIZERS

# h_TF = x_TD wi, y_TD = h_TF * scale wo: two hidden matrices and a vector.
NAMES = {"wi": jax.P("embed", "mlp"), "norm": {"scale": jax.P("norm")}, "wo": jax.P("mlp", "embed")}
LEARNING_RATE = 0.02
DECAY = 0.1


@pytest.fixture(autouse=True)
def _standard_promotion():
  """Optax mixes types, which the training step also allows."""
  with jax.numpy_dtype_promotion("standard"):
    yield


def draw(shape, seed):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def make_params(seed=0):
  return {
    "wi": draw((6, 8), seed),
    "norm": {"scale": 1 + draw(8, seed + 1) / 4},
    "wo": draw((8, 6), seed + 2),
  }


def optimizer(opt_type, **changes):
  given = {
    "opt_type": opt_type,
    "learning_rate": LEARNING_RATE,
    "lr_schedule_type": "constant",
    "learning_rate_schedule_steps": 100,
    "warmup_steps_fraction": 0.0,
    "adam_weight_decay": DECAY,
  }
  return build_optimizer(build(OptimizerConfig, DEFAULTS | given | changes), NAMES, ModelConfig())


def loss(params, x_TD, y_TD):
  return jnp.mean((x_TD @ params["wi"] * params["norm"]["scale"][None] @ params["wo"] - y_TD) ** 2)


@pytest.mark.parametrize("opt_type", OPTIMIZERS)
def test_optimizers_fit_the_data(opt_type):
  x_TD = draw((64, 6), 9)
  tx = optimizer(opt_type)
  params = make_params()
  data = (x_TD, x_TD @ draw((6, 6), 10))

  @jax.jit
  def train(params):
    def step(carry, _):
      params, state = carry
      value, gradients = jax.value_and_grad(loss)(params, *data)
      updates, state = tx.update(gradients, state, params)
      return (optax.apply_updates(params, updates), state), value

    return jax.lax.scan(step, (params, tx.init(params)), length=100)[1]

  losses = np.asarray(train(jax.tree.map(jnp.asarray, params)))
  assert losses[-1] < losses[0] / 20


@functools.partial(jax.jit, static_argnums=0)
def updates_of(tx, params, gradients_of_steps):
  """(params, state) after one update per gradient."""
  state = tx.init(params)
  for gradients in gradients_of_steps:
    updates, state = tx.update(gradients, state, params)
    params = optax.apply_updates(params, updates)
  return params, state


MASK = {"wi": True, "norm": {"scale": False}, "wo": True}
OPTAX = {
  "adamw": optax.adamw(LEARNING_RATE, b1=0.8, b2=0.9, eps=1e-3, weight_decay=DECAY, mask=MASK),
  "lion": optax.lion(LEARNING_RATE, b1=0.8, b2=0.9, weight_decay=DECAY, mask=MASK),
  "muon": optax.contrib.muon(
    LEARNING_RATE, beta=0.7, consistent_rms=0.2, weight_decay=DECAY, adam_b1=0.8
  ),
}


@pytest.mark.parametrize("opt_type", OPTAX)
def test_updates_equal_those_of_optax(opt_type):
  keys = {"adam_b1": 0.8, "adam_b2": 0.9, "adam_eps": 1e-3, "muon_beta": 0.7}
  ours = optimizer(opt_type, gradient_clipping_threshold=0.0, **keys)
  steps = [make_params(seed) for seed in (20, 30, 40)]
  got = updates_of(ours, make_params(), steps)[0]
  with jax.numpy_dtype_promotion("standard"):
    want = updates_of(OPTAX[opt_type], make_params(), steps)[0]
  if opt_type == "muon":  # optax's muon uses another Adam for the rest
    del got["norm"], want["norm"]
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), got, want)


@pytest.mark.parametrize("opt_type", OPTIMIZERS)
def test_weight_decay_changes_only_decayed_parameters(opt_type):
  params = make_params()
  after, _ = updates_of(optimizer(opt_type), params, [jax.tree.map(np.zeros_like, params)])
  np.testing.assert_array_equal(after["norm"]["scale"], params["norm"]["scale"])
  for name in ("wi", "wo"):
    np.testing.assert_allclose(after[name], params[name] * (1 - LEARNING_RATE * DECAY), rtol=1e-6)


@pytest.mark.parametrize(
  ("threshold", "kept"), [(0.5, 0.5), (2.0, 2.0), (100.0, None), (0.0, None)]
)
def test_the_global_norm_of_gradients_is_clipped(threshold, kept):
  gradients = make_params(50)
  norm = float(optax.tree.norm(gradients))
  tx = optimizer("adamw", adam_b1=0.9, gradient_clipping_threshold=threshold)
  moment = optax.tree.get(updates_of(tx, make_params(), [gradients])[1], "mu")
  scale = 0.1 * (kept / norm if kept else 1)
  jax.tree.map(lambda m, g: np.testing.assert_allclose(m, scale * g, rtol=1e-5), moment, gradients)


def test_the_learning_rate_schedule_counts_updates():
  params = make_params()
  tx = optimizer("lion", warmup_steps_fraction=0.02, adam_weight_decay=0.0)
  once, twice = (updates_of(tx, params, [params] * n)[0]["wi"] for n in (1, 2))
  np.testing.assert_allclose(np.abs(once - params["wi"]), LEARNING_RATE / 2, rtol=1e-4)
  np.testing.assert_allclose(np.abs(twice - once), LEARNING_RATE, rtol=1e-4)


def test_muon_orthogonalizes_matrices_and_uses_adam_for_the_rest():
  params = make_params()
  gradients = make_params(60)
  plain = {"adam_weight_decay": 0.0, "gradient_clipping_threshold": 0.0, "adam_eps": 0.5}
  moved = {
    opt_type: jax.tree.map(
      lambda after, before: np.asarray(after) - before,
      updates_of(optimizer(opt_type, **plain), params, [gradients] * 2)[0],
      params,
    )
    for opt_type in ("muon", "adamw")
  }
  np.testing.assert_allclose(moved["muon"]["norm"]["scale"], moved["adamw"]["norm"]["scale"], 1e-4)
  # Five Newton-Schulz steps bring singular values close to 1; updates are scaled by
  # 0.2 sqrt(larger side).
  unit = 2 * LEARNING_RATE * 0.2 * np.sqrt(8)
  for name in ("wi", "wo"):
    singular = np.linalg.svd(moved["muon"][name], compute_uv=False)
    assert singular.max() < 1.3 * unit
    assert singular.min() > 0.6 * unit
    assert np.vdot(moved["muon"][name], gradients[name]) < 0


@pytest.mark.parametrize(
  ("name", "keys"),
  [
    ("sgd", {"momentum": 0.8, "nesterov": True}),
    ("adabelief", {"b1": 0.8}),
    ("lamb", {}),
    ("novograd", {"b2": 0.5}),
    ("lars", {}),
    ("schedule_free_adamw", {}),
  ],
)
def test_optimizers_of_optax_are_as_optax_has_them(name, keys):
  """With the schedule of the config, whose rates and lengths are not constant."""
  factory = getattr(optax, name, None) or getattr(optax.contrib, name)
  takes_decay = name in ("lamb", "novograd", "lars", "schedule_free_adamw")
  changes = {
    "lr_schedule_type": "cosine",
    "learning_rate_schedule_steps": 4,
    "adam_weight_decay": 0.3 if takes_decay else 0.0,
    "gradient_clipping_threshold": 0.0,
    "opt_kwargs": FrozenMapping(keys.items()),
  }
  ours = optimizer(f"optax.{name}", **changes)
  cfg = build(
    OptimizerConfig,
    DEFAULTS | {"learning_rate": LEARNING_RATE, "warmup_steps_fraction": 0} | changes,
  )
  decay = {}
  if takes_decay:
    decay["weight_decay"] = 0.3
    mask = {"lars": "weight_decay_mask", "lamb": "mask"}.get(name)
    if mask:
      decay[mask] = MASK
  steps = [make_params(seed) for seed in (20, 30, 40)]
  with jax.numpy_dtype_promotion("standard"):
    got, state = updates_of(ours, make_params(), steps)
    theirs = factory(learning_rate=build_schedule(cfg), **decay, **keys)
    want, _ = updates_of(theirs, make_params(), steps)
  jax.tree.map(np.testing.assert_array_equal, got, want)
  rate = learning_rate(dataclasses.replace(cfg, opt_type=f"optax.{name}"), state)
  assert float(rate) == pytest.approx(float(build_schedule(cfg)(3)))


@pytest.mark.parametrize(
  ("name", "changes", "error"),
  [
    ("no_such", {}, "no optimizer of this name"),
    ("chain", {}, "no optimizer of this name"),
    ("sgd", {}, "adam_weight_decay=0"),
    ("adamw", {"opt_kwargs": FrozenMapping([("b7", 1)])}, "b7"),
  ],
)
def test_what_optax_does_not_take_is_named(name, changes, error):
  with pytest.raises(UserError, match=error):
    optimizer(f"optax.{name}", **changes)
