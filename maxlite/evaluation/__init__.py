"""Evaluation: the held-out loss, that of each document, and how many drafts are accepted."""
