"""The state-space recurrence, position by position: the reference, and the form for generation."""

import jax
import jax.numpy as jnp

from maxlite.kernels.state_space.inputs import StateSpaceInputs


def state_space(inputs: StateSpaceInputs, state_BHCU: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns (y_BTHU, the state after the last position), in the type of the state.

  Args:
    inputs: see `StateSpaceInputs`.
    state_BHCU: the state before the first position.
  """
  dtype = state_BHCU.dtype
  num_shared = state_BHCU.shape[1] // inputs.q_BTGC.shape[2]  # heads of a group

  def step(state_BHCU: jax.Array, position: StateSpaceInputs) -> tuple[jax.Array, jax.Array]:
    q_BHC = jnp.repeat(position.q_BTGC.astype(dtype), num_shared, axis=1)
    k_BHC = jnp.repeat(position.k_BTGC.astype(dtype), num_shared, axis=1)
    decay_BH = jnp.exp(position.log_decay_BTH.astype(dtype))
    written_BHU = position.step_BTH.astype(dtype)[..., None] * position.v_BTHU.astype(dtype)

    state_BHCU = jnp.where(position.is_start_BT[:, None, None, None], 0, state_BHCU)
    state_BHCU = decay_BH[..., None, None] * state_BHCU
    state_BHCU = state_BHCU + k_BHC[..., :, None] * written_BHU[..., None, :]
    y_BHU = jnp.einsum("bhcu,bhc->bhu", state_BHCU, q_BHC)
    return state_BHCU, y_BHU

  positions = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), inputs)
  state_BHCU, y_TBHU = jax.lax.scan(step, state_BHCU, positions)
  return jnp.moveaxis(y_TBHU, 0, 1), state_BHCU
