"""Checks of the step on one device against what must hold for any right step.

They run the program that is compiled for the reference with other parameters, rows and states, so
none of them compiles anything. They find what is wrong in the same way on every mesh.
"""

import dataclasses
import re
from collections.abc import Collection, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from maxlite.auditing.compare import NOISE, TOLERANCE
from maxlite.auditing.measure import Arrays, Measured, StepResults, Steps, tiny_batch
from maxlite.auditing.optimizer_checks import UPDATE_TOLERANCE, check_update
from maxlite.auditing.shrink import LENGTH, ROWS, VOCAB
from maxlite.auditing.static_checks import WITHOUT_GRADIENT
from maxlite.auditing.variants import Variant
from maxlite.data.batch import HostBatch
from maxlite.optim.labels import path_of, trained_paths
from maxlite.registry import LOSSES, PREFERENCE_LOSSES, ROLLOUT_LOSSES
from maxlite.sharding.pytree import PyTree
from maxlite.step.train_state import TrainState
from maxlite.training.features.teacher import TEACHER, Teacher
from maxlite.training.policy_loss import PolicyBatch
from maxlite.training.program import Objective
from maxlite.training.routed_bias import BIAS
from maxlite.training.spec import StepSpec

# Steps of central differences, the next if a token changes its experts within one. Their error is
# about step^2, and about 1e-16 / step from rounding.
DIFFERENCES = (1e-5, 1e-6, 1e-7)
DERIVATIVE_TOLERANCE = 1e-4
HUGE = 1e160  # its square is infinite
LARGE = 100.0  # exponentials of sums of such parameters overflow


def broken_rules(
  spec: StepSpec, reference: Measured, unreached: Collection[str], *, is_random: bool
) -> list[str]:
  """What of the step of every objective breaks a rule, a line each.

  Args:
    unreached: parameters that no gradient reaches, which are mistakes already.
    is_random: whether the step draws random numbers, which other rows change.
  """
  lines: list[str] = []
  with jax.enable_x64(True):
    steps = reference.steps
    if any(each.repeat_batch > 1 for each in spec.objectives):
      once = tuple(dataclasses.replace(each, repeat_batch=1) for each in spec.objectives)
      steps = Steps(Variant().spec_of(dataclasses.replace(spec, objectives=once)), 1)
      lines += check_repetitions(reference, steps)
    for objective in steps.objectives.values():
      batch = tiny_batch(objective.spec.loss)
      if isinstance(batch, PolicyBatch):  # the ratio to the policy itself has a detached part
        off_policy_BT = np.minimum(batch.behaviour_BT, -1)
        batch = batch.replace(behaviour_BT=off_policy_BT)
      step = TinyStep(spec, steps, objective, reference.start, reference.fresh, batch)
      lines += [
        *step.check_derivative(unreached),
        *step.check_padding(),
        *step.check_future(),
        *([] if is_random else step.check_repeated_rows()),
        *step.check_known_losses(),
        *step.check_teacher(),
        *step.check_auxiliary_losses(),
        *step.check_routed_bias(),
        *step.check_frozen(),
        *step.check_skipping(),
        *step.check_large_parameters(),
        *step.check_optimizer(),
      ]
  return lines


def check_repetitions(reference: Measured, once: Steps) -> Iterator[str]:
  """Several updates on a batch are as many single ones, with other random numbers each.

  Args:
    once: the steps of the reference with one update on a batch.
  """
  for name, objective in reference.steps.objectives.items():
    batch = tiny_batch(objective.spec.loss)
    first = once.unflat(reference.start)
    key = jax.random.wrap_key_data(jnp.asarray(first.rng))
    state = first
    for time in range(objective.spec.repeat_batch):
      rng = np.asarray(jax.random.key_data(jax.random.fold_in(key, time)))
      state, _ = once.take(name, state.replace(step=first.step, rng=rng), batch)
    update = once.results(first, state, {}).update
    for path, want in reference.results[name].update.items():
      difference = np.abs(update[path] - want).max(initial=0)
      if difference > UPDATE_TOLERANCE * np.abs(want).max(initial=0):
        yield (
          f"{name}: {objective.spec.repeat_batch} updates on a batch change {path} otherwise than "
          "as many single ones, each with random numbers of its own"
        )
        break


@dataclasses.dataclass(frozen=True)
class TinyStep:
  """The step of an objective on one device, from states and rows that differ in one thing."""

  spec: StepSpec
  steps: Steps
  objective: Objective
  start: Arrays  # the state before the step
  fresh: Arrays  # the state before the first step
  batch: HostBatch

  @property
  def name(self) -> str:
    return self.objective.name

  @property
  def is_of_plugin(self) -> bool:
    """Whether the loss is a plug-in's, which may read more than tokens with a weight."""
    return not LOSSES[self.objective.spec.loss].sums.__module__.startswith("maxlite.")

  @property
  def params(self) -> Arrays:
    """The parameters before the step, by path."""
    found = {}
    for path, leaf in self.start.items():
      if path.startswith("params/"):
        found[path.removeprefix("params/")] = leaf
    return found

  @property
  def trained(self) -> set[str]:
    labels = self.objective.labels
    if labels is None:
      return set(self.params)
    return {self.steps.stacked_path(path) for path in trained_paths(labels)}

  def take(
    self, params: Arrays | None = None, batch: HostBatch | None = None, extra: PyTree = None
  ) -> StepResults:
    """The results of the step, with these instead of its parameters, rows and other inputs."""
    before, after, metrics = self.states(params, batch, extra)
    return self.steps.results(before, after, metrics)

  def states(
    self, params: Arrays | None = None, batch: HostBatch | None = None, extra: PyTree = None
  ) -> tuple[TrainState, TrainState, Arrays]:
    """(state before, state after, metrics); arguments as of `take`."""
    changed = {f"params/{path}": leaf for path, leaf in (params or {}).items()}
    before = self.steps.unflat(self.start | changed)
    rows = self.batch if batch is None else batch
    after, metrics = self.steps.take(self.name, before, rows, extra)
    return before, after, metrics

  def loss_at(self, params: Arrays, *, for_indexer: bool) -> float:
    """The loss from which an indexer learns, or all other parameters: theirs lacks its part."""
    results = self.take(params)
    loss = float(results.loss)
    if not for_indexer and "indexer_loss" in results.metrics:
      factor = self.spec.training.indexer_loss_scaling_factor
      loss -= factor * float(results.metrics["indexer_loss"])
    return loss

  def check_derivative(self, left_out: Collection[str] = ()) -> Iterator[str]:
    """The gradients are the derivatives of the loss that is reported, by central differences."""
    gradients = self.take().gradients
    draw = np.random.default_rng(0)
    directions = {}
    for path in sorted(self.trained):
      if path in left_out or re.search(WITHOUT_GRADIENT, path):
        continue
      direction = draw.normal(size=self.params[path].shape)
      size = np.linalg.norm(gradients[path])
      if not size and not LOSSES[self.objective.spec.loss].logits:
        continue  # a loss of draft heads alone
      directions[path] = direction / max(float(size), 0.1) if size else direction
    for for_indexer in (False, True):
      group = {}
      for path, direction in directions.items():
        if ("/indexer/" in path) == for_indexer:
          group[path] = direction
      if not group or self._is_derivative(group, gradients, for_indexer) is None:
        continue
      for path, direction in group.items():
        wrong = self._is_derivative({path: direction}, gradients, for_indexer)
        if wrong is None:
          continue
        change, expected = wrong
        yield (
          f"{self.name}: the gradient of {path} is not the derivative of the loss: along a random "
          f"direction the loss changes by {change:.8g}, but the gradient says {expected:.8g}; is a "
          "part of it detached, counted twice, or a backward pass wrong?"
        )

  def _is_derivative(
    self, directions: Arrays, gradients: Arrays, for_indexer: bool
  ) -> tuple[float, float] | None:
    """None if the gradients are derivatives in these directions, else (change, expected change)."""
    terms = [float(np.sum(gradients[path] * each)) for path, each in directions.items()]
    expected = sum(terms)
    largest = max(float(np.abs(each).max()) for each in directions.values())
    allowed = DERIVATIVE_TOLERANCE * sum(map(abs, terms))
    change = 0.0
    for size in DIFFERENCES:
      step = size / largest
      losses = []
      for sign in (1, -1):
        moved = {path: self.params[path] + sign * step * v for path, v in directions.items()}
        losses.append(self.loss_at(moved, for_indexer=for_indexer))
      change = (losses[0] - losses[1]) / (2 * step)
      rounding = 1e-14 * max(map(abs, losses)) / step
      if abs(change - expected) <= allowed + rounding:
        return None
    return change, expected

  def check_padding(self) -> Iterator[str]:
    """Tokens of padding, and targets without weight, change nothing."""
    batch = self.batch
    draw = np.random.default_rng(2)
    other_BT = draw.integers(0, VOCAB, batch.tokens_BT.shape).astype(np.int32)
    is_padding_BT = batch.segment_BT == 0
    changes = {
      "tokens of padding": {"tokens_BT": np.where(is_padding_BT, other_BT, batch.tokens_BT)},
      "targets whose weight is zero": {
        "targets_BT": np.where(batch.weight_BT == 0, other_BT, batch.targets_BT)
      },
    }
    want = self.take()
    for what, fields in changes.items():
      yield from self._same(want, self.take(batch=batch.replace(**fields)), f"{what} change")

  def check_future(self) -> Iterator[str]:
    """The prediction of a token does not depend on later tokens of its row."""
    if self.is_of_plugin:
      return
    batch = self.batch
    half = LENGTH // 2
    is_late_BT = np.broadcast_to(np.arange(LENGTH) >= half, batch.tokens_BT.shape)
    early = batch.replace(weight_BT=np.where(is_late_BT, 0, batch.weight_BT))
    draw = np.random.default_rng(3)
    other_BT = draw.integers(0, VOCAB, batch.tokens_BT.shape).astype(np.int32)
    changed = early.replace(tokens_BT=np.where(is_late_BT, other_BT, batch.tokens_BT))
    want = self.take(batch=early).metrics
    got = self.take(batch=changed).metrics
    for name in ("loss", "mtp_loss", "draft_loss", "distill_loss"):
      if name in want and not _close(got[name], want[name]):
        yield (
          f"{self.name}: {name} of the first {half} positions changes from {want[name]:.10g} to "
          f"{got[name]:.10g} with the tokens after them: a mask, a shift, or rows that overwrite "
          "others?"
        )

  def check_repeated_rows(self) -> Iterator[str]:
    """Losses and gradients of rows are those of the same rows twice: they are means."""
    half = ROWS // 2
    batch = self.batch
    once = jax.tree.map(lambda x_BT: x_BT * (np.arange(ROWS)[:, None] < half), batch)
    once = once.replace(weight_BT=once.weight_BT.astype(batch.weight_BT.dtype))
    twice = jax.tree.map(lambda x_BT: np.concatenate([x_BT[:half], x_BT[:half]]), batch)
    once = jax.tree.map(lambda new, old: new.astype(old.dtype), once, batch)
    want, got = self.take(batch=once), self.take(batch=twice)
    yield from self._same(want, got, "the same rows twice change", only_losses=True)

  def _same(
    self, want: StepResults, got: StepResults, what: str, *, only_losses: bool = False
  ) -> Iterator[str]:
    """A line for the first result that differs."""
    largest = max(float(np.abs(each).max(initial=0)) for each in want.gradients.values())
    for name, value in want.metrics.items():
      if only_losses and not re.search(r"loss|rewards|logps", name):
        continue
      if not _close(got.metrics[name], value):
        yield f"{self.name}: {what} {name} from {value} to {got.metrics[name]}"
        return
    for path, gradient in want.gradients.items():
      difference = float(np.abs(got.gradients[path] - gradient).max(initial=0))
      size = max(float(np.abs(gradient).max(initial=0)), NOISE / TOLERANCE * largest)
      if difference > TOLERANCE * size:
        yield f"{self.name}: {what} the gradient of {path} by up to {difference:.3g}"
        return

  def check_known_losses(self) -> Iterator[str]:
    """Losses whose value is known: of equal logits, and of a router without preferences."""
    zeros = {}
    for path, leaf in self.params.items():
      if self.steps.axes(path) and "router" in self.steps.axes(path):
        zeros[path] = np.zeros_like(leaf)
    if zeros:
      metrics = self.take(zeros).metrics
      value = metrics.get("load_balance_loss")
      if value is not None and not np.isclose(value, 1, rtol=1e-6):
        yield (
          f"{self.name}: load_balance_loss of a router whose parameters are zero is {value:.8g} "
          "instead of 1: a sum over layers, rows or micro-batches instead of a mean?"
        )
    unembedding = [p for p in self.params if self.steps.axes(p) and "vocab" in self.steps.axes(p)]
    metrics = self.take({path: np.zeros_like(self.params[path]) for path in unembedding}).metrics
    known = {"loss": np.log(VOCAB), "mtp_loss": np.log(VOCAB), "z_loss": np.log(VOCAB) ** 2}
    if self.objective.spec.loss in {*PREFERENCE_LOSSES, *ROLLOUT_LOSSES} or self.is_of_plugin:
      del known["loss"], known["mtp_loss"]
    for name, value in known.items():
      if unembedding and name in metrics and not np.isclose(metrics[name], value, rtol=1e-6):
        yield (
          f"{self.name}: {name} of equal logits is {metrics[name]:.8g} instead of {value:.8g}: "
          "divided by another number than the weights that it sums?"
        )

  def check_teacher(self) -> Iterator[str]:
    """The divergence from teachers that find all tokens equally likely, by its definition."""
    training = self.spec.training
    # The last logits, which are divided by the temperature below.
    heads = [
      path
      for path in self.params
      if "vocab" in self.steps.axes(path) and not path.endswith("embedding")
    ]
    is_plain = not self.spec.model.final_logits_soft_cap and len(heads) == 1
    if self.objective.spec.loss != "distill" or training.distill_top_k or not is_plain:
      return

    def flatten(key_path: tuple, leaf: jax.Array) -> jax.Array:
      is_unembedding = "vocab" in self.steps.axes(self.steps.stacked_path(path_of(key_path)))
      return 0 * leaf if is_unembedding else leaf

    (teacher,) = [each for each in self.steps.program.features if isinstance(each, Teacher)]
    extra = {TEACHER: tuple(jax.tree.map_with_path(flatten, each) for each in teacher.params)}
    got = float(self.take(extra=extra).metrics["distill_loss"])
    cooled = {heads[0]: self.params[heads[0]] / training.distill_temperature}
    losses = []
    for token in range(VOCAB):
      targets_BT = np.full_like(self.batch.targets_BT, token)
      losses.append(self.take(cooled, self.batch.replace(targets_BT=targets_BT)).metrics["loss"])
    want = training.distill_temperature**2 * (np.mean(losses) - np.log(VOCAB))
    if not np.isclose(got, want, rtol=1e-6):
      yield (
        f"{self.name}: distill_loss is {got:.8g}, but KL(teacher || student) of teachers that find "
        f"all tokens equally likely is {want:.8g}"
      )

  def check_auxiliary_losses(self) -> Iterator[str]:
    """Every loss that is reported has a value, and the total is their weighted sum."""
    metrics = self.take().metrics
    training, moe = self.spec.training, self.spec.model.moe
    for name, value in metrics.items():
      if name.endswith("loss") and np.all(value == 0):
        yield f"{self.name}: {name} is zero: is it computed, and of any tokens?"
    weights = {
      "z_loss": training.z_loss_multiplier,
      "load_balance_loss": moe.load_balance_loss_weight,
      "router_z_loss": moe.router_z_loss_weight,
      "indexer_loss": self.spec.training.indexer_loss_scaling_factor,
      "mtp_loss": training.mtp_loss_scaling_factor,
      "draft_loss": training.draft_loss_weight,
    }
    if self.objective.spec.loss not in ("next_token", "next_token_and_draft", "dpo", "grpo"):
      return
    total = float(metrics["loss"])
    for name, weight in weights.items():
      total += weight * float(metrics.get(name, 0))
    if not np.isclose(metrics["total_loss"], total, rtol=TOLERANCE):
      yield (
        f"{self.name}: total_loss is {metrics['total_loss']:.10g}, but its parts add up to "
        f"{total:.10g}"
      )

  def check_routed_bias(self) -> Iterator[str]:
    """A number added to all routed biases changes nothing; a step moves each against its load."""
    biases = {path: leaf for path, leaf in self.params.items() if re.search(BIAS, path)}
    if not biases or not self.spec.model.moe.routed_bias:
      return
    want = self.take()
    got = self.take({path: leaf + 0.37 for path, leaf in biases.items()})
    if not _close(got.loss, want.loss):
      yield (
        f"{self.name}: a number added to the routed biases of all experts changes the loss from "
        f"{want.loss:.10g} to {got.loss:.10g}: are they in the weights of experts?"
      )
    load_NE = want.metrics["expert_load"]
    expected_NE = self.spec.model.moe.routed_bias_update_rate * np.sign(
      load_NE.mean(axis=1, keepdims=True) - load_NE
    )
    moved = [want.update[path] for path in biases if path in self.trained]
    if len(moved) == len(biases):
      total = sum(np.sum(each > 0) for each in moved), sum(np.sum(each < 0) for each in moved)
      if total != (np.sum(expected_NE > 0), np.sum(expected_NE < 0)):
        yield f"{self.name}: the routed biases do not move against the load of their experts"

  def check_frozen(self) -> Iterator[str]:
    """What the objective does not train keeps its bits, also the sign of zero."""
    frozen = sorted(set(self.params) - self.trained)
    changed = {}
    for path in frozen:
      leaf = self.params[path].copy()
      leaf.flat[0] = -0.0
      changed[path] = leaf
    if not frozen:
      return
    before, after, _ = self.states(changed)
    old, new = self.steps.flat(before), self.steps.flat(after)
    for path in frozen:
      if old[f"params/{path}"].tobytes() != new[f"params/{path}"].tobytes():
        yield f"{self.name}: changes {path}, which it does not train"

  def check_skipping(self) -> Iterator[str]:
    """A step whose loss or norm is not finite changes nothing but its counters."""
    weight_BT = self.batch.weight_BT
    batch = self.batch.replace(weight_BT=np.where(weight_BT > 0, np.inf, weight_BT))
    yield from self._skips({}, batch, "a loss that is not finite")
    for path in sorted(self.params):
      axes = self.steps.axes(path)
      if not axes or "vocab" not in axes:
        continue
      params = {path: self.params[path] * HUGE}
      metrics = self.take(params).metrics
      if np.isfinite(metrics.get("total_loss", metrics["loss"])) and np.isinf(metrics["grad_norm"]):
        yield from self._skips(params, self.batch, "a gradient whose norm is infinite")
        return

  def _skips(self, params: Arrays, batch: HostBatch, what: str) -> Iterator[str]:
    before, after, metrics = self.states(params, batch)
    old, new = self.steps.flat(before), self.steps.flat(after)
    counted = re.compile(r"^(step|skipped|skipped_in_a_row|clock/.*)$|/gradients/")
    for path in sorted(old):
      if counted.search(path):
        continue
      if not np.array_equal(old[path], new[path], equal_nan=True):
        yield f"{self.name}: a step with {what} changes {path}"
        return
    if metrics["skipped"] != before.skipped + 1:
      yield f"{self.name}: a step with {what} is not counted as skipped"

  def check_large_parameters(self) -> Iterator[str]:
    """The gradients are numbers where the loss is finite, also where exponentials overflow."""
    metrics = self.take({path: LARGE * leaf for path, leaf in self.params.items()}).metrics
    if np.isfinite(metrics.get("total_loss", metrics["loss"])) and np.isnan(metrics["grad_norm"]):
      yield (
        f"{self.name}: with {LARGE:g} times the parameters, grad_norm is NaN although the loss is "
        "finite: infinity times zero behind a mask?"
      )

  def check_optimizer(self) -> Iterator[str]:
    """The update is that of the optimizer's formula, also of what has a gradient of zero."""
    few = self.batch
    is_few_BT = np.zeros((ROWS, LENGTH), bool)
    is_few_BT[0, :3] = True  # so few tokens that some experts, and most embeddings, have none
    few = few.replace(
      segment_BT=np.where(is_few_BT, 1, 0).astype(few.segment_BT.dtype),
      weight_BT=np.where(is_few_BT, 1.0, 0.0),
    )
    if self.objective.spec.loss in PREFERENCE_LOSSES:
      few = self.batch
    axes = {path: self.steps.axes(path) for path in sorted(self.trained)}
    for start in (self.fresh, self.start):
      before = self.steps.unflat(start)
      after, metrics = self.steps.take(self.name, before, few)
      lines = check_update(
        self.name,
        self.objective.spec.optimizer,
        self.spec,
        self.steps.results(before, after, metrics),
        self._own(self.steps.flat(before)),
        self._own(self.steps.flat(after)),
        axes,
      )
      found = list(lines)
      yield from found
      if found:
        return  # the next state would repeat them

  def _own(self, state: Arrays) -> Arrays:
    """The leaves of a state without the optimizer states of other phases."""
    if self.spec.phases is None:
      return state
    (phase,) = [each for each in self.spec.phases.phases if each.name == self.name]
    owner = phase.share_optimizer_state or phase.name
    own = f"opt_state/own/{owner}/"
    return {
      path: leaf
      for path, leaf in state.items()
      if path.startswith(own) or not path.startswith("opt_state/")
    }


def _close(one: np.ndarray, other: np.ndarray) -> bool:
  return bool(np.allclose(one, other, rtol=TOLERANCE, atol=NOISE, equal_nan=True))
