"""Architecture rules, checked on the source: imports, sizes, unique names, banned calls."""

import ast
import collections
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.inspect.plainness import GOALS, density_of, total

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "maxlite"
# A package imports only packages of earlier rows; entry points (maxlite/*.py) may import all.
ROWS = (
  {"config"},
  {"kernels"},
  {"sharding", "distributed"},
  {"layers"},
  {"models"},
  {"optim", "data", "metrics", "checkpoint"},
  {"step"},
  {"phases"},
  {"training"},
  {"evaluation"},
  {"runs"},
  {"inference", "planning", "ensemble"},
  {"hf"},
  {"api"},
)
# The most lines of a module, of a function, and of a function inside another.
MAX_MODULE = 500
MAX_FUNCTION = 60
MAX_NESTED = 15
MAX_ANY = 80  # uses of `typing.Any`
# A folder of more than MIN_LINES lines of code may be this many times as dense as the goals.
MIN_LINES = 300
FOLDER_TOLERANCE = 1.25
PLAIN_FOLDERS = ("maxlite", "tools")
# Folders in which every file implements the same interface: their file names may repeat elsewhere.
REGISTRY_FOLDERS = ("kernels/*", "layers/moe/dispatch", "hf/families", "config/schema")
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


@pytest.fixture(scope="module")
def trees() -> dict[Path, Syntax]:
  """The syntax of all programs, which the tests only read."""
  return {path: Syntax(path) for path in PROGRAMS}


def _place(path: Path, node: ast.AST) -> str:
  return f"{path.relative_to(ROOT)}:{node.lineno}"


def _row(package: str) -> int:
  return next((row for row, packages in enumerate(ROWS) if package in packages), len(ROWS))


def _own(path: Path) -> str:
  """The package (or entry point) of maxlite that a file belongs to."""
  return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imports(syntax: Syntax) -> Iterator[tuple[ast.AST, str]]:
  """Full names of what a file imports, at its top or inside a function."""
  for node in syntax.nodes(ast.Import):
    yield from ((node, alias.name) for alias in node.names)
  for node in syntax.nodes(ast.ImportFrom):
    module = "." * node.level + (node.module or "")
    yield from ((node, f"{module}.{alias.name}") for alias in node.names)


def _functions(node: ast.AST, inside: bool = False) -> Iterator[tuple[ast.AST, bool]]:
  """Every function below `node`, and whether it is nested in another function."""
  for child in ast.iter_child_nodes(node):
    is_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
    if is_function:
      yield child, inside
    yield from _functions(child, is_function or (inside and not isinstance(child, ast.ClassDef)))


def test_imports_point_down(trees):
  wrong = []
  for path in SOURCES:
    for node, name in _imports(trees[path]):
      parts = name.split(".")
      outside = parts[0] not in ("maxlite", "") or parts[1] in (_own(path), "__version__")
      if not outside and (parts[0] == "" or _row(parts[1]) >= _row(_own(path))):
        wrong.append(f"{_place(path, node)}: {name}")
  assert not wrong


def test_only_training_and_later_rows_import_the_root_config(trees):
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
  assert not wrong


def test_few_annotations_are_any(trees):
  """Trees of arrays are `PyTree`, JSON is `Json`, values of config keys are `KeyValue`."""
  uses = []
  for path in SOURCES:
    uses += [_place(path, node) for node in trees[path].nodes(ast.Name) if node.id == "Any"]
  assert len(uses) <= MAX_ANY, uses


def test_no_default_outside_the_schema(trees):
  wrong = []
  for path in SOURCES:
    for node in trees[path].nodes(ast.Call):
      if re.match(r"getattr\([\w.]*(cfg|config)\w*, .*, ", ast.unparse(node)):
        wrong.append(_place(path, node))
  assert not wrong


def _has_text(node: ast.AST) -> bool:
  """Whether a node has a literal string in it."""
  constants = [part for part in ast.walk(node) if isinstance(part, ast.Constant)]
  return any(isinstance(constant.value, str) for constant in constants)


def test_no_case_on_the_name_of_a_model(trees):
  name_of_a_model = re.compile(r"(^|\.)(model_name|family|decoder_block)$")
  wrong = []
  for path in SOURCES:
    for node in trees[path].nodes(ast.Compare):
      sides = [ast.unparse(side) for side in (node.left, *node.comparators)]
      if any(map(name_of_a_model.search, sides)) and _has_text(node):
        wrong.append(f"{_place(path, node)}: give the config a field, or the family a table")
  assert not wrong


def test_sizes(trees):
  wrong = []
  for path in PROGRAMS:
    if path.read_text("utf-8").count("\n") > MAX_MODULE:
      wrong.append(f"{path.relative_to(ROOT)}: more than {MAX_MODULE} lines")
    for function, inside in _functions(trees[path].tree):
      lines = function.end_lineno - function.lineno + 1
      most = MAX_FUNCTION
      if inside:
        most = MAX_NESTED
      if lines > most:
        wrong.append(f"{_place(path, function)}: {function.name} has {lines} lines")
  assert not wrong


def _excess_by_folder(root: Path) -> dict[str, float]:
  """The excess over the goals of plain code: of a whole folder, and of its large subfolders.

  A subfolder with more than MIN_LINES lines of code may be a little denser, but no folder hides
  behind another.
  """
  densities = {path: density_of([path]) for path in root.rglob("*.py")}
  excess = {root.name: total(densities.values()).excess()}
  for folder in sorted({path.parent for path in densities} - {root}):
    density = total(value for path, value in densities.items() if folder in path.parents)
    if density.lines > MIN_LINES:
      excess[str(folder.relative_to(ROOT))] = density.excess() / FOLDER_TOLERANCE
  return excess


@pytest.mark.parametrize("folder", PLAIN_FOLDERS)
def test_code_is_plain(folder):
  """The figures and goals are those of tools/inspect/plainness.py."""
  excess = _excess_by_folder(ROOT / folder)
  denser = {name: value for name, value in excess.items() if value > 1}
  assert not denser, "run tools/inspect/plainness.py FOLDER --worst 10"


def test_tests_are_plain():
  """Except for expressions per line, of which numeric assertions have more than other code."""
  figures = density_of((ROOT / "tests").rglob("*.py")).figures()
  kinds = GOALS.keys() - {"nodes per line"}
  assert not [kind for kind in kinds if figures[kind] > GOALS[kind]]


DENSE_CODE = """
double = lambda x: 2 * x
a, b = 1, 2
c = a if b else 0
d = [y for x in [[1]] for y in x]
print(*d)
"""


def test_each_kind_of_dense_code_is_counted(tmp_path):
  (tmp_path / "dense.py").write_text(DENSE_CODE)
  density = density_of([tmp_path / "dense.py"])
  assert density.lines == 5
  kinds = ("named lambdas", "packed assignments", "conditional expressions")
  kinds += ("nested comprehensions", "star-splats")
  assert [density.counts[kind] for kind in kinds] == [1] * 5
  assert density.excess() == 200  # one nested comprehension in 5 lines; the goal is one in 1,000


def test_the_tour_lists_files_after_those_they_import(trees):
  core = re.findall(r"^#### `(maxlite/[\w/]+\.py)`", TOUR.read_text("utf-8"), re.MULTILINE)
  assert len(core) == len(set(core)) > 20
  assert not [path for path in core if not (ROOT / path).is_file()]
  early = []
  for number, path in enumerate(core):
    if path.endswith("/moe_block.py"):  # its steps follow it in the order of its calls
      continue
    imported = set()
    for _, name in _imports(trees[ROOT / path]):
      for module in (name, name.rpartition(".")[0]):
        imported.add(module.replace(".", "/") + ".py")
    early += [f"{path} before {later}" for later in core[number + 1 :] if later in imported]
  assert not early


def test_no_file_is_a_catch_all():
  names = re.compile(r"(.*_)?(utils?|common|helpers?|misc|old)")
  assert not [path for path in PROGRAMS if names.fullmatch(path.stem)]


def test_file_names_are_unique():
  registries = set()
  for pattern in REGISTRY_FOLDERS:
    registries.update(PACKAGE.glob(pattern))
  paths = collections.defaultdict(list)
  for path in SOURCES:
    if path.parent not in registries and not path.stem.startswith("__"):
      paths[path.stem].append(str(path.relative_to(ROOT)))
  assert not [same for same in paths.values() if len(same) > 1]


def test_class_names_are_unique(trees):
  places = collections.defaultdict(list)
  for path in SOURCES:
    for node in trees[path].nodes(ast.ClassDef):
      places[node.name].append(_place(path, node))
  assert not [same for same in places.values() if len(same) > 1]


def test_private_modules_of_jax_and_of_orbax_are_imported_in_one_place_each(trees):
  private = re.compile(r"(jax|jaxlib|flax|orbax|optax)\b.*\._")
  wrong = []
  for path in SOURCES:
    if path in (PRIVATE_JAX, PRIVATE_ORBAX):
      continue
    for node, name in _imports(trees[path]):
      if private.match(name):
        wrong.append(f"{_place(path, node)}: {name}")
  assert not wrong


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


def test_no_unsafe_deserialization(trees):
  wrong = []
  for path in PROGRAMS:
    for node, name in _imports(trees[path]):
      if name.split(".")[0] in UNSAFE_MODULES:
        wrong.append(f"{_place(path, node)}: {name}")
    for node in trees[path].nodes(ast.Call):
      unsafe = any(_is_true(keyword, "allow_pickle") for keyword in node.keywords)
      if unsafe or _dotted(node.func) in UNSAFE_CALLS:
        wrong.append(f"{_place(path, node)}: {ast.unparse(node.func)}")
  assert not wrong


def test_check_vma_false_has_a_reason(trees):
  wrong = []
  for path in PROGRAMS:
    lines = path.read_text("utf-8").splitlines()
    for node in trees[path].nodes(ast.keyword):
      if node.arg == "check_vma" and ast.unparse(node.value) == "False":
        here = lines[max(node.lineno - 2, 0) : node.lineno]
        if not any("#" in line for line in here):
          wrong.append(_place(path, node))
  assert not wrong


def test_no_path_is_of_one_machine_or_leaves_the_repository():
  wrong = []
  for path in TEXTS:
    text = path.read_text("utf-8")
    depth = len(path.relative_to(ROOT).parts) - 1
    wrong += [(path, p) for p in re.findall(r"(?<![\w.~}])/(?:home|root|work|Users)/\S+", text)]
    leaving = re.findall(r"(?<![\w.])((?:\.\./)+)[\w.-]", text)
    wrong += [(path, up) for up in leaving if up.count("../") > depth]
  assert not wrong
