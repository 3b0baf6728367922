"""Soups: the mean of the members' parameters as one more model.

Source: Wortsman et al., Model soups: averaging weights of multiple fine-tuned models improves
accuracy without increasing inference time (2022), section 2.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxlite.checkpoint.chunked_array import ChunkedArray, whole
from maxlite.checkpoint.manager import Checkpoints
from maxlite.checkpoint.parameters import StoredParameters, write_parameters
from maxlite.checkpoint.run_folder import RunFolder
from maxlite.config.schema import CheckpointConfig
from maxlite.data.batch import Batch
from maxlite.ensemble.member_program import MemberFunctions
from maxlite.ensemble.report.ensemble_metrics import score_combinations
from maxlite.metrics.waits import print_to_stderr
from maxlite.step.train_state import TrainState


def mean_of_arrays(*arrays: np.ndarray) -> np.ndarray:
  """The mean, summed in order in at least float32 and rounded once to the arrays' type."""
  wide = np.promote_types(arrays[0].dtype, np.float32)
  total = functools.reduce(np.add, (array.astype(wide) for array in arrays))
  return (total / wide.type(len(arrays))).astype(arrays[0].dtype)


def greedy_soup(nll_Z: Sequence[float], nll_of: Callable[[list[int]], float]) -> list[int]:
  """Add members in order of their loss; keep each with which the loss of the mean does not rise.

  Args:
    nll_of: the loss of the mean of the parameters of these members.
  """
  first, *others = (int(z) for z in np.argsort(nll_Z, kind="stable"))
  chosen, lowest = [first], nll_Z[first]
  for z in others:
    if (nll := nll_of([*chosen, z])) <= lowest:
      chosen, lowest = [*chosen, z], nll
  return chosen


def score_soups(
  functions: MemberFunctions,
  params: Mapping[str, Any],
  batches: Callable[[], Iterator[Batch]],
  num_bytes_V: np.ndarray,
) -> dict[str, dict[str, Any]]:
  """The scores of the soup of all members, and of a greedy one, as by `score_combinations`.

  The greedy soup is chosen on every other batch from the first on; all are scored on the rest. With
  a single batch, there is none.

  Args:
    functions: of one of the members, on one device or with shardings.
    params: by member, numpy, of the same shapes.
  """
  names = list(params)
  one = jax.devices()[0]
  assert functions.evaluate is not None
  evaluate = jax.jit(functions.evaluate)
  predict_one = jax.jit(functions.predict)

  def state_of(members: Sequence[int]) -> TrainState:
    mean = jax.tree.map(mean_of_arrays, *(params[names[z]] for z in members))
    mean = jax.device_put(mean, functions.shardings.params if functions.shardings else one)
    return TrainState(*[None] * 6).replace(params=mean)

  def nll_of(members: Sequence[int]) -> float:
    state = state_of(members)
    half = itertools.islice(batches(), 0, None, 2)
    sums = jax.device_get([evaluate(state, place(batch)) for batch in half])
    return float(sum(each["nll"] for each in sums) / sum(each["weight"] for each in sums))

  place = lambda batch: jax.device_put(batch, functions.batch_sharding or one)
  soups = {"uniform soup": list(range(len(names)))}
  if sum(1 for _ in batches()) > 1:
    greedy = greedy_soup([nll_of([z]) for z in soups["uniform soup"]], nll_of)
    soups[f"greedy soup of {', '.join(names[z] for z in greedy)}"] = greedy
  scores = {}
  for soup, members in soups.items():
    state = state_of(members)
    predict = lambda batch, state=state: [predict_one(state, place(batch))]
    scores[soup] = score_combinations(predict, batches, num_bytes_V)["best member"]
  return scores


def write_soup(folders: Sequence[RunFolder], target: Path) -> None:
  """Write the mean of the parameters of the latest checkpoints as the checkpoint `target`."""
  open_one = lambda f: Checkpoints(CheckpointConfig(), f.checkpoints, print_to_stderr).stored()
  stored = [StoredParameters(*open_one(folder)) for folder in folders]

  def mean(path: str, leaf: Mapping[str, Any]) -> ChunkedArray:
    shape, dtype = tuple(leaf["shape"]), jax.numpy.dtype(leaf["dtype"])
    read = lambda: mean_of_arrays(*(each.read(path, whole(shape)) for each in stored))
    return ChunkedArray(shape, dtype, shape, lambda: [(whole(shape), read())])

  params = {path: mean(path, leaf) for path, leaf in stored[0].leaves.items()}
  write_parameters(target.absolute(), params)  # as Orbax requires
  for each in stored:
    each.verify()
