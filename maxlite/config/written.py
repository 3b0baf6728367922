"""What a user wrote for a key, before it has a type: words, lists of them, and mappings."""

from collections.abc import Iterable, Iterator, Mapping


class Table(Mapping[str, "Raw"]):
  """A mapping in the order of writing: hashable, and equal to one written elsewhere."""

  __slots__ = ("_entries", "source")

  def __init__(self, entries: Iterable[tuple[str, "Raw"]] = (), source: str = "") -> None:
    self._entries = tuple(entries)
    self.source = source  # `FILE:LINE`; empty where it was typed, or made by a program

  def __getitem__(self, key: str) -> "Raw":
    return dict(self._entries)[key]

  def __iter__(self) -> Iterator[str]:
    return (key for key, _ in self._entries)

  def __len__(self) -> int:
    return len(self._entries)

  def __eq__(self, other: object) -> bool:
    return isinstance(other, Table) and self._entries == other._entries

  def __hash__(self) -> int:
    return hash(self._entries)

  def __repr__(self) -> str:
    return f"Table({self._entries!r})"


Raw = str | tuple["Raw", ...] | Table
