"""The notebook of docs/examples runs in Jupyter's kernel, and keeps the outputs of such a run."""

import importlib.util
import json
import os
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "docs" / "examples" / "first_run.ipynb"
HAS_JUPYTER = all(importlib.util.find_spec(name) for name in ("nbclient", "ipykernel"))


def outputs_of(cells):
  outputs = []
  for cell in cells:
    outputs += cell.get("outputs", ())
  return outputs


def printed(cells):
  text = ""
  for output in outputs_of(cells):
    text += "".join(output.get("text", ""))
  return text


def test_the_outputs_are_those_of_a_run():
  cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
  outputs = outputs_of(cells)
  types = {output["output_type"] for output in outputs}
  assert types == {"stream", "display_data", "execute_result"}
  assert re.search(r"^step 100/100  loss  \d.*^Leaderboard", printed(cells), re.DOTALL | re.M)
  assert "\x1b" not in printed(cells)  # colors
  assert sum("image/png" in output.get("data", {}) for output in outputs) == 2


@pytest.mark.skipif(not HAS_JUPYTER, reason="needs Jupyter: pip install -e .[notebook]")
def test_the_notebook_runs(tmp_path, monkeypatch):
  import nbformat
  from nbclient import NotebookClient

  monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
  monkeypatch.setenv("XLA_FLAGS", "")  # one device
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  notebook = nbformat.read(NOTEBOOK, as_version=4)
  kept = printed(notebook.cells)
  place = {"metadata": {"path": str(tmp_path)}}
  NotebookClient(notebook, timeout=600, kernel_name="python3", resources=place).execute()

  def losses(text):
    return re.findall(r"^step +\d+/\d+  (?:eval )?loss.*?[.\d]{6}", text, re.M)

  assert losses(printed(notebook.cells)) == losses(kept)
  assert {path.name for path in (tmp_path / "runs").iterdir()} >= {"llama", "rates"}
