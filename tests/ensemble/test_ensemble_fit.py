"""`Ensemble.fit`: the loop of `step`, with evaluation, patience per member, save and load."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_mlp import BATCH, Mlp, loss
from support.trees import assert_equal_leaves

from maxlite.ensemble import Ensemble, Member
from maxlite.errors import UserError
from maxlite.metrics import waits

# The loss of the last one grows from the first step on.
RATES = (0.1, 0.03, 20.0)
HELD_OUT = [BATCH[:2], BATCH[2:]]


def build():
  members = [Member(Mlp(), optax.sgd, hyperparameters={"learning_rate": rate}) for rate in RATES]
  return Ensemble(members, loss, strategy="stacked", devices=jax.devices()[:1])


@pytest.fixture(scope="module")
def stepped():
  """(held-out losses [step, member], the members' states by step) of the loop by hand."""
  ensemble = build()
  state = ensemble.init(BATCH)
  losses = []
  states = []
  for _ in range(6):
    state, _ = ensemble.step(state, BATCH)
    losses.append(np.mean([ensemble.evaluate(state, batch) for batch in HELD_OUT], axis=0))
    states.append(jax.device_get(ensemble.member_states(state)))
  return np.stack(losses), states


def test_fit_is_the_loop_of_step_with_rows_and_progress(stepped):
  losses, states = stepped
  lines = []
  ensemble = build()
  fitted = ensemble.fit(iter([BATCH] * 6), 5, eval_batches=HELD_OUT, period=2, report=lines.append)
  assert [int(row["step"]) for row in fitted.rows] == [2, 4, 5]
  for row in fitted.rows:
    np.testing.assert_array_equal(row["eval_loss"], losses[int(row["step"]) - 1])
    assert row["loss"].shape == (3,)
  assert_equal_leaves(ensemble.member_states(fitted.state), states[4])
  assert len(lines) == 3
  assert lines[0].startswith("step 2/5  loss: best ")
  assert "(m0: learning_rate=0.1)" in lines[0]


def test_each_member_has_the_state_of_its_lowest_loss(stepped):
  losses, states = stepped
  ensemble = build()
  fitted = ensemble.fit(
    [BATCH] * 6, 6, eval_batches=HELD_OUT, period=1, patience=2, report=lambda line: None
  )
  best = np.nanargmin(losses, axis=0)
  assert best[0] > best[2]
  own = ensemble.member_states(fitted.state)
  for name, step in zip(ensemble.names, best, strict=True):
    assert_equal_leaves(own[name], states[step][name])


def test_the_evaluated_loss_is_that_of_the_parameters():
  ensemble = build()
  state = ensemble.init(BATCH)
  for name, value in zip(ensemble.names, ensemble.evaluate(state, BATCH), strict=True):
    variables = ensemble.member_params(state, name)
    expected = jnp.mean((Mlp().apply(variables, BATCH) - 1) ** 2)
    np.testing.assert_allclose(value, expected, rtol=1e-6)


def test_a_saved_ensemble_is_loaded_bit_for_bit(stepped, tmp_path):
  _, states = stepped
  ensemble = build()
  fitted = ensemble.fit([BATCH] * 3, 3, report=lambda line: None)
  ensemble.save(fitted.state, tmp_path / "saved")
  ensemble.save(fitted.state, tmp_path / "saved")  # replaces it
  again = build()
  state = again.load(tmp_path / "saved", BATCH)
  fitted = again.fit([BATCH] * 3, 3, state=state, report=lambda line: None)
  assert_equal_leaves(again.member_states(fitted.state), states[5])
  other = Ensemble([Member(Mlp(7), optax.adam(0.1), name=name) for name in ("m0", "m1")], loss)
  with pytest.raises(UserError, match="holds no states of these models and optimizers"):
    other.load(tmp_path / "saved", BATCH)
  with pytest.raises(UserError, match="there is no folder"):
    again.load(tmp_path / "missing")


def test_mistakes_are_named_before_training():
  ensemble = build()
  with pytest.raises(UserError, match="fit: patience=2 compares held-out losses: give eval_b"):
    ensemble.fit([BATCH], 1, patience=2)
  with pytest.raises(UserError, match="fit: num_steps=0 must be an integer of at least 1"):
    ensemble.fit([BATCH], 0)
  with pytest.raises(UserError, match="fit: there are no batches"):
    ensemble.fit([], 1)


def test_labels_say_what_differs():
  members = [
    Member(Mlp(), optax.sgd, hyperparameters={"learning_rate": 0.1}),
    Member(Mlp(5), optax.sgd, hyperparameters={"learning_rate": 0.1}, seed=1, name="wide"),
    Member(Mlp(), optax.adam(0.1)),
  ]
  assert Ensemble(members, loss).labels == {
    "m0": "width=3 learning_rate=0.1 seed=0",
    "wide": "width=5 learning_rate=0.1 seed=1",
    "m2": "width=3 seed=0",
  }
  assert Ensemble(members[:1], loss).labels == {"m0": ""}


def test_what_takes_long_is_reported(monkeypatch, capsys):
  monkeypatch.setattr(waits, "FIRST_SECONDS", 0.01)
  ensemble = build()
  ensemble.step(ensemble.init(BATCH), BATCH)
  printed = capsys.readouterr().err
  assert "compiling the initial state of 3 members ... " in printed
  assert "compiling the step of 3 members (stacked) ... " in printed
