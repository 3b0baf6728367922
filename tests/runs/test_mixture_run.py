"""A run over a mixture: losses by source, exact resume when it is extended, and several hosts."""

import json
import shutil

import pytest
from support.host_runs import run
from support.tiny_run import logged, start

from maxlite.metrics.plots.curves import draw_curves

LIGHT = {"decoder_block": "llama", "base_num_decoder_layers": 1, "gradient_accumulation_steps": 1}
LIGHT |= {"ema_decay": 0, "eval_fraction": 0.3}


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory):
  """Values of dataset_mixture: two sources, and a third from step 4 on."""
  folder = tmp_path_factory.mktemp("sources")
  for name, word in {"a": "alpha ", "b": "beta ", "c": "gamma "}.items():
    lines = (json.dumps({"text": f"{n} " + word * (2 + n % 5)}) for n in range(60))
    (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines))

  def entry(name, **keys):
    return {"name": name, "path": f"{folder}/{name}.jsonl", **keys}

  two = [entry("a", weight=3, type="jsonl"), entry("b", weight=1, type="jsonl")]
  three = [*two, entry("c", weight=2, type="jsonl", from_step=4)]
  return [json.dumps(entries).replace('"', "") for entries in (two, three)]


@pytest.mark.slow
def test_a_run_whose_mixture_is_extended_equals_one_that_had_it_from_the_start(mixtures, folder):
  two, three = mixtures
  interrupted = folder / "interrupted"
  whole = folder / "whole"
  assert start(interrupted, dataset_mixture=two, **LIGHT | {"steps": 4})[0] == 0
  code, output = start(interrupted, dataset_mixture=three, **LIGHT)
  assert (code, "resuming from the checkpoint of step 4" in output) == (0, True)
  code, expected = start(whole, dataset_mixture=three, **LIGHT)
  assert code == 0
  rows = logged(whole)[4:]
  assert [row for row in logged(interrupted) if row["step"] > 4] == rows
  evaluated = rows[-1]
  assert {name for name in evaluated if "eval_loss/" in name} == {f"eval_loss/{n}" for n in "abc"}
  losses = [evaluated[f"eval_loss/{name}"] for name in "abc"]
  assert min(losses) < evaluated["eval_loss"] < max(losses)
  assert "rows from step 0: a 7" in expected
  assert "c {:.4f}".format(evaluated["eval_loss/c"]) in expected
  uses = [line for line in expected.splitlines() if line.startswith("read of ")]
  assert [line[len("read of ")] for line in uses] == ["a", "b", "c"]
  assert sum(int(line.split()[3]) for line in uses) == 8 * 16
  assert output.splitlines()[-4:-1] == uses
  draw_curves(interrupted / "run/metrics.jsonl", folder / "curves.png")
  assert (folder / "curves.png").stat().st_size


@pytest.mark.slow
def test_two_hosts_and_a_host_that_resumes_from_them_read_the_mixture_of_one(mixtures, folder):
  light = LIGHT | {"dataset_mixture": mixtures[1]}
  one = folder / "one"
  two = folder / "two"
  run(one, processes=1, devices=8, **light)
  output = run(two, processes=2, devices=4, **light)
  assert "read of c: " in output
  resumed = shutil.copytree(two, folder / "resumed")
  for step in (6, 8):
    shutil.rmtree(resumed / f"run/checkpoints/{step}")
  run(resumed, processes=1, devices=8, **light)
  for there in (two, resumed):
    for row, expected in zip(logged(there), logged(one), strict=True):
      assert row == pytest.approx(expected, rel=2e-5)
