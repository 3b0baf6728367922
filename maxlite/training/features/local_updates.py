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
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding

from maxlite.config.schema import LocalUpdatesConfig
from maxlite.sharding.pytree import PyTree
from maxlite.step.train_state import Metrics, TrainState
from maxlite.step.train_step import Step, StepResult, global_norm
from maxlite.training.feature import Feature, FeatureRequest
from maxlite.training.loss import DecoderLoss
from maxlite.training.spec import ObjectiveSpec

AXIS = "ensemble"
OUTER_SCOPE = "outer_step"  # Named scope of outer steps in compiled programs.
_COUNTERS = ("skipped", "skipped_in_a_row")  # Metrics of the worst replica.
# Metrics that add up over replicas.
_SUMS = ("num_tokens", "skipped_spikes", "clipped_heads", "expert_load", "expert_dropped")
_MAXIMA = ("expert_buffer_factor", "max_logits")  # Metrics of the replica that needs most.


class LocalUpdates(struct.PyTreeNode):
  """The optimizer state of such a run, whose `params` are those after the latest outer step."""

  outer: optax.OptState
  # The states of the replicas; every leaf is stacked, [R, ...].
  replicas: TrainState


@dataclasses.dataclass(frozen=True)
class OuterOptimizer(Feature):
  """The replicas along mesh axis `ensemble`, and the outer steps that join them.

  The spec of such a run shards the rows of a batch over this axis first.
  """

  cfg: LocalUpdatesConfig
  mesh: Mesh

  @functools.cached_property
  def tx(self) -> optax.GradientTransformation:
    """The optimizer of the outer steps."""
    return optax.sgd(self.cfg.diloco_outer_lr, self.cfg.diloco_outer_momentum, nesterov=True)

  def wrap_loss(self, loss: DecoderLoss, objective: ObjectiveSpec) -> DecoderLoss:
    """The loss for use inside a shard_map over the replicas."""
    sharder = loss.model.sharder.inside_shard_map(AXIS)
    return dataclasses.replace(loss, model=loss.model.clone(sharder=sharder))

  def start(self, state: TrainState) -> TrainState:
    """The state before the first step: replicas of a solo run's, which draw different numbers."""
    num_replicas = self.mesh.shape[AXIS]

    def stack(leaf: jax.Array) -> jax.Array:
      return jnp.broadcast_to(leaf, (num_replicas, *leaf.shape))

    key = jax.random.wrap_key_data(state.rng)
    keys_R = jax.vmap(functools.partial(jax.random.fold_in, key))(jnp.arange(num_replicas))
    replicas = jax.tree.map(stack, state).replace(rng=jax.random.key_data(keys_R))
    outer = self.tx.init(state.params)
    return state.replace(opt_state=LocalUpdates(outer, replicas))

  def shard_state(
    self, shardings: TrainState, state: TrainState, shard: Callable[[PyTree], PyTree]
  ) -> TrainState:
    """Shard the replicas as the solo run's state, after their axis."""

    def of_replicas(own: NamedSharding) -> NamedSharding:
      return NamedSharding(own.mesh, jax.P(AXIS, *own.spec))

    outer = shard(jax.eval_shape(self.tx.init, state.params))
    replicas = jax.tree.map(of_replicas, shardings)
    return shardings.replace(opt_state=LocalUpdates(outer, replicas))

  def wrap_step(self, step: Step, objective: ObjectiveSpec | None = None) -> Step:
    """The step of all replicas, with the outer step where one is due.

    Args:
      step: the step of a solo run, for use inside a shard_map over the axis.
    """

    def one_replica(stacked: TrainState, batch: PyTree) -> StepResult:
      state = jax.tree.map(lambda leaf: leaf[0], stacked)
      result = step(state, batch)
      return jax.tree.map(lambda leaf: leaf[None], result)

    all_replicas = jax.shard_map(
      one_replica,
      mesh=self.mesh,
      in_specs=jax.P(AXIS),
      out_specs=jax.P(AXIS),
      axis_names={AXIS},
      check_vma=False,  # no communication over the axis; gradients are taken inside
    )

    def joint_step(state: TrainState, batch: PyTree) -> StepResult:
      replicas, metrics = all_replicas(state.opt_state.replicas, batch)
      new = state.replace(step=state.step + 1, opt_state=state.opt_state.replace(replicas=replicas))
      with jax.named_scope(OUTER_SCOPE):
        is_due = new.step % self.cfg.diloco_sync_period == 0
        new = jax.lax.cond(is_due, self._outer_step, lambda state: state, new)
      trained = new.opt_state.replicas
      counts = {name: jnp.max(vars(trained)[name]) for name in _COUNTERS}
      return new.replace(**counts), _combine_metrics(metrics) | counts

    return joint_step

  def _outer_step(self, state: TrainState) -> TrainState:
    """Step by the mean difference of the replicas whose parameters are finite, and restart all."""
    replicas = state.opt_state.replicas
    difference_R = jax.tree.map(_difference, state.params, replicas.params)
    finite_R = jnp.isfinite(jax.vmap(global_norm)(difference_R))
    gradient = jax.tree.map(functools.partial(_mean_of_finite, finite_R), difference_R)
    updates, outer = self.tx.update(gradient, state.opt_state.outer, state.params)
    params = optax.apply_updates(state.params, updates)
    # If no replica is finite, the parameters stay as they were.
    params, outer = jax.tree.map(
      functools.partial(jnp.where, jnp.any(finite_R)),
      (params, outer),
      (state.params, state.opt_state.outer),
    )
    restarted = jax.tree.map(
      lambda leaf, own_R: jnp.broadcast_to(leaf, own_R.shape), params, replicas.params
    )
    skipped_R = replicas.skipped + jnp.where(finite_R, 0, 1)
    replicas = replicas.replace(params=restarted, skipped=skipped_R)
    return state.replace(params=params, opt_state=LocalUpdates(outer, replicas))


def build_local_updates(request: FeatureRequest) -> OuterOptimizer:
  """The outer optimizer of a run with replicas; an entry of FEATURES."""
  return OuterOptimizer(request.spec.local_updates, request.sharder.mesh)


def _difference(start: jax.Array, own_R: jax.Array) -> jax.Array:
  """start - own for every replica, in float32 at least."""
  return _widen(start)[None] - _widen(own_R)


def _widen(leaf: jax.Array) -> jax.Array:
  return leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))


def _mean_of_finite(finite_R: jax.Array, leaf_R: jax.Array) -> jax.Array:
  """The mean of `leaf_R` over the replicas that are finite; zero if none is."""
  kept_R = finite_R.reshape(-1, *(1,) * (leaf_R.ndim - 1))
  num_kept = jnp.maximum(jnp.sum(finite_R), 1).astype(leaf_R.dtype)
  return jnp.sum(jnp.where(kept_R, leaf_R, 0), axis=0) / num_kept


def _combine_metrics(metrics_R: Metrics) -> Metrics:
  """The metrics of all replicas: sums of counts, and means over tokens."""
  tokens_R = metrics_R["num_tokens"]
  share_R = tokens_R / jnp.maximum(jnp.sum(tokens_R), 1)
  combined = {}
  for name, values_R in metrics_R.items():
    if name in _COUNTERS:
      continue
    if name in _SUMS:
      combined[name] = jnp.sum(values_R, axis=0)
    elif name in _MAXIMA:
      combined[name] = jnp.max(values_R, axis=0)
    else:
      combined[name] = jnp.sum(values_R * share_R, axis=0)
  return combined
