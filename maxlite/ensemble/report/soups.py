"""Soups: the mean of the members' parameters as one more model.

Source: Wortsman et al., Model soups: averaging weights of multiple fine-tuned models improves
accuracy without increasing inference time (2022), section 2.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from maxlite.checkpoint.chunked_array import ChunkedArray, Index, whole
from maxlite.checkpoint.manager import Checkpoints
from maxlite.checkpoint.parameters import StoredParameters, write_parameters
from maxlite.checkpoint.run_folder import RunFolder
from maxlite.config.schema import CheckpointConfig
from maxlite.data.batch import Batch
from maxlite.ensemble.members.program import MemberFunctions
from maxlite.ensemble.report.ensemble_metrics import score_combinations
from maxlite.metrics.waits import print_to_stderr
from maxlite.sharding.pytree import PyTree
from maxlite.step.train_state import TrainState
from maxlite.storage.json_values import Json, JsonObject


def mean_of_arrays(*arrays: np.ndarray) -> np.ndarray:
  """The mean, summed in order in at least float32 and rounded once to the arrays' type."""
  own_dtype = arrays[0].dtype
  wide = np.promote_types(own_dtype, np.float32)
  total = arrays[0].astype(wide)
  for array in arrays[1:]:
    total = total + array.astype(wide)
  mean = total / wide.type(len(arrays))
  return mean.astype(own_dtype)


def greedy_soup(nll_Z: Sequence[float], nll_of: Callable[[list[int]], float]) -> list[int]:
  """Add members in order of their loss; keep each with which the loss of the mean does not rise.

  Args:
    nll_Z: the loss of every member.
    nll_of: the loss of the mean of the parameters of these members.
  """
  order = np.argsort(nll_Z, kind="stable").tolist()
  chosen = [order[0]]
  lowest = nll_Z[order[0]]
  for z in order[1:]:
    nll = nll_of([*chosen, z])
    if nll <= lowest:
      chosen.append(z)
      lowest = nll
  return chosen


def score_soups(
  functions: MemberFunctions,
  params: Mapping[str, PyTree],
  batches: Callable[[], Iterator[Batch]],
  num_bytes_V: np.ndarray,
) -> dict[str, JsonObject]:
  """The scores of the soup of all members, and of a greedy one, as by `score_combinations`.

  The greedy soup is chosen on every other batch from the first on; all are scored on the rest. With
  a single batch, there is none.

  Args:
    functions: the functions of one of the members, on one device or with shardings.
    params: by member, its parameters as NumPy arrays; all have the same shapes.
    batches: iterates over the same batches on every call.
    num_bytes_V: bytes of text of every token of the vocabulary.
  """
  names = list(params)
  evaluator = _SoupEvaluator(functions, list(params.values()))
  soups = {"uniform soup": list(range(len(names)))}
  num_batches = sum(1 for _ in batches())
  if num_batches > 1:

    def nll_of(members: Sequence[int]) -> float:
      half = itertools.islice(batches(), 0, None, 2)
      return evaluator.nll(members, half)

    nll_Z = [nll_of([z]) for z in range(len(names))]
    greedy = greedy_soup(nll_Z, nll_of)
    names_of_greedy = ", ".join(names[z] for z in greedy)
    soups[f"greedy soup of {names_of_greedy}"] = greedy
  scores = {}
  for soup, members in soups.items():
    predict = evaluator.predictor(members)
    scores[soup] = score_combinations(predict, batches, num_bytes_V)["best member"]
  return scores


class _SoupEvaluator:
  """Builds soups of members, and evaluates them."""

  def __init__(self, functions: MemberFunctions, params: Sequence[PyTree]):
    """
    Args:
      functions: the functions of one of the members.
      params: the parameters of every member.
    """
    assert functions.evaluate is not None
    self._params = params
    self._evaluate = jax.jit(functions.evaluate)
    self._predict = jax.jit(functions.predict)
    # Where parameters and batches are placed; those of a member without a mesh, on one device.
    self._params_placement = jax.devices()[0]
    self._batch_placement = jax.devices()[0]
    if functions.shardings is not None:
      self._params_placement = functions.shardings.params
    if functions.batch_sharding is not None:
      self._batch_placement = functions.batch_sharding

  def _state(self, members: Sequence[int]) -> TrainState:
    """A state with the mean of the members' parameters, and nothing else."""
    own = [self._params[z] for z in members]
    mean = jax.tree.map(mean_of_arrays, *own)
    placed = jax.device_put(mean, self._params_placement)
    absent: PyTree = None
    return TrainState(
      step=absent,
      params=placed,
      opt_state=absent,
      rng=absent,
      skipped=absent,
      skipped_in_a_row=absent,
    )

  def nll(self, members: Sequence[int], batches: Iterable[Batch]) -> float:
    """The loss [nats per token] of the soup of these members."""
    state = self._state(members)
    sums = []
    for batch in batches:
      sums.append(self._evaluate(state, jax.device_put(batch, self._batch_placement)))
    sums = jax.device_get(sums)
    nll = sum(each["nll"] for each in sums)
    weight = sum(each["weight"] for each in sums)
    return float(nll / weight)

  def predictor(self, members: Sequence[int]) -> Callable[[Batch], list[jax.Array]]:
    """The soup as the only member whose predictions `score_combinations` takes."""
    state = self._state(members)

    def predict(batch: Batch) -> list[jax.Array]:
      return [self._predict(state, jax.device_put(batch, self._batch_placement))]

    return predict


def write_soup(folders: Sequence[RunFolder], target: Path) -> None:
  """Write the mean of the parameters of the latest checkpoints as the checkpoint `target`."""
  stored = []
  for folder in folders:
    checkpoints = Checkpoints(CheckpointConfig(), folder.checkpoints, print_to_stderr)
    stored.append(StoredParameters(*checkpoints.stored()))
  params = {}
  for path, leaf in stored[0].leaves.items():
    params[path] = _mean_of_stored(stored, path, leaf)
  write_parameters(target.absolute(), params)  # as Orbax requires
  for each in stored:
    each.verify()


def _mean_of_stored(
  stored: Sequence[StoredParameters],
  path: str,
  leaf: Mapping[str, Json],
) -> ChunkedArray:
  """The mean of an array of several checkpoints, which is computed when it is read.

  Args:
    leaf: the shape and dtype of the array.
  """
  shape = tuple(leaf["shape"])
  dtype = jax.numpy.dtype(leaf["dtype"])
  all_of_it = whole(shape)

  def read_chunks() -> Iterator[tuple[Index, np.ndarray]]:
    arrays = [each.read(path, all_of_it) for each in stored]
    yield all_of_it, mean_of_arrays(*arrays)

  return ChunkedArray(shape, dtype, shape, read_chunks)
