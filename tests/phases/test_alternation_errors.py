"""Mistakes in the Python API of alternating training end in one line."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_alternation import (
  a_to_b_and_c,
  adams,
  batches,
  fit_loss,
  make_params,
  match_loss,
  take,
)

from maxlite.config.errors import UserError
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
  loss = lambda params, batch, collections: (collections["sums"]["n"], {}, collections)
  alternation = Alternation([Phase("fit", ["a/.*"], loss, optax.sgd(0.1), steps=1)])
  with pytest.raises(
    UserError, match=r"phase fit takes collections, .* init\(params, collections\)"
  ):
    alternation.step(alternation.init(make_params()), next(batches(1)))


def first_step(build_alternation):
  alternation = build_alternation()
  alternation.step(
    alternation.init(make_params(), {"sums": {"n": jnp.zeros(())}}), next(batches(1))
  )


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"name": "match"}, "two phases are called match"),
    ({"steps": 0}, "phase fit takes 0 steps"),
    ({"steps": None}, "phase fit has no length: give it steps or until, or name it in initial"),
    ({"steps": 2.0}, "phase fit has steps=2.0; give an integer"),
    ({"optimizer": optax.sgd}, r"phase fit has optimizer=sgd; give an optimizer, as sgd\("),
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
  fit = {"name": "fit", "train": ["a/.*"], "loss": fit_loss, "optimizer": adams()[0], "steps": 1}
  match = {"name": "match", "train": ["c/.*"], "loss": match_loss, "optimizer": adams()[1]}
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
  loss = lambda params, batch: jnp.sum(params["w"] * params["count"].astype(jnp.float32))
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


def test_no_phases():
  with pytest.raises(ValueError, match="there are no phases"):
    Alternation([])
