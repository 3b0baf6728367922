"""The Python blocks of docs/api.md run in order, as they are written."""

import re
import runpy
import sys
from pathlib import Path

import pytest
from support.tiny_run import empty_plots, shared_programs

from maxlite import registry

PAGE = Path(__file__).parents[2] / "docs" / "api.md"


@pytest.mark.slow
def test_the_blocks_of_the_page_run(tmp_path, monkeypatch):
  (tmp_path / "data").mkdir()
  for name in "abcd":
    (tmp_path / "data" / f"{name}.txt").write_text("to be or not to be\n" * 200)
  blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.DOTALL | re.M)
  (plugin,) = [block for block in blocks if block.startswith("# my_plugin.py\n")]
  (tmp_path / "my_plugin.py").write_text(plugin)
  script = tmp_path / "page.py"
  script.write_text("\n".join(block for block in blocks if block != plugin))
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, "path", [*sys.path])
  try:
    with empty_plots(), shared_programs():
      names = runpy.run_path(str(script))
  finally:
    registry.SCHEDULES.pop("one_over_sqrt", None)
    sys.modules.pop("my_plugin", None)
  assert names["best"].step == 1
