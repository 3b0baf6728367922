"""What a run keeps on disk: its folder, checkpoints and weight files."""
