"""The optimizer states of phases: one each, or one for several that train the same parameters."""

from collections.abc import Mapping

import jax
import optax
from flax import struct

from maxlite.errors import UserError
from maxlite.optim.labels import Labels, trained_paths
from maxlite.sharding.pytree import PyTree


@struct.dataclass
class PhaseOptStates:
  """The optimizer states of all phases, each for the parameters that its phase trains."""

  own: dict[str, optax.OptState]  # by the phase that owns it


def owners_of(shares: Mapping[str, str | None]) -> dict[str, str]:
  """By phase, the phase whose optimizer state it updates: itself, or the one that it names.

  Args:
    shares: by phase, the phase that it names, or None.

  Raises:
    UserError: a phase names itself, no phase with an optimizer, or one that names another.
  """
  owners = {}
  for name, owner in shares.items():
    if owner is None:
      owners[name] = name
      continue
    place = f"phase {name}: share_optimizer_state={owner}"
    if owner not in shares:
      raise UserError(f"{place} is not a phase with an optimizer; there are {', '.join(shares)}")
    if owner == name:
      raise UserError(f"{place} is the phase itself: name another phase, or leave it out")
    if shares[owner] is not None:
      raise UserError(f"{place} itself shares the state of {shares[owner]}: name that phase")
    owners[name] = owner
  return owners


def init_opt_states(
  params: PyTree,
  optimizers: Mapping[str, optax.GradientTransformation],
  labels: Mapping[str, Labels],
  owners: Mapping[str, str],
) -> PhaseOptStates:
  """Initialize the optimizer states of all phases.

  Args:
    optimizers: by phase, as returned by `partitioned`; a phase without one has no state.

  Raises:
    UserError: phases that share a state train different parameters, or have optimizers whose
      states differ; or an optimizer does not take these parameters.
  """
  states = {name: _init(name, tx, params) for name, tx in optimizers.items()}
  owned = {}
  for name, state in states.items():
    owner = owners[name]
    _check_same(name, owner, labels, state, states[owner])
    if owner == name:
      owned[name] = state
  return PhaseOptStates(owned)


def _init(name: str, tx: optax.GradientTransformation, params: PyTree) -> optax.OptState:
  try:
    return tx.init(params)
  except (AttributeError, TypeError, ValueError) as error:
    reason = " ".join(str(error).split())
    raise UserError(
      f"phase {name}: its optimizer cannot be initialized with the parameters: {reason}"
    ) from error


def _check_same(
  name: str, owner: str, labels: Mapping[str, Labels], state: PyTree, owned: PyTree
) -> None:
  place = f"phase {name}: share_optimizer_state={owner}"
  trained = set(trained_paths(labels[name]))
  trained_by_owner = set(trained_paths(labels[owner]))
  differ = sorted(trained ^ trained_by_owner)
  if differ:
    raise UserError(f"{place} trains other parameters; they differ in {', '.join(differ[:3])}")
  types = jax.tree.map(jax.typeof, state)
  owned_types = jax.tree.map(jax.typeof, owned)
  if types != owned_types:
    raise UserError(f"{place} has an optimizer of another kind: give both the same kind")
