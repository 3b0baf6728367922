"""Mistakes in the Python API of alternating training end in one line."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from alternation_cases import (
  FIT_ADAM,
  MATCH_ADAM,
  a_to_b_and_c,
  assert_same,
  batches,
  fit_loss,
  make_params,
  match_loss,
  take,
)

from maxlite.errors import UserError
from maxlite.phases import Alternation, Phase, Threshold


def test_an_optimizer_that_needs_the_loss_value_is_a_user_error():
  alternation = Alternation([Phase("fit", ["a/.*", "b/.*"], fit_loss, optax.lbfgs(), steps=1)])
  with pytest.raises(ValueError, match="such as lbfgs, is not supported") as error:
    take(alternation, alternation.init(make_params()), batches(1))
  assert "\n" not in str(error.value)


def test_a_state_is_used_once():
  alternation = a_to_b_and_c(ema_decay=0.9)
  state = alternation.init(make_params())
  alternation.step(state, next(batches(1)))
  for use in (
    lambda: alternation.step(state, next(batches(1))),
    lambda: alternation.next_phase(state),
    lambda: alternation.ema_params(state),
  ):
    with pytest.raises(UserError, match="donated to an earlier step: continue with the state"):
      use()


def test_a_loss_with_collections_needs_them_in_the_state():
  def loss(params, batch, collections):
    return (collections["sums"]["n"], {}, collections)

  alternation = Alternation([Phase("fit", ["a/.*"], loss, optax.sgd(0.1), steps=1)])
  with pytest.raises(
    UserError, match=r"phase fit takes collections, .* init\(params, collections\)"
  ):
    alternation.step(alternation.init(make_params()), next(batches(1)))


UPDATE = {"loss": None, "optimizer": None}


def halved(params):
  return jax.tree.map(lambda leaf: leaf.astype(jnp.float16), params)


def first_step(build_alternation):
  alternation = build_alternation()
  collections = {"sums": {"n": jnp.zeros(())}}
  state = alternation.init(make_params(), collections)
  alternation.step(state, next(batches(1)))


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"name": "match"}, "two phases are called match"),
    ({"steps": 0}, "phase fit takes 0 steps"),
    ({"steps": None}, "phase fit has no length: give it steps or until, or name it in initial"),
    ({"steps": 2.0}, "phase fit has steps=2.0; give an integer"),
    ({"optimizer": optax.sgd}, r"phase fit has optimizer=sgd; give an optimizer, as sgd\("),
    ({"optimizer": "adam"}, r"optimizer='adam', a string; give an optimizer, as optax.adam\("),
    ({"optimizer": None}, r"phase fit has optimizer=NoneType; give an optimizer, as optax.adam"),
    ({"until": {"metric": "loss"}, "steps": None}, r"until={'metric': 'loss'}, a dict; give Plate"),
    ({"until": Threshold("loss", below=1.0, max_steps=9)}, "needs steps= or until=, one of the"),
    ({"loss": "mse"}, r"phase fit has loss='mse'; give a function loss\(params, batch\)"),
    ({"loss": lambda batch, params: 1.0}, r"has the arguments \(batch, params\); it is called as"),
    (
      {"loss": lambda params: 1.0},
      r"has the arguments \(params\); it is called as loss\(params, b",
    ),
    (
      {"loss": lambda xy, tree: fit_loss(tree, xy)},
      r"the loss of phase fit takes \(batch, params\); it is called as loss\(params, batch\)",
    ),
    ({"loss": lambda params, batch: None}, "'loss' of phase fit is None; return the loss at the"),
    ({"loss": lambda params, batch: (1.0, 2.0)}, "returns a float as its second value, not a dict"),
    ({"loss": lambda params, batch: (1.0, {"skipped": 1.0})}, "'skipped' of phase fit is a metric"),
    ({"repeat_batch": 0}, "repeat_batch=0; give an integer, at least 1"),
    (
      {"optimizer": optax.lookahead(optax.sgd(1.0), 2, 0.1)},
      r"optax\.lookahead, which needs pairs .* is not supported",
    ),
    (
      {"optimizer": optax.masked(optax.sgd(1.0), {"e": True})},
      "cannot be initialized with the par",
    ),
    (
      {"update": lambda params, batch: params},
      "has update= and loss=: an update takes no gradient",
    ),
    (UPDATE | {"update": lambda params, batch: params["a"]}, "the update .* must return all param"),
    (UPDATE | {"update": lambda params, batch: (params, 1.0)}, "a float as its second value, not"),
    (UPDATE | {"update": lambda params, batch: halved(params)}, "returns a/bias as float16"),
    (UPDATE | {"update": lambda batch, params: params}, "it is called as update\\(params, batch"),
    ({"train": [1]}, "phase fit trains"),
    ({"train": []}, "phase fit trains"),
    ({"train": "a/.*"}, "phase fit trains 'a/.*'; give a list"),
    ({"train": ["a/.*", "e/kernel"]}, "phase fit: 'e/kernel' matches no .* nearest are"),
    ({"accumulate": 0}, "accumulate=0"),
    ({"accumulate": 2.0}, "accumulate=2.0; give an integer"),
    ({"accumulate": 3}, r"a batch of shape \(16, 8\) does not divide into accumulate=3"),
    ({"loss": lambda params, batch: batch[0]}, "'loss' of phase fit is float32\\[16,8\\]"),
    ({"loss": lambda params, batch: 1}, "'loss' of phase fit is int32"),
    ({"loss": lambda params, batch: (1.0, {"m": batch[0]})}, "'m' of phase fit is float32"),
    ({"loss": lambda params, batch: (1.0, {"phase": 1.0})}, "'phase' of phase fit is a metric of"),
    ({"loss": lambda params, batch: (1.0, {}, {}, {})}, "the loss of phase fit returns 4 values"),
    (
      {"loss": lambda params, batch, collections: 1.0},
      "the loss of phase fit returns 1 values, not .*collections",
    ),
    (
      {"loss": lambda params, batch, collections: (1.0, {}, {"sums": {}})},
      "the loss of phase fit must return the collections that it gets; they differ in sums/n",
    ),
    ({"until": Threshold("m", below=1.0, max_steps=9), "steps": None}, "waits for the metric 'm'"),
    (
      {"until": Threshold("loss", below=1.0, max_steps=2.5), "steps": None},
      r"phase fit takes 2\.5 steps; give an integer",
    ),
  ],
)
def test_mistakes_are_one_line_errors(changes, message):
  fit = {"name": "fit", "train": ["a/.*"], "loss": fit_loss, "optimizer": FIT_ADAM, "steps": 1}
  match = {"name": "match", "train": ["c/.*"], "loss": match_loss, "optimizer": MATCH_ADAM}
  with pytest.raises(ValueError, match=message) as error:
    first_step(lambda: Alternation([Phase(**(fit | changes)), Phase(**match, steps=1)]))
  assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  ("keys", "message"),
  [
    ({"strategy": "both"}, "no strategy 'both'; choose one of auto, separate, switch"),
    ({"ema_decay": 1.0}, "ema_decay=1.0"),
    ({"match": lambda params, batch: (fit_loss(params, batch), {"loss": jnp.zeros(3)})}, "'loss'"),
  ],
)
def test_unknown_choices_are_one_line_errors(keys, message):
  with pytest.raises(ValueError, match=message) as error:
    first_step(lambda: a_to_b_and_c(**keys))
  assert "\n" not in str(error.value)


def test_integers_are_frozen_and_to_train_them_is_a_one_line_error():
  def loss(params, batch):
    return jnp.sum(params["w"] * params["count"].astype(jnp.float32))

  params = {"w": jnp.ones(2), "count": jnp.arange(2)}
  alternation = Alternation([Phase("fit", ["w"], loss, optax.sgd(0.1), steps=1)])
  state, _ = alternation.step(alternation.init(params), None)
  np.testing.assert_array_equal(state.params["count"], [0, 1])
  with pytest.raises(UserError, match=r"phase all trains count, which is int32\[2\]") as error:
    Alternation([Phase("all", [".*"], loss, optax.sgd(0.1), steps=1)]).init(params)
  assert "\n" not in str(error.value)


def test_an_initial_phase_takes_an_integer_number_of_steps():
  phase = Phase("fit", ["a/.*"], fit_loss, optax.sgd(0.1), steps=1)
  with pytest.raises(UserError, match=r"initial_phases: fit takes 1\.5 steps; give an integer"):
    Alternation([phase], initial_phases={"fit": 1.5})


@pytest.mark.parametrize(
  ("phases", "message"),
  [
    ([("fit", ["a/.*"], fit_loss)], r"phases\[0\] is a tuple, not a Phase; write Phase\("),
    (Phase("fit", ["a/.*"], fit_loss, optax.sgd(0.1), steps=1), "phases is a Phase; give a list"),
    ([Phase("warm", ["a/.*"], fit_loss, optax.sgd(0.1))], "phase warm has no length"),
  ],
)
def test_what_is_not_a_list_of_phases_is_a_one_line_error(phases, message):
  with pytest.raises(UserError, match=message) as error:
    Alternation(phases)
  assert "\n" not in str(error.value)


def test_a_phase_after_the_initial_phases_is_needed():
  phase = Phase("warm", ["a/.*"], fit_loss, optax.sgd(0.1))
  with pytest.raises(UserError, match="all phases run only at the start: give the phase that"):
    Alternation([phase], initial_phases={"warm": 2})


def test_a_state_that_init_did_not_return_is_a_one_line_error():
  with pytest.raises(UserError, match=r"a dict that Alternation\.init did not return"):
    a_to_b_and_c().step(make_params(), next(batches(1)))


@pytest.mark.parametrize("strategy", ["separate", "switch"])
def test_a_loss_that_does_not_depend_on_what_its_phase_trains_is_an_error(strategy):
  """At the first step of the phase; weight decay would move its parameters silently."""
  fit = Phase("fit", ["a/.*"], fit_loss, optax.sgd(0.1), steps=1)
  wrong = Phase("wrong", ["d/.*", "c/bias"], fit_loss, optax.adamw(0.1), steps=1)
  alternation = Alternation([fit, wrong], strategy=strategy)
  state, _ = take(alternation, alternation.init(make_params()), batches(1))
  says = "phase wrong trains c/bias, d/bias, d/kernel, whose gradient is exactly zero in its first"
  with pytest.raises(UserError, match=says) as error:
    alternation.step(state, next(batches(1)))
  assert "\n" not in str(error.value)


def test_parameters_that_do_not_change_the_loss_are_warned_of_once():
  phase = Phase("fit", ["a/.*", "c/kernel"], fit_loss, optax.sgd(0.1), steps=1)
  alternation = Alternation([phase])
  with pytest.warns(UserWarning, match="phase fit: the gradient of c/kernel is exactly zero"):
    state, _ = take(alternation, alternation.init(make_params()), batches(1))
  take(alternation, state, batches(1))  # a warning would be an error


def test_steps_that_are_not_finite_are_skipped_and_end_the_training():
  """The loss is NaN for a NaN batch, and the gradient of the root infinite at zero."""

  def loss(params, batch):
    return jnp.sum(params["w"] * batch) + jnp.sqrt(params["v"])

  phase = Phase("fit", [".*"], loss, optax.adam(0.1), steps=1)
  alternation = Alternation([phase], max_skipped_steps=3, ema_decay=0.5)
  state = alternation.init({"w": jnp.ones(2), "v": jnp.ones(())})
  good = np.float32(1)
  bad = np.float32(np.nan)
  state, _ = take(alternation, state, [good])
  before = jax.device_get(state)
  state, rows = take(alternation, state, [bad, bad])
  for name in ("params", "opt_state", "ema"):
    assert_same(getattr(state, name), getattr(before, name))
  assert [int(row["skipped_in_a_row"]) for row in rows] == [1, 2]
  state, rows = take(alternation, state, [good, bad, bad])
  assert int(rows[0]["skipped_in_a_row"]) == 0
  with pytest.raises(UserError, match="phase fit: the loss or a gradient was not finite in 3 cons"):
    take(alternation, state, [bad] * 5)
  zero = alternation.init({"w": jnp.ones(2), "v": jnp.zeros(())})
  zero, (row,) = take(alternation, zero, [good])
  assert int(row["skipped"]) == 1
  assert np.isfinite(row["loss"])
  assert float(zero.params["v"]) == 0


def test_no_phases():
  with pytest.raises(ValueError, match="there are no phases"):
    Alternation([])


class Counting(nn.Module):
  """It counts its calls in the collection `counts`."""

  @nn.compact
  def __call__(self, x_BD):
    count = self.variable("counts", "calls", lambda: jnp.zeros(()))
    count.value += 1
    return nn.Dense(1)(x_BD)


@pytest.mark.parametrize(
  ("given", "problem"),
  [(True, "changes the collection counts"), (False, "reads the collection counts")],
)
def test_collections_that_a_loss_does_not_pass_on_are_named(given, problem):
  (batch,) = batches(1)
  variables = Counting().init(jax.random.key(0), batch[0])
  collections = {"counts": variables["counts"]} if given else {}

  def loss(params, batch):
    return jnp.mean(Counting().apply({"params": params, **collections}, batch[0]))

  alternation = Alternation([Phase("fit", [".*"], loss, optax.sgd(0.1), steps=1)])
  with pytest.raises(UserError, match=rf"phase fit .*{problem}, .*mutable=\['counts'\]"):
    alternation.compile(alternation.init(variables["params"]), batch)
