"""Local-update training (DiLoCo): replicas train alone and are averaged periodically.

Each replica takes the run's training step on its share of the rows. After every period, the mean of
(start - replica) over the replicas is the gradient of an outer step with Nesterov momentum, and all
replicas continue from its result, each with its optimizer state. Only this step
communicates over the mesh axis `ensemble`, apart from the metrics' few numbers.

Source: Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models (2023),
algorithm 1.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh

from maxlite.config.schema import LocalUpdatesConfig
from maxlite.models import Decoder
from maxlite.optim.labels import state_names
from maxlite.sharding import Sharder
from maxlite.step.train_state import TrainState
from maxlite.step.train_step import Step, global_norm

AXIS = "ensemble"
OUTER_SCOPE = "outer_step"  # named scope of outer steps in compiled programs
_COUNTERS = ("skipped", "skipped_in_a_row")  # metrics of the worst replica
_SUMS = ("num_tokens", "expert_load", "expert_dropped")  # metrics that add up over replicas


@struct.dataclass
class LocalUpdates:
  """The optimizer state of such a run, whose `params` are those after the latest outer step."""

  outer: optax.OptState
  replicas: TrainState  # every leaf stacked, [R, ...]


@dataclasses.dataclass(frozen=True)
class OuterOptimizer:
  """The replicas along mesh axis `ensemble`, and the outer steps that join them."""

  cfg: LocalUpdatesConfig
  mesh: Mesh

  def model_of_one(self, model: Decoder) -> Decoder:
    """The model for use inside a shard_map over the replicas."""
    return model.clone(sharder=model.sharder.inside_shard_map(AXIS))

  @functools.cached_property
  def tx(self) -> optax.GradientTransformation:
    return optax.sgd(self.cfg.diloco_outer_lr, self.cfg.diloco_outer_momentum, nesterov=True)

  def start(self, state: TrainState) -> TrainState:
    """The state before the first step: replicas of a solo run's, which draw different numbers."""
    num_replicas = self.mesh.shape[AXIS]
    copy = lambda leaf: jnp.broadcast_to(leaf, (num_replicas, *leaf.shape))
    key = jax.random.wrap_key_data(state.rng)
    keys_R = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(num_replicas))
    replicas = jax.tree.map(copy, state).replace(rng=jax.random.key_data(keys_R))
    return state.replace(opt_state=LocalUpdates(self.tx.init(state.params), replicas))

  def names(self, axes: TrainState, state: TrainState, names: Any) -> TrainState:
    """Logical names of `start`'s result, from the names `axes` of the solo run's state.

    Args:
      names: of the parameters.
    """
    outer = state_names(jax.eval_shape(self.tx.init, state.params), state.params, names)
    replicas = jax.tree.map(lambda own: jax.P(AXIS, *own), axes)
    return axes.replace(opt_state=LocalUpdates(outer, replicas))

  def build_step(self, local_step: Step) -> Step:
    """The step of all replicas, with the outer step where one is due.

    Args:
      local_step: the step of a solo run, for use inside a shard_map over the axis.
    """

    def one_replica(stacked: TrainState, batch: Any) -> tuple[TrainState, dict]:
      new, metrics = local_step(jax.tree.map(lambda leaf: leaf[0], stacked), batch)
      return jax.tree.map(lambda leaf: leaf[None], (new, metrics))

    all_replicas = jax.shard_map(
      one_replica,
      mesh=self.mesh,
      in_specs=jax.P(AXIS),
      out_specs=jax.P(AXIS),
      axis_names={AXIS},
      check_vma=False,  # no communication over the axis; gradients are taken inside
    )

    def step(state: TrainState, batch: Any) -> tuple[TrainState, dict]:
      replicas, metrics = all_replicas(state.opt_state.replicas, batch)
      new = state.replace(step=state.step + 1, opt_state=state.opt_state.replace(replicas=replicas))
      with jax.named_scope(OUTER_SCOPE):
        is_due = new.step % self.cfg.diloco_sync_period == 0
        new = jax.lax.cond(is_due, self._outer_step, lambda state: state, new)
      trained = new.opt_state.replicas
      counts = {name: jnp.max(vars(trained)[name]) for name in _COUNTERS}
      return new.replace(**counts), _combine_metrics(metrics) | counts

    return step

  def _outer_step(self, state: TrainState) -> TrainState:
    """Step by the mean difference of the replicas whose parameters are finite, and restart all."""
    replicas = state.opt_state.replicas
    wide = lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
    difference_R = jax.tree.map(
      lambda start, own_R: wide(start)[None] - wide(own_R), state.params, replicas.params
    )
    finite_R = jnp.isfinite(jax.vmap(global_norm)(difference_R))

    def mean(leaf_R: jax.Array) -> jax.Array:
      kept_R = finite_R.reshape(-1, *(1,) * (leaf_R.ndim - 1))
      share = jnp.maximum(jnp.sum(finite_R), 1).astype(leaf_R.dtype)
      return jnp.sum(jnp.where(kept_R, leaf_R, 0), axis=0) / share

    gradient = jax.tree.map(mean, difference_R)
    updates, outer = self.tx.update(gradient, state.opt_state.outer, state.params)
    is_kept = jnp.any(finite_R)
    keep = lambda new, old: jax.tree.map(functools.partial(jnp.where, is_kept), new, old)
    params = keep(optax.apply_updates(state.params, updates), state.params)
    restarted = jax.tree.map(
      lambda leaf, own_R: jnp.broadcast_to(leaf, own_R.shape), params, replicas.params
    )
    skipped_R = replicas.skipped + jnp.where(finite_R, 0, 1)
    replicas = replicas.replace(params=restarted, skipped=skipped_R)
    outer = keep(outer, state.opt_state.outer)
    return state.replace(params=params, opt_state=LocalUpdates(outer, replicas))


def shard_rows(sharder: Sharder) -> Sharder:
  """The sharder that divides the rows of a batch over the replicas first."""
  names = ("activation_batch", "activation_batch_no_exp")
  rows = {name: (AXIS, *sharder.mesh_axes(name)) for name in names}
  return Sharder(sharder.mesh, dict(sharder.overrides) | rows)


def _combine_metrics(metrics_R: dict[str, jax.Array]) -> dict[str, jax.Array]:
  """The metrics of all replicas: sums of counts, and means over tokens."""
  share_R = metrics_R["num_tokens"] / jnp.maximum(jnp.sum(metrics_R["num_tokens"]), 1)
  combined = {}
  for name, values_R in metrics_R.items():
    if name not in _COUNTERS:
      combined[name] = jnp.sum(values_R if name in _SUMS else values_R * share_R, axis=0)
  return combined
