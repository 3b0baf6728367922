"""Phases that share an optimizer state, repeat a batch, have no gradient or run only once."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from alternation_cases import (
  a_to_b_and_c,
  assert_same,
  batches,
  fit_loss,
  make_params,
  own_state,
  take,
)

from maxlite.errors import UserError
from maxlite.phases import Alternation, Phase


def square_loss(params, batch):
  return jnp.sum((params["w"] - batch) ** 2)


def by_hand(tx, losses, params, stream):
  """Parameters after one update per (loss, batch), with one optimizer state."""

  @jax.jit
  def update(gradients, state, params):
    with jax.numpy_dtype_promotion("standard"):
      updates, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), state

  state = tx.init(params)
  for loss, batch in zip(losses, stream, strict=True):
    params, state = update(jax.grad(loss)(params, batch), state, params)
  return params


def test_phases_share_one_optimizer_state():
  """Two losses on the same parameters, whose moments and schedule count both."""

  def mirrored(params, batch):
    return square_loss(params, -batch)

  tx = optax.adam(optax.linear_schedule(0.1, 0.0, 8))
  phases = [
    Phase("one", ["w"], square_loss, tx, steps=2),
    Phase("two", ["w"], mirrored, tx, steps=1, share_optimizer_state="one"),
  ]
  alternation = Alternation(phases)
  params = {"w": jnp.ones(3)}
  stream = [np.full(3, n, np.float32) for n in range(6)]
  state, _ = take(alternation, alternation.init(params), stream)
  assert list(state.opt_state.own) == ["one"]
  assert int(own_state(state, "one")[0].count) == 6
  want = by_hand(tx, [square_loss, square_loss, mirrored] * 2, params, stream)
  np.testing.assert_allclose(state.params["w"], want["w"], rtol=1e-6)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"train": ["a/.*"]}, "trains other parameters; they differ in b/bias, b/kernel"),
    ({"optimizer": optax.sgd(0.1)}, "has an optimizer of another kind"),
    (
      {"share_optimizer_state": "one "},
      "is not a phase with an optimizer; there are one, two, three",
    ),
    ({"share_optimizer_state": "two"}, "is the phase itself"),
    ({"share_optimizer_state": "three"}, "itself shares the state of one"),
  ],
)
def test_phases_that_cannot_share_are_one_line_errors(changes, message):
  keys = {"train": ["a/.*", "b/.*"], "loss": fit_loss, "optimizer": optax.adam(0.1), "steps": 1}
  shared = keys | {"share_optimizer_state": "one"}
  phases = [Phase("one", **keys), Phase("two", **shared | changes), Phase("three", **shared)]
  with pytest.raises(UserError, match=f"phase two: share_optimizer_state=.*{message}") as error:
    Alternation(phases).init(make_params())
  assert "\n" not in str(error.value)


def test_a_batch_is_repeated():
  """Three updates on each batch, with other random numbers, count as one step."""

  def loss(params, batch, key):
    return square_loss(params, batch), {"drawn": jax.random.uniform(key)}

  tx = optax.adam(0.1)
  params = {"w": jnp.ones(3)}
  stream = [np.full(3, n, np.float32) for n in range(2)]
  drawn = []
  for repeat_batch in (1, 3):
    phase = Phase("fit", ["w"], loss, tx, steps=1, repeat_batch=repeat_batch)
    alternation = Alternation([phase])
    state, rows = take(alternation, alternation.init(params), stream)
    drawn += [float(row["drawn"]) for row in rows]
  assert int(state.step) == 2
  assert int(state.clock.step) == 2
  assert int(own_state(state, "fit")[0].count) == 6
  repeated = [stream[0]] * 3 + [stream[1]] * 3
  want = by_hand(tx, [square_loss] * 6, params, repeated)
  np.testing.assert_allclose(state.params["w"], want["w"], rtol=1e-6)
  assert len(set(drawn)) == 4
  assert_same(state.rng, alternation.init(params).rng)


def test_every_repetition_draws_other_numbers():
  def loss(params, batch, key):
    drawn = jax.random.uniform(key)
    return params["w"] * drawn, {"drawn": drawn}

  phase = Phase("fit", ["w"], loss, optax.sgd(1.0), steps=1, repeat_batch=2)
  alternation = Alternation([phase])
  state, (row,) = take(alternation, alternation.init({"w": jnp.zeros(())}), [None])
  assert alternation.reason == "separate: there is one phase"
  assert abs(state.params["w"] + 2 * row["drawn"]) > 1e-3


@pytest.mark.parametrize("strategy", ["separate", "switch"])
def test_a_target_network_follows_in_a_phase_without_a_gradient(strategy):
  def follow(params, batch):
    target = 0.5 * params["target"] + 0.5 * params["w"]
    moved = params | {"target": target, "w": params["w"] + 1}  # w is not trained by this phase
    gap = jnp.abs(target - params["w"])
    return moved, {"gap": jnp.max(gap)}

  phases = [
    Phase("fit", ["w"], square_loss, optax.sgd(0.1), steps=2),
    Phase("follow", ["target"], update=follow, steps=1),
  ]
  alternation = Alternation(phases, strategy=strategy, ema_decay=0.5)
  state = alternation.init({"w": jnp.ones(3), "target": jnp.zeros(3), "unused": jnp.zeros(1)})
  state, rows = take(alternation, state, [np.zeros(3, np.float32)] * 3)
  np.testing.assert_allclose(state.params["w"], np.full(3, 0.64), rtol=1e-6)
  np.testing.assert_allclose(state.params["target"], np.full(3, 0.32), rtol=1e-6)
  np.testing.assert_allclose(state.ema["target"], np.full(3, 0.16), rtol=1e-6)
  assert list(state.opt_state.own) == ["fit"]
  assert alternation.untrained(state.params) == ["unused"]
  assert ["gap" in row for row in rows] == [False, False, True]
  assert ["loss" in row for row in rows] == [True, True, False]


def test_an_update_may_change_integers_and_is_skipped_if_it_is_not_finite():
  def count(params, batch):
    return {"count": params["count"] + 1, "mean": params["mean"] + batch}

  alternation = Alternation([Phase("count", [".*"], update=count, steps=1)], ema_decay=0.5)
  state = alternation.init({"count": jnp.arange(2), "mean": jnp.zeros(())})
  stream = [np.float32(x) for x in (1, np.nan, 2)]
  state, rows = take(alternation, state, stream)
  assert state.params["count"].tolist() == [2, 3]
  assert float(state.params["mean"]) == 3
  assert [int(row["skipped"]) for row in rows] == [0, 1, 1]
  assert alternation.ema_params(state)["count"].tolist() == [2, 3]


def test_an_initial_phase_need_not_be_in_the_cycle():
  phases = [
    Phase("warm", ["a/.*", "b/.*"], fit_loss, optax.sgd(0.1)),
    Phase("fit", ["b/.*"], fit_loss, optax.sgd(0.1), steps=1),
  ]
  alternation = Alternation(phases, initial_phases={"warm": 2})
  assert alternation.timeline(4) == [(1, 2, "warm"), (3, 3, "fit"), (4, 4, "fit")]
  state, rows = take(alternation, alternation.init(make_params()), batches(5))
  assert [int(row["phase"]) for row in rows] == [0, 0, 1, 1, 1]
  assert state.clock.taken_P.tolist() == [2, 3]
  assert int(state.clock.round) == 3


def test_frozen_leaves_keep_the_sign_of_zero_and_do_not_decay():
  params = {"w": jnp.ones(2), "zero": jnp.array([-0.0, 0.0]), "frozen": jnp.ones(2)}

  def loss(params, batch):
    return square_loss(params, batch) + jnp.sum(params["zero"] * 3 + params["frozen"] ** 2)

  decaying = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1, weight_decay=0.5))
  phases = [
    Phase("w", ["w"], loss, decaying, steps=1),
    Phase("other", ["frozen"], loss, decaying, steps=5),
  ]
  for strategy in ("separate", "switch"):
    alternation = Alternation(phases, strategy=strategy)
    state, _ = take(alternation, alternation.init(params), [np.float32(3)])
    for name in ("zero", "frozen"):
      got = np.asarray(state.params[name])
      assert got.tobytes() == np.asarray(params[name]).tobytes()
    assert not np.array_equal(state.params["w"], params["w"])


def test_only_trained_leaves_count_in_the_clipping_norm():
  params = {"w": jnp.zeros(1), "frozen": jnp.ones(1)}

  def loss(params, batch):
    return jnp.sum(params["w"] * 3 + params["frozen"] * 400)

  clipped = optax.chain(optax.clip_by_global_norm(5.0), optax.sgd(1.0))
  alternation = Alternation([Phase("w", ["w"], loss, clipped, steps=1)])
  state, rows = take(alternation, alternation.init(params), [None])
  assert float(state.params["w"][0]) == -3
  assert float(rows[0]["grad_norm"]) == 3


def test_a_wrapped_optimizer_of_optax_trains():
  """MultiSteps is an object, not a transformation."""
  params = {"w": jnp.ones(2), "frozen": jnp.ones(2)}
  multi = optax.MultiSteps(optax.sgd(0.1), every_k_schedule=2)
  alternation = Alternation([Phase("fit", ["w"], square_loss, multi, steps=1)])
  state, _ = take(alternation, alternation.init(params), [np.float32(0)])
  assert_same(state.params, params)
  state, _ = take(alternation, state, [np.float32(2)])
  np.testing.assert_allclose(state.params["w"], np.ones(2), atol=1e-6)  # the mean gradient is zero
  state, _ = take(alternation, state, [np.float32(0)] * 2)
  np.testing.assert_allclose(state.params["w"], np.full(2, 0.8), rtol=1e-6)


def eval_loss(params, batch):
  x_BD, _ = batch
  return jnp.mean((x_BD @ params["a"]["kernel"] - 1) ** 2)


def test_fit_is_the_loop_of_step(tmp_path):
  stream = list(batches(7))
  alternation = a_to_b_and_c()
  state = alternation.init(make_params())
  losses = []
  states = []
  for batch in stream:
    state, metrics = alternation.step(state, batch)
    losses.append(float(metrics["loss"]))
    states.append(jax.device_get(state.params))
  lines = []
  start = alternation.init(make_params())
  fitted = alternation.fit(stream, 4, state=start, period=2, report=lines.append)
  names = []
  for first, last, name in alternation.timeline(7):
    names += [name] * (last - first + 1)
  found = [(int(row["step"]), str(row["phase"])) for row in fitted.rows]
  assert found == [(step, names[step - 1]) for step in (2, 4)]
  assert [float(row["loss"]) for row in fitted.rows] == losses[1:4:2]
  assert lines[0].startswith(f"step 2/4  loss {losses[1]:.4f}")
  alternation.save(fitted.state, tmp_path / "saved")
  loaded = alternation.load(tmp_path / "saved", make_params())
  fitted = alternation.fit(stream[4:], 3, state=loaded, report=lines.append)
  assert_same(fitted.state.params, states[6])
  again = alternation.load(tmp_path / "saved", make_params())
  with pytest.raises(UserError, match="batches end after 3 of num_steps=9"):
    alternation.fit(stream[4:], 9, state=again)


def test_patience_returns_the_state_of_the_lowest_held_out_loss():
  stream = list(batches(7))
  alternation = a_to_b_and_c()
  rows = []
  states = []
  for patience in (None, 1):
    fitted = alternation.fit(
      stream,
      7,
      state=alternation.init(make_params()),
      eval_loss=eval_loss,
      eval_batches=stream[:2],
      period=1,
      patience=patience,
      report=lambda line: None,
    )
    rows.append([float(row["eval_loss"]) for row in fitted.rows])
    states.append(fitted.state)
  every, stopped = rows
  assert stopped == every[: len(stopped)]
  assert len(stopped) < 7
  assert stopped[-1] >= stopped[-2] == min(stopped)
  found = np.mean([eval_loss(states[1].params, batch) for batch in stream[:2]])
  np.testing.assert_allclose(found, min(stopped), rtol=1e-6)
