"""The table over seeds says what a mean of a few seeds can say."""

from maxlite.ensemble.report.leaderboard import LeaderboardEntry
from maxlite.ensemble.report.seeds import seeds_table


def entry(rate, seed, loss, status="finished"):
  overrides = {"learning_rate": rate, "init_weights_seed": seed}
  return LeaderboardEntry(f"r{rate}s{seed}", overrides, 10, loss, loss, 1.0, status)


def rows_of(entries):
  _, _, *lines = seeds_table(entries).splitlines()
  return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_differences_are_paired_by_seed():
  """Every seed is 0.1 better, while the seeds themselves differ by ten times as much."""
  losses = {0: 1.0, 1: 2.0, 2: 3.0}
  entries = [entry(0.1, seed, loss) for seed, loss in losses.items()]
  worse = {0: 1.1, 1: 2.11, 2: 3.09}
  entries += [entry(0.2, seed, loss) for seed, loss in reversed(worse.items())]
  best, other = rows_of(entries)
  assert best == ["learning_rate=0.1", "3", "2.0000", "0.5774", "-", "-", "best mean"]
  assert other == [
    *("learning_rate=0.2", "3", "2.1000", "0.5745"),
    # Student's quantile of 2 degrees of freedom, 4.3027, times 0.01 / sqrt(3)
    *("+0.1000", "+0.0752 to +0.1248", "worse"),
  ]


def test_noise_is_not_distinguishable():
  entries = [entry(0.1, seed, loss) for seed, loss in enumerate((1.0, 1.2, 1.1))]
  entries += [entry(0.2, seed, loss) for seed, loss in enumerate((1.2, 1.0, 1.2))]
  best, other = rows_of(entries)
  assert best[-1] == "best mean"
  assert other[-1] == "not distinguishable"


def test_members_without_a_final_loss_are_left_out():
  entries = [entry(0.1, 0, 1.0), entry(0.1, 1, 1.1), entry(0.2, 0, 2.0)]
  entries.append(entry(0.2, 1, None, "diverged at step 3"))
  entries.append(entry(0.2, 2, 0.5, "stopped at step 7 by halving"))
  best, other = rows_of(entries)
  assert best[1] == "2"
  assert other[1:] == ["1", "2.0000", "-", "-", "-", "fewer than two seeds in common"]


def test_there_is_no_table_without_seeds():
  assert not seeds_table([entry(0.1, 0, 1.0), entry(0.2, 0, 1.1)])
