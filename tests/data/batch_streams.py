"""What tests of streams of batches share."""

from collections.abc import Iterable, Iterator

from support import trees

from maxlite.data.batch import Batch


def take(stream: Iterator[Batch], count: int) -> list[Batch]:
  """The next batches of a stream."""
  return [next(stream) for _ in range(count)]


def assert_same(batches: Iterable[Batch], others: Iterable[Batch]) -> None:
  """Assert that two lists of batches are equal, also in their number."""
  for batch, other in zip(batches, others, strict=True):
    trees.assert_equal_leaves(batch, other)


def join(parts: list[Batch]) -> Batch:
  """The batch whose rows are those of `parts`, of one host each."""
  return trees.concatenate(parts)
