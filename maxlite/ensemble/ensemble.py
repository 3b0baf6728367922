"""The Python API: any Linen modules, each with its optimizer and seed, trained at once."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from maxlite.config.errors import UserError
from maxlite.ensemble.ensemble_metrics import Prediction, summarize, uniform_weights
from maxlite.ensemble.factory import Factory, call_factory, call_model
from maxlite.ensemble.member_program import Loss, Member, build_programs
from maxlite.ensemble.planner import Plan, choose
from maxlite.ensemble.strategies import STRATEGIES, Request


class Ensemble:
  """Members that get in every strategy what each would get alone.

  The state is whatever suits the strategy; `member_params` and `member_states` tell what of it is
  whose. Every step donates the state it is given.
  """

  def __init__(
    self,
    members: Sequence[Member],
    loss: Loss,
    *,
    predict: Callable[[nn.Module, Any], Any] = call_model,
    strategy: str = "auto",
    devices: Sequence[jax.Device] | None = None,
    own_batches: bool = False,
    memory_gb: float = 0.0,
  ):
    """
    Args:
      loss: of a bound module and a batch; a scalar, or (scalar, {name: scalar} to be logged).
      predict: what members are compared and combined by; of a bound module and inputs.
      strategy: a name of STRATEGIES, or `auto`.
      own_batches: whether `step` gets a batch per member, stacked along a first axis.
      memory_gb: for the members' states on one device; 0: no bound.

    Raises:
      UserError: no members, a name twice, or no such strategy.
    """
    width = len(str(max(len(members) - 1, 0)))
    self.members = [
      dataclasses.replace(member, name=member.name or f"m{z:0{width}d}")
      for z, member in enumerate(members)
    ]
    self.names = [member.name for member in self.members]
    self._loss, self._predict, self._strategy = loss, predict, strategy
    self._devices = list(devices or jax.local_devices())
    self._own_batches, self._memory_gb = own_batches, memory_gb
    self.plan: Plan | None = None
    self._engine: Any = None
    self._factory: Factory | None = None
    if not members:
      raise UserError("an ensemble needs members; give a list of Member")
    twice = {name for name in self.names if self.names.count(name) > 1}
    if twice:
      raise UserError(f"two members are called {min(twice)}; give each a name of its own")
    if strategy not in ("auto", *STRATEGIES):
      known = ", ".join(("auto", *STRATEGIES))
      raise UserError(f"no strategy {strategy!r}; choose one of {known}")

  @classmethod
  def from_factory(
    cls, path: str, *, num_workers: int = 0, checkpoint_period: int = 100, **keywords: Any
  ) -> "Ensemble":
    """An ensemble that processes can make anew, so that strategy `processes` can serve it.

    The worker processes import the factory's module: what a script does must stand under its
    `if __name__ == "__main__":`.

    Args:
      path: `package.module:function` of a function that returns {members, loss, predict}.
      num_workers: of strategy `processes`; 0: one per member, up to the cores or GPUs.
      checkpoint_period: steps between the files that a worker which dies goes on from.
      keywords: as of `Ensemble`.
    """
    ensemble = cls(**call_factory(path), **keywords)
    ensemble._factory = Factory(path, num_workers, checkpoint_period)
    return ensemble

  def init(self, example_batch: Any) -> Any:
    """The state before the first step; chooses how to run, which `plan` tells."""
    if self._own_batches:
      example_batch = jax.tree.map(lambda leaf: leaf[0], example_batch)
    programs = build_programs(self.members, self._loss, self._predict, example_batch)
    batch = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), example_batch
    )
    request = Request(
      build=lambda devices: programs,
      batch=batch,
      devices=self._devices,
      own_batches=self._own_batches,
      finish=stack_common,
      factory=self._factory and dataclasses.replace(self._factory, example_batch=example_batch),
    )
    self.plan, self._engine = choose(request, self._strategy, self._memory_gb)
    return self._engine.init()

  def step(self, state: Any, batch: Any) -> tuple[Any, dict[str, jax.Array]]:
    """(state, {metric: [Z]}): every member's loss, whether it diverged, and what all log."""
    return self._engine.step(state, batch)

  def member_states(self, state: Any) -> dict[str, Any]:
    """Every member's state, as it would be alone."""
    return dict(zip(self.names, self._engine.unpack(state), strict=True))

  def member_params(self, state: Any, name: str) -> Any:
    """The tree that the member's `module.init` would give, trained."""
    if name not in self.names:
      raise UserError(f"no member {name!r}; there are {', '.join(self.names)}")
    return self.member_states(state)[name].variables

  def load_states(self, states: dict[str, Any]) -> Any:
    """The state made of the members' own, as `member_states` gives them."""
    return self._engine.pack([states[name] for name in self.names])

  def predict(self, state: Any, inputs: Any) -> Prediction:
    """The members' mean, each one's own, and the standard deviation between them."""
    values = self._engine.predict(state, inputs)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *values)
    return summarize(stacked, uniform_weights(len(self.names)))


def stack_common(metrics: list[dict]) -> dict[str, jax.Array]:
  """{name: [Z]} of the scalars that every member has."""
  names = set.intersection(*(set(one) for one in metrics))
  scalar = [n for n in metrics[0] if n in names and all(one[n].ndim == 0 for one in metrics)]
  return {name: jnp.stack([one[name] for one in metrics]) for name in scalar}
