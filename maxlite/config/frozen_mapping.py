"""Values as the user wrote them, before they have a type: strings, lists and mappings."""

from collections.abc import Iterable, Iterator, Mapping


class FrozenMapping(Mapping[str, "Raw"]):
  """A hashable mapping that keeps its order; equal if entries and order are equal."""

  __slots__ = ("_entries", "source")

  def __init__(self, entries: Iterable[tuple[str, "Raw"]] = (), source: str = "") -> None:
    self._entries = dict(entries)
    self.source = source  # `FILE:LINE`; empty if not from a file

  def __getitem__(self, key: str) -> "Raw":
    return self._entries[key]

  def __iter__(self) -> Iterator[str]:
    return iter(self._entries)

  def __len__(self) -> int:
    return len(self._entries)

  def __eq__(self, other: object) -> bool:
    return isinstance(other, FrozenMapping) and [*self.items()] == [*other.items()]

  def __hash__(self) -> int:
    return hash(tuple(self.items()))

  def __repr__(self) -> str:
    return f"FrozenMapping({[*self.items()]!r})"


Raw = str | tuple["Raw", ...] | FrozenMapping
