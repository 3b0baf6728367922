"""Programs whose arrays differ in size: evaluation under vmap against separate evaluation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.ad_checkpoint import checkpoint_name

from maxlite.ensemble.engines.batched_jaxpr import vmap_programs
from maxlite.ensemble.engines.jaxpr_comparison import SUBJAXPRS, JaxprMismatchError
from maxlite.ensemble.engines.padding_rules import RULES

SIZES = (2, 5)
# Programs here run once.
FAST_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
_UNARY = {
  "abs": jnp.abs,
  "copy": jnp.copy,
  "cos": jnp.cos,
  "erf": jax.lax.erf,
  "erf_inv": lambda x: jax.lax.erf_inv(jnp.tanh(x)),
  "erfc": jax.lax.erfc,
  "exp": jnp.exp,
  "exp2": jnp.exp2,
  "expm1": jnp.expm1,
  "floor": jnp.floor,
  "integer_pow": lambda x: x**3,
  "is_finite": jnp.isfinite,
  "log": lambda x: jnp.log(jnp.abs(x) + 1),
  "log1p": lambda x: jnp.log1p(jnp.abs(x)),
  "logistic": jax.nn.sigmoid,
  "neg": jnp.negative,
  "round": jnp.round,
  "rsqrt": lambda x: jax.lax.rsqrt(jnp.abs(x) + 1),
  "sign": jnp.sign,
  "sin": jnp.sin,
  "sqrt": lambda x: jnp.sqrt(jnp.abs(x)),
  "square": jnp.square,
  "tanh": jnp.tanh,
}
_BINARY = {
  "add": jnp.add,
  "div": jnp.divide,
  "eq": jax.lax.eq,
  "ge": jax.lax.ge,
  "gt": jax.lax.gt,
  "le": jax.lax.le,
  "lt": jax.lax.lt,
  "max": jnp.maximum,
  "min": jnp.minimum,
  "mul": jnp.multiply,
  "ne": jax.lax.ne,
  "pow": lambda x, y: jax.lax.pow(jnp.abs(x) + 1, y),
  "sub": jnp.subtract,
}
FIXED = np.linspace(-1.0, 1.0, 8, dtype=np.float32).reshape(4, 2)  # an operand of equal sizes
_OTHER = {
  "add_any": jax.grad(lambda x: jnp.sum(jnp.sin(x) * jnp.exp(x))),
  "broadcast_in_dim": lambda x: (
    jnp.sum(jnp.broadcast_to(x[:1] + 1, (4, *x.shape[1:]))),
    jnp.broadcast_to(x[0] + 1, x.shape),
    jnp.broadcast_to(jnp.exp(x), (3, *x.shape)),
  ),
  "clamp": lambda x: jax.lax.clamp(-0.5, x, 0.5),
  "concatenate": lambda x: (
    jnp.concatenate([x, x[:, :1], -x], axis=1),
    jnp.concatenate([x, FIXED.T, jnp.exp(x), x], axis=0),
  ),
  "convert_element_type": lambda x: x.astype(jnp.int32),
  "dot_general": lambda x: (x @ x.T, x.T @ x, jnp.exp(x) @ FIXED, jnp.exp(x) @ jnp.exp(x).T),
  "gather": lambda x: jnp.take(x, jnp.array([2, 0]), axis=1, mode="clip"),
  "name": lambda x: checkpoint_name(x, "x") + 1,
  "pad": lambda x: (
    jnp.pad(x, ((1, 2), (0, 1)), constant_values=3.0),
    jax.lax.pad(x, jnp.float32(2), ((-1, 1, 0), (1, -2, 0))),
    jax.lax.pad(FIXED, jnp.float32(2), ((x.shape[0], 5 - x.shape[0], 0), (0, 0, 0))),
  ),
  "random_split": lambda x: jax.random.normal(
    jax.random.split(jax.random.key(0), x.shape[0])[1], (2,)
  ),
  "reduce_max": lambda x: (jnp.max(x, axis=0), jnp.max(-jnp.abs(x)), jnp.max(x - 9, axis=1)),
  "reduce_min": lambda x: (jnp.min(x, axis=0), jnp.min(jnp.abs(x) + 1)),
  "reduce_precision": lambda x: jax.lax.reduce_precision(x, 8, 7),
  "reduce_sum": lambda x: (jnp.sum(x), jnp.sum(jnp.exp(x), axis=0), jnp.mean(x + 1)),
  "reshape": lambda x: (x.reshape(-1), x.reshape(-1) * 2 + 1, x.reshape(1, *x.shape, 1)),
  "scatter-add": lambda x: (
    x.at[:, jnp.array([0, 2, 0, 3])].add(x),
    jnp.exp(x).at[:, 1].add(jnp.exp(x[:, 0])),
  ),
  "select_n": lambda x: (jnp.where(x > 0, x, jnp.exp(x)), jax.lax.select(x[0, 0] > 0, x, x + 1)),
  "slice": lambda x: (
    x[1:],
    x[:, 1:3],
    x[x.shape[0] // 2 :],
    jax.lax.slice_in_dim(FIXED, x.shape[0] // 2, x.shape[0] // 2 + 2),
  ),
  "split": lambda x: jnp.split(jnp.concatenate([x, 2 * x], axis=0), [x.shape[0]], axis=0),
  "squeeze": lambda x: jnp.squeeze(x[:, :1], axis=1),
  "transpose": jnp.transpose,
}
_LOGICAL = {
  "and": lambda x: (x > 0) & (x < 1),
  "not": lambda x: ~(x > 0),
  "or": lambda x: (x > 1) | (x < -1),
  "xor": lambda x: (x > 0) ^ (x > 1),
}
FUNCTIONS = (
  _UNARY
  | {name: lambda x, f=f: (f(x, 1 - x), f(2.0, x), f(x, 2.0)) for name, f in _BINARY.items()}
  | _OTHER
  | _LOGICAL
)
NOT_TRACED = {"stop_gradient"}  # JAX removes it before tracing
NO_GRADIENT = {"random_split"}


def gradient(f, x):
  """Of a sum over all results, in which each has a different weight."""
  results = lambda x: [y for y in jax.tree.leaves(f(x)) if jnp.issubdtype(y.dtype, jnp.floating)]
  return jax.grad(lambda x: sum((jnp.sum(jnp.sin(y)) for y in results(x)), start=jnp.sum(0 * x)))(x)


def poisoned(x):
  """x, with NaN wherever it is zero, as in its padding."""
  return x + 0 / x


@functools.cache
def results() -> dict[str, tuple[list, list[list]]]:
  """By function: (stacked results, results of each member); computed in one program."""

  def everything(x):
    return {
      name: (f(poisoned(x)), [] if name in NO_GRADIENT else gradient(f, x))
      for name, f in FUNCTIONS.items()
    }

  arrays = inputs(SIZES)
  together, alone = run_all([everything] * len(arrays), arrays)
  return {name: (together[name], [one[name] for one in alone]) for name in FUNCTIONS}


def inputs(sizes):
  draw = np.random.default_rng(0)
  return [draw.normal(size=(size, 4)).astype(np.float32) for size in sizes]


def run_all(functions, arrays):
  """(stacked results, results of each member by itself)."""
  wrapped = [lambda x, _, f=f: f(x) for f in functions]
  shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
  names = [f"m{z}" for z in range(len(arrays))]
  run = vmap_programs(wrapped, names, shapes, None, sizes=True)
  most = np.max([x.shape for x in arrays], axis=0)
  padded = [np.pad(x, [(0, m - n) for n, m in zip(x.shape, most, strict=True)]) for x in arrays]
  together = jax.jit(run, compiler_options=FAST_COMPILE)(np.stack(padded), None)
  return together, [
    jax.jit(f, compiler_options=FAST_COMPILE)(x) for f, x in zip(functions, arrays, strict=True)
  ]


def assert_members_equal(together, alone):
  for z, own in enumerate(alone):
    for got, want in zip(jax.tree.leaves(together), jax.tree.leaves(own), strict=True):
      inside = tuple(map(slice, want.shape))
      np.testing.assert_allclose(got[z][inside], want, rtol=3e-6, atol=3e-6)
      beyond = np.array(got[z])
      beyond[inside] = 0
      assert not beyond.any()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_padding_does_not_affect_members(name):
  assert_members_equal(*results()[name])


def test_every_rule_is_tested():
  def operations(jaxpr):
    for eqn in jaxpr.eqns:
      yield eqn.primitive.name
      for key in SUBJAXPRS.get(eqn.primitive.name, ()):
        yield from operations(eqn.params[key].jaxpr)

  tested = set()
  for function in FUNCTIONS.values():
    tested |= set(operations(jax.make_jaxpr(function)(inputs(SIZES)[0]).jaxpr))
  assert set(RULES) - tested == NOT_TRACED


sizes = st.integers(1, 6)


@settings(max_examples=6, deadline=None, derandomize=True)
@given(st.lists(st.tuples(sizes, sizes, sizes), min_size=2, max_size=3), st.data())
def test_moved_elements_are_found_for_any_sizes(shapes, data):
  cut = st.integers(0, min(2, *(shape[0] for shape in shapes)))
  first, low, high = data.draw(cut), data.draw(cut), data.draw(cut)

  def move(x):
    a, b, c = x.shape
    merged = poisoned(x).reshape(a * b, c)
    turned = poisoned(x).transpose(1, 0, 2).reshape(b, a * c)
    joined = jnp.concatenate([x, poisoned(x)[first:], 2 * x], axis=0)
    room = jnp.pad(poisoned(x), ((low, high), (0, a), (b, 0)))
    return merged, turned, joined, room, jax.lax.slice_in_dim(x, a - 1, a)

  draw = np.random.default_rng(0)
  arrays = [draw.normal(size=shape).astype(np.float32) for shape in shapes]
  assert_members_equal(*run_all([move] * len(arrays), arrays))


@pytest.mark.parametrize(
  ("function", "message"),
  [
    (lambda x: jnp.sort(x, axis=0), "sort"),
    (lambda x: jax.random.bits(jax.random.key(0), x.shape), "random_bits"),
    (lambda x: jnp.take(x, jnp.array([1]), axis=0, mode="clip"), "gather"),
    (lambda x: jnp.take(FIXED, (x[:, 0] > 0).astype(jnp.int32), axis=0, mode="clip"), "gather"),
    (lambda x: jnp.take(FIXED, jnp.arange(x.shape[0]) % 2, axis=0, mode="clip"), "arange"),
    (lambda x: jnp.array(FIXED).at[(x[:, 0] > 0).astype(jnp.int32)].add(x[:, :2]), "scatter-add"),
    (lambda x: x.at[1].add(1.0), "scatter-add"),
    (lambda x: x.at[:, 1].set(1.0), "scatter"),
    (lambda x: jax.lax.dynamic_slice_in_dim(x, jnp.int32(1), 1, axis=1), "dynamic_slice"),
    (lambda x: jnp.cumsum(x, axis=0), "cumsum"),
    (jnp.argmax, "argmax"),
    (lambda x: x[::2], "slice"),
    (lambda x: jax.lax.pad(x, jnp.float32(0), ((0, 0, 1), (0, 0, 0))), "pad"),
  ],
)
def test_operations_that_are_not_proven_are_rejected(function, message):
  with pytest.raises(JaxprMismatchError, match=message) as error:
    run_all([function] * 2, inputs((2, 5)))
  assert "\n" not in str(error.value)


def test_loops_of_different_length_over_different_sizes():
  def loops(x):
    last, rows = jax.lax.scan(lambda c, row: (c * 0.5 + row, c.sum()), x[0], x)
    _, back = jax.lax.scan(lambda c, row: (c + row, c), x[0], x, reverse=True)
    count = jax.lax.while_loop(lambda n: n < x.shape[0], lambda n: n + 2, 0)
    chosen = jax.lax.cond(x.sum() > 0, lambda: poisoned(x).sum(0), lambda: -x.sum(0))
    kept = jax.grad(jax.checkpoint(lambda x: jnp.sum(jnp.sin(x) ** 2)))(x)
    return last, rows, back, count, chosen, kept

  assert_members_equal(*run_all([loops] * 2, inputs(SIZES)))
