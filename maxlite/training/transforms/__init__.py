"""Transforms of the training step: an entry of a table each, built from the config."""
