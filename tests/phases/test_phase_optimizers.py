"""Parts of a tree and their optimizers' states: who trains what, and what is shared."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxlite.phases.phase_optimizers import PhaseOptimizers, merge, partition_params, paths_in

PARAMS = {"a": {"kernel": jnp.ones((2, 3)), "bias": jnp.ones(3)}, "b": [jnp.ones(4)], "none": None}


def optimizers_of(optimizers, regexes, *, share=True):
  """(the optimizers, the phases' parts of PARAMS)."""
  parts = {name: partition_params(PARAMS, list(rs))[0] for name, rs in regexes.items()}
  return PhaseOptimizers(optimizers, parts, share=share), parts


def step(optimizers, parts, states, name):
  gradients = jax.tree.map(jnp.ones_like, parts[name])
  return optimizers.update(name, gradients, states, parts[name])[1]


def test_parts_make_up_the_whole_again():
  trained, frozen = partition_params(PARAMS, ["a/.*l", "b/.*"])
  assert paths_in(trained) == ["a/kernel", "b/[0]"]
  assert paths_in(frozen) == ["a/bias"]
  assert jax.tree.structure(merge(trained, frozen)) == jax.tree.structure(PARAMS)
  assert all(
    x is y for x, y in zip(*map(jax.tree.leaves, (merge(frozen, trained), PARAMS)), strict=True)
  )


def test_a_regex_is_of_whole_paths_and_names_the_nearest():
  with pytest.raises(ValueError, match=r"^'a/kern' matches no .* nearest are a/kernel") as error:
    partition_params(PARAMS, ["b/.*", "a/kern"])
  assert "\n" not in str(error.value)


@pytest.mark.parametrize("share", [False, True])
def test_only_what_is_trained_has_state(share):
  regexes = {"one": ["a/kernel"], "two": ["a/.*"]}
  optimizers, parts = optimizers_of(
    {name: optax.adam(1e-3) for name in regexes}, regexes, share=share
  )
  sizes = [leaf.size for leaf in jax.tree.leaves(optimizers.init(parts)) if leaf.ndim]
  assert sum(sizes) == 2 * (9 if share else 6 + 9)


def test_shared_state_is_one_and_schedules_are_not():
  """An optimizer that takes all steps, and two that take them in turn and share their state."""
  schedule = optax.linear_schedule(1.0, 0.0, 10)
  regexes = {"one": ["a/.*"], "two": ["a/kernel"], "other": ["b/.*"]}
  txs = {name: optax.adam(schedule) for name in regexes}
  optimizers, parts = optimizers_of(txs, regexes)
  states = optimizers.init(parts)
  for name in ("one", "two", "two"):
    states = step(optimizers, parts, states, name)
  (shared,) = states.shared.values()
  alone = optax.adam(schedule)
  want = alone.init(parts["two"])
  for _ in range(3):
    with jax.numpy_dtype_promotion("standard"):
      want = alone.update(jax.tree.map(jnp.ones_like, parts["two"]), want, parts["two"])[1]
  np.testing.assert_array_equal(shared[0].mu["a"]["kernel"], want[0].mu["a"]["kernel"])
  assert shared[0].count == 3
  assert [int(states.own[name][1].count) for name in regexes] == [1, 2, 0]
  assert states.own["other"][0].count == 0  # shares nothing with the two
  assert states.own["one"][0].mu["a"]["bias"] is not None


def test_hyperparameters_of_their_own_stay_so():
  regexes = {"one": ["a/.*"], "two": ["a/.*"]}
  txs = {
    name: optax.inject_hyperparams(optax.adam)(learning_rate=rate)
    for name, rate in (("one", 0.5), ("two", 0.25))
  }
  optimizers, parts = optimizers_of(txs, regexes)
  states = optimizers.init(parts)
  for name in ("one", "two"):
    states = step(optimizers, parts, states, name)
  rates = [states.own[name].hyperparams["learning_rate"] for name in regexes]
  np.testing.assert_array_equal(rates, [0.5, 0.25])


def test_a_leaf_in_common_joins_phases_through_others():
  regexes = {"one": ["a/kernel"], "two": ["b/.*"], "both": ["a/kernel", "b/.*"]}
  optimizers, parts = optimizers_of({name: optax.adam(1e-3) for name in regexes}, regexes)
  states = optimizers.init(parts)
  for name in regexes:
    states = step(optimizers, parts, states, name)
  assert list(states.shared) == ["one"]
  assert states.shared["one"][0].count == 3


@pytest.mark.parametrize(
  "other", [optax.lion(1e-3), optax.sgd(1e-3), optax.adam(1e-3, mu_dtype=jnp.bfloat16)]
)
def test_shared_state_needs_optimizers_of_one_kind(other):
  regexes = {"one": ["a/.*"], "two": ["a/bias"]}
  with pytest.raises(ValueError, match="one and two share the state of a/bias"):
    optimizers_of({"one": optax.adam(1e-3), "two": other}, regexes)
  optimizers_of({"one": optax.adam(1e-3), "two": other}, {"one": ["a/.*"], "two": ["b/.*"]})
