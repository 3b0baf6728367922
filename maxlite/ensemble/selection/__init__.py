"""Which members train on, and from what: halving and populations."""
