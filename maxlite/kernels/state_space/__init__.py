"""The state-space recurrence of Mamba-2: a decay per head, and rank-one updates of a state."""
