"""Rows sorted by group, each multiplied by its group's matrix."""
