"""Values as the user wrote them, before they have a type: strings, lists and mappings."""

import re
from collections.abc import Iterable, Iterator, Mapping

import yaml

from maxlite.errors import UserError


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

  def located(self, name: str) -> str:
    """`name (FILE:LINE)`, or `name` if it is not from a file."""
    if not self.source:
      return name
    return f"{name} ({self.source})"

  def __repr__(self) -> str:
    return f"FrozenMapping({[*self.items()]!r})"


yaml.SafeDumper.add_representer(FrozenMapping, yaml.SafeDumper.represent_dict)
Raw = str | tuple["Raw", ...] | FrozenMapping
_UNQUOTED = re.compile(r"-?[\w./][\w./+*-]*")  # text that needs no quotes within [] and {}
# Limits of a YAML document.
_MAX_DEPTH = 32
_MAX_NODES = 100_000
_MAX_SHOWN = 300  # characters of a value in an error message


class YamlValueError(UserError):
  """YAML without one clear value; the message continues a line that begins with the key."""


def compose_yaml(text: bytes | str) -> yaml.Node | None:
  """The root node of a document; raises `yaml.YAMLError` if it is malformed or too large."""
  try:
    root = yaml.compose(text, Loader=yaml.SafeLoader)
  except RecursionError:
    raise yaml.MarkedYAMLError(problem=f"nested deeper than {_MAX_DEPTH} levels") from None
  if root is not None:
    _require_small(root)
  return root


def _require_small(root: yaml.Node) -> None:
  """Raise `yaml.MarkedYAMLError` if a document is too deep or too large, aliases written out."""
  num_nodes = 0
  stack = [(root, 0)]
  while stack:
    node, depth = stack.pop()
    num_nodes += 1
    if depth > _MAX_DEPTH or num_nodes > _MAX_NODES:
      limit = f"nested deeper than {_MAX_DEPTH} levels or more than {_MAX_NODES} values"
      raise yaml.MarkedYAMLError(problem=limit, problem_mark=node.start_mark)
    if isinstance(node, yaml.MappingNode):
      for key, value in node.value:
        stack.append((key, depth + 1))
        stack.append((value, depth + 1))
    elif isinstance(node, yaml.SequenceNode):
      for part in node.value:
        stack.append((part, depth + 1))


def from_yaml(node: yaml.Node | None, file: str = "") -> Raw:
  """Convert a YAML node, keeping its scalars as they are written.

  Args:
    file: the file of the node, for the `source` of mappings; empty: none.

  Raises:
    YamlValueError: a scalar is null, or a mapping has a duplicate key or one that is not text.
  """
  if isinstance(node, yaml.SequenceNode):
    return tuple(from_yaml(child, file) for child in node.value)
  if isinstance(node, yaml.MappingNode):
    return _mapping_from_yaml(node, file)
  if not isinstance(node, yaml.ScalarNode) or node.tag == "tag:yaml.org,2002:null":
    raise YamlValueError("has no value; write one, or remove the line to keep the default")
  return str(node.value)


def _mapping_from_yaml(node: yaml.MappingNode, file: str) -> FrozenMapping:
  entries: dict[str, Raw] = {}
  for key_node, value_node in node.value:
    key = from_yaml(key_node)
    if not isinstance(key, str):
      raise YamlValueError(f"has {show(key)} for a key; write `key: value`")
    if key in entries:
      raise YamlValueError(f"has {key} twice in one mapping; remove one of the two")
    try:
      entries[key] = from_yaml(value_node, file)
    except YamlValueError as error:
      raise YamlValueError(f"has a mapping whose {key} {error}") from None
  source = ""
  if file:
    source = f"{file}:{node.start_mark.line + 1}"
  return FrozenMapping(entries.items(), source)


def show(value: object) -> str:
  """Format a value, typed or raw, as in YAML and on the command line."""
  if isinstance(value, bool):
    return str(value).lower()
  if isinstance(value, tuple):
    elements = [_show_element(element) for element in value]
    return "[" + ", ".join(elements) + "]"
  if isinstance(value, FrozenMapping):
    entries = [f"{_show_element(key)}: {_show_element(part)}" for key, part in value.items()]
    return "{" + ", ".join(entries) + "}"
  text = str(value)
  if not text or " " in text or not text.isprintable():
    return repr(text)
  return text


def abbreviate(text: str) -> str:
  """`text`, or its first part and its length if it is too long for an error message."""
  if len(text) <= _MAX_SHOWN:
    return text
  return f"{text[: _MAX_SHOWN // 2]}... ({len(text)} characters)"


def _show_element(value: object) -> str:
  """`show` within a list or mapping, where YAML needs quotes around some text."""
  if not isinstance(value, str) or (_UNQUOTED.fullmatch(value) and value.lower() != "null"):
    return show(value)
  return str(yaml.safe_dump(value, default_style='"', width=float("inf"))).rstrip("\n")
