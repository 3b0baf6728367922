"""The gated delta rule: a linear recurrence over positions whose state is a matrix per head."""
