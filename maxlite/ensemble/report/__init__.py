"""Results of an ensemble: the leaderboard, combined predictions and soups."""
