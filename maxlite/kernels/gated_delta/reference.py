"""The gated delta rule, position by position: the reference, and the form for generation."""

import jax
import jax.numpy as jnp

from maxlite.kernels.gated_delta.inputs import DeltaInputs


def gated_delta(inputs: DeltaInputs, state_BHCU: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns (y_BTHU, the state after the last position), in the type of the state.

  Args:
    inputs: see `DeltaInputs`.
    state_BHCU: the state before the first position.
  """
  dtype = state_BHCU.dtype

  def step(state_BHCU: jax.Array, position: DeltaInputs) -> tuple[jax.Array, jax.Array]:
    q_BHC = position.q_BTHC.astype(dtype)
    k_BHC = position.k_BTHC.astype(dtype)
    v_BHU = position.v_BTHU.astype(dtype)
    decay_BH = jnp.exp(position.log_decay_BTH.astype(dtype))
    beta_BH = position.beta_BTH.astype(dtype)
    is_start_B = position.is_start_BT

    state_BHCU = jnp.where(is_start_B[:, None, None, None], 0, state_BHCU)
    state_BHCU = decay_BH[..., None, None] * state_BHCU
    held_BHU = jnp.einsum("bhcu,bhc->bhu", state_BHCU, k_BHC)
    change_BHU = beta_BH[..., None] * (v_BHU - held_BHU)
    state_BHCU = state_BHCU + k_BHC[..., :, None] * change_BHU[..., None, :]
    y_BHU = jnp.einsum("bhcu,bhc->bhu", state_BHCU, q_BHC)
    return state_BHCU, y_BHU

  positions = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), inputs)
  state_BHCU, y_TBHU = jax.lax.scan(step, state_BHCU, positions)
  return jnp.moveaxis(y_TBHU, 0, 1), state_BHCU
