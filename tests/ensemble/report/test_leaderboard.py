"""The leaderboard and members.jsonl, best member first."""

import dataclasses
import io
import json

import pytest
from rich.console import Console

from maxlite.config import load_config
from maxlite.ensemble.report.leaderboard import (
  LeaderboardEntry,
  leaderboard_markdown,
  leaderboard_table,
  median_tokens_per_second,
  write_members,
)
from maxlite.ensemble.run.finalize import keys_of_model

ENTRIES = [
  LeaderboardEntry(
    "slow", {"learning_rate": 1e-4, "steps": 50}, 1_234_567, 3.5, 3.25, 9876.4, "finished"
  ),
  LeaderboardEntry(
    "lost",
    {"learning_rate": 1.0, "steps": 50},
    999_949,
    None,
    None,
    0,
    "diverged at step 3",
  ),
  LeaderboardEntry(
    "good", {"learning_rate": 0.01, "steps": 50}, 999_950, 3.75, 2.25, 12345.6, "finished"
  ),
  LeaderboardEntry("unseen", {"learning_rate": 0.02, "steps": 50}, 123, None, None, 0, "finished"),
]
BEST_FIRST = ["good", "slow", "lost", "unseen"]


def printed(entries, width):
  console = Console(file=io.StringIO(), width=width)
  console.print(leaderboard_table(entries))
  return console.file.getvalue()


def markdown_rows(text):
  """[[cell, ...], ...] of every table row, including titles and rules."""
  rows = []
  for line in text.splitlines():
    if line.startswith("|"):
      cells = line.strip("|").split(" | ")
      rows.append([cell.strip() for cell in cells])
  return rows


def test_members_are_written_best_first_as_strict_json(tmp_path):
  path = tmp_path / "run" / "members.jsonl"
  write_members([dataclasses.replace(ENTRIES[0], name="before")], path)
  write_members(ENTRIES, path)
  rows = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
  assert [row["name"] for row in rows] == BEST_FIRST
  assert rows[0] == dataclasses.asdict(ENTRIES[2])
  assert rows[2]["final_loss"] is None
  assert [file.name for file in path.parent.iterdir()] == ["members.jsonl"]


def test_markdown_has_a_row_per_member_best_first():
  titles, rule, *rows = markdown_rows(leaderboard_markdown(ENTRIES, {}))
  assert len({len(row) for row in (titles, rule, *rows)}) == 1
  assert [row[1] for row in rows] == BEST_FIRST
  good = ["1", "good", "learning_rate=0.01", "1.0M", "3.7500", "2.2500", "12,346", "finished"]
  lost = ["3", "lost", "learning_rate=1.0", "999.9K", "-", "-", "0", "diverged at step 3"]
  assert rows[0] == good
  assert rows[1][3] == "1.2M"
  assert rows[2] == lost
  assert rows[3][3:7] == ["123", "-", "-", "0"]


def test_shared_overrides_are_shown_once():
  for text in (leaderboard_markdown(ENTRIES, {}), printed(ENTRIES, 200)):
    assert text.count("steps=50") == 1
    assert text.count("learning_rate=") == len(ENTRIES)
  some_lack_it = [*ENTRIES, LeaderboardEntry("odd", {}, 1, 2.0, 2.0, 1.0, "finished")]
  assert leaderboard_markdown(some_lack_it, {}).count("steps=50") == len(ENTRIES)
  assert "All members" not in leaderboard_markdown(ENTRIES[:1], {})


def test_combinations_are_a_separate_table():
  scores = {"nll": 2.0, "bits_per_byte": 1.5, "accuracy": 0.5, "brier": 0.25, "ece": 0.0625}
  without_bytes = {name: score for name, score in scores.items() if name != "bits_per_byte"}
  text = leaderboard_markdown(ENTRIES, {"best member": scores, "mean of probs": without_bytes})
  titles, _, best, mean = markdown_rows(text.split("# Combined prediction")[1])
  assert titles == ["prediction", "nll", "bits/byte", "accuracy", "Brier", "ECE"]
  assert best == ["best member", "2.0000", "1.5000", "0.5000", "0.2500", "0.0625"]
  assert mean[2] == "-"


def test_cells_are_shown_verbatim():
  overrides = {"remat_saved_names": ("bold", "moe_rows"), "prompt": "two words"}
  entries = [dataclasses.replace(ENTRIES[0], name="a|[red]", overrides=overrides), ENTRIES[1]]
  table = printed(entries, 300)
  markdown = leaderboard_markdown(entries, {})
  assert "a|[red]" in table
  assert "a\\|[red]" in markdown
  for text in (table, markdown):
    assert "remat_saved_names=[bold, moe_rows] prompt='two words'" in text


@pytest.mark.parametrize("width", [80, 110])
def test_long_overrides_are_shown_in_several_lines(width):
  long = {f"a_rather_long_key_number_{i}": i for i in range(6)} | {"phases": "x" * 99}
  entries = [dataclasses.replace(ENTRIES[0], overrides=long), ENTRIES[1]]
  table = printed(entries, width)
  markdown = leaderboard_markdown(entries, {})
  assert table.count("overrides") == 1
  assert 20 < table.count("x") < 41  # of the long value
  assert all(f"{key}={value}" in markdown for key, value in long.items())
  assert all(cell in table for cell in ("3.2500", "9,876", "1.2M"))


def test_a_speed_of_several_members_is_explained():
  note = "tokens/s: of one member, while all members of its group train in the same step"
  together = [dataclasses.replace(entry, tokens_per_second=5.0) for entry in ENTRIES[:2]]
  for text in (leaderboard_markdown(together, {}), printed(together, 150)):
    assert note in text
  assert note not in leaderboard_markdown(ENTRIES, {})


def test_keys_of_another_family_are_not_those_of_a_model():
  special = {"num_experts", "kv_lora_rank", "base_mlp_dim"}

  def special_keys_of(family):
    cfg = load_config([f"decoder_block={family}"], needs_data=False)
    return special.intersection(keys_of_model(cfg))

  assert special_keys_of("llama") == {"base_mlp_dim"}
  assert special_keys_of("mixtral") == {"num_experts", "base_mlp_dim"}
  assert special_keys_of("deepseek") == special


def test_speed_is_the_median_of_the_run():
  rows = [{"num_tokens": 100, "step_seconds": seconds} for seconds in (9.0, 0.5, 0.4, 2.0, 0.5)]
  assert median_tokens_per_second(rows) == 200
  assert median_tokens_per_second([]) == 0
