"""Causal attention within documents."""
