"""Ways to run the training steps of many members, one file per engine."""
