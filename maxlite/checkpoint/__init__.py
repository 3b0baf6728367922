"""What a run keeps on disk: its folder and its checkpoints."""
