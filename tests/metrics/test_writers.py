"""Writers keep every row exactly once across kills, and console lines are readable."""

import datetime
import io
import json
import os
import resource
import signal
import threading
import time

import numpy as np
import pytest
from rich.console import Console
from rich.table import Table
from tensorboardX.proto.event_pb2 import Event, SessionLog

from maxlite.errors import UserError
from maxlite.metrics.step_row import TIME
from maxlite.metrics.writers import (
  METRICS,
  ConsoleWriter,
  JsonConsoleWriter,
  JsonlWriter,
  TensorBoardWriter,
  Writers,
  open_console,
  read_rows,
)

TRAINING = {
  "step": 10,
  "loss": 2.5,
  "learning_rate": 1e-3,
  "grad_norm": 0.5,
  "tokens_per_second_per_device": 12345.0,
  "tflops_per_device": 0.25,
}


def write_rows(path, resume_step, steps):
  writer = JsonlWriter(path, resume_step)
  for step in steps:
    writer.write({"loss": step / 3, "step": step})
  writer.close()


def test_rows_round_trip_in_order(tmp_path):
  write_rows(tmp_path / "run" / "metrics.jsonl", -1, range(5))
  rows = read_rows(tmp_path / "run" / "metrics.jsonl")
  assert rows == [{"step": step, "loss": step / 3} for step in range(5)]


def test_resuming_drops_the_rows_after_the_step(tmp_path):
  path = tmp_path / "metrics.jsonl"
  write_rows(path, -1, range(10))
  whole = path.read_bytes()
  write_rows(path, 4, range(5, 10))
  assert path.read_bytes() == whole
  assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("cut", [1, 5, 15])
def test_only_an_incomplete_last_line_is_dropped(tmp_path, cut):
  path = tmp_path / "metrics.jsonl"
  write_rows(path, -1, range(10))
  whole = path.read_bytes()
  path.write_bytes(whole[:-cut])
  assert [row["step"] for row in read_rows(path)] == list(range(9))
  write_rows(path, 9, [9])
  assert path.read_bytes() == whole


def test_an_invalid_line_is_an_error_and_the_file_is_kept(tmp_path):
  path = tmp_path / "metrics.jsonl"
  path.write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
  with pytest.raises(ValueError, match=r"metrics\.jsonl line 2 is not a row of metrics"):
    JsonlWriter(path, 1)
  assert path.read_text() == '{"step": 1}\nnonsense\n{"step": 3}\n'


@pytest.mark.parametrize(
  "line",
  [
    "",
    "[]",
    "null",
    "{}",
    '{"step": 1.5}',
    '{"step": true}',
    '{"step": -1}',
    '{"step": "1"}',
    '{"step": 1, "loss": "2"}',
    '{"step": 1, "loss": [2]}',
    '{"step": 1, "loss": NaN}',
    '{"step": 1, "loss": 1e999}',
    f'{{"step": 1, "loss": {"9" * 400}}}',
    f'{{"step": 1, "loss": {"9" * 5000}}}',
    "[" * 100_000,
    '{"step": 1, "loss": ' + "[" * 100_000,
    "\x00" * 100,
  ],
)
@pytest.mark.parametrize("is_last", [True, False])
def test_a_complete_line_is_a_row_of_numbers_or_an_error(tmp_path, line, is_last):
  path = tmp_path / "metrics.jsonl"
  path.write_text(f'{{"step": 0}}\n{line}\n' + '{"step": 2}\n' * (not is_last))
  with pytest.raises(UserError, match=r"metrics\.jsonl line 2 is not a row of metrics"):
    read_rows(path, METRICS)


def test_a_line_without_end_is_an_error(tmp_path):
  path = tmp_path / "metrics.jsonl"
  path.write_text('{"step": 0}\n')
  os.truncate(path, 1 << 40)  # sparse: zeros
  with pytest.raises(UserError, match=r"line 2 is not a row of metrics"):
    read_rows(path)


@pytest.mark.parametrize("name", ["eval_loss", "eval_ema_loss", "step"])
def test_no_changed_digit_of_a_held_out_loss_is_read(tmp_path, name):
  path = tmp_path / "metrics.jsonl"
  writer = JsonlWriter(path, -1, METRICS)
  row = {"step": 12, "loss": 2.5, "eval_loss": 1.25, "eval_ema_loss": 1.75}
  writer.write(row)
  writer.close()
  assert read_rows(path, METRICS) == [row]
  whole = path.read_text()
  first = whole.index(f'"{name}": ') + len(name) + 4
  digits = [n for n in range(first, first + len(str(row[name]))) if whole[n].isdigit()]
  assert digits
  for n in digits:
    path.write_text(whole[:n] + str((int(whole[n]) + 1) % 10) + whole[n + 1 :])
    with pytest.raises(UserError, match=r"line 1 has other values than were written \(crc32\)"):
      read_rows(path, METRICS)


def test_rows_of_an_earlier_version_are_read(tmp_path):
  path = tmp_path / "metrics.jsonl"
  path.write_text('{"step": 1, "eval_loss": 1.5}\n')
  write = JsonlWriter(path, 1, METRICS)
  write.close()
  assert read_rows(path, METRICS) == [{"step": 1, "eval_loss": 1.5}]


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to(path.parent / "victim")])
def test_rows_are_not_written_through_links_and_pipes(tmp_path, make):
  (tmp_path / "victim").write_text("precious")
  make(tmp_path / "metrics.jsonl")
  for use in (read_rows, lambda path: JsonlWriter(path, 0)):
    with pytest.raises(UserError, match=r"metrics\.jsonl is (not a file|a link to .*victim)"):
      use(tmp_path / "metrics.jsonl")
  assert (tmp_path / "victim").read_text() == "precious"


def test_a_full_disk_names_the_file(tmp_path):
  writer = JsonlWriter(tmp_path / "metrics.jsonl", -1)
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
  resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
  try:
    with pytest.raises(OSError, match=r"metrics\.jsonl") as caught:
      writer.write({"step": 1, "text": "x" * 200})
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, before)
  writer.close()
  assert caught.value.filename == str(tmp_path / "metrics.jsonl")


def test_json_is_strict_and_keys_are_sorted(tmp_path):
  writer = JsonlWriter(tmp_path / "metrics.jsonl", -1)
  writer.write({"b": float("nan"), "a": float("-inf"), "step": 1})
  writer.write({"a": 1.0, "step": 2, "b": 2})
  writer.flush()
  lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
  assert lines == ['{"step": 1, "a": null, "b": null}', '{"step": 2, "a": 1.0, "b": 2}']
  writer.close()


def test_flushed_rows_survive_a_kill(tmp_path):
  writer = JsonlWriter(tmp_path / "metrics.jsonl", -1)
  writer.write({"step": 1})
  writer.flush()
  assert read_rows(tmp_path / "metrics.jsonl") == [{"step": 1}]
  writer.close()


def console_text(rows, *, terminal=False, phases=()):
  file = io.StringIO()
  console = Console(file=file, force_terminal=terminal, width=60)
  writer = ConsoleWriter(300, -1, console, phases)
  for row in rows:
    writer.write(row)
  writer.close()
  return file.getvalue()


def test_console_lines_without_a_terminal_are_plain_and_aligned():
  later = TRAINING | {"step": 300, "loss": 12.25, "grad_norm": 1234.5, "skipped": 0}
  text = console_text([TRAINING, later])
  first, second = text.splitlines()
  assert "\x1b" not in text
  assert "\r" not in text
  assert first.startswith("step  10/300  loss  2.5000  lr 1.00e-03  |grad|      0.5")
  assert first.endswith("12,345 tok/s/device    0.250 TFLOP/s/device")
  assert [first.index(word) for word in ("lr", "|grad|", "tok/s", "TFLOP")] == [
    second.index(word) for word in ("lr", "|grad|", "tok/s", "TFLOP")
  ]


def test_console_shows_the_metrics_of_a_row():
  row = TRAINING | {"mfu": 0.415, "expert_imbalance": 1.25, "skipped": 2, "loss": float("nan")}
  line = console_text([row])
  for cell in ("loss     nan", "MFU 41.5%", "imbalance  1.25", "skipped 2"):
    assert cell in line


def test_console_evaluation_line():
  row = TRAINING | {"step": 100, "eval_loss": 1.5, "eval_bits_per_byte": 2.1640}
  training, evaluation = console_text([row]).splitlines()
  assert training.startswith("step 100/300  loss  2.5000")
  assert evaluation == "eval 100/300  loss  1.5000  bits/byte 2.1640"


def test_console_names_phases_and_counts_accepted_drafts():
  drafts = {"eval_acceptance_1": 0.5, "eval_acceptance_2": 0.25, "eval_accepted_length": 0.625}
  rows = [
    TRAINING | {"phase": 0},
    TRAINING | {"phase": 1, "draft_loss": 0.5, "eval_loss": 1.5} | drafts,
  ]
  fit, match, evaluation = console_text(rows, phases=["fit", "match"]).splitlines()
  assert fit.startswith("step  10/300  fit    loss  2.5000  lr")
  assert match.startswith("step  10/300  match  loss  2.5000  drafts  0.5000  lr")
  assert evaluation.endswith("loss  1.5000  drafts accepted 50.0% 25.0%  0.62 in a chain")


def test_lines_of_a_file_have_the_remaining_time():
  clock = [0.0]
  console = Console(file=io.StringIO(), width=60, get_time=lambda: clock[0])
  writer = ConsoleWriter(300, -1, console)
  for step in (1, 10, 20):
    clock[0] += 40.0
    writer.write(TRAINING | {"step": step})
  writer.close()
  first, _, last = console.file.getvalue().splitlines()
  assert "left" not in first
  assert last.endswith("  0:19:39 left")  # 280 steps at 19 steps in 80 s


def test_a_terminal_has_a_progress_bar_below_the_lines():
  text = console_text([TRAINING], terminal=True)
  assert "\x1b" in text
  assert "10/300" in text
  assert "left" in text


def tensorboard_events(directory):
  for path in sorted(directory.iterdir()):
    content = path.read_bytes()
    while content:
      length = int.from_bytes(content[:8], "little")
      yield Event.FromString(content[12 : 12 + length])
      content = content[12 + length + 4 :]


def test_tensorboard_has_every_value_and_purges_on_resume(tmp_path):
  writer = TensorBoardWriter(tmp_path, 4, "steps: 9")
  assert not list(tmp_path.iterdir())  # the library is imported with the first row
  writer.write({"step": 5, "loss": 2.5, "skipped": 1})
  writer.flush()
  writer.close()
  events = list(tensorboard_events(tmp_path))
  scalars = set()
  texts = []
  for event in events:
    for value in event.summary.value:
      if value.tag.startswith("config"):
        texts.append((event.step, value.tensor.string_val[0]))
      else:
        scalars.add((value.tag, event.step, value.simple_value))
  assert scalars == {("loss", 5, 2.5), ("skipped", 5, 1.0)}
  assert texts == [(4, b"steps: 9")]
  assert [event.step for event in events if event.session_log.status == SessionLog.START] == [5]


def test_writers_forward_all_calls(tmp_path):
  paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
  writers = Writers([JsonlWriter(path, -1) for path in paths])
  writers.write({"step": 1})
  writers.flush()
  assert [read_rows(path) for path in paths] == [[{"step": 1}]] * 2
  writers.close()
  assert json.loads(paths[1].read_text()) == {"step": 1}


def test_expert_loads_have_a_separate_file_that_resumes_like_rows(tmp_path):
  def write(resume_step, steps):
    paths = (tmp_path / "metrics.jsonl", tmp_path / "expert_load.jsonl")
    rows, loads = (JsonlWriter(path, resume_step) for path in paths)
    writers = Writers([rows], loads)
    for step in steps:
      writers.write({"step": step}, np.float32([[step, 3], [2, 2]]))
    writers.flush()
    writers.close()
    return [path.read_text() for path in paths]

  whole = write(-1, range(1, 6))
  assert write(3, [4, 5]) == whole
  metrics, loads = (read_rows(path) for path in sorted(tmp_path.iterdir())[::-1])
  assert metrics == [{"step": step} for step in range(1, 6)]
  assert loads == [{"step": step, "expert_load": [[step, 3], [2, 2]]} for step in range(1, 6)]


def test_a_dense_model_has_no_loads(tmp_path):
  writers = Writers([JsonlWriter(tmp_path / "metrics.jsonl", -1)])
  writers.write({"step": 1}, None)
  writers.close()
  assert read_rows(tmp_path / "metrics.jsonl") == [{"step": 1}]


def test_a_notebook_gets_plain_text(monkeypatch, capsys):
  monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
  monkeypatch.setenv("FORCE_COLOR", "1")  # as Jupyter sets it
  console = open_console()
  console.print("[bold] " + "x" * 300, style="red")
  assert capsys.readouterr().out == "[bold] " + "x" * 300 + "\n"
  assert not console.is_terminal


def test_a_line_ends_with_the_time_of_its_row():
  row = TRAINING | {TIME: 1_790_000_000.4}
  local = datetime.datetime.fromtimestamp(1_790_000_000)
  assert console_text([row]).splitlines()[0].endswith(f"  {local:%Y-%m-%d %H:%M:%S}")
  assert f"  {local:%H:%M:%S}" in console_text([row], terminal=True)


def test_json_lines_have_rows_and_messages(capsys):
  console = open_console(log_format="json")
  console.print("data: [1, 2]", "more")
  console.print("first\nsecond", style="red")
  console.print(Table("a column"), soft_wrap=False)
  writer = JsonConsoleWriter(console)
  writer.write({"step": 3, "loss": float("nan"), TIME: 1_790_000_000.4})
  console.print_row({"step": 4}, member="a")
  lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
  messages = [line["message"] for line in lines if "message" in line]
  assert messages[:3] == ["data: [1, 2] more", "first", "second"]
  assert any("a column" in message for message in messages[3:])
  row, of_member = lines[-2:]
  assert row.pop("time") == "2026-09-21T14:13:20.400+00:00"
  assert row == {"step": 3, "loss": None, TIME: 1_790_000_000.4}
  assert (of_member["member"], of_member["step"]) == ("a", 4)
  open_console(quiet=True, log_format="json").print("nothing")
  assert capsys.readouterr().out == ""


def test_rows_are_uploaded_in_a_thread_and_before_a_flush_returns(tmp_path):
  uploaded = []
  may_upload = threading.Event()

  def upload():
    may_upload.wait(10)
    uploaded.append(len(read_rows(tmp_path / "metrics.jsonl")))

  writers = Writers([JsonlWriter(tmp_path / "metrics.jsonl", -1)], upload=upload, uploads_rows=True)
  for step in range(5):
    writers.write({"step": step})  # does not wait
  may_upload.set()
  writers.flush()
  assert uploaded[-1] == 5
  assert len(uploaded) <= 6
  writers.write({"step": 5})
  deadline = time.monotonic() + 10
  while uploaded[-1] < 6 and time.monotonic() < deadline:
    time.sleep(0.01)
  assert uploaded[-1] == 6
  writers.write({"step": 6})
  writers.close()
  assert uploaded[-1] == 7


def test_an_error_of_an_upload_ends_the_run_at_the_next_flush(tmp_path):
  tried = threading.Event()

  def upload():
    tried.set()
    raise UserError("taken over")

  writers = Writers([], upload=upload, uploads_rows=True)
  writers.write({"step": 1})
  assert tried.wait(10)
  with pytest.raises(UserError, match="taken over"):
    writers.flush()
  writers.close()
