"""The Python API: divergence, user errors, and the example scripts."""

import re
import runpy
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from families import largest_error
from small_mlp import BATCH, Mlp, loss
from support import trees
from support.slow_cases import slow
from support.tiny import compilations

from maxlite.ensemble import Ensemble, Member
from maxlite.errors import UserError
from maxlite.registry import ENSEMBLE_STRATEGIES

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"


def trained(rates, strategy, num_steps=4):
  members = [Member(Mlp(), optax.sgd(rate), seed=z, name=f"lr{rate}") for z, rate in rates]
  ensemble = Ensemble(members, loss, strategy=strategy, devices=jax.devices()[:1])
  state = ensemble.init(BATCH)
  for _ in range(num_steps):
    state, metrics = ensemble.step(state, BATCH)
  return ensemble.member_states(state), metrics


def test_a_diverging_member_is_frozen_and_does_not_affect_the_others():
  """They have the bits that they have beside another member in the same program."""

  def beside(rate):
    return [(0, 0.1), (7, rate), (1, 0.01), (2, 0.03)]

  with_it, metrics = trained(beside(1e30), "stacked")
  without, _ = trained(beside(0.2), "stacked")
  np.testing.assert_array_equal(metrics["diverged"], [False, True, False, False])
  broken = with_it.pop("lr1e+30")
  assert all(largest_error(with_it[name], without[name]) == 0 for name in with_it)
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(broken.params))
  assert 0 < int(broken.step - broken.skipped) < 4


@pytest.mark.parametrize("strategy", ["fused", "submesh"])
def test_arrays_that_a_module_closes_over_are_not_donated(strategy):
  kernel = jnp.ones((2, 1))

  class Closed(nn.Module):
    @nn.compact
    def __call__(self, x_BD):
      return x_BD @ self.param("kernel", lambda key: kernel)

  members = [Member(Closed(), optax.sgd(0.1))]
  ensemble = Ensemble(members, loss, strategy=strategy, devices=jax.devices()[:1])
  ensemble.step(ensemble.init(BATCH), BATCH)
  np.testing.assert_array_equal(kernel, np.ones((2, 1)))


@pytest.mark.parametrize(("strategy", "widths"), [slow("fused", (3, 5)), ("stacked", (4, 4))])
def test_members_may_use_several_devices_by_themselves(strategy, widths):
  mesh = jax.sharding.Mesh(np.array(jax.devices()), "data")

  class Sharded(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x_BD):
      x_BD = jax.lax.with_sharding_constraint(x_BD, jax.NamedSharding(mesh, jax.P("data")))
      return nn.Dense(self.width)(x_BD)

  members = [Member(Sharded(width), optax.sgd(0.1)) for width in widths]
  ensemble = Ensemble(members, loss, strategy=strategy, devices=jax.devices()[:1])
  x_BD = np.ones((8, 2), np.float32)
  state, first = ensemble.step(ensemble.init(x_BD), x_BD)
  _, second = ensemble.step(state, x_BD)
  assert np.all(second["loss"] < first["loss"])


def test_injected_hyperparameters_are_stacked_arrays_of_the_state():
  rates = (0.1, 0.01)
  members = [Member(Mlp(), optax.sgd, hyperparameters={"learning_rate": rate}) for rate in rates]
  ensemble = Ensemble(members, loss, strategy="stacked", devices=jax.devices()[:1])
  state = ensemble.init(BATCH)
  for _ in range(4):
    state, _ = ensemble.step(state, BATCH)
  (group,) = state
  opt_state = group.members.opt_state
  np.testing.assert_allclose(opt_state.hyperparams["learning_rate"], rates)
  expected, _ = trained([(0, rate) for rate in rates], "stacked")
  for name, rate in zip(ensemble.names, rates, strict=True):
    params = expected[f"lr{rate}"].params
    assert largest_error(ensemble.member_params(state, name)["params"], params) <= 1e-6


def test_returned_states_stay_valid_after_the_next_step():
  members = [Member(Mlp(), optax.sgd(0.1))] * 2 + [Member(Mlp(4), optax.sgd(0.1))]
  for strategy in ("fused", "submesh"):  # two stacked, one not; none stacked
    ensemble = Ensemble(members, loss, strategy=strategy, devices=jax.devices()[:1])
    state = ensemble.init(BATCH)
    states = ensemble.member_states(state)
    before = jax.tree.map(np.array, states)
    ensemble.step(state, BATCH)
    ensemble.step(ensemble.load_states(states), BATCH)
    assert largest_error(states, before) == 0


def test_a_prediction_has_mean_members_and_disagreement():
  members = [Member(Mlp(width), optax.sgd(0.1), seed=width) for width in (2, 3)]
  ensemble = Ensemble(members, loss, devices=jax.devices()[:2])
  state = ensemble.init(BATCH)
  own = [
    np.asarray(member.model.apply(ensemble.member_params(state, name), BATCH))
    for member, name in zip(members, ensemble.names, strict=True)
  ]
  prediction = ensemble.predict(state, BATCH)
  np.testing.assert_allclose(prediction.members, own, rtol=1e-6)
  np.testing.assert_allclose(prediction.mean, np.mean(own, axis=0), rtol=1e-5)
  np.testing.assert_allclose(prediction.disagreement, np.std(own, axis=0), rtol=1e-4, atol=1e-6)


def one_member(own_loss, strategy="auto", devices=1):
  members = [Member(Mlp(), optax.sgd(0.1))]
  return Ensemble(members, own_loss, strategy=strategy, devices=jax.devices()[:devices])


def predict_of_layers(*widths):
  ensemble = Ensemble([Member(nn.Dense(width), optax.sgd(0.1)) for width in widths], loss)
  return ensemble.predict(ensemble.init(BATCH), BATCH)


def _init(strategy="auto", devices=8, **keywords):
  members = [Member(Mlp(width), optax.sgd(0.1)) for width in (2, 3)]
  return Ensemble(
    members, loss, strategy=strategy, devices=jax.devices()[:devices], **keywords
  ).init(BATCH)


@pytest.mark.parametrize(
  ("mistake", "message"),
  [
    (lambda: Ensemble([], loss), "an ensemble needs members; give a list"),
    (
      lambda: Ensemble([Member(Mlp(), optax.sgd(0.1), name="a")] * 2, loss),
      "two members are called a; give each a different name",
    ),
    (
      lambda: Ensemble([Member(Mlp(), optax.sgd(0.1))], loss, strategy="stack"),
      "no strategy 'stack'; choose one of auto, stacked",
    ),
    (lambda: _init("switched", devices=1), "2 members and 1 devices; take strategy auto"),
    (
      lambda: Ensemble([Member(Mlp(), optax.lbfgs())], loss).init(BATCH),
      "optimizer that needs the loss value, such as lbfgs, is not supported: choose one",
    ),
    (
      lambda: _init("stacked"),
      "stacked cannot serve these members: width is 2 in m0, and 3 in m1; use fused",
    ),
    (lambda: Member(Mlp, optax.sgd(0.1)), r"model=Mlp of a Member is not .*: call it, Mlp\("),
    (lambda: Member(Mlp(), optax.sgd), r"optimizer=sgd of a Member is not .*: call it, sgd\("),
    (lambda: Member(Mlp(), optax.sgd(0.1), seed=1.5), r"seed=1\.5 of a Member is not an integer"),
    (
      lambda: Member(Mlp(), optax.sgd(0.1), seed=jax.random.key(0)),
      "of a Member is not an integer",
    ),
    (
      lambda: Ensemble([Member(nn.Dropout(0.1, deterministic=True), optax.sgd(0.1))], loss).init(
        BATCH
      ),
      "the model Dropout has no parameters to train",
    ),
    (
      lambda: predict_of_layers(1, 2),
      r"prediction of m0 has shape \(4, 1\), and that of m1 \(4, 2\): give a predict",
    ),
    (lambda: Ensemble([Mlp()], loss), "must be a list of Member"),
    (lambda: Ensemble(Member(Mlp(), optax.sgd(0.1)), loss), "must be a list of Member"),
    (
      lambda: one_member(lambda model, batch: model(batch)).init(BATCH),
      r"'loss' of the model Mlp is float32\[4,1\]; a loss returns a floating scalar",
    ),
    (
      lambda: one_member(lambda model, batch: (loss(model, batch), 1.0)).init(BATCH),
      r"loss of the model Mlp returns a float as its second value.* \(scalar, \{name: scalar\}\)",
    ),
    (
      lambda: one_member(lambda model, batch: (loss(model, batch), {"diverged": 1.0})).init(BATCH),
      "'diverged' of the model Mlp is a metric of the step: give it another name",
    ),
    (lambda: one_member(loss).step(None, BATCH), r"no state yet: call init\(example_batch\) first"),
    (lambda: one_member(loss).load_states({}), r"no state yet: call init\(example_batch\) first"),
    (
      lambda: _init(own_batches=True),
      r"takes a batch per member, stacked: a leaf of shape \(4, 2\) .* first axis of 2",
    ),
    (lambda: _init(memory_gb=1e-9), "need .* GB on a device, and 1e-09 GB are given: train fewer"),
  ],
)
def test_a_user_error_is_one_line(mistake, message):
  with pytest.raises(ValueError, match=message) as error:
    mistake()
  assert "\n" not in str(error.value)


@pytest.mark.parametrize("strategy", ["stacked", slow("switched"), slow("submesh")])
def test_a_donated_state_is_one_line(strategy):
  ensemble = one_member(loss, strategy)
  state = ensemble.init(BATCH)
  ensemble.step(state, BATCH)
  uses = (
    lambda: ensemble.step(state, BATCH),
    lambda: ensemble.member_states(state),
    lambda: ensemble.predict(state, BATCH),
  )
  for use in uses:
    with pytest.raises(UserError, match="this state was donated to an earlier step"):
      use()


@pytest.mark.parametrize("strategy", ["stacked", "submesh"])
def test_a_batch_of_another_size_is_one_line(strategy):
  members = [Member(Mlp(), optax.sgd(rate)) for rate in (0.1, 0.2)]
  ensemble = Ensemble(members, loss, strategy=strategy, devices=jax.devices()[:1])
  state = ensemble.init(BATCH)
  match = r"the batch is float32\[3,2\], and that of init was float32\[4,2\]"
  with pytest.raises(UserError, match=match):
    ensemble.step(state, BATCH[:3])
  ensemble.step(state, BATCH)  # the state was not donated


@pytest.mark.parametrize("strategy", ["stacked", slow("switched"), slow("submesh")])
def test_own_batches_of_another_number_of_members_are_one_line(strategy):
  members = [Member(Mlp(), optax.sgd(rate)) for rate in (0.1, 0.2)]
  devices = jax.devices()[: 2 if strategy == "switched" else 1]
  ensemble = Ensemble(members, loss, strategy=strategy, devices=devices, own_batches=True)
  state = ensemble.init(np.stack([BATCH] * 2))
  for wrong in (1, 3):
    with pytest.raises(UserError, match=rf"\({wrong}, 4, 2\) does not have a first axis of 2"):
      ensemble.step(state, np.stack([BATCH] * wrong))


@pytest.mark.parametrize("strategy", ["stacked", slow("switched"), slow("submesh")])
def test_states_of_other_members_are_one_line(strategy):
  optimizers = {"sgd": optax.sgd(0.1), "adam": optax.adam(0.1)}
  ensembles = {
    name: Ensemble(
      [Member(Mlp(), optimizer, name="a")], loss, strategy=strategy, devices=jax.devices()[:1]
    )
    for name, optimizer in optimizers.items()
  }
  states = {name: each.member_states(each.init(BATCH)) for name, each in ensembles.items()}
  for given, of in (("sgd", "adam"), ("adam", "sgd")):
    with pytest.raises(UserError, match=r"state of a is not .*: it differs in opt_state/0/count"):
      ensembles[of].load_states(states[given])
  with pytest.raises(UserError, match="there is no state of a: give one of every member"):
    ensembles["sgd"].load_states({"b": states["sgd"]["a"]})


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["stacked", "switched"])
def test_random_keys_in_the_optimizer_state_are_those_of_a_solo_run(strategy):
  def noisy(seed):
    return optax.chain(optax.add_noise(0.1, 0.5, seed), optax.sgd(0.1))

  members = [Member(Mlp(), noisy(seed), seed, f"m{seed}") for seed in (0, 1)]

  def train(strategy):
    """The parameters of a member after two steps, and a move of its state between them."""
    ensemble = Ensemble(members, loss, strategy=strategy, devices=jax.devices()[:2])
    state, _ = ensemble.step(ensemble.init(BATCH), BATCH)
    state = ensemble.load_states(ensemble.member_states(state))
    state, _ = ensemble.step(state, BATCH)
    return ensemble.member_params(state, "m1")

  for leaf, expected in trees.leaf_pairs(train(strategy), train("submesh")):
    np.testing.assert_allclose(leaf, expected, atol=1e-6)


def test_auto_avoids_strategies_that_cannot_batch_a_callback():
  class Calling(nn.Module):
    @nn.compact
    def __call__(self, x_BD):
      y_BD = jax.lax.stop_gradient(nn.Dense(1)(x_BD))
      return y_BD + jax.pure_callback(np.sin, jax.ShapeDtypeStruct(y_BD.shape, y_BD.dtype), y_BD)

  members = [Member(Calling(), optax.sgd(rate)) for rate in (0.1, 0.2)]
  ensemble = Ensemble(members, loss, devices=jax.devices()[:1])
  _, metrics = ensemble.step(ensemble.init(BATCH), BATCH)
  assert ensemble.plan.strategy == "submesh"
  assert np.isfinite(metrics["loss"]).all()
  with pytest.raises(UserError, match=r"stacked cannot serve these members: .*vmap_method"):
    Ensemble(members, loss, strategy="stacked", devices=jax.devices()[:1]).init(BATCH)


def test_a_refusal_of_jax_without_a_text_has_a_reason():
  """On several devices, JAX cannot vmap a grouped convolution of a batch that all members share."""

  class Grouped(nn.Module):
    @nn.compact
    def __call__(self, x_BTC):
      return nn.Conv(2, (3,), feature_group_count=2)(x_BTC)

  members = [Member(Grouped(), optax.sgd(0.1), seed=seed) for seed in range(2)]
  batch = np.ones((2, 4, 2), np.float32)
  reason = r"JAX cannot batch .* \(NotImplementedError .*linear\.py:\d+ in __call__\)"
  with pytest.raises(UserError, match=f"stacked cannot serve these members: {reason}; use submesh"):
    Ensemble(members, loss, strategy="stacked", devices=jax.devices()[:2]).init(batch)


def test_a_strategy_that_refuses_without_a_text_is_listed_as_unsupported(monkeypatch):
  def refuse(_request):
    raise NotImplementedError

  monkeypatch.setitem(ENSEMBLE_STRATEGIES, "refusing", refuse)
  ensemble = Ensemble([Member(Mlp(), optax.sgd(0.1))], loss, devices=jax.devices()[:1])
  ensemble.init(BATCH)
  caption = ensemble.plan.table().caption
  assert re.search(r"refusing: JAX cannot batch .*:\d+ in refuse\)", caption)


def test_an_unknown_member_is_an_error_that_names_it():
  ensemble = Ensemble([Member(Mlp(), optax.sgd(0.1), name="a")], loss)
  state = ensemble.init(BATCH)
  with pytest.raises(ValueError, match="no member 'b'; there are a"):
    ensemble.member_params(state, "b")


@pytest.mark.slow
@pytest.mark.parametrize(
  ("script", "printed"),
  [
    ("different_mlps.py", "mean of all"),
    ("learning_rates.py", "mean of all"),
    ("adapters.py", "state of 16 adapters"),
  ],
)
def test_example_scripts_run(script, printed, monkeypatch, capsys):
  monkeypatch.setattr("sys.argv", [script, "--steps", "3"])
  with jax.numpy_dtype_promotion("standard"):
    runpy.run_path(str(EXAMPLES / script), run_name="__main__")
  assert printed in capsys.readouterr().out


@pytest.mark.slow
def test_states_are_saved_and_restored_by_orbax(tmp_path):
  """In another program, as `abstract_states` describes them."""

  def make():
    return Ensemble(
      [Member(Mlp(width), optax.adam(0.1), name=f"w{width}") for width in (2, 3)], loss
    )

  ensemble = make()
  with jax.numpy_dtype_promotion("standard"):
    state, _ = ensemble.step(ensemble.init(BATCH), BATCH)
    saved = ensemble.member_states(state)
    with ocp.StandardCheckpointer() as checkpointer:
      checkpointer.save(tmp_path / "states", saved)
    _, expected = ensemble.step(state, BATCH)
    other = make()
    other.init(BATCH)
    with ocp.StandardCheckpointer() as checkpointer:
      restored = checkpointer.restore(tmp_path / "states", other.abstract_states())
    _, metrics = other.step(other.load_states(restored), BATCH)
  np.testing.assert_array_equal(metrics["loss"], expected["loss"])
  assert other.best(metrics["loss"]) == ensemble.names[int(np.argmin(metrics["loss"]))]
  assert other.best([np.nan, 1.0]) == "w3"
  with pytest.raises(UserError, match="no member has a finite value"):
    other.best([np.nan, np.inf])


@pytest.mark.slow
def test_accumulated_updates_of_optax_are_an_optimizer():
  members = [Member(Mlp(), optax.MultiSteps(optax.sgd(rate), 2)) for rate in (0.1, 0.2)]
  ensemble = Ensemble(members, loss, strategy="stacked", devices=jax.devices()[:1])
  state = ensemble.init(BATCH)
  losses = []
  with jax.numpy_dtype_promotion("standard"):
    for _ in range(3):
      state, metrics = ensemble.step(state, BATCH)
      losses.append(np.asarray(metrics["loss"]))
  np.testing.assert_array_equal(losses[0], losses[1])
  assert np.all(losses[2] < losses[1])


@pytest.mark.slow
def test_the_cost_of_one_member_does_not_grow_with_their_number():
  """Starting a stack and taking a member out of it compile programs of one member."""
  compiled = {}
  for count in (2, 200):
    members = [
      Member(Mlp(), optax.sgd, seed=z, hyperparameters={"learning_rate": 0.1 / (1 + z)})
      for z in range(count)
    ]
    with compilations() as found:
      ensemble = Ensemble(members, loss, strategy="stacked", devices=jax.devices()[:1])
      state, _ = ensemble.step(ensemble.init(BATCH), BATCH)
      for name in (ensemble.names[0], ensemble.names[-1]):
        ensemble.member_params(state, name)
    compiled[count] = found
  assert len(compiled[2]) == len(compiled[200])


class DocumentedMlp(nn.Module):
  width: int
  depth: int

  @nn.compact
  def __call__(self, x_BD):
    for _ in range(self.depth):
      x_BD = nn.tanh(nn.Dense(self.width)(x_BD))
    return nn.Dense(1)(x_BD)


@pytest.mark.smoke
@pytest.mark.parametrize("page", ["README.md", slow("docs/ensembles.md")])
def test_the_first_lines_of_the_pages_run(page, tmp_path):
  """The first block that creates an `Ensemble`, and the line with a rate per member."""
  text = (ROOT / page).read_text("utf-8")
  block = next(b for b in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "Ensemble(" in b)
  of_rates = re.search(r"\[Member\(MLP\(.*hyperparameters.*\]", text).group()
  script = tmp_path / "example.py"
  script.write_text(f"{block}\nrates = (1e-3, 1e-2)\nmembers_of_rates = {of_rates}\n")
  inputs = {"MLP": DocumentedMlp, "loss": loss, "optax": optax}
  inputs |= {"batch": BATCH, "batches": [BATCH, BATCH], "inputs": BATCH}
  with jax.numpy_dtype_promotion("standard"):
    names = runpy.run_path(str(script), inputs)
  assert names["metrics"]["loss"].shape == (4,)
  numbers = [member.numbers for member in names["members_of_rates"]]
  assert numbers == [{"learning_rate": 1e-3}, {"learning_rate": 1e-2}]


def with_period(learning_rate, period):
  return optax.MultiSteps(optax.sgd(learning_rate), period)


def with_length(learning_rate, length):
  return optax.sgd(optax.cosine_decay_schedule(learning_rate, length))


def with_staircase(learning_rate, staircase):
  schedule = optax.exponential_decay(learning_rate, 10, 0.5, staircase=staircase)
  return optax.sgd(schedule)


def with_condition(learning_rate, threshold):
  return optax.sgd(learning_rate if threshold > 1 else 0.1)


@pytest.mark.parametrize("strategy", ["auto", "stacked", "fused", "padded"])
@pytest.mark.parametrize(
  ("optimizer", "name"),
  [
    (with_period, "period"),
    (with_length, "length"),
    (with_staircase, "staircase"),
    (with_condition, "threshold"),
  ],
)
def test_numbers_that_cannot_be_arrays_are_named_before_compiling(optimizer, name, strategy):
  members = [
    Member(Mlp(), optimizer, hyperparameters={"learning_rate": 0.1 * value, name: value})
    for value in (1, 2)
  ]
  ensemble = Ensemble(members, loss, strategy=strategy, devices=jax.devices()[:1])
  message = rf"{name} cannot differ between members .*\(learning_rate can\); give"
  with (
    compilations() as compiled,
    jax.numpy_dtype_promotion("standard"),  # as optax needs
    pytest.raises(UserError, match=message),
  ):
    ensemble.init(BATCH)
  assert not [name for name in compiled if "init" in name or "step" in name]


@pytest.mark.parametrize("strategy", ["stacked", slow("submesh")])
def test_a_multi_steps_of_each_member_may_be_given(strategy):
  members = [Member(Mlp(), with_period(0.1, period), seed=3) for period in (1, 2)]
  if strategy == "submesh":
    periods = [{"learning_rate": 0.1, "period": period} for period in (1, 2)]
    members = [Member(Mlp(), with_period, seed=3, hyperparameters=each) for each in periods]
  ensemble = Ensemble(members, loss, strategy=strategy, devices=jax.devices()[:1])
  state, _ = ensemble.step(ensemble.init(BATCH), BATCH)
  states = ensemble.member_states(state)
  drawn = nn.init(loss, Mlp())(jax.random.key(3), BATCH)["params"]
  assert largest_error(states["m1"].params, drawn) == 0  # its first update is at step 2
  assert largest_error(states["m0"].params, drawn) > 0


class Counting(nn.Module):
  """It counts its calls in the collection `counts`."""

  @nn.compact
  def __call__(self, x_BD):
    count = self.variable("counts", "calls", lambda: jnp.zeros(()))
    count.value += 1
    return nn.Dense(1)(x_BD)


def test_a_collection_that_may_not_change_is_named():
  def loss_by_apply(model, batch):
    model(batch)
    return jnp.mean(Counting().apply(model.variables, batch))

  ensemble = Ensemble([Member(Counting(), optax.sgd(0.1))], loss_by_apply)
  with pytest.raises(UserError, match="changes the collection counts, which is immutable") as error:
    ensemble.init(BATCH)
  assert "\n" not in str(error.value)
