"""docs/config.md is generated from the schema, and docs/from_maxtext.md from MaxText's keys."""

import subprocess
import sys
from pathlib import Path

import pytest

from maxlite.config.maxtext.answers import maxtext_keys

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("tool", ["config_reference", "maxtext_reference"])
def test_reference_is_up_to_date(tool):
  command = [sys.executable, f"tools/inspect/{tool}.py", "--check"]
  result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
  assert result.returncode == 0, result.stdout + result.stderr


def test_the_page_for_users_of_maxtext_has_each_of_its_keys():
  page = (ROOT / "docs" / "from_maxtext.md").read_text("utf-8")
  for key in Path(__file__).with_name("maxtext_keys.txt").read_text("utf-8").split():
    assert f"`{key}`" in page, key
  assert f"and {len(maxtext_keys().same_name)}\nof its keys by name" in page
