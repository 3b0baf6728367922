"""What a run tells of itself: numbers, where they are written, curves and traces."""
