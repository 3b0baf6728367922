"""Rows sorted by group, each through its group's feed-forward network."""
