"""Nothing that is printed can have characters that a terminal obeys, whoever wrote the text."""

import io
import re
import sys
from pathlib import Path

import pytest
from rich.table import Table

import maxlite
from maxlite.config import load_config
from maxlite.errors import (
  UserError,
  escape,
  escape_controls,
  exit_on_user_error,
  get_logger,
  prepare_process,
  write_line,
)
from maxlite.metrics.waits import print_to_stderr
from maxlite.metrics.writers import open_console

# The start of a sequence (ESC, C1), a bell, a backspace, a line to overwrite, text from right to
# left, and bytes that are no UTF-8.
HOSTILE = "\x1b]0;title\x07\x1b[31m\x9b2J\x08\r\x00\x7f\x85\u202e\ufeff\udcff"


def assert_safe(text, *, kept=""):
  assert kept in text
  assert all(character.isprintable() or character in "\n\t" for character in text), ascii(text)


@pytest.mark.parametrize("text", ["plain", "Ünïcode 漢字 🙂", "two\nlines\twith a tab", ""])
def test_printable_text_is_kept(text):
  assert escape(text) == escape_controls(text) == text


def test_every_other_character_is_escaped():
  for code in range(0x110000):
    character = chr(code)
    assert (escape(character) == character) == (character.isprintable() or character in "\n\t")
    assert_safe(escape(character))


def test_joiners_of_scripts_are_text_and_controls_are_not():
  assert escape_controls("\u0646\u200c\u0645 \x1b[31m") == "\u0646\u200c\u0645 \\x1b[31m"


def test_an_error_is_one_safe_line(capsys):
  error = UserError(f"key{HOSTILE}=1: two\nlines")
  assert_safe(str(error), kept="\\x1b]0;title\\x07")
  assert "\n" not in str(error)
  with pytest.raises(SystemExit), exit_on_user_error("maxlite.train"):
    raise error
  assert capsys.readouterr().err == f"maxlite.train: {error}\n"


def test_an_error_of_a_file_is_one_safe_line(capsys):
  with pytest.raises(SystemExit), exit_on_user_error("maxlite.train"):
    raise PermissionError(13, "Permission denied", f"x{HOSTILE}\ny")
  error = capsys.readouterr().err
  assert error.count("\n") == 1
  assert_safe(error, kept="Permission denied")


@pytest.mark.parametrize("where", ["argument", "flag", "file", "value", "preset"])
def test_a_mistake_of_a_config_is_one_safe_line(where, tmp_path):
  text = HOSTILE.replace("\x00", "").replace("\udcff", "")
  file = tmp_path / "c.yml"
  escaped = "".join(f"\\u{ord(character):04x}" for character in text)
  file.write_text(f'"a{escaped}": 1\n')
  argument = {
    "argument": f"a{text}=1",
    "flag": f"--a{text}=1",
    "file": str(file),
    "value": f"steps={text}",
    "preset": f"model_name={text}",
  }[where]
  with pytest.raises(UserError) as caught:
    load_config([argument])
  assert_safe(str(caught.value), kept="x1b")


def test_lines_of_the_console_are_safe(capsys):
  console = open_console()
  table = Table("member", f"h{HOSTILE}")
  table.add_row(f"a{HOSTILE}", "1.0")
  console.print(f"step 1/2\nmember {HOSTILE}")
  console.print(table)
  output = capsys.readouterr().out
  assert_safe(output, kept="step 1/2\nmember \\x1b]0;title\\x07")
  assert output.count("\\x1b]0;") == 3


def test_lines_of_other_writers_are_safe(capsys):
  write_line(f"a  b {HOSTILE}")
  print_to_stderr(HOSTILE)
  logger = get_logger("maxlite.a_module")
  logger.warning("row %s of %s", HOSTILE, "file")
  error = capsys.readouterr().err
  assert_safe(error, kept="a  b \\x1b]0;title\\x07")


def test_a_log_record_is_escaped_once(caplog):
  logger = get_logger("maxlite.a_module")
  get_logger("maxlite.a_module")
  logger.warning("100%% of %s", "a\x1b")
  assert caplog.messages == ["100% of a\\x1b"]


def test_tracebacks_are_safe(capsys, monkeypatch):
  monkeypatch.setattr(sys, "excepthook", sys.excepthook)
  monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
  prepare_process("maxlite.train")
  try:
    raise RuntimeError(HOSTILE)
  except RuntimeError as error:
    sys.excepthook(RuntimeError, error, error.__traceback__)
  error = capsys.readouterr().err
  assert_safe(error, kept="RuntimeError: \\x1b]0;title\\x07")
  assert error.startswith("Traceback (most recent call last):\n")


def test_abandoned_writes_are_not_reported(capsys, monkeypatch):
  """Threads of TensorStore report a closed event loop for each, after the error of the first."""
  monkeypatch.setattr(sys, "excepthook", sys.excepthook)
  monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
  prepare_process("maxlite.train")

  class Raising:
    def __init__(self, text):
      self.text = text

    def __del__(self):
      raise RuntimeError(self.text)

  for text in ("Event loop is closed", "another"):
    Raising(text)
  shown = capsys.readouterr().err
  assert "another" in shown
  assert "closed" not in shown


@pytest.mark.parametrize(
  "error",
  [
    MemoryError("4 GB"),
    ImportError("a.so: failed to map segment from shared object"),
    RuntimeError("can't start new thread"),
    OSError(12, "Cannot allocate memory"),
  ],
)
def test_a_lack_of_memory_is_one_line(error, capsys, monkeypatch):
  monkeypatch.setattr(sys, "excepthook", sys.excepthook)
  monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
  prepare_process("maxlite.train")
  shown = RuntimeError("long text of a library")
  shown.__cause__ = error
  sys.excepthook(RuntimeError, shown, None)
  line = capsys.readouterr().err
  assert line.startswith(f"maxlite.train: out of memory ({type(error).__name__}: ")
  assert line.count("\n") == 1


def test_generated_text_is_safe_in_a_terminal_alone(monkeypatch):
  from maxlite.inference.generation import CompletionText, _write_text

  for is_terminal in (True, False):
    stream = io.StringIO()
    stream.isatty = lambda is_terminal=is_terminal: is_terminal
    monkeypatch.setattr(sys, "stdout", stream)
    _write_text([CompletionText(None, "x\x07\u200dy", "")])
    expected = "x\\x07\u200dy\n" if is_terminal else "x\x07\u200dy\n"
    assert stream.getvalue() == expected


# Text that these write is the package's own, or is meant for programs.
_OWN_TEXT = {
  "maxlite/__main__.py",
  "maxlite/errors.py",
  "maxlite/compare.py",
  "maxlite/config/load.py",
  "maxlite/convert.py",
  "maxlite/data/__main__.py",
  "maxlite/data/sources/template_worker.py",
  "maxlite/diff.py",
  "maxlite/inference/generation.py",
  "maxlite/metrics/writers.py",  # JSON, which escapes all but ASCII
}


def test_there_is_no_other_way_to_print():
  root = Path(maxlite.__file__).parents[1]
  printing = r"std(out|err)\.write|(?<![.\w])(?<!def )print\(|(?<!Safe)Console\(|getLogger\(__"
  found = set()
  for path in (root / "maxlite").rglob("*.py"):
    if re.search(printing, path.read_text("utf-8")):
      found.add(path.relative_to(root).as_posix())
  assert found == _OWN_TEXT
