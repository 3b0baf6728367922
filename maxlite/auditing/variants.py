"""The ways to compute the same step that an audit compares: meshes, and paths through the code."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from maxlite.config.schema import MESH_AXES, MeshConfig, ModelConfig
from maxlite.registry import PREFERENCE_LOSSES
from maxlite.training.spec import StepSpec

NUM_DEVICES = 8
CONTEXT_STRATEGIES = ("all_gather", "ring", "ulysses")
# The axes that an audit varies. `ensemble` shards the members of an ensemble, not a step.
AXES = tuple(axis for axis in MESH_AXES if axis != "ensemble")
# By name, keys of the mixture of experts: how tokens reach their experts.
DISPATCHES: dict[str, dict[str, Any]] = {
  "ragged": {"sparse_matmul": True, "use_ring_of_experts": False, "capacity_factor": -1.0},
  "all_gather": {"sparse_matmul": True, "use_ring_of_experts": True, "capacity_factor": -1.0},
  "dense": {"sparse_matmul": False, "use_ring_of_experts": False, "capacity_factor": -1.0},
}


@dataclasses.dataclass(frozen=True)
class Variant:
  """One way to compute the step."""

  degrees: tuple[int, ...] = (1,) * len(AXES)  # of AXES
  accumulation: int = 1  # micro-batches
  remat: str = ""  # remat_policy; "": the config's
  scan: bool | None = None  # scan_layers; None: the config's
  dispatch: str = ""  # a name in DISPATCHES; "": the config's
  attention: str = ""  # the backend; "": the config's
  grouped_matmul: str = ""  # the backend; "": the config's
  context: str = ""  # context_parallel_strategy; "": the config's
  rows: str = ""  # "shuffled", or "a document each"; "": as in the reference

  @property
  def mesh(self) -> dict[str, int]:
    """The degrees above 1, by axis."""
    return {axis: n for axis, n in zip(AXES, self.degrees, strict=True) if n > 1}

  @property
  def num_devices(self) -> int:
    return math.prod(self.degrees)

  def __str__(self) -> str:
    words = [f"{axis}={degree}" for axis, degree in self.mesh.items()] or ["one device"]
    if self.accumulation > 1:
      words.append(f"{self.accumulation} micro-batches")
    if self.remat:
      words.append(f"remat {self.remat}")
    if self.scan is not None:
      words.append("scan" if self.scan else "no scan")
    if self.dispatch:
      words.append(f"dispatch {self.dispatch}")
    if self.attention:
      words.append(f"attention {self.attention}")
    if self.grouped_matmul:
      words.append(f"experts by {self.grouped_matmul}")
    if self.context:
      words.append(self.context)
    if self.rows:
      words.append(f"rows {self.rows}")
    return ", ".join(words)

  def spec_of(self, spec: StepSpec) -> StepSpec:
    """The tiny step `spec`, computed in this way."""
    degrees: dict[str, Any] = {}
    for axis in MESH_AXES:
      degrees[f"ici_{axis}_parallelism"] = self.mesh.get(axis, 1)
      degrees[f"dcn_{axis}_parallelism"] = 1
    changes: dict[str, Any] = {}
    if self.remat:
      changes |= {"remat_policy": self.remat, "remat_saved_names": ()}
    if self.scan is not None:
      changes["scan_layers"] = self.scan
    if self.attention:
      changes["attention"] = self.attention
    if self.context:
      changes["context_parallel_strategy"] = self.context
    moe = spec.model.moe
    if self.dispatch:
      moe = dataclasses.replace(moe, **DISPATCHES[self.dispatch])
    if self.grouped_matmul:
      moe = dataclasses.replace(moe, grouped_matmul=self.grouped_matmul)
    objectives = []
    for objective in spec.objectives:
      objectives.append(
        dataclasses.replace(objective, gradient_accumulation_steps=self.accumulation)
      )
    return dataclasses.replace(
      spec,
      mesh=dataclasses.replace(spec.mesh, **degrees),
      model=dataclasses.replace(spec.model, moe=moe, **changes),
      training=dataclasses.replace(spec.training, gradient_accumulation_steps=self.accumulation),
      objectives=tuple(objectives),
    )


def variants_of(
  spec: StepSpec, user_mesh: MeshConfig, num_meshes: int, seed: int, *, is_random: bool
) -> list[Variant]:
  """The variants of a tiny step, after the reference: `Variant()`.

  First each axis alone, so that a difference names its axis; then other paths through the code on
  one device; then meshes of all devices, each with other paths.

  Args:
    num_meshes: how many meshes of several axes; -1: all.
    is_random: whether the step draws random numbers, which other micro-batches and rows change.
  """
  model = spec.model
  variants = []
  used = [axis for axis in AXES if axis != "expert" or model.family.is_moe]
  for axis in used:
    variants.append(Variant(_degrees_of({axis: 2})))
  variants += _paths(spec, is_random=is_random)

  draw = np.random.default_rng(seed)
  choices = list(_choices(model, is_random=is_random))
  order = itertools.cycle(draw.permutation(len(choices)))
  others = [name for name in CONTEXT_STRATEGIES if name != model.context_parallel_strategy]
  strategies = itertools.cycle(others)  # the config's is on the mesh of this axis alone
  for degrees in _meshes(user_mesh, used, num_meshes, draw):
    context = next(strategies) if degrees[AXES.index("context")] > 1 else ""
    path = choices[next(order)]
    variants.append(dataclasses.replace(path, degrees=degrees, context=context))
  return variants


def _degrees_of(mesh: dict[str, int]) -> tuple[int, ...]:
  return tuple(mesh.get(axis, 1) for axis in AXES)


def _paths(spec: StepSpec, *, is_random: bool) -> list[Variant]:
  """Other paths through the code, one at a time, on one device."""
  model = spec.model
  paths = []
  if not is_random:
    paths.append(Variant(accumulation=3))
    paths.append(Variant(_degrees_of({"data": 2}), accumulation=2))
    paths.append(Variant(rows="shuffled"))
    has_pairs = any(each.loss in PREFERENCE_LOSSES for each in spec.objectives)
    if not has_pairs and not _depends_on_rows(model):
      paths.append(Variant(rows="a document each"))
  paths.append(Variant(remat="none" if model.remat_policy == "full" else "full"))
  paths.append(Variant(scan=not model.scan_layers))
  paths.append(Variant(attention="reference"))
  if model.family.is_moe and model.moe.capacity_factor == -1:
    for name, keys in DISPATCHES.items():
      if any(getattr(model.moe, key) != value for key, value in keys.items()):
        paths.append(Variant(_degrees_of({"expert": 2}), dispatch=name))
    if model.moe.sparse_matmul:
      paths.append(Variant(grouped_matmul="reference"))
  return paths


def _depends_on_rows(model: ModelConfig) -> bool:
  """Whether a loss or a limit is per row, so that other rows of the same documents change it."""
  moe = model.moe
  per_row = moe.load_balance_loss_scope == "sequence" or moe.capacity_factor != -1
  return model.family.is_moe and per_row


def _choices(model: ModelConfig, *, is_random: bool) -> Iterator[Variant]:
  """Combinations of other paths, for the meshes of several axes."""
  dispatches = [""]
  if model.family.is_moe and model.moe.capacity_factor == -1:
    dispatches = list(DISPATCHES)
  accumulations = (1,) if is_random else (1, 3)
  for accumulation, remat, dispatch in itertools.product(accumulations, ("", "full"), dispatches):
    yield Variant(accumulation=accumulation, remat=remat, dispatch=dispatch)


def _meshes(
  user_mesh: MeshConfig, used: list[str], number: int, draw: np.random.Generator
) -> list[tuple[int, ...]]:
  """Meshes of eight devices: first one of the user's axes, then random ones.

  The first of these have every pair of axes: some sums are only wrong over two at a time.
  """
  meshes = []
  for degrees in itertools.product((1, 2, 4, 8), repeat=len(AXES)):
    is_used = all(n == 1 or axis in used for axis, n in zip(AXES, degrees, strict=True))
    if math.prod(degrees) == NUM_DEVICES and is_used:
      meshes.append(degrees)
  shuffled = [meshes[i] for i in draw.permutation(len(meshes))]
  own = {axis for axis in used if _total_degree(user_mesh, axis) > 1}

  def distance(degrees: tuple[int, ...]) -> int:
    """How many axes are sharded here and not in the user's mesh, or the other way round."""
    sharded = {axis for axis, n in zip(AXES, degrees, strict=True) if n > 1}
    return len(sharded ^ own)

  if own:
    nearest = min(shuffled, key=distance)
    shuffled.remove(nearest)
    shuffled.insert(0, nearest)
  ordered = shuffled[: bool(own)]
  missing = set(itertools.combinations(used, 2)) - _pairs(ordered)
  while missing:
    best = max(shuffled, key=lambda degrees: len(_pairs([degrees]) & missing))
    ordered.append(best)
    missing -= _pairs([best])
  ordered += [degrees for degrees in shuffled if degrees not in ordered]
  return ordered if number < 0 else ordered[:number]


def _pairs(meshes: Sequence[tuple[int, ...]]) -> set[tuple[str, str]]:
  """The pairs of axes that one of the meshes has."""
  pairs: set[tuple[str, str]] = set()
  for degrees in meshes:
    sharded = [axis for axis, n in zip(AXES, degrees, strict=True) if n > 1]
    pairs |= set(itertools.combinations(sharded, 2))
  return pairs


def _total_degree(mesh: MeshConfig, axis: str) -> int:
  degrees = [getattr(mesh, f"{group}_{axis}_parallelism") for group in ("ici", "dcn")]
  return math.prod(2 if degree == -1 and axis == "fsdp" else max(degree, 1) for degree in degrees)
