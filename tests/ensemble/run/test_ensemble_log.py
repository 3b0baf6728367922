"""The lines of a step on the console."""

from maxlite.ensemble.run.ensemble_log import describe_step


def test_the_median_of_two_is_between_them():
  rows = {"a": {"loss": 1.0}, "b": {"loss": 2.0}}
  (line,) = describe_step(1, 2, None, rows)
  assert "best 1.0000 (a), median 1.5000, worst 2.0000 (b)" in line
  (line,) = describe_step(1, 2, None, rows | {"c": {"loss": 1.8}})
  assert "median 1.8000" in line


def test_held_out_losses_come_first_and_the_time_that_is_left_last():
  rows = {"a": {"loss": 1.0, "eval_loss": 1.5}, "b": {"loss": 2.0, "eval_loss": None}}
  eval_line, loss_line = describe_step(10, 100, 2.0, rows)
  speed = "2 members  2.000 s  0:03:00 left"
  eval_losses = "eval loss: best 1.5000 (a), median 1.5000, worst 1.5000 (a)"
  losses = "loss: best 1.0000 (a), median 1.5000, worst 2.0000 (b)"
  assert eval_line == f"step 10/100  {eval_losses}  {speed}"
  assert loss_line == f"step 10/100  {losses}  {speed}"
  assert describe_step(100, 100, 2.0, rows)[0].endswith("  2 members  2.000 s")
  assert describe_step(1, 2, None, {}) == []
