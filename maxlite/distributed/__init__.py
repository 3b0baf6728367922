"""Runs of multiple processes: initialization, failure detection, signals."""
