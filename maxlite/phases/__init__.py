"""Alternating training: which parameters each phase trains, when, and with which optimizer."""
