"""Searches: the proposals of every sampler, and rounds of members that are resumed."""

import contextlib
import itertools
import math
import signal

import pytest
from support.ensemble_runs import TINY, checksums, rows_of
from support.tiny import KEYS as MODEL
from support.tiny_run import Output, keys_in

from maxlite.config import load_config
from maxlite.config.tuning import search_of
from maxlite.config.values import Setting, parse
from maxlite.ensemble.run.search import Study
from maxlite.ensemble.run_members import run_members
from maxlite.errors import UserError
from maxlite.registry import SAMPLERS

pytest.importorskip("optuna")
RANGE = "learning_rate: {log_uniform: [1e-4, 1]}"


def search(space=RANGE, sampler="tpe", rounds=4, num_members=8, seed=0):
  text = (
    f"{{sampler: {sampler}, rounds: {rounds}, num_members: {num_members}, seed: {seed}, "
    f"space: {{{space}}}}}"
  )
  return search_of(parse(Setting("search", text, "test")))


def error_of(point):
  """Least at a learning rate of 0.01."""
  return abs(math.log10(float(point["learning_rate"])) + 2)


def rounds_of(parsed, loss=error_of):
  """The points of all rounds."""
  study = Study(parsed)
  rounds = []
  for _ in range(parsed.rounds):
    rounds.append(study.propose())
    study.tell([loss(point) for point in rounds[-1]])
  return rounds


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_proposals_are_distinct_within_the_space_and_the_same_in_every_process(sampler):
  space = (
    f"{RANGE}, base_num_decoder_layers: {{uniform: [1, 3]}}, opt_type: {{choice: [lion, muon]}}"
  )
  rounds = rounds_of(search(space, sampler))
  points = list(itertools.chain.from_iterable(rounds))
  assert len(set(points)) == len(points) == 32
  for point in points:
    assert 1e-4 <= float(point["learning_rate"]) <= 1
  assert {point["base_num_decoder_layers"] for point in points} == {"1", "2", "3"}
  assert {point["opt_type"] for point in points} == {"lion", "muon"}
  assert rounds_of(search(space, sampler)) == rounds
  assert rounds_of(search(space, sampler, seed=1)) != rounds


@pytest.mark.parametrize("sampler", ["tpe", "cma"])
def test_samplers_learn_from_the_losses(sampler):
  parsed = search(sampler=sampler, rounds=6)

  def last(loss):
    return [error_of(point) for point in rounds_of(parsed, loss)[-1]]

  def mean(errors):
    return sum(errors) / len(errors)  # of random points: 1

  def error_unless_diverged(point):
    error = error_of(point)
    if error > 1:
      return math.inf
    return error

  assert mean(last(error_of)) < 0.5
  # Diverged members count as the worst.
  assert mean(last(error_unless_diverged)) < 0.6


def test_a_space_with_too_few_points_is_an_error():
  with pytest.raises(UserError, match="no further points after 3: write fewer rounds"):
    rounds_of(search("opt_type: {choice: [adamw, lion, muon]}", num_members=2), lambda _: 1.0)


SEARCH = f"{{sampler: tpe, rounds: 2, num_members: 2, space: {{{RANGE}}}}}"


def start(folder, output=None, text=SEARCH):
  output = output or Output()
  keys = MODEL | keys_in(folder, **TINY, run_name="ens", ensemble_strategy="stacked")
  argv = [f"{name}={value}" for name, value in keys.items()]
  cfg = load_config([*argv, f"search={text}"], needs_data=False)
  with contextlib.redirect_stdout(output):
    code = run_members(cfg)
  return code, output.getvalue()


@pytest.mark.slow
def test_a_search_is_resumed_in_its_round_and_ends_in_one_leaderboard(root, capsys):
  whole = root / "search"
  killed = root / "killed_search"
  code, _ = start(whole)
  assert code == 0
  names = ["r00_m00", "r00_m01", "r01_m00", "r01_m01"]
  board = (whole / "ens/leaderboard.md").read_text()
  assert all(name in board for name in names)
  first = SEARCH.replace("rounds: 2", "rounds: 1")
  code, _ = start(killed, text=first)
  assert code == 0
  code, _ = start(killed, Output(at=1, number=signal.SIGTERM))
  assert code == 128 + signal.SIGTERM
  assert not (killed / "ens/leaderboard.md").exists()  # that of the first round
  code, _ = start(killed)
  assert code == 0
  for name in names:
    assert rows_of(killed, name) == rows_of(whole, name)
    assert checksums(killed, name) == checksums(whole, name)
  _, output = start(killed)
  assert "nothing to do" in output
  with pytest.raises(SystemExit, match="2"):
    start(killed, text=SEARCH.replace("log_uniform", "uniform"))
  assert "r00_m00 was trained with learning_rate=" in capsys.readouterr().err
