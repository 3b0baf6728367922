"""The tool that runs the commands of docs/models.md reports exports with other logits."""

import shutil
import sys
from pathlib import Path

import pytest
from support.needs import needs_transformers

pytestmark = [
  pytest.mark.hf,
  needs_transformers,
]
FIXTURES = Path(__file__).resolve().parent / "hf_fixtures"


@pytest.fixture
def hf_commands():
  from tools.inspect import hf_commands

  return hf_commands


@pytest.mark.parametrize(("error", "code"), [(1e-7, 0), (1e-3, 1), (float("nan"), 1)])
def test_an_export_with_other_logits_fails(monkeypatch, tmp_path, capsys, hf_commands, error, code):
  monkeypatch.setattr(hf_commands.Shell, "run", lambda *_: "loss 4.0  lr 1e-3, eval_loss 4.0")
  monkeypatch.setattr(hf_commands, "write_tokenizer", lambda folder: None)
  monkeypatch.setattr(hf_commands, "logits_error", lambda run, export: error)
  monkeypatch.setattr(sys, "argv", ["hf_commands", "--out", str(tmp_path), "llama"])
  assert hf_commands.main() == code
  assert ("failed: the logits" in capsys.readouterr().out) == bool(code)


@pytest.mark.slow
def test_logits_of_mistral4_are_compared(tmp_path, hf_commands):
  folder = tmp_path / "mistral4"
  shutil.copytree(FIXTURES / "mistral4", folder)
  hf_commands.write_tokenizer(folder)
  assert hf_commands.logits_error(folder, folder) < hf_commands.TOLERANCE
