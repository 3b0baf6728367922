"""The state-space recurrence in chunks, its states and gradients, against the steps in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import trees
from support.slow_cases import slow

from maxlite.kernels.state_space import chunked, reference
from maxlite.kernels.state_space.inputs import StateSpaceInputs

NUM_ROWS = 2
NUM_HEADS = 6
NUM_GROUPS = 2
NUM_CHANNELS = 8
NUM_VALUE_CHANNELS = 6
CHUNK = 8


@pytest.fixture(autouse=True)
def float64():
  with jax.enable_x64(True):
    yield


def draw_inputs(num_positions: int, starts: list[tuple[int, int]] = ()) -> StateSpaceInputs:
  """Draws operands; `starts` are (row, position) of the first positions of documents."""
  rng = np.random.default_rng(num_positions)
  lead = (NUM_ROWS, num_positions)
  is_start = np.zeros(lead, bool)
  for row, position in starts:
    is_start[row, position] = True
  return StateSpaceInputs(
    q_BTGC=jnp.asarray(rng.normal(size=(*lead, NUM_GROUPS, NUM_CHANNELS))),
    k_BTGC=jnp.asarray(rng.normal(size=(*lead, NUM_GROUPS, NUM_CHANNELS))),
    v_BTHU=jnp.asarray(rng.normal(size=(*lead, NUM_HEADS, NUM_VALUE_CHANNELS))),
    step_BTH=jnp.asarray(rng.uniform(size=(*lead, NUM_HEADS))),
    log_decay_BTH=jnp.asarray(-rng.exponential(0.3, size=(*lead, NUM_HEADS))),
    is_start_BT=jnp.asarray(is_start),
  )


def draw_state() -> jax.Array:
  shape = (NUM_ROWS, NUM_HEADS, NUM_CHANNELS, NUM_VALUE_CHANNELS)
  return jnp.asarray(np.random.default_rng(1).normal(size=shape))


def floats_of(inputs: StateSpaceInputs) -> dict[str, jax.Array]:
  """The inputs that have gradients."""
  floats = inputs._asdict()
  del floats["is_start_BT"]
  return floats


def positions(inputs: StateSpaceInputs, span: slice) -> StateSpaceInputs:
  return jax.tree.map(lambda x: x[:, span], inputs)


STARTS = [(0, 3), (0, 8), (1, 15), (1, 16), (1, 17)]


@pytest.mark.parametrize("num_positions", [slow(1), slow(7), slow(8), 29])
@pytest.mark.parametrize("starts", [slow([]), STARTS], ids=["one document", "documents"])
def test_chunks_equal_the_recurrence(num_positions, starts):
  starts = [(row, position) for row, position in starts if position < num_positions]
  inputs = draw_inputs(num_positions, starts)
  state = draw_state()

  def run_chunked(inputs, state):
    return chunked.state_space(inputs, state, CHUNK)

  def differentiate(run):
    """Results of `run`, and gradients of its floating-point inputs and state."""

    def loss(floats, state):
      y, after = run(inputs._replace(**floats), state)
      weight = jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)
      return jnp.sum(weight * y) + jnp.sum(after**2), (y, after)

    value_and_grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
    return jax.jit(value_and_grad)(floats_of(inputs), state)

  expected = differentiate(reference.state_space)
  for got, want in trees.leaf_pairs(differentiate(run_chunked), expected):
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_a_strong_decay_before_a_document_keeps_gradients_finite():
  inputs = draw_inputs(CHUNK, [(0, 5), (1, 6)])
  strong = inputs.log_decay_BTH.at[:, :5].set(-1000.0)  # exp(1000) overflows

  def loss(log_decay, run):
    y, after = run(inputs._replace(log_decay_BTH=log_decay), draw_state())
    return jnp.sum(y**2) + jnp.sum(after**2)

  expected = jax.grad(loss)(strong, reference.state_space)
  found = jax.grad(loss)(strong, chunked.state_space)
  np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("module", [reference, chunked])
def test_a_document_equals_itself_alone(module):
  inputs = draw_inputs(20, [(0, 11), (1, 11)])
  run = jax.jit(module.state_space)
  y, state = run(inputs, draw_state())
  second = positions(inputs, slice(11, None))
  alone, state_alone = run(second, jnp.zeros_like(draw_state()))
  np.testing.assert_allclose(y[:, 11:], alone, rtol=1e-9, atol=1e-12)
  np.testing.assert_allclose(state, state_alone, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("module", [reference, chunked])
def test_no_gradient_crosses_the_start_of_a_document(module):
  inputs = draw_inputs(20, [(0, 11), (1, 11)])

  def second_document(floats):
    y, _ = module.state_space(inputs._replace(**floats), draw_state())
    return jnp.sum(y[:, 11:] ** 2)

  for gradient in jax.jit(jax.grad(second_document))(floats_of(inputs)).values():
    assert not np.any(gradient[:, :11])  # exactly
    assert np.any(gradient[:, 11:])


@pytest.mark.slow
def test_the_state_carries_over():
  inputs = draw_inputs(21, [(0, 4)])
  y, state = chunked.state_space(inputs, draw_state(), CHUNK)
  first_inputs = positions(inputs, slice(0, 13))
  second_inputs = positions(inputs, slice(13, None))
  first, between = chunked.state_space(first_inputs, draw_state(), CHUNK)
  second, last = reference.state_space(second_inputs, between)
  joined = jnp.concatenate([first, second], axis=1)
  np.testing.assert_allclose(y, joined, rtol=1e-9, atol=1e-12)
  np.testing.assert_allclose(state, last, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("starts", [[], [(0, 9)]])
def test_a_state_map_is_the_run_over_its_positions(starts):
  inputs = draw_inputs(21, starts)

  def state_map(inputs):
    return chunked.state_map(chunked.chunk_maps(inputs, jnp.float64, CHUNK))

  def end_of(run):
    """The state after the positions and its gradients."""

    def loss(floats, state):
      after = run(inputs._replace(**floats), state)
      return jnp.sum(after**2), after

    return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(floats_of(inputs), draw_state())

  def by_map(inputs, state):
    found = state_map(inputs)
    by_group = found.offset_BGKCU.shape
    after = found.factor_BGK[..., None, None] * state.reshape(by_group) + found.offset_BGKCU
    return after.reshape(state.shape)

  def by_steps(inputs, state):
    return reference.state_space(inputs, state)[1]

  for got, want in trees.leaf_pairs(end_of(by_map), end_of(by_steps)):
    np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("module", [reference, chunked])
def test_idle_positions_leave_the_state(module):
  inputs = draw_inputs(5)
  idle = inputs._replace(
    log_decay_BTH=jnp.zeros_like(inputs.log_decay_BTH),
    step_BTH=jnp.zeros_like(inputs.step_BTH),
  )
  _, state = jax.jit(module.state_space)(idle, draw_state())
  np.testing.assert_array_equal(state, draw_state())
