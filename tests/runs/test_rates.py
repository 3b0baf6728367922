"""A resumed run reports a learning rate that a changed schedule makes jump."""

import pytest

from maxlite.config import load_config
from maxlite.config.saved import differences
from maxlite.config.schema import flatten
from maxlite.runs.run_report import describe_rates


def rates(before, now, done=50):
  saved = load_config(before)
  cfg = load_config(now)
  return describe_rates(cfg, differences(flatten(saved), flatten(cfg)), done)


def test_more_steps_raise_the_rate_and_the_key_keeps_it():
  (line,) = rates(["steps=50"], ["steps=90"])
  assert "learning rate of step 51: 1.08e-03, before the change 2.00e-04" in line
  assert "learning_rate_schedule_steps=50 keeps the schedule" in line
  assert not rates(["steps=50"], ["steps=90", "learning_rate_schedule_steps=50"])


@pytest.mark.parametrize("key", ["learning_rate=1e-3", "lr_schedule_type=constant"])
def test_every_key_of_the_schedule_is_reported(key):
  assert rates(["steps=90"], ["steps=90", key])


def test_a_rate_that_does_not_change_is_not_reported():
  assert not rates(["steps=90"], ["steps=90", "log_period=5"])
  assert not rates(["steps=50", "lr_schedule_type=constant"], ["lr_schedule_type=constant"])
  assert not rates(["steps=50"], ["steps=90"], done=0)
