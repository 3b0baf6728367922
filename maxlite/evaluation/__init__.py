"""Evaluation: the held-out loss, the loss of each document, and how many drafts are accepted."""
