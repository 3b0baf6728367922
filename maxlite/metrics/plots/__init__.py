"""Figures drawn from logged metrics."""
