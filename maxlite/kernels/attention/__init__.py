"""Causal attention within documents: training (api.py) and generation (cached.py)."""
