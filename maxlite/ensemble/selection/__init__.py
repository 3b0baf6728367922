"""Which members train on, and from what: halving, populations and searches."""
