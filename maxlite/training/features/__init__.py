"""Features around the training step, a file each; see training/feature.py."""
