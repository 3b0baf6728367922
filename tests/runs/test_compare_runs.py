"""maxlite.compare: which run is better on held-out documents, or that it is chance."""

import json
import sys

import numpy as np
import pytest
from support.tiny_run import start

import maxlite
from maxlite.compare import main
from maxlite.errors import UserError
from maxlite.runs.compare_runs import _common_unit

pytestmark = pytest.mark.usefixtures("fast_programs")


@pytest.fixture(scope="module")
def documents(tmp_path_factory):
  folder = tmp_path_factory.mktemp("data") / "held_out"
  folder.mkdir()
  (folder.parent / "train.txt").write_text("to be or not to be\n" * 20)
  draw = np.random.default_rng(0)
  for n in range(24):
    words = draw.choice(["to", "be", "or", "not"], draw.integers(8, 40))
    (folder / f"{n:02}.txt").write_text(" ".join(words))
  return folder


def text(documents):
  """Keys with which a run reads these documents."""
  return {
    "dataset_type": "text",
    "dataset_path": str(documents.parent / "train.txt"),
    "eval_dataset_path": str(documents),
  }


def test_a_run_is_not_distinguishable_from_its_copy(finished, copy, documents, monkeypatch, capsys):
  runs = [finished[0] / "run", copy / "run"]
  report = documents.parent / "compare.json"
  keys = [f"{key}={value}" for key, value in text(documents).items()]
  keys.append(f"json={report}")
  monkeypatch.setattr(sys, "argv", ["maxlite.compare", *map(str, runs), *keys])
  assert main() == 0
  lines = capsys.readouterr().out.splitlines()
  assert lines[0].split()[:3] == ["run", "nats/token", "difference"]
  assert lines[1].endswith("best")
  assert lines[2].split()[2:] == ["+0.0000", "+0.0000", "to", "+0.0000", "not", "distinguishable"]
  assert lines[3].startswith("over 24 documents")
  found = json.loads(report.read_text())
  assert [row["verdict"] for row in found["runs"]] == ["best", "not distinguishable"]
  expected = maxlite.open_run(runs[0], **text(documents)).evaluate()["eval_ema_loss"]
  np.testing.assert_allclose(found["runs"][0]["loss"], expected, rtol=0.05)  # rows cut documents


@pytest.mark.slow
def test_an_untrained_run_is_worse(finished, folder, documents):
  code, _ = start(folder, steps=1, learning_rate=0.0)
  assert code == 0
  found = maxlite.compare(folder / "run", finished[0] / "run", **text(documents))
  best, worst = found.runs
  assert best.run.endswith("finished/run")
  assert worst.verdict == "worse"
  assert worst.difference.mean == pytest.approx(worst.loss - best.loss)


def test_runs_that_hold_out_other_documents_are_refused(finished):
  with pytest.raises(UserError, match="takes two runs or more"):
    maxlite.compare(finished[0] / "run")
  with pytest.raises(UserError, match=r"is not a run folder: it has no config\.yml"):
    maxlite.compare(finished[0], finished[0])
  one = np.array([[3.0, 9.0, 5.0], [4.0, 12.0, 6.0]])
  for other, message in (
    (one[:1], "b holds out 1 documents, and a 2: compare them on the same ones"),
    (one + np.array([[0, 100, 0]]), "b and a hold out other documents"),
  ):
    with pytest.raises(UserError, match=message):
      _common_unit(["a", "b"], [one, other])


def test_other_tokenizers_are_compared_in_bits_per_byte():
  one = np.array([[3.0, 9.0, 5.0], [4.0, 12.0, 6.0]])
  sums_RD, weights_RD, unit = _common_unit(["a", "b"], [one, one * [[2, 1, 3]]])
  assert unit == "bits/byte"
  np.testing.assert_allclose(sums_RD[1], np.array([15.0, 18.0]) / np.log(2))
  np.testing.assert_array_equal(weights_RD, [[9, 12], [9, 12]])
  _, weights_RD, unit = _common_unit(["a", "b"], [one, one * [[1, 1, 3]]])
  assert unit == "nats/token"
  np.testing.assert_array_equal(weights_RD, [[3, 4], [3, 4]])
