"""Check the rules of the code that its source alone can answer: imports, banned calls and names.

  python tools/check.py

Prints what breaks a rule, a line each, and exits with 1 if there is any. Planted bugs whose code
has changed are listed too, as warnings.
"""

import ast
import collections
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "maxlite"
# A package or file imports only those of earlier rows; entry points (maxlite/*.py, __main__.py) may
# import all.
ROWS = (
  {"libtpu_environment"},
  {"errors"},
  {"registry"},
  {"storage"},
  {"config"},
  {"kernels"},
  {"sharding", "distributed"},
  {"layers"},
  {"models"},
  {"optim", "data", "metrics", "checkpoint"},
  {"step"},
  {"libraries"},
  {"phases"},
  {"training"},
  {"evaluation", "auditing"},
  {"runs"},
  {"inference", "planning", "ensemble"},
  {"adapters"},
  {"rollouts"},
  {"hf"},
  {"api"},
  {"tinker"},
)
# Likewise the folders of maxlite/ensemble: the files beside them are the API and the commands.
ROWS_OF_ENSEMBLE = (
  {"members"},
  {"workers", "report"},
  {"engines"},
  {"selection"},
  {"run"},
  {"ensemble"},
  {"__init__", "__main__", "run_members"},
)
PRIVATE_JAX = PACKAGE / "distributed" / "jax_private.py"
PRIVATE_ORBAX = PACKAGE / "checkpoint" / "orbax_object_store.py"
TOUR = ROOT / "docs" / "tour.md"
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "yaml.load", "yaml.unsafe_load", "yaml.full_load"}


def _found(*folders: str, suffixes: tuple[str, ...] = (".py",)) -> list[Path]:
  found = []
  for folder in folders:
    for path in sorted((ROOT / folder).rglob("*")):
      if path.is_file() and path.suffix in suffixes:
        found.append(path)
  return found


SOURCES = _found("maxlite")
PROGRAMS = [*_found("maxlite", "tests", "tools"), ROOT / "setup.py"]
TEXTS = [
  *_found("maxlite", "tests", "tools", "docs", "configs", suffixes=(".py", ".md", ".sh", ".yml")),
  *(path for path in ROOT.glob("*") if path.suffix in (".py", ".md", ".toml")),
  *(ROOT / ".ci").iterdir(),
]


class Syntax:
  """The syntax tree of a program, and its nodes by type."""

  def __init__(self, path: Path):
    self.tree = ast.parse(path.read_text("utf-8"))
    self._nodes = collections.defaultdict(list)
    for node in ast.walk(self.tree):
      self._nodes[type(node)].append(node)

  def nodes(self, kind: type) -> list:
    return self._nodes[kind]


Trees = dict[Path, Syntax]


def _place(path: Path, node: ast.AST) -> str:
  return f"{path.relative_to(ROOT)}:{node.lineno}"


def _row(package: str) -> int:
  return next((row for row, packages in enumerate(ROWS) if package in packages), len(ROWS))


def _own(path: Path) -> str:
  """The package (or entry point) of maxlite that a file belongs to."""
  if path.name == "__main__.py":
    return "__main__"
  return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imports(syntax: Syntax) -> Iterator[tuple[ast.AST, str]]:
  """Full names of what a file imports, at its top or inside a function."""
  for node in syntax.nodes(ast.Import):
    yield from ((node, alias.name) for alias in node.names)
  for node in syntax.nodes(ast.ImportFrom):
    module = "." * node.level + (node.module or "")
    yield from ((node, f"{module}.{alias.name}") for alias in node.names)


def imports_point_down(trees: Trees) -> list[str]:
  wrong = []
  for path in SOURCES:
    for node, name in _imports(trees[path]):
      parts = name.split(".")
      outside = parts[0] not in ("maxlite", "") or parts[1] in (_own(path), "__version__")
      if not outside and (parts[0] == "" or _row(parts[1]) >= _row(_own(path))):
        wrong.append(f"{_place(path, node)}: {name}")
  return wrong


def folders_of_ensembles_import_down(trees: Trees) -> list[str]:
  folder = PACKAGE / "ensemble"
  row_of = {own: row for row, owners in enumerate(ROWS_OF_ENSEMBLE) for own in owners}
  wrong = []
  for path in folder.rglob("*.py"):
    own = path.relative_to(folder).parts[0].removesuffix(".py")
    for node, name in _imports(trees[path]):
      if not name.startswith("maxlite.ensemble."):
        continue
      other = name.split(".")[2]
      if other != own and row_of.get(other, len(ROWS_OF_ENSEMBLE)) >= row_of[own]:
        wrong.append(f"{_place(path, node)}: {name}")
  return wrong


def only_training_and_later_rows_import_the_root_config(trees: Trees) -> list[str]:
  wrong = []
  for path in SOURCES:
    if _row(_own(path)) >= _row("training"):
      continue
    for node, name in _imports(trees[path]):
      if _own(path) != "config" and re.fullmatch(r"maxlite\.config(\.\w+)?\.Config", name):
        wrong.append(f"{_place(path, node)}: take a section, not {name}")
    for node in trees[path].nodes(ast.Attribute):
      if re.search(r"\b(schema|config)\.Config$", ast.unparse(node)):
        wrong.append(f"{_place(path, node)}: take a section, not schema.Config")
  return wrong


def no_default_outside_the_schema(trees: Trees) -> list[str]:
  wrong = []
  for path in SOURCES:
    for node in trees[path].nodes(ast.Call):
      if re.match(r"getattr\([\w.]*(cfg|config)\w*, .*, ", ast.unparse(node)):
        wrong.append(_place(path, node))
  return wrong


def _has_text(node: ast.AST) -> bool:
  """Whether a node has a literal string in it."""
  constants = [part for part in ast.walk(node) if isinstance(part, ast.Constant)]
  return any(isinstance(constant.value, str) for constant in constants)


def no_case_on_the_name_of_a_model(trees: Trees) -> list[str]:
  name_of_a_model = re.compile(r"(^|\.)(model_name|family|decoder_block)$")
  wrong = []
  for path in SOURCES:
    for node in trees[path].nodes(ast.Compare):
      sides = [ast.unparse(side) for side in (node.left, *node.comparators)]
      if any(map(name_of_a_model.search, sides)) and _has_text(node):
        wrong.append(f"{_place(path, node)}: give the config a field, or the family a table")
  return wrong


def the_tour_lists_files_after_those_they_import(trees: Trees) -> list[str]:
  core = re.findall(r"^#### `(maxlite/[\w/]+\.py)`", TOUR.read_text("utf-8"), re.MULTILINE)
  missing = [path for path in core if not (ROOT / path).is_file()]
  if missing or len(core) != len(set(core)) or len(core) <= 20:
    return [f"docs/tour.md: lists each file of the core path once; missing: {missing}"]
  early = []
  for number, path in enumerate(core):
    if path.endswith("/moe_block.py"):  # its steps follow it in the order of its calls
      continue
    imported = set()
    for _, name in _imports(trees[ROOT / path]):
      for module in (name, name.rpartition(".")[0]):
        imported.add(module.replace(".", "/") + ".py")
    early += [f"{path} before {later}" for later in core[number + 1 :] if later in imported]
  return early


def no_file_is_a_catch_all(_: Trees) -> list[str]:
  names = re.compile(r"(.*_)?(utils?|common|helpers?|misc|old)")
  return [str(path.relative_to(ROOT)) for path in PROGRAMS if names.fullmatch(path.stem)]


def private_modules_of_jax_and_of_orbax_are_imported_in_one_place_each(trees: Trees) -> list[str]:
  private = re.compile(r"(jax|jaxlib|flax|orbax|optax)\b.*\._")
  wrong = []
  for path in SOURCES:
    if path in (PRIVATE_JAX, PRIVATE_ORBAX):
      continue
    for node, name in _imports(trees[path]):
      if private.match(name):
        wrong.append(f"{_place(path, node)}: {name}")
  return wrong


def _is_true(keyword: ast.keyword, name: str) -> bool:
  """Whether a keyword argument is `name=True`."""
  return keyword.arg == name and ast.unparse(keyword.value) == "True"


def _dotted(function: ast.expr) -> str:
  """The name of a called function, such as `yaml.load`; empty for other expressions."""
  parts = []
  while isinstance(function, ast.Attribute):
    parts.append(function.attr)
    function = function.value
  if not isinstance(function, ast.Name):
    return ""
  return ".".join([function.id, *reversed(parts)])


def no_unsafe_deserialization(trees: Trees) -> list[str]:
  wrong = []
  for path in PROGRAMS:
    for node, name in _imports(trees[path]):
      if name.split(".")[0] in UNSAFE_MODULES:
        wrong.append(f"{_place(path, node)}: {name}")
    for node in trees[path].nodes(ast.Call):
      unsafe = any(_is_true(keyword, "allow_pickle") for keyword in node.keywords)
      if unsafe or _dotted(node.func) in UNSAFE_CALLS:
        wrong.append(f"{_place(path, node)}: {ast.unparse(node.func)}")
  return wrong


def check_vma_false_has_a_reason(trees: Trees) -> list[str]:
  wrong = []
  for path in PROGRAMS:
    lines = path.read_text("utf-8").splitlines()
    for node in trees[path].nodes(ast.keyword):
      if node.arg == "check_vma" and ast.unparse(node.value) == "False":
        here = lines[max(node.lineno - 2, 0) : node.lineno]
        if not any("#" in line for line in here):
          wrong.append(_place(path, node))
  return wrong


def no_path_is_of_one_machine_or_leaves_the_repository(_: Trees) -> list[str]:
  wrong = []
  for path in TEXTS:
    text = path.read_text("utf-8")
    depth = len(path.relative_to(ROOT).parts) - 1
    found = re.findall(r"(?<![\w.~}])/(?:home|root|work|Users)/\S+", text)
    leaving = re.findall(r"(?<![\w.])((?:\.\./)+)[\w.-]", text)
    found += [up for up in leaving if up.count("../") > depth]
    wrong += [f"{path.relative_to(ROOT)}: {part}" for part in found]
  return wrong


def tests_import_no_test_modules(trees: Trees) -> list[str]:
  wrong = []
  for path in _found("tests"):
    for node, name in _imports(trees[path]):
      if re.search(r"(^|\.)test_\w+", name):
        wrong.append(f"{_place(path, node)}: {name}: move what is shared to tests/support")
  return wrong


def every_page_is_in_the_index_of_the_docs(_: Trees) -> list[str]:
  docs = ROOT / "docs"
  listed = re.findall(r"\]\(((?:measurements/)?\w+\.md)\)", (docs / "README.md").read_text("utf-8"))
  pages = [path for path in docs.rglob("*.md") if path.name != "README.md"]
  return sorted({str(path.relative_to(docs)) for path in pages} ^ set(listed))


def the_walkthrough_shows_the_code_as_it_is(_: Trees) -> list[str]:
  tool = runpy.run_path(str(ROOT / "tools" / "inspect" / "walkthrough.py"))
  page = tool["PAGE"].read_text("utf-8")
  try:
    is_stale = tool["refreshed"](page) != page
  except tool["StaleMarkerError"] as error:
    return [f"docs/walkthrough.md: {error}"]
  return [f"docs/walkthrough.md: run {tool['COMMAND']}"] if is_stale else []


RULES: tuple[Callable[[Trees], list[str]], ...] = (
  imports_point_down,
  folders_of_ensembles_import_down,
  only_training_and_later_rows_import_the_root_config,
  no_default_outside_the_schema,
  no_case_on_the_name_of_a_model,
  the_tour_lists_files_after_those_they_import,
  no_file_is_a_catch_all,
  private_modules_of_jax_and_of_orbax_are_imported_in_one_place_each,
  no_unsafe_deserialization,
  check_vma_false_has_a_reason,
  no_path_is_of_one_machine_or_leaves_the_repository,
  tests_import_no_test_modules,
  every_page_is_in_the_index_of_the_docs,
  the_walkthrough_shows_the_code_as_it_is,
)


def main() -> int:
  trees = {path: Syntax(path) for path in PROGRAMS}
  num_wrong = 0
  for rule in RULES:
    wrong = rule(trees)
    num_wrong += len(wrong)
    for place in wrong:
      print(f"{rule.__name__.replace('_', ' ')}: {place}")
  mutants = runpy.run_path(str(ROOT / "tools" / "inspect" / "mutants.py"))
  for name, reason in mutants["stale_mutants"](mutants["read_mutants"]()).items():
    print(f"warning: the mutant {name} is stale: {reason}")
  return int(num_wrong > 0)


if __name__ == "__main__":
  sys.exit(main())
