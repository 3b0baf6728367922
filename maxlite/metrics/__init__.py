"""Metrics of a run: values, writers, plots and profiler traces."""
