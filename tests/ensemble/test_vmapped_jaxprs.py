"""Alignment of programs: which differences are allowed, and errors for the others."""

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxlite.config.errors import UserError
from maxlite.ensemble import Ensemble, Member
from maxlite.ensemble.engines.engine_base import JaxprMismatchError
from maxlite.ensemble.engines.vmapped_jaxprs import group_by_jaxpr, vmap_programs

X = jax.ShapeDtypeStruct((3,), jnp.float32)


def vmapped(f, g, x=X, y=X):
  return vmap_programs([f, g], ["f", "g"], [(x,), (y,)], in_axes=(0,))


def test_only_literals_that_differ_are_stacked():
  run = vmapped(lambda x: x * 2.0 + 1.0, lambda x: x * 3.0 + 1.0)
  consts = jax.make_jaxpr(run)(jnp.ones((2, 3))).consts
  assert [np.asarray(values).tolist() for values in consts] == [[2.0, 3.0]]


def test_closed_over_arrays_are_varying_literals():
  a, b = np.array([1.0, 2.0, 3.0], np.float32), np.array([4.0, 5.0, 6.0], np.float32)
  run = vmapped(lambda x: x * a, lambda x: x * b)
  np.testing.assert_array_equal(run(jnp.ones((2, 3))), [a, b])


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, lambda f: lambda x: jax.lax.map(f, x)])
def test_literals_in_inner_jaxprs_are_found(wrap):
  functions = [wrap(lambda x, n=n: jnp.sin(x) * n) for n in (2.0, 3.0)]
  want = [function(jnp.arange(3.0)) for function in functions]
  np.testing.assert_allclose(vmapped(*functions)(jnp.stack([jnp.arange(3.0)] * 2)), want, rtol=1e-6)


@jax.custom_vjp
def scaled_with_bounded_gradient(x, scale):
  return x * scale


scaled_with_bounded_gradient.defvjp(
  lambda x, scale: (x * scale, scale), lambda scale, g: (jnp.clip(g * scale, -1, 1), None)
)


@pytest.mark.parametrize("custom", [jnp.logaddexp, scaled_with_bounded_gradient])
@pytest.mark.parametrize("transform", [lambda f: f, lambda f: jax.grad(lambda x: f(x).sum())])
def test_literals_may_be_arguments_of_functions_with_their_own_derivative(custom, transform):
  x_D = jnp.arange(3.0)
  functions = [transform(lambda x, n=n: custom(x, jnp.full_like(x, n))) for n in (0.5, 2.0)]
  scalars = [transform(lambda x, n=n: custom(x, n)) for n in (0.5, 2.0)]
  for own in (functions, scalars):
    got = jax.jit(vmapped(*own))(jnp.stack([x_D] * 2))
    np.testing.assert_allclose(got, [function(x_D) for function in own], rtol=1e-6)


def test_branches_and_loops_use_the_literals_of_each_program():
  def function(limit, x):
    count = jax.lax.while_loop(lambda n: n < limit, lambda n: n + 1, 0)
    return jax.lax.cond(x.sum() > 1, lambda: x * limit, lambda: -x), count

  run = vmapped(*(lambda x, n=n: function(n, x) for n in (2, 5)))
  x_ZD = jnp.array([[1.0, 1.0, 1.0], [0.0, 0.0, 1.0]])
  with jax.numpy_dtype_promotion("standard"):
    got, count = run(x_ZD)
  np.testing.assert_array_equal(got, [[2.0, 2.0, 2.0], [0.0, 0.0, -1.0]])
  np.testing.assert_array_equal(count, [2, 5])


def test_branches_of_other_platforms_are_not_compiled():
  def times(n):
    branches = {"cpu": lambda x: x * n, "default": lambda x: jnp.sin(x) * n}
    return lambda x: jax.lax.platform_dependent(x, **branches)

  run, x_ZD = vmapped(times(2.0), times(3.0)), jnp.ones((2, 3))
  np.testing.assert_array_equal(run(x_ZD), [[2.0] * 3, [3.0] * 3])
  assert "sine" not in jax.jit(run).lower(x_ZD).as_text()


@pytest.mark.parametrize(
  ("f", "g", "message"),
  [
    (jnp.sin, jnp.cos, "operation: sin in f, cos in g"),
    (jnp.sin, lambda x: jnp.sin(x) + 1, "operation: return in f, add in g"),
    (
      lambda x: x - 2 * x,
      lambda x: 2 * x - x,
      r"operands of (sub|mul): \[0, 1\] in f, \[1, 0\] in g",
    ),
    (
      lambda x: x + x,
      lambda x: x + 1,
      r"operands of add: \[0, 0\] in f, \[0, 'float32\[\]'\] in g",
    ),
    (lambda x: jnp.sum(x[None], axis=0), lambda x: jnp.sum(x[None], axis=1), "axes of sum"),
    (lambda x: x.astype(jnp.int32), lambda x: x.astype(jnp.int8), "new_dtype of astype"),
  ],
)
def test_other_differences_are_errors_that_name_them(f, g, message):
  with pytest.raises(JaxprMismatchError, match=message):
    vmapped(f, g)


@pytest.mark.parametrize(
  ("shape", "message"),
  [
    ((4,), r"shape of an array: \(3,\) in f, \(4,\) in g"),
    ((4, 1), r"shape of an array: \(3,\) in f, \(4, 1\) in g"),
  ],
)
def test_shapes_must_not_differ(shape, message):
  with pytest.raises(JaxprMismatchError, match=message):
    vmapped(jnp.sin, jnp.sin, X, jax.ShapeDtypeStruct(shape, jnp.float32))


def test_functions_that_differ_in_literals_form_a_group():
  double, triple = (lambda x: x * 2.0), (lambda x: x * 3.0)
  nested = lambda x: [x * 2.0]
  functions = [double, jnp.sin, triple, double, nested]
  groups = group_by_jaxpr(functions, [(X,)] * 5)
  assert groups == [[0, 2, 3], [1], [4]]


class Module(nn.Module):
  act: Callable = nn.relu
  width: int = 3
  depth: int = 1
  transpose: bool = False

  @nn.compact
  def __call__(self, x_BD):
    for _ in range(self.depth):
      x_BD = self.act(nn.Dense(self.width)(x_BD))
    return x_BD.T if self.transpose else x_BD


@pytest.mark.parametrize(
  ("fields", "optimizer", "message"),
  [
    ({"act": nn.gelu}, optax.sgd(0.1), r"operation: relu in m0, gelu in m1 \(module Module\)"),
    ({"act": jnp.sin}, optax.sgd(0.1), r"operation: relu in m0, sin in m1 \(module Module\)"),
    ({"depth": 2}, optax.sgd(0.1), "params/Dense_1/bias is only in m1"),
    ({"width": 4}, optax.sgd(0.1), r"shape of params/Dense_0/bias: \(3,\) in m0, \(4,\) in m1"),
    ({"transpose": True}, optax.sgd(0.1), r"axes of .*: .* in m0, .* in m1|operation: "),
    ({}, optax.adam(0.1), "opt_state/0/count is only in m1"),
    ({}, optax.sgd(0.1, momentum=0.9), "opt_state/0/trace/Dense_0/bias is only in m1"),
    ({}, optax.chain(optax.clip(1.0), optax.sgd(0.1)), "results of m0 and m1 have equal leaves"),
  ],
)
def test_refusals_name_the_first_difference_in_the_members(fields, optimizer, message):
  members = [Member(Module(), optax.sgd(0.1)), Member(Module(**fields), optimizer)]
  loss = lambda model, batch: jnp.mean(model(batch) ** 2)
  with pytest.raises(UserError, match=message) as error:
    Ensemble(members, loss, strategy="stacked").init(np.ones((2, 2), np.float32))
  assert "\n" not in str(error.value)
