"""The commands of README.md and the docs parse, and the tutorial's run as they are written."""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from maxlite import convert
from maxlite.config import load_config

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "AGENTS.md", *(ROOT / "docs").rglob("*.md")])
TUTORIAL = ROOT / "docs" / "tutorial.md"
CONFIGURED = ("train", "evaluate", "generate", "serve", "plan", "audit", "convert")
# Words of a command line that are not configuration: see maxlite/plan.py and maxlite/convert.py.
WORDS = {"plan": {"estimate", "phases"}, "convert": set(convert.COMMANDS)}
PLACEHOLDER = re.compile(r"\.\.\.|\[key=value|key=value|<|\$\(")


def commands(page: Path) -> Iterator[tuple[str, list[str]]]:
  """(place, words) of the commands in the indented blocks of a page."""
  text = page.read_text("utf-8").replace("\\\n", " ")
  for number, line in enumerate(text.splitlines(), start=1):
    if line.startswith("    ") and not PLACEHOLDER.search(line):
      try:
        words = shlex.split(re.sub(r" (2?>|\||&).*", "", line), comments=True)
      except ValueError:  # not a command
        continue
      while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
      if words[:1] in (["python"], ["bash"], ["pytest"]):
        yield f"{page.name} line {number}: {line.strip()}", words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_the_docs_are_valid(page, tmp_path, monkeypatch):
  link_folders(tmp_path)
  for name in ("tokenizer.json", "h100.txtpb"):  # which the user has
    (tmp_path / name).touch()
  monkeypatch.chdir(tmp_path)
  for place, (program, *words) in commands(page):
    if program == "python" and words[:1] == ["-m"]:
      module = words[1]
      assert not module.startswith("maxlite.") or importlib.util.find_spec(module), place
      name = module.removeprefix("maxlite.")
      keys = [word for word in words[2:] if word not in WORDS.get(name, ())]
      if name == "convert":
        keys = keys[len(convert.COMMANDS[words[2]]) :]  # its folders
      if name in CONFIGURED:
        check_keys(place, keys)
    elif program in ("python", "bash"):
      assert (ROOT / words[0]).is_file(), place
    else:
      paths = [word for word in words if word.startswith("tests")]
      assert all((ROOT / path).exists() for path in paths), place


def check_keys(place: str, words: list[str]) -> None:
  """Fail unless all words are configs of this repository, keys and their values."""
  # A key whose value is in an object store would be looked up there.
  words = [word for word in words if not word.startswith("--help") and "://" not in word]
  own = [word for word in words if not word.endswith(".yml") or (ROOT / word).is_file()]
  assert all(word in own or word.startswith("runs/") for word in words), place
  if any(word.startswith("configs/chat/") for word in own):
    own.append("chat_template_path=configs/chat/plain.jinja")
  try:
    load_config(own, needs_data=False)
  except ValueError as error:
    pytest.fail(f"{place}: {error}")


def link_folders(folder: Path) -> None:
  for name in ("configs", "docs"):
    (folder / name).symlink_to(ROOT / name)


@pytest.mark.slow
def test_the_tutorial_runs_as_written(tmp_path):
  link_folders(tmp_path)
  commands_only = re.sub(r"^```.*?^```", "", TUTORIAL.read_text("utf-8"), flags=re.DOTALL | re.M)
  lines = [line for line in commands_only.splitlines() if line.startswith("    ")]
  script = "set -e -o pipefail\n" + "\n".join(line.strip() for line in lines)
  bash = shutil.which("bash")
  environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
  environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"  # of its `python`
  subprocess.run([bash, "-c", script], cwd=tmp_path, env=environment, check=True, timeout=1800)
  for name in ("runs/llama/curves.png", "runs/moe/expert_load.png", "moe_hf/config.json"):
    assert (tmp_path / name).exists()
