"""The Python API of alternating training."""

import functools
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from alternation_cases import (
  FIT_ADAM,
  MATCH_ADAM,
  a_to_b_and_c,
  assert_close,
  assert_same,
  batches,
  fit_loss,
  layer,
  make_params,
  match_loss,
  own_state,
  take,
)
from flax import nnx, struct
from hypothesis import Phase as Stage
from hypothesis import given, settings
from hypothesis import strategies as st
from support.slow_cases import slow
from support.tiny import compilations

from maxlite.checkpoint.checksum import leaves_by_path
from maxlite.checkpoint.manager import Checkpoints
from maxlite.config.schema import DEFAULTS, CheckpointConfig, ModelConfig, OptimizerConfig, build
from maxlite.errors import UserError
from maxlite.optim import build_optimizer
from maxlite.optim.labels import labels_of, split, trained_paths
from maxlite.phases import Alternation, Phase, Plateau, Threshold
from maxlite.registry import OPTIMIZERS

DOCS = Path(__file__).parents[2] / "docs"


def match_gap(params, batch):
  """The loss of the match phase without its metrics."""
  loss, _ = match_loss(params, batch)
  return loss


def by_hand(num_steps):
  """The A to B and C case as two jitted functions: (params, losses)."""
  params = make_params()
  moving = {"fit": {"a": params["a"], "b": params["b"]}, "match": {"c": params["c"]}}
  optimizers = {"fit": FIT_ADAM, "match": MATCH_ADAM}
  losses = {"fit": fit_loss, "match": match_gap}

  @functools.partial(jax.jit, static_argnums=0)
  def step(name, trained, frozen, state, batch):
    def loss(trained):
      return losses[name](trained | frozen, batch)

    value, gradients = jax.value_and_grad(loss)(trained)
    with jax.numpy_dtype_promotion("standard"):
      updates, state = optimizers[name].update(gradients, state, trained)
    return optax.apply_updates(trained, updates), state, value

  states = {name: tx.init(moving[name]) for name, tx in optimizers.items()}
  others = {"fit": "match", "match": "fit"}
  order = ["fit"] * 2 + (["fit"] * 3 + ["match"] * 2) * num_steps
  values = []
  for name, batch in zip(order, batches(num_steps), strict=False):
    frozen = moving[others[name]]
    moving[name], states[name], value = step(name, moving[name], frozen, states[name], batch)
    values.append(value)
  return moving["fit"] | moving["match"] | {"d": params["d"]}, values


@pytest.fixture(scope="module")
def uninterrupted():
  """(state on the host, metrics of each step) of 12 steps."""
  alternation = a_to_b_and_c()
  state, rows = take(alternation, alternation.init(make_params()), batches(12))
  return jax.device_get(state), rows


@pytest.mark.smoke
def test_a_to_b_and_c_equals_two_handwritten_functions(uninterrupted):
  params, losses = by_hand(12)
  state, rows = uninterrupted
  assert_same(state.params, params)
  assert [row["loss"] for row in rows] == losses
  assert [int(row["phase"]) for row in rows] == [0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1]
  assert ["gap" in row for row in rows] == [row["phase"] == 1 for row in rows]


@pytest.mark.slow
def test_switch_gives_the_same_numbers(uninterrupted):
  alternation = a_to_b_and_c("switch")
  state, rows = take(alternation, alternation.init(make_params()), batches(12))
  want, want_rows = uninterrupted
  assert_close(state, want)
  assert_close(rows, want_rows)
  assert alternation.num_compiled == 1


def test_the_learning_rate_schedule_counts_steps_of_its_phase():
  """The fit phase's rate is zero after ten of its steps, of which the match phase takes none."""
  alternation = a_to_b_and_c()
  state, _ = take(alternation, alternation.init(make_params()), batches(15))
  assert state.clock.taken_P.tolist() == [11, 4]
  before = jax.device_get(state.params)
  state, rows = take(alternation, state, batches(2, first=15))
  assert [row["phase"] for row in rows] == [1, 1]
  state, _ = take(alternation, state, batches(1))
  assert_same(state.params["a"], before["a"])


def test_untrained_parameters_are_listed():
  assert a_to_b_and_c().untrained(make_params()) == ["d/bias", "d/kernel"]


@pytest.mark.smoke
@pytest.mark.parametrize("strategy", ["separate", "switch"])
def test_changes_of_phase_compile_nothing(strategy, monkeypatch):
  tiny = {"a": jnp.ones(()), "b": jnp.ones(())}

  def loss(params, batch):
    return (params["a"] * params["b"] - batch) ** 2

  sgd = optax.sgd(1e-3)
  phases = [Phase(name, [name], loss, sgd, steps=1) for name in tiny]
  alternation = Alternation(phases, strategy=strategy)
  state = alternation.init(tiny)
  batch = np.float32(0.5)
  alternation.compile(state, batch)
  num_compiled = alternation.num_compiled
  state, _ = alternation.step(state, batch)  # includes what JAX compiles for any first program
  monkeypatch.setattr(jax, "device_get", None)  # the host computes the phase without the device
  with compilations() as compiled:
    for _ in range(1000):
      state, metrics = alternation.step(state, batch)
    jax.jit(lambda x: x - 3)(metrics["loss"])
  assert state.clock.step == 1001
  assert len(compiled) == 1  # the program after the loop, which shows that the listener works
  assert num_compiled == {"separate": 2, "switch": 1}[strategy]
  assert alternation.num_compiled == num_compiled


def test_frozen_parameters_have_no_backward_pass():
  """In a chain of four square layers, of which only the first or the last is trained."""
  width = 64
  rows = 32
  names = "abcd"
  params = {name: jnp.ones((width, width)) for name in names}

  def loss(params, x_BD):
    for name in names:
      x_BD = x_BD @ params[name]
    return jnp.mean(x_BD)

  sgd = optax.sgd(1e-3)
  phases = [Phase(name, [name], loss, sgd, steps=1) for name in "ad"]
  alternation = Alternation(phases, strategy="separate")
  alternation.compile(alternation.init(params), jnp.ones((rows, width)))
  matmuls = {"a": 4 + 3 + 1, "d": 4 + 1}  # forward, backward to the layer, and its weight gradient
  for name, number in matmuls.items():
    flops = alternation.programs[name].cost_analysis()["flops"]
    assert flops == pytest.approx(number * 2 * rows * width**2, rel=0.1), name


def sharded(params, mesh):
  specs = {"kernel": jax.P("x"), "bias": jax.P()}

  def place(key_path, leaf):
    spec = specs[key_path[-1].key]
    return jax.device_put(leaf, jax.NamedSharding(mesh, spec))

  return jax.tree_util.tree_map_with_path(place, params)


@pytest.mark.parametrize("strategy", ["separate", slow("switch")])
def test_mesh_equals_one_device(strategy, uninterrupted):
  mesh = jax.make_mesh((8,), ("x",))
  alternation = a_to_b_and_c(strategy, ema_decay=0.5)
  state = alternation.init(sharded(make_params(), mesh))
  adam_state = own_state(state, "fit")[0]
  for tree in (state.params, adam_state.mu, state.ema):
    assert tree["a"]["kernel"].sharding.spec == jax.P("x")
  rows_of = jax.NamedSharding(mesh, jax.P("x"))
  stream = (jax.device_put(batch, rows_of) for batch in batches(12))
  state, _ = take(alternation, state, stream)
  want, _ = uninterrupted
  assert_close(state.params, want.params)
  assert_close(state.opt_state, want.opt_state)


def save_and_restore(folder, alternation, state, params):
  checkpoints = Checkpoints(build(CheckpointConfig, DEFAULTS), folder, report=print)
  checkpoints.save(1, state, {})
  checkpoints.wait()
  restored = checkpoints.restore(alternation.abstract_state(params))
  checkpoints.close()
  return restored[0]


@pytest.mark.smoke
@pytest.mark.parametrize(("killed_after", "following"), [(3, "fit"), (6, "match")])
def test_restored_state_resumes_bit_for_bit(killed_after, following, tmp_path, uninterrupted):
  before = a_to_b_and_c()
  after = a_to_b_and_c()
  mesh = jax.make_mesh((1,), ("x",), devices=jax.devices()[1:2])
  state, _ = take(before, before.init(make_params()), batches(killed_after))
  params = sharded(make_params(), mesh)
  state = save_and_restore(tmp_path, after, state, params)
  assert after.next_phase(state) == following
  state, rows = take(after, state, batches(12 - killed_after, first=killed_after))
  want, want_rows = uninterrupted
  assert_same(state, want)
  assert_same(rows, want_rows[killed_after:])


@pytest.mark.slow
def test_resumes_on_another_mesh(tmp_path, uninterrupted):
  before = a_to_b_and_c("switch")
  after = a_to_b_and_c()
  four = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
  eight = jax.make_mesh((8,), ("x",))
  state, _ = take(before, before.init(sharded(make_params(), four)), batches(6))
  state = save_and_restore(tmp_path, after, state, sharded(make_params(), eight))
  adam_state = own_state(state, "fit")[0]
  assert adam_state.mu["a"]["kernel"].sharding.mesh == eight
  state, _ = take(after, state, batches(6, first=6))
  want, _ = uninterrupted
  assert_close(state, want)


def optimizer_of(opt_type, names):
  """An optimizer with clipping, decay and large steps."""
  keys = {"opt_type": opt_type, "learning_rate": 0.1, "learning_rate_schedule_steps": 100}
  return build_optimizer(build(OptimizerConfig, DEFAULTS | keys), names, ModelConfig())


def moved(old, new):
  """Paths of the leaves whose bits differ between the trees."""
  old = leaves_by_path(old)
  new = leaves_by_path(new)
  return {path for path in old if not np.array_equal(old[path], new[path])}


partitions = st.lists(
  st.sets(st.sampled_from("abc"), min_size=1), min_size=len(OPTIMIZERS), max_size=len(OPTIMIZERS)
)


# No shrinking of failing examples: every example compiles.
@pytest.mark.smoke
@settings(max_examples=2, deadline=None, derandomize=True, phases=[Stage.generate])
@given(
  parts=partitions,
  kinds=st.sampled_from(["kernel", "bias", ".*"]),
  accumulate=st.permutations([1, 1, 4, 4]),
  strategy=st.sampled_from(["separate", "switch"]),
)
def test_frozen_parameters_keep_their_bits(tmp_path_factory, parts, kinds, accumulate, strategy):
  """A phase for every optimizer, under decay, clipping, averaging, accumulation and a restart."""
  params = make_params()
  names = {name: {"kernel": jax.P("embed", "mlp"), "bias": jax.P("norm")} for name in params}

  def loss(params, batch):
    return fit_loss(params, batch) + match_gap(params, batch)

  phases = []
  for opt_type, part, parts_of_batch in zip(OPTIMIZERS, parts, accumulate, strict=True):
    train = [f"{name}/{kinds}" for name in sorted(part)]
    trained_names, _ = split(names, labels_of(names, train))
    tx = optimizer_of(opt_type, trained_names)
    phases.append(Phase(opt_type, train, loss, tx, steps=1, accumulate=parts_of_batch))
  alternation = Alternation(phases, strategy=strategy, ema_decay=0.5)
  state = alternation.init(params)
  for step, batch in enumerate(batches(len(phases) + 1)):
    phase = phases[step % len(phases)]
    trained = set(trained_paths(labels_of(params, phase.train)))
    old_params = jax.device_get(state.params)
    old_ema = jax.device_get(state.ema)
    if step == 2:
      folder = tmp_path_factory.mktemp("checkpoints")
      state = save_and_restore(folder, alternation, state, params)
    state, _ = alternation.step(state, batch)
    assert moved(old_params, jax.device_get(state.params)) == trained
    assert moved(old_ema, jax.device_get(state.ema)) == trained
  slots = leaves_by_path(state.opt_state)
  for path in alternation.untrained(params):
    assert not [slot for slot in slots if path in slot]


def test_phases_that_train_the_same_leaf_have_separate_optimizer_states():
  """Each counts half of the steps, so the parameters differ from those of one phase."""

  def trained(names):
    """(kernel of a, number of steps that each optimizer counts) after four steps."""
    phases = []
    for name in names:
      phases.append(Phase(name, ["a/.*", "b/.*"], fit_loss, optax.adam(1e-2), steps=1))
    alternation = Alternation(phases)
    state, _ = take(alternation, alternation.init(make_params()), batches(4))
    counts = [int(own_state(state, name)[0].count) for name in names]
    assert list(state.opt_state.own) == names
    return state.params["a"]["kernel"], counts

  of_halves, counts = trained(["one", "two"])
  assert counts == [2, 2]
  of_whole, counts = trained(["whole"])
  assert counts == [4]
  assert not np.array_equal(of_halves, of_whole)


@pytest.mark.slow
def test_accumulation_gives_the_same_numbers():
  results = []
  for accumulate in (1, 4):
    phase = Phase("fit", ["a/.*"], fit_loss, optax.sgd(0.1), steps=1, accumulate=accumulate)
    alternation = Alternation([phase])
    results.append(take(alternation, alternation.init(make_params()), batches(3)))
  whole, accumulated = results
  assert_close(accumulated, whole)


@pytest.mark.parametrize("strategy", ["separate", "switch"])
def test_a_condition_ends_a_phase_one_step_after_it_is_met(strategy):
  def loss(params, batch):
    return jnp.sum(params["w"] * batch)

  is_low = Threshold("loss", below=0.5, max_steps=9)
  is_flat = Plateau("loss", patience=2, max_steps=9)
  phases = [
    Phase("low", ["w"], loss, optax.sgd(0.0), until=is_low),
    Phase("flat", ["w"], loss, optax.sgd(0.0), until=is_flat),
  ]
  alternation = Alternation(phases, strategy=strategy)
  state = alternation.init({"w": jnp.ones(1)})
  stream = [np.array([loss], np.float32) for loss in (2, 1, 0, 9, 3, 2, 2, 2, 9, 9)]
  state, rows = take(alternation, state, stream)
  assert [int(row["phase"]) for row in rows] == [0, 0, 0, 0, 1, 1, 1, 1, 1, 0]
  assert state.clock.round == 1


def test_a_phase_may_have_batches_of_another_shape():
  alternation = a_to_b_and_c("auto")
  state = alternation.init(make_params())
  x_BD, y_BD = next(batches(1))
  large = (x_BD, y_BD)
  small = (x_BD[:4], y_BD[:4])
  alternation.compile(state, large, own_batches={"match": small})
  assert alternation.reason == "separate: the phases' batches differ"
  own_batch = {"fit": large, "match": small}
  for _ in range(7):
    phase = alternation.next_phase(state)
    state, _ = alternation.step(state, own_batch[phase])
  assert state.clock.taken_P.tolist() == [5, 2]
  with pytest.raises(ValueError, match="phase fit was compiled for another batch"):
    alternation.step(state, small)
  with pytest.raises(ValueError, match="use strategy='separate'"):
    a_to_b_and_c("switch").compile(state, large, own_batches={"match": small})


@pytest.mark.slow
def test_the_callers_parameters_are_not_donated():
  params = sharded(make_params(), jax.make_mesh((8,), ("x",)))
  alternation = a_to_b_and_c()
  take(alternation, alternation.init(params), batches(2))
  assert_same(params, make_params())


def test_the_documentation_contains_the_script():
  script = (DOCS / "examples" / "alternating.py").read_text("utf-8")
  code = script[script.index("import argparse") :]
  assert code in (DOCS / "alternating.md").read_text("utf-8")


@pytest.mark.slow
@pytest.mark.parametrize(
  ("script", "arguments", "says"),
  [
    ("alternating.py", "--steps 4", "2 programs"),
    ("gan.py", "--steps 4", "radius"),
    ("actor_critic.py", "--rounds 40", "round  40  reward"),
    ("em.py", "--steps 60", "component with weight 0.67"),
  ],
)
def test_the_scripts_of_the_documentation_run(script, arguments, says, monkeypatch, capsys):
  monkeypatch.setattr("sys.argv", [script, *arguments.split()])
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    runpy.run_path(str(DOCS / "examples" / script), run_name="__main__")
  assert says in capsys.readouterr().out


class CallableModel(struct.PyTreeNode):
  """A model that is its own tree of parameters, as in Equinox."""

  layers: list[dict[str, jax.Array]]

  def __call__(self, x_BD):
    for params in self.layers:
      x_BD = layer(params, x_BD)
    return x_BD


def test_the_parameters_may_be_a_model_that_can_be_called():
  params = make_params()
  model = CallableModel([params["a"], params["b"]])

  def loss(model, batch):
    x_BD, y_BD = batch
    return jnp.mean((model(x_BD) - y_BD) ** 2)

  phases = [
    Phase("first", ["layers/0/.*"], loss, optax.sgd(0.1), steps=1),
    Phase("second", ["layers/1/kernel"], loss, optax.sgd(0.1), steps=1),
  ]
  alternation = Alternation(phases, ema_decay=0.9)
  assert alternation.untrained(model) == ["layers/1/bias"]
  (batch,) = batches(1)
  state, _ = alternation.step(alternation.init(model), batch)
  gradient = jax.grad(loss)(model, batch).layers[0]["kernel"]
  first, second = state.params.layers
  np.testing.assert_allclose(first["kernel"], params["a"]["kernel"] - 0.1 * gradient, rtol=1e-6)
  assert_same(second, params["b"])
  assert type(alternation.ema_params(state)) is CallableModel


def test_the_parameters_may_be_the_state_of_an_nnx_model():
  class Model(nnx.Module):
    def __init__(self):
      self.a = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
      self.b = nnx.Linear(4, 2, rngs=nnx.Rngs(1))

  graph, params = nnx.split(Model())

  def loss(params, batch):
    model = nnx.merge(graph, params)
    return jnp.mean(jnp.square(model.b(nnx.relu(model.a(batch)))))

  phases = [Phase("b", train=["b/.*"], loss=loss, optimizer=optax.sgd(0.1), steps=1)]
  alternation = Alternation(phases)
  state, metrics = alternation.step(alternation.init(params), jnp.ones((5, 3)))
  assert metrics["loss"] > 0
  assert_same(state.params["a"], params["a"])
  gradient = jax.grad(loss)(params, jnp.ones((5, 3)))
  expected = jax.tree.map(lambda leaf, slope: leaf - 0.1 * slope, params["b"], gradient["b"])
  assert_close(state.params["b"], expected)


def test_leaves_that_are_no_arrays_are_refused():
  params = {"kernel": np.ones(2, np.float32), "activation": jnp.tanh}
  alternation = Alternation([Phase("fit", ["kernel"], fit_loss, optax.sgd(0.1), steps=1)])
  with pytest.raises(UserError, match=r"activation of the parameters is a .*, not an array"):
    alternation.init(params)
